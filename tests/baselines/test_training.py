"""The baselines learn, in single and in half precision, and come back from disk."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fst
from fst.base import build_model as build
from fst.baselines import (
    DeepONetConfig,
    FNOConfig,
    PerceiverIOConfig,
    TransolverConfig,
)
from fst.metrics import relative_l2, squared_relative_l2
from small_baselines import (
    GRID,
    OBSERVED,
    SMALL,
    SMALL_ON_GRID,
    grid_queries,
    heat_solutions,
    observe_boundary,
    observe_everywhere,
    stirred_baseline,
)

# What fits four solutions quickly: configuration, learning rate, and the error to fall below.
LEARNERS = {
    "fno": (FNOConfig(grid=GRID, width=16, layers=2, modes=(6, 8)), 5e-3, 0.05),
    "perceiver-io": (
        PerceiverIOConfig(width=32, heads=4, latents=16, layers=2, fourier_bands=8),
        2e-3,
        0.10,
    ),
    "transolver": (TransolverConfig(width=64, layers=2, heads=4, slices=16), 1e-3, 0.05),
    "deeponet": (DeepONetConfig(observations=OBSERVED, branch=(64, 64), trunk=(64, 64)), 3e-3, 0.1),
}
MOST_STEPS = 1_500


@pytest.mark.parametrize("name", LEARNERS)
def test_each_model_overfits_four_solutions(name):
    if name == "fno":
        pytest.importorskip("neuralop")
    config, rate, goal = LEARNERS[name]
    model = build(config)
    solutions = heat_solutions(4, GRID)
    observations, queries = observe_boundary(solutions), grid_queries(4, GRID)
    targets = solutions.flatten(1).unsqueeze(-1)
    for statistics in (model.standardize_values, model.standardize_outputs):
        statistics.set(targets.mean(), targets.std())
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=MOST_STEPS, pct_start=0.05
    )
    error = float("inf")
    for step in range(1, MOST_STEPS + 1):
        optimizer.zero_grad()
        prediction = model.represent(observations).decode(queries)
        squared_relative_l2(prediction, targets).mean().backward()
        optimizer.step()
        schedule.step()
        if step % 25 == 0:
            with torch.no_grad():
                error = relative_l2(model(observations)(queries), targets).mean().item()
            if error < 0.9 * goal:
                break
    assert error < goal


@pytest.mark.parametrize("name", [*SMALL, *SMALL_ON_GRID])
def test_half_precision_reaches_every_parameter_and_keeps_wide_outputs(name):
    """One training step under autocast, as on a GPU; FNO's transforms stay in float32."""
    if "fno" in name:
        pytest.importorskip("neuralop")
    model = stirred_baseline({**SMALL, **SMALL_ON_GRID}[name])
    fields = heat_solutions(2, GRID)
    observations = (observe_boundary if name in SMALL else observe_everywhere)(fields)
    queries = grid_queries(2, GRID)
    with torch.no_grad():
        exact = model(observations)(queries)
    with torch.autocast("cpu", torch.bfloat16):
        prediction = model.represent(observations).decode(queries)
    assert prediction.dtype == torch.float32
    assert relative_l2(prediction, exact).max() < 0.1
    squared_relative_l2(prediction, fields.flatten(1).unsqueeze(-1)).mean().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert bool(torch.isfinite(torch.view_as_real(parameter.grad + 0j)).all()), parameter_name
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm > 0
    before = copy.deepcopy(model)
    torch.optim.Adam(model.parameters(), lr=1e-3).step()
    assert not torch.equal(before(observations)(queries), model(observations)(queries))


# The layer that reads coordinates or their Fourier features, and its axis of positions.
READERS = {
    "fno": ("network.lifting.fcs.0", -1),
    "perceiver-io": ("embed_position.0", -2),
    "transolver": ("network.embed.0", -2),
    "deeponet": ("trunk.0", -2),
    "grid-transolver": ("network.embed.0", -2),
}


@pytest.mark.parametrize("name", READERS)
def test_half_precision_keeps_positions_distinct(name):
    """bfloat16 itself has 513 numbers for these 1,024."""
    if "fno" in name:
        pytest.importorskip("neuralop")
    config, grid = {**SMALL, **SMALL_ON_GRID}[name], (2, 1024)
    if hasattr(config, "grid"):
        config = replace(config, grid=grid, **({"modes": (2, 6)} if name == "fno" else {}))
    model = build(config)
    layer, axis = READERS[name]
    seen = []
    module = model.get_submodule(layer)
    module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    observations = observe_everywhere(torch.zeros(1, *grid))
    if name == "deeponet":
        observations = observe_boundary(torch.zeros(1, *GRID))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.represent(observations).decode(grid_queries(1, grid)[:, -1024:])
    read = seen[-1].movedim(axis, 0).reshape(-1, seen[-1].numel() // seen[-1].shape[axis])
    assert read.dtype == torch.bfloat16  # what follows needs no more memory than before
    assert len(read[-1024:].float().unique(dim=0)) == 1024


def test_deeponets_branch_reads_values_as_they_are():
    model = build(SMALL["deeponet"])
    observations = observe_boundary(heat_solutions(2, GRID))
    with torch.no_grad():
        exact = model.branch[0](observations.values.squeeze(-1))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model.branch[0](observations.values.squeeze(-1)), exact.bfloat16())


def test_fnos_fourier_transforms_are_outside_half_precision():
    """The paper trains with FP32 transforms: under autocast a layer gives the same bits."""
    pytest.importorskip("neuralop")
    layer = build(SMALL["fno"]).network.fno_blocks.convs[0]
    fields = torch.randn(2, SMALL["fno"].width, *GRID)
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer(fields)
    assert torch.equal(inside, layer(fields))
    assert torch.equal(layer(fields.bfloat16()), layer(fields.bfloat16().float()))


@pytest.mark.parametrize("name", [*SMALL, *SMALL_ON_GRID])
def test_a_baseline_comes_back_whole(name, tmp_path: Path):
    if "fno" in name:
        pytest.importorskip("neuralop")
    model = stirred_baseline({**SMALL, **SMALL_ON_GRID}[name])
    model.save_pretrained(tmp_path)
    loaded = fst.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config == model.config
    fields, queries = heat_solutions(2, GRID), grid_queries(2, GRID)
    observations = (observe_boundary if name in SMALL else observe_everywhere)(fields)
    assert torch.equal(loaded(observations)(queries), model(observations)(queries))
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.state_dict())


def test_the_papers_fno_runs_on_the_papers_grid():
    """Observed as in the data, asked for a few points: one forward pass at the full size."""
    pytest.importorskip("neuralop")
    model = build(FNOConfig(layers=1))
    solutions = heat_solutions(1, (201, 1024))
    with torch.no_grad():
        output = model(observe_boundary(solutions))
        assert output.values.shape == (1, 201 * 1024, 1)
        assert output(grid_queries(1, (201, 1024))[:, ::1000]).shape == (1, 206, 1)
