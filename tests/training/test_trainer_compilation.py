"""Whether a run is compiled, and what a failing compiler leaves the user with."""

import pytest
import torch

from fst import cli
from fst.recipes import RECIPES
from fst.recipes.comparison import equal_terms
from fst.training import trainer
from fst.training.settings import TrainingSettings
from fst.training.trainer import CompilationError, compiles, explained

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
OPEN = TrainingSettings()


@pytest.fixture
def machine(monkeypatch):
    """Triton and a GPU that can be compiled for, each to be taken away."""
    monkeypatch.setattr(trainer, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(trainer, "_python_is_known", lambda: True)
    return monkeypatch


def test_left_open_a_gpu_compiles(machine):
    assert compiles(OPEN, GPU)
    assert not compiles(OPEN, CPU)


def test_a_gpu_that_is_too_old_does_not_that_is_too_old(machine):
    machine.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert not compiles(OPEN, GPU)


def test_nor_what_has_no_triton(machine):
    machine.setattr(trainer, "find_spec", lambda name: None)
    assert not compiles(OPEN, GPU)


def test_nor_a_python_that_the_compiler_does_not_know(machine):
    machine.setattr(trainer, "_python_is_known", lambda: False)
    assert not compiles(OPEN, GPU)


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("wanted", [False, True])
def test_what_the_settings_say_is_done(device, wanted):
    assert compiles(TrainingSettings(compile=wanted), device) is wanted


def test_every_recipe_leaves_it_open_but_the_demo():
    chosen = {name: make().training.compile for name, make in RECIPES.items()}
    assert {name: choice for name, choice in chosen.items() if choice is not None} == {
        "demo/burgers": False,
        "demo/fno": False,
        "demo/perceiver-io": False,
    }


def test_a_failing_compiler_is_explained():
    def broken(graph, inputs):
        raise RuntimeError("no such register")

    torch._dynamo.reset()
    compiled = torch.compile(torch.sin, backend=broken)
    with (
        pytest.raises(
            CompilationError, match="RuntimeError: no such register.; .*--training.compile False"
        ),
        explained(),
    ):
        compiled(torch.zeros(2))
    torch._dynamo.reset()


def test_other_errors_stay_as_they_are():
    with pytest.raises(torch.OutOfMemoryError, match="full"), explained():
        raise torch.OutOfMemoryError("full")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], None),
        (["--compile"], None),
        (["--no-compile"], False),
        (["--compile-mode", "default"], True),
        (["--no-compile", "--compile-mode", "default"], False),
    ],
)
def test_what_a_comparison_compiles(words, expected, monkeypatch):
    asked = []

    def noted(recipe, compilation):
        asked.append(equal_terms(recipe, compilation).training)
        raise ValueError("that is all")

    monkeypatch.setattr("fst.recipes.comparison.equal_terms", noted)
    words = ["compare", "darcy", "--budget", "1m", "--out", "nowhere", "--models", "fst", *words]
    assert cli.main(words) == cli.USER_ERROR
    (training,) = asked
    assert training.compile is expected
    if expected:
        assert training.compile_mode == "default"
