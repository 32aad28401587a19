"""What do more evaluation points, and a symmetry, do for the predictions of a trained FST?

    python benchmarks/evaluation_points.py burgers-single --points 128 256 512 1024 --out rows.jsonl
    python benchmarks/evaluation_points.py burgers-single --points 2048 \\
        --symmetries none odd-reflection --out rows.jsonl

Evaluation points are drawn at random, so a trained model may be given others than it was trained
with. A symmetry makes the prediction the mean of those for the observations and for their image.
Each row is one number of points, half of them at anchors and half from the Sobol sequence, and one
symmetry: the mean and median relative L2 error on solutions that nothing was trained or tested on
(Burgers: validation solutions of the recipes; Darcy: new ones), and the milliseconds of one.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

import fst
from fst.data import BurgersData, BurgersSamples, DarcyData, GridSamples, burgers, darcy
from fst.evaluation.protocol import device_name, measuring
from fst.metrics import relative_l2
from fst.model import FunctionSpaceTransformer
from fst.pretrained import digest
from fst.symmetry import SYMMETRIES
from fst.training.run_folder import describe_environment

GRID = (201, 128)
NEW = 1  # a seed of Darcy samples that no recipe takes


def burgers_samples(viscosities: list[float], count: int, condition: bool) -> GridSamples:
    """The first validation solutions of each viscosity, on a part of the grid."""
    data = BurgersData()
    initial = burgers.sample_initial(count, data.points, data.seed, start=data.training)
    times = burgers.saved_times()
    exact = torch.cat([burgers.solve(initial, nu, times).float() for nu in viscosities])
    conditions = torch.tensor(viscosities).repeat_interleave(count)[:, None]
    return BurgersSamples.from_solutions(exact, conditions if condition else None).on_grid(GRID)


def darcy_samples(count: int) -> GridSamples:
    inputs, solutions = darcy.generate(count, DarcyData().resolution, NEW)
    coefficients = torch.where(inputs, darcy.HIGH, darcy.LOW)
    return GridSamples.fully_observed(coefficients, solutions)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", help="a name, or a folder of weights")
    parser.add_argument("--points", type=int, nargs="+", default=[256, 512, 1024, 2048])
    names = ("none", *SYMMETRIES)
    parser.add_argument("--symmetries", nargs="+", default=["none"], choices=names)
    parser.add_argument("--viscosities", type=float, nargs="+", default=[0.01])
    parser.add_argument("--solutions", type=int, default=32, help="of each viscosity, or of Darcy")
    parser.add_argument("--darcy", action="store_true", help="the weights are those of Darcy flow")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(given)
    model = fst.from_pretrained(options.weights)
    assert isinstance(model, FunctionSpaceTransformer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, trained = model.to(device), replace(model.config, prediction_points="as-trained")
    if options.darcy:
        samples = darcy_samples(options.solutions)
    else:
        conditioned = model.condition_channels > 0
        samples = burgers_samples(options.viscosities, options.solutions, conditioned)
    samples = samples.to(device)
    for points, symmetry in product(options.points, options.symmetries):
        half = points // 2
        model.config = replace(
            trained,
            points_from_anchors=half,
            points_from_sobol=half,
            prediction_symmetry=symmetry,
        )
        errors: list[float] = []
        seconds = 0.0
        with measuring(model):
            for number in range(len(samples)):
                batch = samples.batch(torch.tensor([number], device=device))
                start = time.perf_counter()
                answer = model(batch.observations)(batch.queries)
                errors += relative_l2(answer, batch.targets, batch.mask).tolist()
                seconds += time.perf_counter() - start
        row = {
            "weights": Path(options.weights).name,
            "weights_sha256": digest(model.state_dict()),
            "trained_with": trained.points_from_anchors + trained.points_from_sobol,
            "points": points,
            "symmetry": symmetry,
            "viscosities": [] if options.darcy else options.viscosities,
            "solutions": len(errors),
            "error": statistics.fmean(errors),
            "median": statistics.median(errors),
            "milliseconds": round(1e3 * seconds / len(errors), 1),
            "hardware": device_name(device),
            "threads": torch.get_num_threads(),
            "git": describe_environment()["git"],
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = f"{row['error']:.5f}, median {row['median']:.5f}"
        print(f"{points:5d} points, symmetry {symmetry}: {shown}", flush=True)


if __name__ == "__main__":
    main()
