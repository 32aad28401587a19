"""What the baselines say about input they cannot use."""

import subprocess
import sys

import pytest
import torch

from fst import Observations
from fst.base import build_model as build
from fst.baselines import (
    DeepONetConfig,
    FNOConfig,
    GridTransolverConfig,
    PerceiverIOConfig,
    TransolverConfig,
)
from small_baselines import (
    GRID,
    OBSERVED,
    SMALL,
    SMALL_ON_GRID,
    grid_queries,
    heat_solutions,
    observe_boundary,
    observe_everywhere,
)

BAD_CONFIGS = [
    (lambda: FNOConfig(grid=(201,)), "grid must give 2 numbers"),
    (lambda: FNOConfig(modes=(10, 30, 2)), "modes must give 2 numbers"),
    (lambda: FNOConfig(grid=(8, 8)), "modes must not exceed the grid"),
    (lambda: FNOConfig(width=0), "width must be at least 1, got 0"),
    (lambda: PerceiverIOConfig(width=30), "width must be a multiple of heads, got 30 and 8"),
    (lambda: PerceiverIOConfig(latents=0), "latents must be at least 1"),
    (lambda: PerceiverIOConfig(low=(0.0, 1.0)), "low must be below high on axis 1"),
    (lambda: TransolverConfig(slices=0), "slices must be at least 1"),
    (lambda: TransolverConfig(width=20), "width must be a multiple of heads, got 20 and 8"),
    (lambda: GridTransolverConfig(grid=(128,)), "grid must give 2 numbers"),
    (lambda: DeepONetConfig(branch=(8, 16)), "must end in the same width, got 16 and 918"),
    (lambda: DeepONetConfig(trunk=()), "trunk must give at least one positive width"),
    (lambda: DeepONetConfig(observations=0), "observations must be at least 1"),
]


@pytest.mark.parametrize(("make", "message"), BAD_CONFIGS)
def test_impossible_sizes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_build_names_what_it_got():
    with pytest.raises(TypeError, match="config must describe a model, got dict"):
        build({})


def observations_with(values: torch.Tensor | None = None, **changes) -> Observations:
    good = observe_boundary(heat_solutions(2, GRID))
    return Observations(
        changes.get("positions", good.positions),
        good.values if values is None else values,
        changes.get("condition"),
        changes.get("mask"),
    )


@pytest.fixture
def fno():
    pytest.importorskip("neuralop")
    return build(SMALL["fno"])


def test_fno_names_positions_off_the_grid(fno):
    positions = observations_with().positions.clone()
    positions[1, 3, 1] += 0.4 / (GRID[1] - 1)
    with pytest.raises(ValueError, match=r"positions must be points of the 9 x 16 grid.*\(1, 3\)"):
        fno(observations_with(positions=positions))


def test_fno_names_a_point_observed_twice(fno):
    positions = observations_with().positions.clone()
    positions[1, 3] = positions[1, 5]
    with pytest.raises(ValueError, match="positions names grid point 5 of sample 1 more than once"):
        fno(observations_with(positions=positions))


def test_fno_answers_at_grid_points_only(fno):
    output = fno(observations_with())
    queries = grid_queries(2, GRID).clone()
    queries[0, 20, 0] += 0.3 / (GRID[0] - 1)
    with pytest.raises(ValueError, match=r"queries must be points of the 9 x 16 grid.*\(0, 20\)"):
        output(queries)


def test_fno_works_in_float32_alone(fno):
    good = observations_with()
    with pytest.raises(TypeError, match="values must be float32"):
        fno.double()(Observations(good.positions.double(), good.values.double()))


@pytest.mark.parametrize("name", SMALL_ON_GRID)
def test_models_of_a_whole_grid_need_all_of_it(name):
    if "fno" in name:
        pytest.importorskip("neuralop")
    model = build(SMALL_ON_GRID[name])
    whole = observe_everywhere(heat_solutions(2, GRID))
    part = Observations(whole.positions[:, :-1], whole.values[:, :-1])
    with pytest.raises(ValueError, match="must cover all 144 points of the grid; .* point 143"):
        model(part)
    with pytest.raises(ValueError, match="queries must be points of the 9 x 16 grid"):
        model(whole)(torch.rand(2, 3, 2))


def test_deeponet_counts_its_observations():
    model = build(SMALL["deeponet"])
    good = observations_with()
    with pytest.raises(ValueError, match=f"the {OBSERVED} observations .* got {OBSERVED - 1}"):
        model(Observations(good.positions[:, 1:], good.values[:, 1:]))


def test_deeponet_refuses_padding_and_wandering_positions():
    model = build(SMALL["deeponet"])
    mask = torch.ones(2, OBSERVED, dtype=torch.bool)
    model(observations_with(mask=mask))
    mask[0, 3] = False
    with pytest.raises(ValueError, match="mask must not leave out observations"):
        model(observations_with(mask=mask))
    positions = observations_with().positions.clone()
    positions[1] = positions[1].flip(0)
    with pytest.raises(ValueError, match="positions must be the same for every sample"):
        model(observations_with(positions=positions))


@pytest.mark.parametrize("kind", ["fno", "perceiver-io"])
def test_a_viscosity_must_have_a_logarithm(kind):
    if kind == "fno":
        pytest.importorskip("neuralop")
    sizes = {"condition_channels": 1, "log_condition": True}
    configs = {
        "fno": FNOConfig(grid=GRID, width=4, layers=1, modes=(4, 6), **sizes),
        "perceiver-io": PerceiverIOConfig(width=8, heads=2, latents=4, layers=1, **sizes),
    }
    model = build(configs[kind])
    with pytest.raises(ValueError, match="condition must be positive"):
        model(observations_with(condition=torch.tensor([[0.1], [0.0]])))
    with pytest.raises(ValueError, match="condition is missing"):
        model(observations_with())


@pytest.mark.parametrize("name", SMALL)
def test_what_all_models_check(name):
    if name == "fno":
        pytest.importorskip("neuralop")
    model = build(SMALL[name])
    good = observations_with()
    with pytest.raises(ValueError, match="values must be finite"):
        model(observations_with(good.values.log()))
    with pytest.raises(ValueError, match="condition was given, but this model takes none"):
        model(observations_with(condition=torch.ones(2, 1)))
    with pytest.raises(ValueError, match="positions must lie in the domain"):
        model(observations_with(positions=good.positions + 1))
    with pytest.raises(ValueError, match="queries must lie in the domain"):
        model(good)(torch.full((2, 3, 2), 1.5))
    with pytest.raises(ValueError, match="queries must have batch size 2"):
        model(good)(torch.rand(3, 3, 2))


WITHOUT_THE_PACKAGE = """
import sys
sys.modules["neuralop"] = None  # what Python does when an import has failed
from fst.base import build_model as build
from fst.baselines import FNOConfig, PerceiverIOConfig
build(PerceiverIOConfig(width=8, heads=2, latents=4, layers=1))
try:
    build(FNOConfig())
except ImportError as error:
    print(error)
"""


def test_only_fno_needs_its_package_and_it_says_which():
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PACKAGE], capture_output=True, text=True, check=True
    )
    assert "pip install 'function-space-transformer[baselines]'" in ran.stdout
