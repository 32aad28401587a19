"""Which of the saved times hold the error of Burgers weights?

    python benchmarks/error_by_time.py burgers-all --viscosities 0.01 1 4 --out rows.jsonl

Every row is one viscosity: the relative L2 error over the whole grid, from all anchors and from the
16 nearest, and `by_time`: the error at each saved time over the norm of the whole solution. Their
squares add up to that of the whole, for each solution. Means are over the first validation
solutions of the recipes' data, which nothing was trained on. `crowding` is how many anchors stand
within 0.03 of a front, over how many even ones would.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from anchor_gate import crowding, near_fronts

import fst
from fst.data import BurgersData, BurgersSamples, burgers
from fst.evaluation.protocol import measuring
from fst.operators import Operator
from fst.pretrained import digest
from fst.training.run_folder import describe_environment

NEIGHBORS = 16


def errors(model: Operator, viscosity: float, solutions: int) -> dict[str, Any]:
    """The row of one viscosity."""
    data = BurgersData()
    initial = burgers.sample_initial(solutions, data.points, data.seed, start=data.training)
    exact = burgers.solve(initial, viscosity, burgers.saved_times()).float()  # n t x
    condition = None
    if model.condition_channels:
        condition = torch.full((solutions, 1), viscosity)
    samples = BurgersSamples.from_solutions(exact, condition)
    by_time, nearest = [], []
    at_fronts = torch.zeros(2)
    with measuring(model):
        for number, solution in enumerate(exact):
            batch = samples.batch(torch.tensor([number]))
            field = model(batch.observations)
            norm = solution.norm()
            missed = field(batch.queries).view_as(solution) - solution
            by_time.append(missed.norm(dim=1) / norm)
            missed = field(batch.queries, neighbors=NEIGHBORS).view_as(solution) - solution
            nearest.append((missed.norm() / norm).item())
            along = field.unit_anchors.positions[..., 1].view(1, model.config.row_count, -1)
            at_fronts += torch.stack(crowding(along, near_fronts(solution[None])))
    found = torch.stack(by_time)  # n t
    return {
        "viscosity": viscosity,
        "solutions": solutions,
        "error": found.norm(dim=1).mean().item(),
        "nearest": sum(nearest) / solutions,
        "crowding": (at_fronts[0] / at_fronts[1]).item(),
        "by_time": [round(value, 6) for value in found.mean(dim=0).tolist()],
    }


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", help="a name, or a folder of weights")
    parser.add_argument("--viscosities", type=float, nargs="+", default=[0.01, 0.2, 1.0, 4.0])
    parser.add_argument("--solutions", type=int, default=4, help="of each viscosity")
    parser.add_argument("--label", help="by which the rows know the weights; their name")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(given)
    model = fst.from_pretrained(options.weights)
    assert isinstance(model, Operator)
    known = {
        "weights": options.label or Path(options.weights).name,
        "weights_sha256": digest(model.state_dict()),
        "git": describe_environment()["git"],
    }
    for viscosity in options.viscosities:
        row = known | errors(model, viscosity, options.solutions)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        worst = max(range(len(row["by_time"])), key=row["by_time"].__getitem__)
        print(
            f"ν {viscosity:g}: {row['error']:.4f}, {row['nearest']:.4f} from {NEIGHBORS} anchors; "
            f"largest at saved time {worst}: {row['by_time'][worst]:.4f}", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
