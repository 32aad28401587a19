"""Kernels compiled ahead: what is noted, what is compiled, and that nothing depends on it."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from compiling import SHARED, printed_by
from fst.kernels import ahead
from fst.kernels.feed_forward_packing import EXTRA
from fst.training import trainer

operators = pytest.importorskip("fst.kernels.operators")
weights = pytest.importorskip("fst.kernels.weights")

HOPPER = ahead.GPU(9, 0, 132, SHARED)
CUDA = torch.device("cuda", 0)


class Told:
    """Stands in for the process."""

    def __init__(self):
        self.lines = []

    def tell(self, line):
        self.lines.append(json.loads(line))


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(ahead, "_worker", Told())
    return ahead._worker.lines


@pytest.fixture
def on_hopper(monkeypatch, tmp_path):
    """A machine that seems to have such a GPU; compiled kernels go to the folder."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    properties = SimpleNamespace(
        major=9,
        minor=0,
        multi_processor_count=HOPPER.processors,
        shared_memory_per_block_optin=HOPPER.shared_memory,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(ahead, "_at_once", lambda processes: 2)
    return tmp_path


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def projection(count):
    layer = meta(64, 128 + EXTRA, dtype=torch.float32)
    return "fst::normed_linear", (meta(count, 128), layer, meta(64, 192), 1e-5)


def compiled(folder):
    """The kernels that are there, all their files written."""
    return sorted(path.name[len("__grp__") : -len(".json")] for path in folder.glob("*/__grp__*"))


def found_by_another(folder, lines):
    """The kernels of these calls in another process, and whether it found them."""
    calls = folder / "calls"
    calls.write_text("\n".join(lines))
    child = Path(__file__).parent / "ahead_compilation.py"
    return json.loads(printed_by([str(child), str(calls)], folder))


def test_fakes_on_a_gpu_are_noted(told):
    with FakeTensorMode():
        anchors = torch.empty(4, 2, 48, device="cuda")
        torch.ops.fst.anchor_weights(anchors, anchors, torch.bfloat16)
    described = {"shape": [4, 2, 48], "stride": [96, 48, 1], "offset": 0, "dtype": "torch.float32"}
    assert told == [["fst::anchor_weights", [described, described, {"dtype": "torch.bfloat16"}]]]


def test_where_a_tensor_begins_is_described():
    part = {"shape": [2, 3], "stride": [8, 1], "offset": 16, "dtype": "torch.bfloat16"}
    tensor = meta(4, 8)[2:, :3]
    assert json.loads(ahead.describe("any", (tensor, 1.5, None, True, [tensor, tensor]))) == [
        "any",
        [part, 1.5, None, True, [part, part]],
    ]


def test_fakes_elsewhere_are_not(told):
    with FakeTensorMode():
        anchors = torch.empty(4, 2, 48)
        torch.ops.fst.anchor_weights(anchors, anchors, torch.bfloat16)
    assert told == []


def test_the_backward_pass_is_noted_before_anything_is_compiled(monkeypatch):
    noted = []
    monkeypatch.setattr(operators, "note", lambda *call: noted.append(ahead.describe(*call)))

    def compile_graph(graph, inputs):
        raise RuntimeError("as far as this goes")

    def loss(positions, scales):
        prepared = weights.prepare(positions, scales)
        return weights.weights_forward(*prepared, torch.float32)[0].square().sum()

    step = torch.compile(loss, backend=aot_autograd(fw_compiler=compile_graph), dynamic=False)
    positions = torch.rand(2, 16, 2, requires_grad=True)
    with pytest.raises(Exception, match="as far as this goes"):
        step(positions, torch.rand(2, 16, 2))
    names = {json.loads(line)[0] for line in noted}
    assert names == {"fst::anchor_weights", "fst::anchor_weights_backward"}


def test_sizes_that_are_not_known_are_left_out(told):
    shape_environment = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_environment)
    anchors = mode.from_tensor(torch.empty(4, 2, 48))
    with pytest.raises(TypeError):
        ahead.describe("fst::anchor_weights", (anchors,))
    assert not shape_environment.guards  # to ask for a number would fix it


