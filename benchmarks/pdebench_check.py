"""Trained weights on trajectories of PDEBench's own generator, which no training here has seen.

    python benchmarks/pdebench_check.py nu0.01.npz --weights burgers-single
    python benchmarks/pdebench_check.py nu0.001.npz --weights burgers-all --viscosity 0.001

FILE holds `u` (samples, times, cells) and `t`, with every k-th of the 201 saved times. The model is
given what the recipes give it: u at t = 0 from the file, and both end cells at 201 times. The file
does not hold that many, so they come from our solver, started from the file's initial values
(`solver`); with `file`, the end cells are given only at the times that the file holds. The error is
the relative L2 against the file, decoded from all anchors and from the 16 nearest. One row for each
is added to OUT, a file of JSON lines.
"""

import argparse
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

import fst
from fst.data import burgers
from fst.data.samples import BurgersSamples, boundary_observation_indices, index_coordinates
from fst.evaluation.protocol import EvaluationSettings, device_name, measure, measuring, represented
from fst.operators import Operator
from fst.pretrained import digest
from fst.training.run_folder import describe_environment

TIMES, FINAL_TIME, NEIGHBORS = 201, 2.0, 16
SETTINGS = EvaluationSettings(grids=(), neighbors=(NEIGHBORS,))


@dataclass(frozen=True)
class Row:
    """The error of one model on one file, decoded in one way."""

    file: str
    file_sha256: str
    weights: str
    weights_sha256: str
    viscosity: float
    observed: str
    neighbors: int | None
    error: float
    errors: tuple[float, ...]
    device: str
    versions: dict[str, Any]
    git: dict[str, Any] | None


def read(path: Path) -> tuple[Tensor, Tensor]:
    """Trajectories and the indices of their times among the saved ones."""
    with numpy.load(path) as file:
        u, t = (torch.from_numpy(file[name]) for name in ("u", "t"))
    steps = t.double() * (TIMES - 1) / FINAL_TIME
    if (steps - steps.round()).abs().max() > 1e-3:
        raise SystemExit(f"{path}: t must be among the {TIMES} saved times, got {t.tolist()}")
    return u, steps.round().long()


def observe(u: Tensor, times: Tensor, viscosity: float, source: str) -> tuple[Tensor, Tensor]:
    """(time, cell) of what is observed, and the values there."""
    cells = u.shape[-1]
    indices = boundary_observation_indices(TIMES, cells)
    if source == "solver":
        solution = burgers.solve(u[:, 0].double(), viscosity, burgers.saved_times()).float()
    else:
        indices = indices[torch.isin(indices[:, 0], times)]
        solution = torch.full((len(u), TIMES, cells), torch.nan)
        solution[:, times] = u
    return indices, solution[:, indices[:, 0], indices[:, 1]]


def score(
    model: Operator, path: Path, viscosity: float, source: str
) -> dict[int | None, tuple[float, ...]]:
    """Relative L2 of every trajectory, by the number of anchors decoded from."""
    u, times = read(path)
    indices, values = observe(u, times, viscosity, source)
    grid = (TIMES, u.shape[-1])
    samples = BurgersSamples(
        grid=grid,
        held=(times, torch.arange(grid[1])),
        targets=u,
        observed_positions=index_coordinates(indices, grid),
        observed_values=values,
        condition=torch.full((len(u), 1), viscosity) if model.condition_channels else None,
    ).to(next(model.parameters()).device)
    with measuring(model):
        found = measure(represented(model, SETTINGS), samples, SETTINGS)
    return {each.neighbors: each.errors for each in found}


def main(given: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="PDEBench's trajectories (.npz)")
    parser.add_argument("--weights", default="burgers-single", help="a name or a folder")
    parser.add_argument("--viscosity", type=float, default=0.01)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/pdebench/rows.jsonl"))
    options = parser.parse_args(given)
    model = fst.from_pretrained(options.weights).to(options.device)
    assert isinstance(model, Operator)
    provenance = {
        "file": options.file.name,
        "file_sha256": hashlib.sha256(options.file.read_bytes()).hexdigest(),
        "weights": Path(options.weights).name,
        "weights_sha256": digest({k: v.cpu() for k, v in model.state_dict().items()}),
        "viscosity": options.viscosity,
        "device": device_name(torch.device(options.device)),
        **{name: describe_environment()[name] for name in ("versions", "git")},
    }
    rows = [
        Row(
            observed=source,
            neighbors=neighbors,
            error=sum(errors) / len(errors),
            errors=errors,
            **provenance,
        )
        for source in ("solver", "file")
        for neighbors, errors in score(model, options.file, options.viscosity, source).items()
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        for row in rows:
            file.write(json.dumps(asdict(row)) + "\n")
            ways = "all anchors" if row.neighbors is None else f"{row.neighbors} nearest anchors"
            print(f"{row.weights} on {row.file}, end cells from the {row.observed}, {ways}: "
                  f"{row.error:.5f}")  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
