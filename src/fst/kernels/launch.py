"""The host side of every kernel: operators, launches, tiles, and where kernels for Hopper run.

Operators are PyTorch's, so that autograd and compilers see the kernels.

A launch from the cache costs the host less than Triton's own way, which finds out anew what it
compiled. A kernel is compiled for its constants and for what Triton sees in the other arguments:
their types, integers, and whether addresses are multiples of 16. Where all of these are as they
were before, the compiled kernel is the same, and is launched at once.

A program that PyTorch's compiler traces names its kernels before it runs: operators are called with
tensors that have no memory. The kernels that they would launch are noted, and the first launch
compiles all of them beside each other.

Kernels for Hopper are tried first where they apply, and one that fails is given up with a warning.
They are written in Gluon, a young language whose names change between versions of Triton, so the
modules that hold them are imported only by the `launch` that is passed to `try_on_hopper`, which
`from_module` makes.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from importlib import import_module
from inspect import signature
from typing import Any, Generic, TypeVar, get_origin, get_type_hints

import torch
import triton
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map

# By the names of arguments; those that are not there have none.
Gradients = Mapping[str, Tensor | None]

# Arguments that hide nothing which PyTorch's dispatcher would have to take care of.
_PLAIN = {Tensor, nn.Parameter, int, float, bool, type(None), torch.dtype}


Result = TypeVar("Result")
Fake = TypeVar("Fake", bound=Callable[..., Any])


class Operator(Generic[Result]):
    """A function as an operator, and a shorter way to the same function.

    Compilers and whatever else looks into programs see the operator. PyTorch's way from a call of
    it to the function costs the host more than most kernels take, so where nobody looks, the
    function is called as it is, or by an autograd function without the layers in between.
    """

    def __init__(self, name: str, function: Callable[..., Result]) -> None:
        self._name, self.function = name, function
        self._run = _on_its_gpu(function)
        self.definition: Any = torch.library.custom_op(name, self._run, mutates_args=())
        # Autograd functions do not look for tensors in lists.
        self._lists = any(get_origin(hint) is list for hint in get_type_hints(function).values())
        self._differentiated: type[torch.autograd.Function] | None = None

    def __call__(self, *arguments: Any) -> Result:
        run: Callable[..., Result] = self.definition
        if torch.compiler.is_compiling() or not _unobserved(arguments):
            return run(*arguments)
        if not (torch.is_grad_enabled() and _any_requires_grad(arguments)):
            run = self._run
        elif self._differentiated is not None:
            run = self._differentiated.apply
        return run(*arguments)

    def register_fake(self, fake: Fake) -> Fake:
        @functools.wraps(fake)
        def traced(*arguments: Any) -> Any:
            _note_launches(self.function, arguments)
            return fake(*arguments)

        self.definition.register_fake(traced)
        return fake

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

    def gradients(
        self, *names: str, outputs: bool = False
    ) -> Callable[[Callable[..., Gradients]], None]:
        """Register a function that gives the gradients of arguments, by their names.

        It takes the context, the gradient of the first output (of all, where they are a list), the
        arguments of these names and, if asked for, the outputs.
        """
        parameters = list(signature(self.function).parameters)
        wanted = [parameters.index(name) for name in names]

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            several = output if isinstance(output, tuple) else (output,)
            kept = [*(inputs[i] for i in wanted), *(several if outputs else ())]
            ctx.save_for_backward(*(each if isinstance(each, Tensor) else None for each in kept))
            ctx.numbers = [None if isinstance(each, Tensor) else each for each in kept]
            ctx.mark_non_differentiable(*several[1:])
            ctx.set_materialize_grads(False)

        def register(differentiate: Callable[..., Gradients]) -> None:
            def backward(ctx: Any, grad: Any, *rest: None) -> tuple[Tensor | None, ...]:
                pairs = zip(ctx.saved_tensors, ctx.numbers, strict=True)
                kept = [number if tensor is None else tensor for tensor, number in pairs]
                found = {} if grad is None else differentiate(ctx, grad, *kept)
                return tuple(map(found.get, parameters))

            self.register_autograd(backward, setup_context=save)

        return register


def operator(name: str) -> Callable[[Callable[..., Result]], Operator[Result]]:
    """Make a function an operator; it runs with the GPU of its first tensor as the current one."""
    return functools.partial(Operator, name)


def _on_its_gpu(function: Callable[..., Result]) -> Callable[..., Result]:
    """Triton launches on the current GPU, which need not be the one that holds the tensors."""

    @functools.wraps(function)
    def run(*arguments: Any) -> Result:
        first = next(each for each in arguments if isinstance(each, Tensor))
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


# Launches in the cache: more would be such as do not repeat.
MOST_LAUNCHES = 4096


# A compiled kernel, the constants that belong behind its arguments, and all that must live as long
# as its `id` is part of a key.
_launch_cache: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {}


def _specialization(argument: Any) -> Any:
    """All that Triton looks at."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, float):
        return float
    if isinstance(argument, tuple):
        return tuple(map(_specialization, argument))
    return getattr(argument, "seen", argument)  # descriptions have it from `gluon_parts`


