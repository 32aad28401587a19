"""What the sections of `speed.py` share: sizes, models, synthetic data, precision and the clock."""

import gc
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fst import FunctionSpaceConfig, FunctionSpaceTransformer, Observations, kernels, model
from fst.baselines import DeepONetConfig, FNOConfig, PerceiverIOConfig, TransolverConfig, build
from fst.data.samples import BurgersSamples
from fst.data.views import (
    boundary_observation_indices,
    index_coordinates,
    index_product,
    subset_indices,
)
from fst.operators import Operator

Row = dict[str, Any]
Config = FunctionSpaceConfig | FNOConfig | PerceiverIOConfig | TransolverConfig | DeepONetConfig

SEED = 2026091311
MODES = 4


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
    local_queries: int | None = None
    """How many random queries the local blends answer; None takes the whole grid."""
    samples: int = 192
    agreement_samples: int = 2_000
    agreement_steps: int = 2_000
    growth: tuple[int, ...] = (1, 2, 4)
    seconds: float = 5.0
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
# A CPU: the widths stay, everything else shrinks; the local blends keep the paper's anchors.
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
    seconds=0.8,
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
    refinement_steps=2,
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
    local_queries=256,
    samples=4,
    agreement_samples=4,
    agreement_steps=4,
    seconds=0.0,
    matrix=64,
    copied=2**16,
)


@dataclass(frozen=True)
class Setting:
    """One run of the benchmark."""

    device: torch.device
    sizes: Sizes
    compiled: bool
    """Whether compiled entries are measured too."""
    steps: int
    """Of the agreement."""
    run: Path | None = None
    """A folder with a trained model, for the local blends."""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def precisions(self) -> tuple[str, ...]:
        return ("bf16", "fp32") if self.cuda else ("fp32",)


@dataclass(frozen=True)
class Conclusion:
    """What follows from the rows of a section: rows of their own, and sentences."""

    rows: list[Row] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


class Section(ABC):
    """A part of the benchmark: named entries, each of which gives one row."""

    name: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    isolated: ClassVar[bool] = True
    """Whether every entry deserves a process of its own: fresh compiler, fresh memory."""

    @abstractmethod
    def entries(self, setting: Setting) -> list[str]: ...

    @abstractmethod
    def measure(self, entry: str, setting: Setting) -> Row: ...

    def conclude(self, rows: list[Row], earlier: dict[str, list[Row]]) -> Conclusion:
        """From the rows without an error, and those of the sections before."""
        del rows, earlier
        return Conclusion()


def operator(config: Config, device: torch.device) -> Operator:
    """The untrained model, always with the same weights."""
    torch.manual_seed(SEED)
    if isinstance(config, FunctionSpaceConfig):
        return model.build(config).to(device)
    return build(config).to(device)


def field_model(setting: Setting) -> FunctionSpaceTransformer:
    """The model whose field is decoded locally: a trained one where there is one."""
    if setting.run is not None:
        return FunctionSpaceTransformer.from_pretrained(setting.run).to(setting.device).eval()
    torch.manual_seed(SEED)
    return model.build(setting.sizes.local).to(setting.device).eval()


def waves(count: int, positions: Tensor) -> Tensor:
    """Travelling, decaying waves at positions (p, 2) of time and space, (count, p).

        u = Σ_k a_k exp(-k² t / 10) sin(2π k (x - c t) + φ_k)

    They solve a linear equation exactly, so that a model can learn them without any solver.
    """
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.rand(2 * MODES + 1, count, 1, generator=generator).to(positions.device)
    amplitudes, phases, speed = drawn[:MODES], 2 * torch.pi * drawn[MODES:-1], 2 * drawn[-1] - 1
    time_, space = positions.unbind(dim=1)
    total = torch.zeros(count, len(positions), device=positions.device)
    for k, (amplitude, phase) in enumerate(zip(amplitudes, phases, strict=True), start=1):
        angle = 2 * torch.pi * k * (space - speed * time_) + phase
        total += amplitude * torch.exp(-(k**2) * time_ / 10) * angle.sin()
    return total


def observed_positions(sizes: Sizes, device: torch.device) -> Tensor:
    return index_coordinates(boundary_observation_indices(*sizes.grid), sizes.grid).to(device)


def samples(sizes: Sizes, count: int, device: torch.device, whole: bool) -> BurgersSamples:
    """Waves in the place of Burgers solutions, supervised on the whole grid or a part of it."""
    counts = sizes.grid if whole else sizes.supervision
    held = tuple(map(subset_indices, sizes.grid, counts))
    places = index_coordinates(index_product(held), sizes.grid).to(device)
    observed = observed_positions(sizes, device)
    return BurgersSamples(
        grid=sizes.grid,
        held=held,
        targets=waves(count, places).unflatten(1, counts),
        observed_positions=observed,
        observed_values=waves(count, observed),
    )


def observations(sizes: Sizes, batch: int, device: torch.device) -> Observations:
    positions = observed_positions(sizes, device)
    return Observations(positions.expand(batch, -1, -1), waves(batch, positions)[..., None])


def grid_queries(sizes: Sizes, device: torch.device) -> Tensor:
    """All points of the grid, (1, q, 2)."""
    axes = tuple(torch.arange(points) for points in sizes.grid)
    return index_coordinates(index_product(axes), sizes.grid).to(device)[None]


def path(name: str) -> AbstractContextManager[None]:
    """`fast` is what users get; `plain` has PyTorch's operations only."""
    return kernels.reference() if name == "plain" else nullcontext()


def precision(name: str, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16, enabled=name == "bf16")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def release(device: torch.device) -> None:
    """Free what the last entry held, and begin to look for the peak anew."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None


def clock(
    call: Callable[[], object],
    setting: Setting,
    *,
    warmup: int = 3,
    least: int = 3,
    most: int = 200,
) -> Row:
    """Medians over many calls, each waited for: seen by the host, and between events on a GPU."""
    device = setting.device
    for _ in range(warmup if setting.sizes.seconds else 1):
        call()
    synchronize(device)
    host: list[float] = []
    on_device: list[float] = []
    begun = time.perf_counter()
    while len(host) < least or time.perf_counter() - begun < setting.sizes.seconds:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 if setting.cuda else 0)]
        start = time.perf_counter()
        if events:
            events[0].record()
        call()
        if events:
            events[1].record()
        synchronize(device)
        host.append(1e3 * (time.perf_counter() - start))
        if events:
            on_device.append(events[0].elapsed_time(events[1]))
        if len(host) == most:
            break
    return {
        "ms": statistics.median(host),
        "least_ms": min(host),
        "device_ms": statistics.median(on_device) if on_device else None,
        "calls": len(host),
    }