# Looked for, not imported: the interpreter is off in here, and was on when Triton was imported.
@pytest.mark.skipif(find_spec("triton.experimental.gluon") is None, reason="needs Gluon")
def test_what_is_noted_is_compiled_and_found(on_hopper, monkeypatch):
    lines = []
    describe = ahead.describe

    def kept(*call):
        lines.append(describe(*call))
        return lines[-1]

    monkeypatch.setattr(ahead, "describe", kept)
    places = meta(2, 2, 64, dtype=torch.float32)
    with ahead.compiled_ahead(CUDA), FakeTensorMode() as mode:
        # Of one kernel, since it makes no difference here how many tokens there are.
        for name, arguments in (
            projection(4096),
            projection(1000),
            ("fst::anchor_weights", (places, places, torch.bfloat16)),
        ):
            fakes = (mode.from_tensor(x) if torch.is_tensor(x) else x for x in arguments)
            moved = (torch.empty_like(x, device="cuda") if torch.is_tensor(x) else x for x in fakes)
            operator = getattr(torch.ops.fst, name.removeprefix("fst::"))
            operator(*moved)
        until = time.monotonic() + 100
        while len(compiled(on_hopper)) < 2 and time.monotonic() < until:
            time.sleep(0.1)
    kernels = ["normed_linear_gluon_kernel", "weights_kernel"]
    assert compiled(on_hopper) == kernels
    assert sorted(found_by_another(on_hopper, lines)) == [[name, True] for name in kernels]


@pytest.mark.parametrize(("shared_memory", "tried"), [(SHARED, 1), (1, 3)])
def test_other_tiles_follow_where_shared_memory_is_short(on_hopper, shared_memory, tried):
    layer, packed = meta(64, 176 + EXTRA, dtype=torch.float32), meta(64, 192)
    second, bias = meta(64, dtype=torch.float32), meta(1, dtype=torch.float32)
    call = ahead.describe("fst::output_mlp", (meta(640, 176), layer, packed, second, bias, 1e-5))
    gpu = [8, 0, 108, shared_memory]
    subprocess.run(
        [sys.executable, "-m", "fst.kernels.ahead_worker", json.dumps([gpu, 1])],
        input=f"no call\n{call}\n",
        text=True,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    assert compiled(on_hopper) == ["output_kernel"] * tried


@pytest.mark.parametrize("program", ["no such program", "false"])
def test_a_process_that_fails_harms_nothing(on_hopper, monkeypatch, program):
    monkeypatch.setattr(sys, "executable", program)
    with ahead.compiled_ahead(CUDA), FakeTensorMode():
        for count in range(1, 20):
            anchors = torch.empty(count, 2, 48, device="cuda")
            found, _ = torch.ops.fst.anchor_weights(anchors, anchors, torch.bfloat16)
            assert found.shape == (count, 48, 48)
            time.sleep(0.005)
    assert ahead._worker is None
    assert compiled(on_hopper) == []


def test_a_process_that_does_not_listen_is_not_waited_for(on_hopper, monkeypatch, tmp_path):
    deaf = tmp_path / "deaf"
    deaf.write_text("#!/bin/sh\nexec sleep 60\n")
    deaf.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(deaf))
    with ahead.compiled_ahead(CUDA), FakeTensorMode():
        process = ahead._worker._process
        anchors = torch.empty(1, 2, 48, device="cuda")
        for number in range(3000):  # more than a pipe holds
            ahead.note("fst::anchor_weights", (anchors, number))
    assert process.returncode == -signal.SIGTERM  # it did not end by itself


def test_nothing_starts_without_a_gpu_or_in_the_interpreter(on_hopper, monkeypatch):
    def start(*given, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    with ahead.compiled_ahead(torch.device("cpu")):
        assert ahead._worker is None
    monkeypatch.setattr(ahead, "_Worker", start)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with ahead.compiled_ahead(CUDA):
        assert ahead._worker is None


def test_processors_are_shared(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(32)), raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert [ahead._at_once(processes) for processes in (1, 2, 4, 32)] == [8, 8, 4, 0]


@pytest.mark.parametrize("compiles", [True, False])
def test_a_trainer_compiles_ahead_in_its_first_step_alone(monkeypatch, compiles):
    events = []

    @contextmanager
    def recorded(device, processes):
        events.append((device, processes))
        yield

    def step(self):
        events.append("step" if gc.isenabled() else "step without looking for garbage")

    monkeypatch.setattr(trainer, "compiled_ahead", recorded)
    monkeypatch.setattr(trainer.Trainer, "_update", step)
    one = object.__new__(trainer.Trainer)
    one.device, one.processes, one._compiles = CUDA, 2, compiles
    one.update()
    one.update()
    first = [(CUDA, 2), "step without looking for garbage"] if compiles else ["step"]
    assert events == [*first, "step"]


def test_a_first_step_that_fails_leaves_the_collector_as_it_was(monkeypatch):
    def fail(self):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(trainer.Trainer, "_update", fail)
    one = object.__new__(trainer.Trainer)
    one.device, one.processes, one._compiles = torch.device("cpu"), 1, True
    for before in (False, True):
        (gc.enable if before else gc.disable)()
        with pytest.raises(RuntimeError, match="out of memory"):
            one.update()
        assert gc.isenabled() is before
