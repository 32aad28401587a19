"""Annotations of the whole package, shapes included, are enforced in tests: one import hook.

Arguments are checked when a function has returned, not before it runs. So a function that refuses
what it was given raises its own error, which tests are about, and a function that takes it must
have been given what its annotations say.
"""

import functools
import random
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Self, TypeVar

import torch
from beartype import BeartypeConf, FrozenDict, beartype
from jaxtyping import install_import_hook

Function = TypeVar("Function", bound=Callable[..., object])

SOURCE = Path(__file__).parents[2] / "src" / "fst"
# Their functions become GPU code from their source text, which a decorator would hide.
UNCHECKED = {
    f"fst.kernels.{path.stem}"
    for path in (SOURCE / "kernels").glob("*.py")
    if "@triton.jit" in path.read_text() or "@gluon.jit" in path.read_text()
}
# Tests compile its functions in one graph, which cannot hold a check.
UNCHECKED.add("fst.kernels.modules")

_random = random.Random(0)
# An int is a float, as for mypy; beartype knows Self only in classes that it decorates itself.
_check = beartype(
    conf=BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict({Self: object}))
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


class Unhooked:
    """A finder, before the hook, of the modules that are left as they are."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, path, target) if name in UNCHECKED else None


def install() -> None:
    install_import_hook("fst", f"{__name__}.after_return")
    sys.meta_path.insert(0, Unhooked())
