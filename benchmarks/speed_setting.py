"""What the sections of `speed.py` share: sizes, models, synthetic data, precision and the clock."""

import gc
import importlib.util
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from speed_sizes import Config, Sizes
from torch import Tensor

from fst import FunctionSpaceTransformer, Observations, kernels
from fst.base import build_model
from fst.cuda_graph import capture
from fst.data.burgers import sample_initial, saved_times, solve
from fst.data.samples import (
    BurgersSamples,
    boundary_observation_indices,
    index_coordinates,
    index_product,
    subset_indices,
)
from fst.operators import Operator

Row = dict[str, Any]

SEED = 2026091311
MODES = 4
VISCOSITY = 0.01


@dataclass(frozen=True)
class Setting:
    """One run of the benchmark."""

    device: torch.device
    sizes: Sizes
    compiled: bool
    """Whether compiled entries are measured too."""
    steps: int
    """Of a training whose accuracy is looked at."""
    starts: int
    """How many times each path trains where loss curves are compared."""
    run: Path | None = None
    """A folder with a trained FST, whose weights ours then has."""

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
    timeless: ClassVar[bool] = False
    """Whether no row is about time: then processes run beside each other."""

    @abstractmethod
    def entries(self, setting: Setting) -> list[str]: ...

    def alone(self, entry: str) -> bool:
        """Whether an entry deserves a process of its own: a fresh compiler and fresh memory."""
        return "compiled" in entry

    def forgetful(self, entry: str) -> bool:
        """Whether that process also does without what compilers have kept on the disk."""
        del entry
        return False

    @abstractmethod
    def measure(self, entry: str, setting: Setting) -> Row: ...

    def conclude(self, rows: list[Row], earlier: dict[str, list[Row]]) -> Conclusion:
        """From the rows without an error, and those of the sections before."""
        del rows, earlier
        return Conclusion()


def models(setting: Setting) -> dict[str, Config]:
    """Every model that can be built here."""
    configs = setting.sizes.configs()
    if importlib.util.find_spec("neuralop") is None:
        del configs["fno"]
    return configs


def operator(config: Config, device: torch.device) -> Operator:
    """The untrained model, always with the same weights; fused unless the path is plain."""
    torch.manual_seed(SEED)
    network = build_model(config)
    assert isinstance(network, Operator)
    return kernels.fuse(network).to(device)


def field_model(setting: Setting) -> FunctionSpaceTransformer:
    """An FST whose weights are like those of use: a trained one where there is one."""
    torch.manual_seed(SEED)
    network = (
        FunctionSpaceTransformer(setting.sizes.local)
        if setting.run is None
        else FunctionSpaceTransformer.from_pretrained(setting.run)
    )
    return kernels.fuse(network).to(setting.device).eval()


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
    return _samples(
        sizes,
        sizes.grid if whole else sizes.supervision,
        lambda indices: waves(count, index_coordinates(indices, sizes.grid).to(device)),
    )


def burgers_samples(sizes: Sizes, count: int, device: torch.device) -> BurgersSamples:
    """Burgers solutions, made on the spot: what is to be learned and not only timed."""
    times, points = sizes.grid
    initial = sample_initial(count, points, SEED).to(device)
    solutions = solve(initial, VISCOSITY, saved_times(times)).float()  # b t x
    return _samples(
        sizes,
        sizes.supervision,
        lambda indices: solutions[:, *indices.to(device).unbind(dim=1)],
    )


def _samples(
    sizes: Sizes, counts: tuple[int, int], values: Callable[[Tensor], Tensor]
) -> BurgersSamples:
    """Samples on a part of the grid, from their values at grid indices (p, 2)."""
    held = tuple(map(subset_indices, sizes.grid, counts))
    seen = boundary_observation_indices(*sizes.grid)
    return BurgersSamples(
        grid=sizes.grid,
        held=held,
        targets=values(index_product(held)).unflatten(1, counts),
        observed_positions=index_coordinates(seen, sizes.grid),
        observed_values=values(seen),
    )


def observations(sizes: Sizes, batch: int, device: torch.device) -> Observations:
    positions = observed_positions(sizes, device)
    return Observations(positions.expand(batch, -1, -1), waves(batch, positions)[..., None])


def grid_queries(grid: tuple[int, int], device: torch.device) -> Tensor:
    """All points of the grid, (1, q, 2)."""
    axes = tuple(torch.arange(points) for points in grid)
    return index_coordinates(index_product(axes), grid).to(device)[None]


@contextmanager
def path(name: str) -> Iterator[None]:
    """`fast` is what users get; within `plain`, models that are made are not fused."""
    fast = dict(kernels.FAST)
    if name == "plain":
        kernels.FAST.clear()
    try:
        yield
    finally:
        kernels.FAST.update(fast)


def precision(name: str, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16, enabled=name == "bf16")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def release(device: torch.device) -> None:
    """Free what the last entry held on a GPU, and begin to look for the peak anew."""
    if device.type == "cuda":
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None


def recorded(
    call: Callable[[], object], device: torch.device, times: int = 1
) -> Callable[[], object]:
    """The call, so many times, as a CUDA graph on a GPU: the GPU's time, not that of Python.

    Under autocast, weights are rounded before the graph and not again in it.
    """
    if device.type != "cuda":
        return call

    def work() -> tuple[()]:
        for _ in range(times):
            call()
        return ()

    return capture(work, (), device)[0]


def clock(
    call: Callable[[], object],
    setting: Setting,
    *,
    warmup: int = 3,
    least: int = 3,
    most: int = 200,
    times: int = 1,
) -> Row:
    """Medians over many calls, each waited for: seen by the host, and between events on a GPU.

    A call that does something so many times counts as the time of one.
    """
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
        host.append(1e3 * (time.perf_counter() - start) / times)
        if events:
            on_device.append(events[0].elapsed_time(events[1]) / times)
        if len(host) == most:
            break
    return {
        "ms": statistics.median(host),
        "least_ms": min(host),
        "device_ms": statistics.median(on_device) if on_device else None,
        "least_device_ms": min(on_device) if on_device else None,
        "calls": len(host),
    }
