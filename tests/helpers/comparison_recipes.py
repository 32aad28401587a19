"""The models of single-viscosity Burgers and Darcy, shrunk to seconds, for comparisons in tests."""

from dataclasses import replace
from pathlib import Path

from fst.baselines import (
    DeepONetConfig,
    FNOConfig,
    GridTransolverConfig,
    PerceiverIOConfig,
    TransolverConfig,
)
from fst.commands.jobs import attempt
from fst.config import FunctionSpaceConfig
from fst.data import BurgersData
from fst.evaluation.protocol import EvaluationSettings
from fst.recipes import find
from fst.recipes.recipe import Recipe

GRID = (11, 32)
GRIDS = ((5, 8), GRID)
OBSERVED = 32 + 2 * 10  # the first time, and both ends of every later one


def shrink_model(config: object) -> object:
    match config:
        case FunctionSpaceConfig():
            return replace(
                config,
                **{"width": 16, "heads": 2, "fourier_bands": 4, "rows": (4,), "anchors_per_row": 4},
                **{"predictor_width": 8, "predictor_heads": 2, "predictor_blocks": 1},
                **{"refinement_steps": 1, "points_from_anchors": 4, "points_from_sobol": 4},
            )
        case FNOConfig():
            square = len({*config.grid}) == 1
            grid = (16, 16) if square else GRID
            return replace(config, grid=grid, width=8, layers=1, modes=(4, 6))
        case PerceiverIOConfig():
            return replace(config, width=16, heads=2, latents=8, layers=1, fourier_bands=4)
        case GridTransolverConfig() | TransolverConfig():
            return replace(config, width=16, heads=2, layers=1, slices=4)
        case DeepONetConfig():
            return replace(config, observations=OBSERVED, branch=(16, 16), trunk=(16, 16))
    raise TypeError(config)


def small(name: str) -> Recipe:
    """A recipe of burgers-single at a size that trains in milliseconds a step."""
    recipe = find(name)
    assert isinstance(recipe.data, BurgersData)
    assert isinstance(recipe.evaluation, EvaluationSettings)
    whole = recipe.data.supervision_grid is None
    return replace(
        recipe,
        model=shrink_model(recipe.model),
        data=replace(
            recipe.data,
            **{"training": 6, "validation": 2, "test": 3, "points": GRID[1], "times": GRID[0]},
            **{"supervision_grid": None if whole else (5, 8), "validation_grid": (5, 8)},
        ),
        training=replace(
            recipe.training,
            **{"batch_size": 2, "queries": None if whole else 16, "precision": "fp32"},
            **{"log_every": 5, "tensorboard": False},
        ),
        evaluation=replace(
            recipe.evaluation, grids=GRIDS, paper_errors=recipe.evaluation.paper_errors[-2:]
        ),
    )


class Launches:
    """Runs jobs in this process, and notes which; `faults` come instead of some of them."""

    def __init__(self, **faults) -> None:
        self.seen: list[str] = []
        self.faults = faults

    def __call__(self, job) -> int:
        self.seen.append(job.name)
        fault = self.faults.get(job.model)
        return attempt(job) if fault is None else fault()


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder but its lock: when it was last changed, and what it holds."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }
