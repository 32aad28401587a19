"""Small models in place of weights that do not ship with this version of the package.

Pages that needed one say so. Where all weights ship, this file is of no use.
"""

from pathlib import Path

import torch
from torch import Tensor

import fst
from fst.data import burgers, darcy
from fst.metrics import squared_relative_l2
from fst.pretrained import PretrainedError

NAMES = ("burgers-single", "darcy")
SMALL = fst.FunctionSpaceConfig(
    width=40, heads=4, fourier_bands=8, rows=(12,), anchors_per_row=12, predictor_width=32,
    predictor_blocks=1, refinement_steps=2, points_from_anchors=32, points_from_sobol=32,
)  # fmt: skip

used: list[str] = []
"""The names that a stand-in was made for."""


def install(*, reduced: bool) -> None:
    """From here on, `fst.from_pretrained` trains a stand-in for a name without weights."""
    load = fst.from_pretrained

    def from_pretrained(source: str | Path) -> fst.Model:
        try:
            return load(source)
        except PretrainedError:
            if source not in NAMES or Path(source).exists():
                raise
            used.append(str(source))
            return train(str(source), *((1, 8) if reduced else (500, 128)))

    fst.from_pretrained = from_pretrained


def train(name: str, steps: int, samples: int) -> fst.FunctionSpaceTransformer:
    """A small model of the right kind after a short training on coarse data."""
    torch.manual_seed(0)
    observations, queries, targets = problem(name, samples)
    model = fst.FunctionSpaceTransformer(SMALL)
    model.standardize_values.set(observations.values.mean(), observations.values.std())
    model.standardize_outputs.set(targets.mean(), targets.std())
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [
        torch.optim.Muon(matrices, lr=3e-3, weight_decay=0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.Adam(others, lr=3e-3),
    ]
    for step in range(steps):
        rows, asked = torch.randint(samples, (8,)), torch.randint(len(queries), (256,))
        seen = fst.Observations(observations.positions[rows], observations.values[rows])
        predicted = model(seen)(queries[asked].expand(8, -1, -1))
        squared_relative_l2(predicted, targets[rows][:, asked]).mean().backward()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 50) * (1 - step / steps)
            optimizer.step()
            optimizer.zero_grad()
    return model


def problem(name: str, samples: int) -> tuple[fst.Observations, Tensor, Tensor]:
    """Observations, the grid of queries (q 2) and targets (b q 1)."""
    if name == "darcy":
        high, solutions = darcy.generate(samples, 32, seed=0, fine=128)
        axis = torch.linspace(0, 1, 32)
        grid = torch.cartesian_prod(axis, axis)
        values = torch.where(high, darcy.HIGH, darcy.LOW).reshape(samples, -1, 1)
        observations = fst.Observations(grid.expand(samples, -1, -1), values)
        return observations, grid, solutions.reshape(samples, -1, 1)
    initial = burgers.sample_initial(samples, 128, seed=0)
    solution = burgers.solve(initial, 0.01, torch.linspace(0, 2, 41)).float()
    grid = torch.cartesian_prod(torch.linspace(0, 1, 41), torch.linspace(0, 1, 128))
    time, space = grid.T
    observed = (time == 0) | (space == 0) | (space == 1)
    targets = solution.reshape(samples, -1, 1)
    positions = grid[observed].expand(samples, -1, -1)
    return fst.Observations(positions, targets[:, observed]), grid, targets
