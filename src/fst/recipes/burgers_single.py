"""Burgers at one viscosity, ν = 0.01 (paper, Section 4.1 and Appendix B).

Every model has the same 1,424 observations, batch size, schedule and stopping rule. The learning
rates and validation grids are the paper's.
"""

from fst.baselines import DeepONetConfig, FNOConfig, PerceiverIOConfig, TransolverConfig
from fst.config import FunctionSpaceConfig
from fst.data import BurgersData
from fst.evaluation.protocol import EvaluationSettings
from fst.recipes import paper
from fst.recipes.recipe import ModelConfig, Recipe
from fst.training.schedules import burgers_single
from fst.training.settings import TrainingSettings

NEIGHBORS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def _recipe(
    model_name: str,
    paper_name: str,
    model: ModelConfig,
    learning_rate: float,
    data: BurgersData,
    parameters: int,
    queries: int | None = 2_500,
    neighbors: tuple[int, ...] = (),
) -> Recipe:
    errors = paper.BURGERS_SINGLE[paper_name]
    return Recipe(
        name=f"burgers-single/{model_name}",
        task="burgers-single",
        model_name=paper_name,
        model=model,
        data=data,
        training=TrainingSettings(
            schedule=burgers_single(), learning_rate=learning_rate, queries=queries, clip=None
        ),
        evaluation=EvaluationSettings(
            grids=paper.BURGERS_GRIDS, neighbors=neighbors, paper_errors=errors
        ),
        paper_parameters=parameters,
        paper_error=errors[-1],
    )


def fst() -> Recipe:
    """The paper's single-viscosity FST.

    Command: fst train burgers-single/fst --out runs/burgers-single
    Cost: at most 250,000 steps; the paper stopped at 98,000 and selected step 92,000.
    Paper: relative L2 0.04185 on the full 201×1024 grid.
    """
    config = FunctionSpaceConfig()
    return _recipe("fst", "FST", config, 1e-3, BurgersData(), 2_830_721, neighbors=NEIGHBORS)


def fno() -> Recipe:
    """FNO on values and mask over the whole grid, supervised on the whole grid.

    Command: fst train burgers-single/fno --out runs/burgers-single-fno
    Cost: at most 250,000 steps; the paper selected step 72,000.
    Needs: function-space-transformer[baselines].
    Paper: relative L2 0.02974 on the full 201×1024 grid.
    """
    data = BurgersData(supervision_grid=None)
    return _recipe("fno", "FNO", FNOConfig(), 3e-3, data, 2_978_161, queries=None)


def perceiver_io() -> Recipe:
    """Perceiver IO.

    Command: fst train burgers-single/perceiver-io --out runs/burgers-single-perceiver-io
    Cost: at most 250,000 steps; the paper selected step 34,000.
    Paper: relative L2 0.25381 on the full 201×1024 grid.
    """
    data = BurgersData(validation_grid=(64, 64))
    return _recipe("perceiver-io", "Perceiver IO", PerceiverIOConfig(), 3e-4, data, 2_936_881)


def transolver() -> Recipe:
    """Transolver on one point set of observations and queries.

    Command: fst train burgers-single/transolver --out runs/burgers-single-transolver
    Cost: at most 250,000 steps; the paper selected step 80,000.
    Paper: relative L2 0.06154 on the full 201×1024 grid.
    """
    data = BurgersData(validation_grid=(64, 64))
    return _recipe("transolver", "Transolver", TransolverConfig(), 3e-4, data, 2_956_424)


def deeponet() -> Recipe:
    """DeepONet, its branch on the observed values.

    Command: fst train burgers-single/deeponet --out runs/burgers-single-deeponet
    Cost: at most 250,000 steps; the paper selected step 32,000.
    Paper: relative L2 0.25581 on the full 201×1024 grid.
    """
    data = BurgersData(validation_grid=(64, 64))
    return _recipe("deeponet", "DeepONet", DeepONetConfig(), 3e-4, data, 2_998_189)
