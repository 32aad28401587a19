"""Operators of PyTorch's that launch our kernels."""

import functools
from collections.abc import Callable
from typing import Any, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fst.kernels.ahead import note

# What each operator runs, by its name.
FUNCTIONS: dict[str, Callable[..., Any]] = {}
# Arguments that hide nothing which PyTorch's dispatcher would have to take care of.
_PLAIN = {Tensor, nn.Parameter, int, float, bool, type(None), torch.dtype}


class Operator:
    """A function as an operator, and a shorter way to the same function.

    Compilers and whatever else looks into programs see the operator. PyTorch's way from a call of
    it to the function costs the host more than most kernels take, so where nobody looks, the
    function is called as it is, or by an autograd function without the layers in between.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        FUNCTIONS[name] = function
        self._name = name
        self._run = _on_its_gpu(function)
        self.definition: Any = torch.library.custom_op(name, self._run, mutates_args=())
        # Autograd functions do not look for tensors in lists.
        self._lists = any(get_origin(hint) is list for hint in get_type_hints(function).values())
        self._differentiated: type[torch.autograd.Function] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling() or not _unobserved(arguments):
            return self.definition(*arguments)
        if not (torch.is_grad_enabled() and _any_requires_grad(arguments)):
            return self._run(*arguments)
        if self._differentiated is None:
            return self.definition(*arguments)
        return self._differentiated.apply(*arguments)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Calls of the fake, by a compiler that traces, are noted for `fst.kernels.ahead`."""

        @functools.wraps(fake)
        def noted(*arguments: Any) -> Any:
            note(self._name, arguments)
            return fake(*arguments)

        return self.definition.register_fake(noted)

    def register_autograd(
        self, differentiate: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        self.definition.register_autograd(differentiate, setup_context=setup_context)
        if self._lists:
            return
        run = self._run

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = run(*arguments)
            setup_context(ctx, arguments, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
        self._differentiated = type(self._name, (torch.autograd.Function,), methods)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make a function an operator; it runs with the GPU of its first tensor as the current one."""
    return functools.partial(Operator, name)


def _on_its_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current GPU, which need not be the one that holds the tensors."""

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        first = arguments[0]
        if not first.is_cuda or first.get_device() == torch.cuda.current_device():
            return function(*arguments)
        with torch.cuda.device(first.device):
            return function(*arguments)

    return run


def _unobserved(arguments: tuple[Any, ...]) -> bool:
    """Whether nothing but autograd would notice how the function is called."""
    return (
        all(type(argument) in _PLAIN for argument in arguments)
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()
    )


def _any_requires_grad(arguments: tuple[Any, ...]) -> bool:
    return any(isinstance(each, Tensor) and each.requires_grad for each in arguments)
