"""Which kernels run where: those for Hopper and what replaces them, and the GPU they run on."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

mlp = pytest.importorskip("fst.kernels.mlp")
hopper = pytest.importorskip("fst.kernels.hopper")
operator = pytest.importorskip("fst.kernels.operators").operator


class OnGPU(torch.Tensor):
    """Claims to be there."""

    is_cuda = True


def test_the_kernels_for_hopper_compile(tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    child = Path(__file__).parent / "hopper_compilation.py"
    run = subprocess.run(
        [sys.executable, str(child)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = run.stdout.split()
    assert len(lines) == 6
    assert max(map(int, lines)) <= 227 * 1024  # shared memory of a multiprocessor


def test_without_the_kernels_for_hopper_others_run(monkeypatch):
    """A failure warns once, and is not tried again."""
    monkeypatch.setattr(hopper, "_given_up", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    x = torch.zeros(4, 176, dtype=torch.bfloat16).as_subclass(OnGPU)
    tried = []

    def launch():
        tried.append(1)
        raise AttributeError("no such name")

    with pytest.warns(UserWarning, match="for Hopper do not work.*AttributeError: no such name"):
        assert not mlp._hopper_took(launch, x)
    assert not mlp._hopper_took(launch, x)
    assert len(tried) == 1
    monkeypatch.setattr(hopper, "_given_up", {"attention"})  # the others are not concerned
    assert mlp._hopper_took(lambda: None, x)
    assert not mlp._hopper_took(launch, x[:, :64])  # too narrow
    assert not mlp._hopper_took(launch, x.half())
    shifted = torch.zeros(712, dtype=torch.bfloat16)[1:705].view(4, 176)
    assert not mlp._hopper_took(launch, x, shifted)  # it begins at two bytes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert not mlp._hopper_took(launch, x)


def test_a_full_gpu_is_not_the_kernels_fault(monkeypatch):
    monkeypatch.setattr(hopper, "_given_up", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    x = torch.zeros(4, 176, dtype=torch.bfloat16).as_subclass(OnGPU)

    def launch():
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        mlp._hopper_took(launch, x)
    assert not hopper._given_up


def test_operators_run_on_the_gpu_that_holds_the_tensors(monkeypatch):
    entered = []

    @contextmanager
    def device(which):
        entered.append(which)
        yield
        entered.append("left")

    monkeypatch.setattr(torch.cuda, "device", device)

    @operator("fst_tests::doubled")
    def doubled(values: torch.Tensor) -> torch.Tensor:
        entered.append("ran")
        return 2 * values

    assert doubled(torch.ones(2)).tolist() == [2, 2]
    assert entered == ["ran"]
    doubled._init_fn(torch.ones(2).as_subclass(OnGPU))
    assert entered[1:] == [torch.device("cpu"), "ran", "left"]
