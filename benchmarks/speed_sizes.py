"""How large everything is that `speed.py` measures."""

from dataclasses import dataclass, field, replace

from fst import FunctionSpaceConfig
from fst.baselines import DeepONetConfig, FNOConfig, PerceiverIOConfig, TransolverConfig
from fst.data.samples import boundary_observation_indices

Config = FunctionSpaceConfig | FNOConfig | PerceiverIOConfig | TransolverConfig | DeepONetConfig


@dataclass(frozen=True)
class Sizes:
    """How large everything is; the defaults are the paper's single-viscosity Burgers."""

    name: str = "paper"
    grid: tuple[int, int] = (201, 1024)
    supervision: tuple[int, int] = (100, 100)
    batch: int = 48
    queries: int = 2_500
    fst: FunctionSpaceConfig = field(default_factory=FunctionSpaceConfig)
    fno: FNOConfig = field(default_factory=FNOConfig)
    perceiver_io: PerceiverIOConfig = field(default_factory=PerceiverIOConfig)
    transolver: TransolverConfig = field(default_factory=TransolverConfig)
    deeponet: DeepONetConfig = field(default_factory=DeepONetConfig)
    many_queries: int = 10_000_000
    local: FunctionSpaceConfig = field(default_factory=FunctionSpaceConfig)
    """Of the field whose local blends are measured."""
    local_grid: tuple[int, int] = (201, 1024)
    """Of the queries that its blends answer."""
    local_queries: int | None = None
    """How many random queries the whole field answers; None takes that grid."""
    samples: int = 192
    agreement_samples: int = 480
    agreement_steps: int = 2_000
    agreement_starts: int = 4
    """How many sets of first weights, all within a rounding of each other."""
    growth: tuple[float, ...] = (0.5, 1, 2, 4)
    seconds: float = 2.0
    """How long one thing is measured for, about."""
    matrix: int = 8_192
    copied: int = 2**31

    def configs(self) -> dict[str, Config]:
        """Every model, fitted to the grid."""
        observed = len(boundary_observation_indices(*self.grid))
        return {
            "fst": self.fst,
            "perceiver-io": self.perceiver_io,
            "transolver": self.transolver,
            "deeponet": replace(self.deeponet, observations=observed),
            "fno": replace(self.fno, grid=self.grid),
        }


PAPER = Sizes()
# A CPU: the widths stay, everything else shrinks; the local blends keep anchors and grid.
REDUCED = Sizes(
    name="reduced",
    grid=(33, 64),
    supervision=(32, 32),
    batch=2,
    queries=256,
    fst=FunctionSpaceConfig(
        rows=(16,), anchors_per_row=16, points_from_anchors=64, points_from_sobol=64
    ),
    many_queries=20_000,
    local_queries=20_000,
    samples=8,
    agreement_samples=16,
    agreement_steps=20,
    agreement_starts=2,
    matrix=1_024,
    copied=2**27,
)
_TINY = FunctionSpaceConfig(
    width=16,
    heads=2,
    fourier_bands=4,
    rows=(4,),
    anchors_per_row=8,
    predictor_width=8,
    predictor_heads=2,
    predictor_blocks=1,
    refinement_steps=1,
    points_from_anchors=8,
    points_from_sobol=8,
)
# Proves that everything runs; its numbers mean nothing.
QUICK = replace(
    REDUCED,
    name="quick",
    grid=(9, 16),
    supervision=(8, 8),
    queries=32,
    fst=_TINY,
    fno=FNOConfig(width=4, layers=1, modes=(4, 4)),
    perceiver_io=PerceiverIOConfig(width=16, heads=2, latents=8, layers=1, fourier_bands=4),
    transolver=TransolverConfig(width=16, layers=1, heads=2, slices=4),
    deeponet=DeepONetConfig(branch=(16, 16), trunk=(16, 16)),
    many_queries=400,
    local=_TINY,
    local_grid=(9, 16),
    local_queries=256,
    samples=4,
    agreement_samples=4,
    agreement_steps=4,
    growth=(1, 2, 4),
    seconds=0.0,
    matrix=64,
    copied=2**16,
)
