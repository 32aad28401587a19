"""What the host does with each launch: nothing that matters may get lost by saving time there.

Which kernels run where: those for Hopper and what replaces them, and the GPU they run on.
"""

import gc
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

pytest.importorskip("triton")
from triton import OutOfResources

from fst.kernels import feed_forward, launch
from fst.kernels.launch import operator
from kernel_examples import OnGPU


@operator("fst_tests::scaled")
def scaled(x: torch.Tensor, y: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x * y * factor, x + 1


@scaled.register_fake
def _(x: torch.Tensor, y: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@operator("fst_tests::scaled_backward")
def scaled_backward(grad: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
    return grad * y * factor


@scaled_backward.register_fake
def _(grad: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(grad)


def save(ctx, inputs, output):
    x, y, ctx.factor = inputs
    ctx.save_for_backward(x, y)


def differentiate(ctx, grad, other):
    x, y = ctx.saved_tensors
    of_y = scaled_backward(grad, x, ctx.factor) if ctx.needs_input_grad[1] else None
    return scaled_backward(grad, y, ctx.factor) + other, of_y, None


scaled.register_autograd(differentiate, setup_context=save)


@operator("fst_tests::pieces")
def pieces(x: torch.Tensor) -> list[torch.Tensor]:
    return [x * 2, x * 3]


@pieces.register_fake
def _(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(x), torch.empty_like(x)]


def save_nothing(ctx, inputs, output):
    pass


def differentiate_pieces(ctx, grads):
    return 2 * grads[0] + 3 * grads[1]


pieces.register_autograd(differentiate_pieces, setup_context=save_nothing)


@pytest.mark.parametrize("learned", [(True, True), (True, False), (False, True), (False, False)])
def test_the_short_way_gives_what_the_operator_gives(learned):
    given = [torch.randn(5) for _ in learned]

    def through(call):
        x, y = (t.clone().requires_grad_(r) for t, r in zip(given, learned, strict=True))
        out = call(x, y, 0.3)
        assert [each.requires_grad for each in out] == [any(learned)] * 2
        if any(learned):
            (out[0].square() + out[1]).sum().backward()
        return *out, x.grad, y.grad

    for ours, theirs in zip(through(scaled), through(scaled.definition), strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def test_whoever_looks_into_programs_sees_the_operator():
    x, y = torch.randn(2, 5).unbind()
    graph = make_fx(lambda x, y: scaled(x, y, 0.3)[0])(x, y).graph
    assert torch.ops.fst_tests.scaled.default in [node.target for node in graph.nodes]

    targets = []

    def backend(module, inputs):
        targets.extend(node.target for node in module.graph.nodes)
        return module

    torch.compile(lambda x: scaled(x, y, 0.3)[0], backend=backend, fullgraph=True)(x)
    assert torch.ops.fst_tests.scaled.default in targets


def test_second_derivatives_are_refused_not_wrong():
    """The backward operators have none."""
    x = torch.randn(5, requires_grad=True)
    (grad,) = torch.autograd.grad(scaled(x, x, 0.3)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()


def test_tensors_in_lists_keep_their_gradients():
    x = torch.randn(5, requires_grad=True)
    first, second = pieces(x)
    (first + second).sum().backward()
    assert x.grad.tolist() == [5] * 5


class Kernel:
    """Stands for Triton's: notes what is launched, and by which way."""

    params = tuple(SimpleNamespace(name=name) for name in ("x", "n", "eps", "SIZE", "WAY"))

    def __init__(self, compiled=True):
        self.launches, self._compiled = [], compiled

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.launches.append(("slow", grid, (*arguments, constants)))
            return Compiled(self) if self._compiled else None

        return launch


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launches.append(("fast", grid, arguments))


@pytest.fixture
def ways(monkeypatch):
    """The ways that a kernel was launched by."""
    monkeypatch.setattr(launch, "_launch_cache", {})
    return lambda kernel: [way for way, _, _ in kernel.launches]


def test_what_is_compiled_is_launched_at_once(ways):
    kernel = Kernel()
    first, second = torch.zeros(2, 8).unbind()
    for tensor, eps in ((first, 0.5), (second, 0.25)):
        launch.launch_kernel(kernel, (7, 2), tensor, 5, eps, WAY="b", SIZE=1, num_warps=4)
    assert ways(kernel) == ["slow", "fast"]
    _, grid, (x, *rest) = kernel.launches[1]
    assert (grid, x.data_ptr()) == ((7, 2, 1), second.data_ptr())
    assert rest == [5, 0.25, 1, "b"]


def test_what_differs_for_triton_is_looked_up_anew(ways):
    x = torch.zeros(64)
    usual = {"SIZE": 1, "WAY": None, "num_warps": 4}
    changes = [
        (x, 6, 0.5, usual), (x[1:], 5, 0.5, usual), (x.double(), 5, 0.5, usual),
        (None, 5, 0.5, usual), (x, 5, 0.5, usual | {"SIZE": 2}),
        (x, 5, 0.5, usual | {"num_warps": 8}),
        (x, 5, 0.5, {"WAY": 1, "SIZE": None, "num_warps": 4}),
    ]  # fmt: skip
    for tensor, number, eps, constants in changes:
        kernel = Kernel()
        launch.launch_kernel(kernel, (1,), x, 5, 0.5, **usual)
        launch.launch_kernel(kernel, (1,), tensor, number, eps, **constants)
        launch.launch_kernel(kernel, (1,), tensor, number, eps, **constants)
        assert ways(kernel) == ["slow", "slow", "fast"]
    launch.launch_kernel(other := Kernel(), (1,), x, 5, 0.5, **usual)
    assert ways(other) == ["slow"]


def test_an_interpreter_is_asked_every_time(ways):
    kernel = Kernel(compiled=False)
    for _ in range(2):
        launch.launch_kernel(kernel, (1,), torch.zeros(8), 5, 0.5, SIZE=1, WAY=2, num_warps=4)
    assert ways(kernel) == ["slow", "slow"]


def test_few_launches_are_cached_and_no_tensor(ways, monkeypatch):
    monkeypatch.setattr(launch, "MOST_LAUNCHES", 3)
    kernel, x = Kernel(), torch.zeros(8)
    for number in range(20):
        launch.launch_kernel(kernel, (1,), x, number, 0.5, SIZE=1, WAY=2, num_warps=4)
        assert len(launch._launch_cache) <= 3
    kernel.launches.clear()
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


@pytest.fixture
def parts(monkeypatch):
    parts = pytest.importorskip("fst.kernels.gluon_parts")
    monkeypatch.setattr(parts, "_descriptions", {})
    checks = []
    check = parts.TensorDescriptor.__post_init__
    monkeypatch.setattr(
        parts.TensorDescriptor, "__post_init__", lambda made: (checks.append(1), check(made))
    )
    return parts, checks


def test_descriptions_are_tritons_own_and_checked_once(parts):
    parts, checks = parts
    first, second = torch.zeros(2, 100, 176, dtype=torch.bfloat16).unbind()
    for tensor in (first, second):
        for found, width in zip(parts.described(tensor, 64, 128, 64), (128, 64), strict=True):
            layout = parts.matrix_layout(64, width, torch.bfloat16)
            number = len(checks)
            wanted = parts.TensorDescriptor.from_tensor(tensor, [64, width], layout)
            del checks[number:]
            assert type(found) is parts.TensorDescriptor
            assert (id(found.base), found.layout) == (id(tensor), wanted.layout)
            for name in ("shape", "strides", "block_shape", "padding"):
                assert list(getattr(found, name)) == list(getattr(wanted, name))
    assert len(checks) == 2
    parts.described(first[:50], 64, 128)
    assert len(checks) == 3


def test_what_triton_refuses_to_describe_is_refused_every_time(parts):
    parts, _ = parts
    parts.described(torch.zeros(100, 176, dtype=torch.bfloat16), 64, 64)
    shifted = torch.zeros(100 * 176 + 1, dtype=torch.bfloat16)[1:].view(100, 176)
    for _ in range(2):
        with pytest.raises(AssertionError, match="16-byte aligned"):
            parts.described(shifted, 64, 64)


def test_few_descriptions_are_cached_and_no_tensor(parts, monkeypatch):
    parts, _ = parts
    monkeypatch.setattr(parts, "MOST_DESCRIPTIONS", 3)
    x = torch.zeros(100, 176, dtype=torch.bfloat16)
    for rows in range(1, 20):
        parts.described(x[:rows], 64, 64)
        assert len(parts._descriptions) <= 3
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_without_the_kernels_for_hopper_others_run(monkeypatch):
    """A failure warns once, and is not tried again."""
    monkeypatch.setattr(launch, "_given_up", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    x = torch.zeros(4, 176, dtype=torch.bfloat16).as_subclass(OnGPU)
    tried = []

    def run():
        tried.append(1)
        raise AttributeError("no such name")

    with pytest.warns(UserWarning, match="for Hopper do not work.*AttributeError: no such name"):
        assert not feed_forward._hopper_took(run, x)
    assert not feed_forward._hopper_took(run, x)
    assert len(tried) == 1
    monkeypatch.setattr(launch, "_given_up", {"attention"})  # the others are not concerned
    assert feed_forward._hopper_took(lambda: None, x)
    assert not feed_forward._hopper_took(run, x[:, :64])  # too narrow
    assert not feed_forward._hopper_took(run, x.half())
    shifted = torch.zeros(712, dtype=torch.bfloat16)[1:705].view(4, 176)
    assert not feed_forward._hopper_took(run, x, shifted)  # it begins at two bytes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert not feed_forward._hopper_took(run, x)


def test_a_full_gpu_is_not_the_kernels_fault(monkeypatch):
    monkeypatch.setattr(launch, "_given_up", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    x = torch.zeros(4, 176, dtype=torch.bfloat16).as_subclass(OnGPU)

    def run():
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        feed_forward._hopper_took(run, x)
    assert not launch._given_up


def test_operators_run_on_the_gpu_that_holds_the_tensors(monkeypatch):
    entered = []

    @contextmanager
    def device(which):
        entered.append(which)
        yield
        entered.append("left")

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(OnGPU, "get_device", lambda tensor: 0, raising=False)

    @operator("fst_tests::doubled")
    def doubled(values: torch.Tensor) -> torch.Tensor:
        entered.append("ran")
        return 2 * values

    assert doubled(torch.ones(2)).tolist() == [2, 2]
    assert entered == ["ran"]
    run = doubled.definition._init_fn
    run(torch.ones(2).as_subclass(OnGPU))
    assert entered[1:] == [torch.device("cpu"), "ran", "left"]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    run(torch.ones(2).as_subclass(OnGPU))
    assert entered[4:] == ["ran"]


def test_smaller_tiles_where_the_best_do_not_fit():
    tried = []

    def run(tiles):
        tried.append(tiles["BLOCK_N"])
        if tiles["BLOCK_N"] > 16:
            raise OutOfResources(300_000, 200_000, "shared memory")
        return "done"

    sizes = [{"BLOCK_N": size} for size in (64, 32, 16)]
    assert launch.first_that_fits(sizes, run) == "done"
    assert tried == [64, 32, 16]
    with pytest.raises(OutOfResources):
        launch.first_that_fits(sizes[:2], run)


class Noted(Kernel):
    """What Triton's own has for those who compile without a launch."""

    def __init__(self):
        super().__init__()
        self.device_caches, self.compiled = {0: None}, []

    def warmup(self, *arguments, grid, **constants):
        self.compiled.append((*arguments, constants["SIZE"]))
        if constants["SIZE"] == 3:
            raise RuntimeError("does not compile")


def run(kernel, x, size=1):
    launch.launch_kernel(kernel, (1,), x, len(x), 0.5, SIZE=size, WAY=2, num_warps=4)


@pytest.fixture
def traced(ways, monkeypatch):
    """A kernel, and an operator that launches it, as a program is traced that runs on a GPU."""
    for name, answer in {"current_device": 0, "is_initialized": True, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(launch, "_noted", {})
    kernel = Noted()

    @operator("fst_tests::noted")
    def noted(x: torch.Tensor, size: int) -> torch.Tensor:
        out = x.new_empty(len(x) - 1)
        assert x.is_cuda
        assert out.is_cuda
        run(kernel, x, size)
        return out

    @noted.register_fake
    def _(x: torch.Tensor, size: int) -> torch.Tensor:
        return x.new_empty(len(x) - 1)

    return kernel, noted


def test_kernels_of_a_traced_program_are_compiled_before_the_first_launch(traced, ways):
    """Once for all arguments that Triton compiles the same kernel for; failures are met later."""
    kernel, noted = traced
    with FakeTensorMode():
        for count, size in ((8, 1), (9, 1), (32, 1), (16, 1), (8, 2), (8, 3)):
            found = noted(torch.empty(count, device="cuda"), size)
            assert (found.device.type, len(found)) == ("cuda", count - 1)
        shifted = torch.empty(9, device="cuda").as_strided((8,), (1,), 1)
        noted(shifted, 1)  # does not begin at a multiple of 16 bytes
        noted(torch.empty(8), 4)  # on a CPU nothing is noted
    assert not kernel.compiled
    assert not kernel.launches
    run(kernel, torch.zeros(8))
    assert ways(kernel) == ["slow"]
    seen = sorted((size, n % 16 == 0, x.data_ptr() % 16) for x, n, _, size in kernel.compiled)
    assert seen == [(1, False, 0), (1, False, 4), (1, True, 0), (2, False, 0), (3, False, 0)]
    assert not launch._noted


def test_a_traced_program_launches_nothing(traced, ways):
    """Not even what is compiled; other threads launch meanwhile."""
    kernel, noted = traced
    run(kernel, torch.zeros(8))
    with FakeTensorMode():
        noted(torch.empty(8, device="cuda"), 1)
    assert ways(kernel) == ["slow"]
    assert not launch._noted

    @operator("fst_tests::noted_beside")
    def beside(x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=run, args=(kernel, torch.zeros(8)))
        other.start()
        other.join()
        return x

    beside.register_fake(torch.empty_like)
    with FakeTensorMode():
        beside(torch.empty(8, device="cuda"))
    assert ways(kernel) == ["slow", "fast"]


def test_nothing_is_noted_where_nothing_would_be_compiled(traced, monkeypatch, recwarn):
    kernel, noted = traced
    example = torch.empty(8)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        dynamic = mode.from_tensor(example, static_shapes=False)
        noted(torch.empty(dynamic.shape[0], device="cuda"), 1)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        noted(torch.empty(8, device="cuda"), 1)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        del kernel.device_caches  # as in Triton's interpreter
        noted(torch.empty(8, device="cuda"), 1)
    assert not launch._noted
    assert not recwarn.list


def test_what_cannot_be_noted_is_said(traced):
    @operator("fst_tests::reads")
    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    reads.register_fake(torch.empty_like)
    with FakeTensorMode(), pytest.warns(UserWarning, match="reads is compiled when it runs"):
        reads(torch.empty(8, device="cuda"))
    assert not launch._noting.get()
