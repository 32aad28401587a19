"""Wrong Python types in the library: a TypeError that names the argument, whatever was given."""

from dataclasses import fields
from typing import get_type_hints

import pytest
import torch

import fst
from fst.baselines import (
    DeepONetConfig,
    FNOConfig,
    GridTransolverConfig,
    PerceiverIOConfig,
    TransolverConfig,
)
from fst.data import BurgersData, DarcyData, ImageData, PointData, PointSample
from fst.evaluation.classification import ClassificationSettings
from fst.evaluation.protocol import EvaluationSettings
from fst.training.schedules import Plateau, Stages, WarmupCosine
from fst.training.settings import CrossEntropy, TrainingSettings
from fst.types import check_argument

SETTINGS = [
    fst.FunctionSpaceConfig,
    FNOConfig,
    PerceiverIOConfig,
    TransolverConfig,
    GridTransolverConfig,
    DeepONetConfig,
    BurgersData,
    DarcyData,
    PointData,
    ImageData,
    TrainingSettings,
    Plateau,
    Stages,
    WarmupCosine,
    CrossEntropy,
    EvaluationSettings,
    ClassificationSettings,
]
WRONG = [object(), b"1", {"a": 1}, [1, 2], ("a",), 1j, torch.ones(2), "3"]


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_setting_of_a_wrong_type_is_named(kind):
    for field in fields(kind):
        for wrong in WRONG:
            if isinstance(wrong, str) and get_type_hints(kind)[field.name] is str:
                continue
            with pytest.raises(TypeError, match=f"^{field.name} must be .*, got "):
                kind(**{field.name: wrong})


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan"), 2**70])
def test_a_number_that_nothing_can_use_is_named(kind, number):
    for field in fields(kind):
        if isinstance(field.default, float):
            with pytest.raises(ValueError, match=f"{field.name}"):
                kind(**{field.name: number if isinstance(number, float) else float("inf")})
        elif type(field.default) is int and isinstance(number, int):
            with pytest.raises(ValueError, match=rf"^{field.name} must be below 2\*\*63"):
                kind(**{field.name: number})


CALLS = {
    "count": lambda wrong: fst.data.burgers.sample_initial(wrong, 8, 0),
    "points": lambda wrong: fst.data.burgers.sample_initial(2, wrong, 0),
    "seed": lambda wrong: fst.data.burgers.sample_initial(2, 8, wrong),
    "initial": lambda wrong: fst.data.burgers.solve(wrong, 0.1, torch.ones(1)),
    "viscosity": lambda wrong: fst.data.burgers.solve(torch.ones(1, 8), wrong, torch.ones(1)),
    "times": lambda wrong: fst.data.burgers.solve(torch.ones(1, 8), 0.1, wrong),
    "nodes": lambda wrong: fst.data.darcy.sample_coefficient(2, wrong, 0),
    "coefficient": lambda wrong: fst.data.darcy.solve(wrong),
    "tolerance": lambda wrong: fst.data.darcy.solve(torch.ones(1, 5, 5), tolerance=wrong),
    "source": lambda wrong: fst.data.darcy.solve(torch.ones(1, 5, 5), source=wrong),
    "path": lambda wrong: fst.data.read_points(wrong),
    "low": lambda wrong: fst.Domain((wrong,), (1.0,)),
    "high": lambda wrong: fst.Domain((0.0,), (wrong,)),
    "observations": lambda wrong: fst.build("demo/burgers")(wrong),
    "positions": lambda wrong: fst.Observations(wrong, torch.ones(1, 1, 1)),
    "points and anchors": lambda wrong: fst.rbf_blend(wrong, wrong, wrong, wrong),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("wrong", [object(), {"a": 1}, b"1", None])
def test_an_argument_of_a_wrong_type_is_named(name, wrong):
    with pytest.raises(TypeError, match=name.split()[0]):
        CALLS[name](wrong)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("path", {"path": 3}),
        ("domain", {"domain": (0, 1)}),
        ("labels", {"labels": ["x"]}),
        ("splits", {"splits": [1, 2]}),
        ("sample 0", {"samples": [{"positions": 1}]}),
    ],
)
def test_points_of_a_wrong_type_are_named(tmp_path, name, given):
    one = PointSample([[0.5]], [[1.0]], [[0.5]], [[1.0]])
    good = {"path": tmp_path / "a.h5", "samples": [one], "domain": fst.Domain.unit(1)}
    with pytest.raises(TypeError, match=f"^{name} must be "):
        fst.data.write_points(**{**good, **given})
    assert not list(tmp_path.iterdir())


def test_what_was_expected_is_said_in_words():
    for kind, words in (
        (int, "a whole number"),
        (float | None, "a number or None"),
        (tuple[int, int], "a tuple of 2, each a whole number"),
        (tuple[float, ...], "a tuple of some, each a number"),
        (bool, "True or False"),
    ):
        with pytest.raises(TypeError, match=f"^width must be {words}, got 'wide'$"):
            check_argument("width", "wide", kind)
    for wrong in (True, 3.5):
        with pytest.raises(TypeError, match="width must be a whole number"):
            check_argument("width", wrong, int)