def launch_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel[grid](*arguments, **constants).

    Arguments are tensors, tuples of them, descriptions of their boxes, numbers or None; constants
    are hashable.
    True counts as 1 here: an argument must not be sometimes the one and sometimes the other.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    key = (id(kernel), device, *map(_specialization, arguments), *constants, *constants.values())
    cached = _launch_cache.get(key)
    if _noting.get():  # whatever is cached: there is no memory to launch it on
        if cached is None and hasattr(kernel, "device_caches"):  # not interpreted
            seen = (*map(_kind, key[2 : 2 + len(arguments)]), *key[2 + len(arguments) :])
            _noted.setdefault((id(kernel), *seen), (kernel, arguments, constants))
        return
    if cached is not None:
        compiled, rest, _ = cached
        compiled[(*grid, 1, 1)[:3]](*arguments, *rest)
        return
    if _noted:
        _compile_noted()
    compiled = kernel[grid](*arguments, **constants)
    names = [parameter.name for parameter in getattr(kernel, "params", ())][len(arguments) :]
    if compiled is None or not all(name in constants for name in names):
        return  # there is nothing compiled, as in Triton's interpreter
    if len(_launch_cache) >= MOST_LAUNCHES:
        _launch_cache.clear()
    rest = tuple(constants[name] for name in names)
    kept = kernel, *(each.layout for each in arguments if hasattr(each, "seen"))
    _launch_cache[key] = compiled, rest, kept


class _Traced(Tensor):
    """A tensor of a traced program, on a GPU but without memory."""

    is_cuda = True

    def data_ptr(self) -> int:
        return int(self.storage_offset()) * self.element_size()


# Whether this thread only notes what it would launch; the kernels that were noted.
_noting: ContextVar[bool] = ContextVar("noting", default=False)
_noted: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}


def _kind(seen: Any) -> Any:
    """What makes another kernel: of integers only whether they are 1, or multiples of 16."""
    return (seen == 1, seen % 16 == 0, seen >= 2**31) if isinstance(seen, int) else seen


def _traced(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    count = argument.untyped_storage().nbytes() // argument.element_size()
    storage = torch.empty(count, dtype=argument.dtype, device="meta").as_subclass(_Traced)
    return storage.as_strided(argument.shape, argument.stride(), argument.storage_offset())


def _note_launches(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Note which kernels a function would launch; others are compiled when they are launched."""
    tensors = [each for each in tree_leaves(arguments) if isinstance(each, FakeTensor)]
    symbolic = any(each._has_symbolic_sizes_strides for each in tensors)
    on_gpu = torch.cuda.is_initialized() and tensors and tensors[0].device.type == "cuda"
    if symbolic or not on_gpu:
        return
    before = _noting.set(True)
    try:
        with _disable_current_modes(), torch.no_grad():
            function(*tree_map(_traced, arguments))
    except Exception as error:
        warnings.warn(f"{function.__name__} is compiled when it runs ({error})", stacklevel=2)
    finally:
        _noting.reset(before)


def _compile_noted() -> None:
    """In threads: most of Triton's work needs no Python. A launch meets what fails here again."""
    jobs = list(_noted.values())
    _noted.clear()
    device = torch.cuda.current_device()
    with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        for kernel, arguments, constants in jobs:
            kernel.device_caches[device]  # made here, not by several threads at once
            pool.submit(kernel.warmup, *arguments, grid=(1,), **constants)


Tiles = dict[str, int]


def tiles_in(count: int, size: int) -> int:
    """As many of this size as hold so many; Triton's `cdiv` takes the host several µs."""
    return -(-count // size)


def first_that_fits(candidates: Sequence[Tiles], launch: Callable[[Tiles], Result]) -> Result:
    """With the first of these tiles that this GPU has the shared memory for."""
    for tiles in candidates[:-1]:
        try:
            return launch(tiles)
        except triton.OutOfResources:
            continue
    return launch(candidates[-1])


def launch_fitting(
    kernel: Any, tokens: int, candidates: Sequence[Tiles], *arguments: Any, **constants: Any
) -> None:
    """A program for each tile of so many tokens, with the first of these tiles that fits."""

    def launch(tiles: Tiles) -> None:
        grid = (tiles_in(tokens, tiles["BLOCK_T"]),)
        launch_kernel(kernel, grid, *arguments, **constants, **tiles)

    first_that_fits(candidates, launch)


_given_up: set[str] = set()
# What says nothing about a kernel.
_FAILURES_OF_THE_GPU = (
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.OutOfMemoryError),
)


@functools.cache
def _answer(question: Callable[[torch.device], Any], device: torch.device) -> Any:
    """What PyTorch says of a GPU, the current one for `_Traced`; it is asked with every launch."""
    return question(torch.device("cuda") if device.type == "meta" else device)


def _on_hopper(tensor: Tensor) -> bool:
    return tensor.is_cuda and _answer(torch.cuda.get_device_capability, tensor.device)[0] == 9


def processors(device: torch.device) -> int:
    count: int = _answer(torch.cuda.get_device_properties, device).multi_processor_count
    return count


def from_module(module: str, function: str, *arguments: Any) -> Callable[[], None]:
    """A call of a function whose module is imported only then."""
    return lambda: getattr(import_module(f"fst.kernels.{module}"), function)(*arguments)


def try_on_hopper(family: str, tensor: Tensor, launch: Callable[[], None]) -> bool:
    """Whether `launch` ran, on the GPU that holds the tensor.

    If it fails, a warning says so and no kernel of the family is tried again.
    """
    if family in _given_up or not _on_hopper(tensor):
        return False
    if _noting.get():
        launch()
        return True
    try:
        launch()
    except _FAILURES_OF_THE_GPU:
        raise
    except Exception as error:  # whatever another version of a young language may raise
        _given_up.add(family)
        warnings.warn(
            f"the {family} kernels for Hopper do not work with Triton {triton.__version__}; slower "
            f"ones run instead ({type(error).__name__}: {error})",
            stacklevel=2,
        )
        return False
    return True
