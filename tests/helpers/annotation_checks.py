"""Annotations of the whole package, shapes included, are enforced in tests: one import hook.

Arguments are checked when a function has returned, not before it runs. So a function that refuses
what it was given raises its own error, which tests are about, and a function that takes it must
have been given what its annotations say.
"""

import functools
import random
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Self, TypeVar

import torch
from beartype import BeartypeConf, FrozenDict, beartype
from jaxtyping import install_import_hook, jaxtyped

Function = TypeVar("Function", bound=Callable[..., object])

SOURCE = Path(__file__).parents[2] / "src" / "fst"
# Their GPU functions are compiled from source text, which the hook's decorators would change.
KERNELS = {
    f"fst.kernels.{path.stem}"
    for path in (SOURCE / "kernels").glob("*.py")
    if "@triton.jit" in path.read_text() or "@gluon.jit" in path.read_text()
}
# Tests compile its functions in one graph, which cannot hold jaxtyping's decorator.
KERNELS.add("fst.kernels.modules")

_random = random.Random(0)
# An int is a float, as for mypy, and may be a symbol in a program that is traced; beartype knows
# Self only in classes that it decorates itself.
_check = beartype(
    conf=BeartypeConf(
        is_pep484_tower=True,
        hint_overrides=FrozenDict({Self: object, int: int | torch.SymInt}),
    )
)


def after_return(function: Function) -> Function:
    """beartype for jaxtyping, which hands over a function's arguments, and then those and `ret`.

    What torch.compile traces is left alone: its stand-ins for tensors are not what was annotated.
    """
    if not any(name.startswith("ret") for name in function.__code__.co_varnames):
        return function
    checked = _check(function)
    for name in getattr(checked, "__kwdefaults__", None) or {}:
        if name.endswith("getrandbits"):  # which item of a list to check: not by everyone's state
            checked.__kwdefaults__[name] = _random.getrandbits

    @functools.wraps(function)
    def unless_compiling(*arguments: object, **named: object) -> object:
        if torch.compiler.is_compiling():
            return None
        return checked(*arguments, **named)

    return unless_compiling


def check(function: Function) -> Function:
    """A checked function that, under torch.compile, is the plain one."""
    checked = jaxtyped(typechecker=after_return)(function)

    @functools.wraps(function)
    def plain_if_compiling(*arguments: object, **named: object) -> object:
        chosen = function if torch.compiler.is_compiling() else checked
        return chosen(*arguments, **named)

    return plain_if_compiling


def check_functions(owner: ModuleType | type, module: str) -> None:
    """Check the Python functions and methods that a module defines; GPU functions are not such."""
    for name, value in list(vars(owner).items()):
        if isinstance(value, type) and value.__module__ == module and value is not owner:
            check_functions(value, module)
        elif isinstance(value, staticmethod):
            setattr(owner, name, staticmethod(check(value.__func__)))
        elif isinstance(value, FunctionType) and value.__module__ == module:
            setattr(owner, name, check(value))


class KernelLoader(SourceFileLoader):
    """Runs a module with GPU functions as it is, and then checks its Python functions."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        check_functions(module, module.__name__)


class KernelFinder:
    """A finder, before the hook, of the modules that need a loader of their own."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in KERNELS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        spec.loader = KernelLoader(name, spec.origin)
        return spec


def install() -> None:
    install_import_hook("fst", f"{__name__}.after_return")
    sys.meta_path.insert(0, KernelFinder())
