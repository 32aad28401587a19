"""Do well-chosen anchor positions lower the error? Oracle positions against even ones, on Burgers.

    python benchmarks/anchor_gate.py --study --out gate        # what can be represented; CPU
    python benchmarks/anchor_gate.py --out gate --minutes 8.5  # trains; one GPU
    python benchmarks/anchor_gate.py --out gate --kinds learned --seeds 0
    python benchmarks/anchor_gate.py --out gate --device cpu --workers 12 --width 48 --cells 256 \\
        --times 51 --batch 8 --queries 256 --rate 4e-3 --sizes 8x8 8x16 8x32  # a small FST
    python benchmarks/anchor_gate.py --out gate --decoder linear  # cannot draw between anchors
    python benchmarks/anchor_gate.py --out gate --bands 32  # finer Fourier features of positions

The oracle (`anchor_oracle.py`) sees the true solution, in validation as well: it bounds what a
predictor of anchors could gain, and is no model one could use. Its positions also reveal where the
fronts are: what positions alone gain is the difference from `told`. `--kinds` takes, in any number:

    oracle    positions equidistribute a monitor of the solution; scales tied to the gaps
    uniform   even positions; scales tied to the (even) gaps by the same rule
    staggered the same, neighbouring rows half a gap apart: nothing is read from any solution
    told      as uniform, but each anchor is told where the oracle would have put it
    silent    as oracle, but the first features are those of even anchors, alike for every input
    fixed     even positions; all length scales 0.03
    learned   the model's own predictor, taught by the oracle with a weight that fades to zero

and after a name, changes of the rule, such as `oracle,beta=3,window=0`. Every finished run adds
one line to `rows.jsonl` in --out; runs that have theirs are skipped. Two runs with the same seed
see the same samples, queries and evaluation points.

With `--decoder linear` the field is the blend of one value per anchor, which is read off its
features: what lies between anchors is then what the blend makes of it.
"""

import argparse
import fcntl
import functools
import itertools
import json
import math
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import anchor_oracle as oracle
import torch
from anchor_oracle import FixedScales, GivenAnchors, LearnedAnchors, Rule, TiedScales, ToldAnchors
from torch import Tensor, nn

from fst import FunctionSpaceConfig, FunctionSpaceTransformer
from fst.data import burgers
from fst.data.burgers_data import PeriodicSamples
from fst.data.samples import BurgersSamples
from fst.evaluation_points import PointDraws
from fst.field import Decoder
from fst.kernels import fuse
from fst.metrics import relative_l2, squared_relative_l2
from fst.nn import FourierFeatures

Row = dict[str, Any]

SEED = 0  # of the initial conditions: the same solutions for every run
FINE = 1024  # cells that data are made with, at least
FIXED_SCALE = 0.03
NEIGHBORS = 16
NEAR = 0.03  # of a front: where the solution falls faster than this slope
FRONT_SLOPE = -10.0
# Of a model narrower than the paper's: the sizes of `demo/burgers`.
SMALL = {
    "heads": 4,
    "fourier_bands": 8,
    "predictor_width": 48,
    "predictor_blocks": 1,
    "refinement_steps": 2,
    "points_from_sobol": 32,
}
WARM_UP_RUNS = 3  # of a step before it is captured
COLUMNS = ("width", "decoder", "bands", "steps", "batch")  # of the table, among the sizes
TIMED = 50  # steps after which a run that would not end in time is given up


# Data


@dataclass(frozen=True)
class Sizes:
    """The data and the budget of every run."""

    training: int = 2000
    validation: int = 84
    cells: int = 1024
    times: int = 201
    steps: int = 2000
    batch: int = 32
    queries: int = 2500
    width: int = 176
    rate: float = 1e-3
    decoder: str = "mlp"
    bands: int = 0
    """Fourier bands of positions; 0 for those of the model's size."""

    @property
    def grid(self) -> tuple[int, int]:
        """Where training asks and validation measures."""
        return min(100, self.times), min(100, self.cells)


def data_path(folder: Path, viscosity: float, sizes: Sizes) -> Path:
    count = sizes.training + sizes.validation
    return folder / f"burgers-{viscosity:g}-{count}x{sizes.times}x{sizes.cells}.pt"


def generate(folder: Path, viscosity: float, sizes: Sizes, device: torch.device) -> None:
    """Solutions (n, times, cells) in a file: training, then validation.

    Thin shocks need thin cells: a coarse solution is every k-th cell of a fine one.
    """
    path = data_path(folder, viscosity, sizes)
    if path.exists():
        return
    started = time.perf_counter()
    count = sizes.training + sizes.validation
    every = max(1, FINE // sizes.cells)
    initial = burgers.sample_initial(count, sizes.cells * every, SEED).to(device)
    times = burgers.saved_times(sizes.times).to(device)
    solution = burgers.solve(initial, viscosity, times)[..., ::every].contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(solution.float().cpu(), path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    print(
        f"ν = {viscosity:g}: {count} solutions, {time.perf_counter() - started:.0f} s", flush=True
    )


@functools.cache
def load(path: Path, device: torch.device) -> Tensor:
    return torch.load(path, mmap=True).to(device)


# Model


@dataclass(frozen=True)
class Job:
    """One run."""

    viscosity: float
    rows: int
    per_row: int
    kind: str
    seed: int
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def name(self) -> str:
        return self.kind.split(",")[0]

    @property
    def rule(self) -> Rule:
        changes: Row = {}
        for change in self.kind.split(",")[1:]:
            key, _, value = change.partition("=")
            changes[key] = value if key == "gap" else float(value)
        return replace(Rule(), **changes)

    @property
    def key(self) -> Row:
        return asdict(self)


class LinearDecoder(Decoder):
    """A blend of values, instead of an MLP of blended features and of the query's position."""

    def __init__(self, width: int, fourier: FourierFeatures, outputs: int) -> None:
        super().__init__(width, fourier, 0, outputs)
        del self.evaluate, self.feed_forward, self.norm
        self.output = nn.Linear(width, outputs)

    def pointwise(self, blended: Tensor, queries: Tensor, condition: Tensor | None) -> Tensor:
        return self.output(blended)


def build_model(job: Job) -> nn.Module:
    torch.manual_seed(1000 + job.seed)
    anchors = job.rows * job.per_row
    small = job.sizes.width < FunctionSpaceConfig().width
    config = FunctionSpaceConfig(
        rows=(job.rows,),
        anchors_per_row=job.per_row,
        points_from_anchors=min(32 if small else 256, anchors),
        width=job.sizes.width,
        coordinates="adaptive" if job.name == "learned" else "uniform",
        length_scales="fixed",
        **(SMALL if small else {})
        | ({"fourier_bands": job.sizes.bands} if job.sizes.bands else {}),
    )
    model = FunctionSpaceTransformer(config)
    if job.sizes.decoder == "linear":
        model.decoder = LinearDecoder(config.width, model.fourier, config.output_channels)
    scales = FixedScales(FIXED_SCALE) if job.name == "fixed" else TiedScales(job.rule)
    if job.name == "learned":
        model.predict_anchors = LearnedAnchors(model.predict_anchors, scales)
    elif job.name == "told":
        model.predict_anchors = ToldAnchors(scales, model.fourier, config.width)
        model.initial_position.register_forward_hook(model.predict_anchors.hint)
    else:
        model.predict_anchors = GivenAnchors(scales)
    if job.name == "silent":
        even = oracle.spread(oracle.even(1, job.rows, job.per_row, torch.device("cpu")))
        model.register_buffer("even", model.fourier(even), persistent=False)
        model.initial_position.register_forward_pre_hook(
            lambda module, given: (model.even.expand_as(given[0]),)
        )
    return model


# Optimiser


def orthogonalized(stack: Tensor) -> Tensor:
    """Five Newton–Schulz steps towards the nearest orthogonal matrices, in bfloat16."""
    wide = stack.shape[1] <= stack.shape[2]
    x = stack.bfloat16() if wide else stack.bfloat16().mT
    x = x / (x.float().norm(dim=(1, 2), keepdim=True).bfloat16() + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return x if wide else x.mT


class MuonAdam:
    """Muon for weight matrices, Adam for the rest; rates are tensors, so that a graph can hold it.

    Matrices of one shape are stacked. Their update is scaled to the size of Adam's.
    """

    momentum, betas, epsilon = 0.95, (0.9, 0.999), 1e-8

    def __init__(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        self.matrices: dict[torch.Size, list[int]] = {}
        self.others: list[int] = []
        for index, (name, p) in enumerate(named):
            matrix = p.ndim == 2 and min(p.shape) > 8 and name.endswith("weight")
            (self.matrices.setdefault(p.shape, []) if matrix else self.others).append(index)
        device = self.parameters[0].device
        self.buffers = {
            shape: torch.zeros(len(indices), *shape, device=device)
            for shape, indices in self.matrices.items()
        }
        self.first, self.second = (
            [torch.zeros_like(self.parameters[i]) for i in self.others] for _ in range(2)
        )
        self.count = torch.zeros((), device=device)

    @torch.no_grad()
    def step(self, gradients: list[Tensor], rate: Tensor, limit: float = 1.0) -> None:
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        gradients = torch._foreach_mul(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
        self._muon(gradients, rate)
        self._adam([gradients[i] for i in self.others], rate)

    def _muon(self, gradients: list[Tensor], rate: Tensor) -> None:
        for shape, indices in self.matrices.items():
            buffer, stack = self.buffers[shape], torch.stack([gradients[i] for i in indices])
            buffer.lerp_(stack, 1 - self.momentum)
            update = orthogonalized(stack.lerp(buffer, self.momentum)).float()
            update = update * (rate * (-0.2 * math.sqrt(max(shape))))
            torch._foreach_add_([self.parameters[i] for i in indices], list(update.unbind()))

    def _adam(self, gradients: list[Tensor], rate: Tensor) -> None:
        (beta1, beta2), parameters = self.betas, [self.parameters[i] for i in self.others]
        self.count += 1
        torch._foreach_lerp_(self.first, gradients, 1 - beta1)
        torch._foreach_mul_(self.second, beta2)
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - beta2)
        root = (1 - beta2**self.count).sqrt()
        below = torch._foreach_sqrt(self.second)
        torch._foreach_div_(below, root)
        torch._foreach_add_(below, self.epsilon)
        update = torch._foreach_div(self.first, below)
        torch._foreach_mul_(update, -rate / (1 - beta1**self.count))
        torch._foreach_add_(parameters, update)


# Training


class Training:
    """A model, its data and one step, which draws all that is random on the device."""

    def __init__(self, job: Job, solution: Tensor, device: torch.device) -> None:
        self.job, self.device = job, device
        sizes = job.sizes
        self.model = fuse(build_model(job)).to(device).train()
        known = solution[: sizes.training]
        self.samples = PeriodicSamples(BurgersSamples.from_solutions(known), sizes.grid)
        self.held_out = solution[sizes.training :]
        targets = self.samples.whole.on_grid(sizes.grid).targets
        for each in (self.model.standardize_values, self.model.standardize_outputs):
            each.set(targets.mean(), targets.std())
        self.needs_oracle = job.name in ("oracle", "told", "silent", "learned")
        self.density = oracle.monitor(known, job.rows, job.rule) if self.needs_oracle else None
        self.optimizer = MuonAdam(self.model)
        self.generator = torch.Generator(device).manual_seed(job.seed)
        config = self.model.config
        sobol = torch.quasirandom.SobolEngine(2, scramble=True, seed=job.seed)
        points = sobol.draw(config.refinement_steps * config.points_from_sobol)
        self.sobol = points.view(config.refinement_steps, -1, 2).to(device)
        self.rate, self.teach, self.loss = (torch.zeros((), device=device) for _ in range(3))

    def draws(self) -> PointDraws:
        """A random subset of the anchors, and a Sobol set shifted at random on the torus."""
        config = self.model.config
        steps, where = config.refinement_steps, {"generator": self.generator, "device": self.device}
        keys = torch.rand(steps, config.anchors, **where)
        shift = torch.rand(steps, 1, 2, **where)
        return PointDraws(
            keys.argsort(dim=1)[:, : config.points_from_anchors], (self.sobol + shift) % 1.0
        )

    def step(self) -> None:
        sizes, where = self.job.sizes, {"generator": self.generator, "device": self.device}
        rows = torch.randint(sizes.training, (sizes.batch,), **where)
        shift = torch.randint(sizes.cells, (sizes.batch, 1), **where)
        reflected = torch.randint(2, (sizes.batch, 1), **where)
        augmentation = torch.cat((shift, reflected), dim=1)
        asked = math.prod(sizes.grid)
        chosen = torch.randint(asked, (sizes.batch, min(sizes.queries, asked)), **where)
        draws = self.draws()
        batch = self.samples.batch(rows, chosen, augmentation)
        anchors = self.model.predict_anchors
        with torch.no_grad():
            moved = None
            if self.density is not None:
                moved = oracle.moved(self.density[rows], augmentation)
            self.place_anchors(moved, sizes.batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            prediction = self.model.represent(batch.observations, draws).decode(batch.queries)
            loss = squared_relative_l2(prediction, batch.targets).mean()
        total = loss + self.teach * anchors.teaching()
        gradients = torch.autograd.grad(total, self.optimizer.parameters)
        self.optimizer.step(list(gradients), self.rate)
        self.loss.copy_(loss.detach())

    def place_anchors(self, density: Tensor | None, batch: int) -> None:
        """Hand positions to the anchors: even ones, or those of a density, or both."""
        job, anchors = self.job, self.model.predict_anchors
        even = oracle.staggered if job.name == "staggered" else oracle.even
        anchors.along = even(batch, job.rows, job.per_row, self.device)
        if density is not None:
            name = "told" if job.name == "told" else "along"
            setattr(anchors, name, oracle.equidistributed(density, job.per_row))

    def set_rates(self, step: int) -> None:
        """Linear warm-up, cosine to zero; the teacher fades out before the end."""
        steps = self.job.sizes.steps
        warm_up = min(300, steps // 5 + 1)
        cosine = 0.5 + 0.5 * math.cos(math.pi * max(0, step - warm_up) / max(1, steps - warm_up))
        self.rate.fill_(self.job.sizes.rate * min(1.0, (step + 1) / warm_up) * cosine)
        if self.job.name == "learned":
            self.teach.fill_(max(0.0, 1 - step / (0.7 * steps)))

    def capture(self) -> Callable[[], Any]:
        """The step as one CUDA graph; as it is where there is no GPU."""
        if self.device.type != "cuda":
            return self.step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS):  # the rate is zero: only the optimiser's averages move
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        # Other threads of the process, such as autograd's, may not be forbidden anything.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            self.step()
        torch.cuda.synchronize()
        return graph.replay


def train(
    job: Job, solution: Tensor, device: torch.device, eager: bool, deadline: float = math.inf
) -> tuple[Training, Row]:
    """The model after its steps, and how they went; `deadline` on the clock of `perf_counter`."""
    training = Training(job, solution, device)
    found: Row = {"graph": device.type == "cuda" and not eager}
    if eager:
        step: Callable[[], Any] = training.step
    else:
        try:
            step = training.capture()
        except Exception:
            traceback.print_exc()
            print("The step could not be captured; it runs as it is.", flush=True)
            return train(job, solution, device, True, deadline)
    synchronize(device)
    started = time.perf_counter()
    losses = []
    for number in range(job.sizes.steps):
        training.set_rates(number)
        step()
        if number == TIMED:
            training.loss.item()
            ended = started + (time.perf_counter() - started) / TIMED * job.sizes.steps
            if ended > deadline:
                raise RuntimeError(f"would end {ended - deadline:.0f} s too late")
        if number % 250 == 0 or number == job.sizes.steps - 1:
            losses.append(round(training.loss.item(), 6))
            if not math.isfinite(losses[-1]):
                raise RuntimeError(f"loss {losses[-1]} in step {number}")
    synchronize(device)
    seconds = time.perf_counter() - started
    found |= {"train_seconds": seconds, "steps_per_second": job.sizes.steps / seconds}
    return training, found | {"losses": losses}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# Validation


def near_fronts(solution: Tensor) -> Tensor:
    """True at cells less than `NEAR` from where the solution falls steeply: (b, times, cells)."""
    cells = solution.shape[2]
    slope = (solution.roll(-1, dims=2) - solution.roll(1, dims=2)) * (cells / 2)
    reach = round(NEAR * cells)
    steep = (slope < FRONT_SLOPE).float().flatten(0, 1)[:, None]
    steep = torch.cat((steep[..., -reach:], steep, steep[..., :reach]), dim=-1)
    wide = torch.nn.functional.max_pool1d(steep, 2 * reach + 1, stride=1)
    return wide[:, 0].reshape(solution.shape) > 0


def crowding(along: Tensor, fronts: Tensor) -> tuple[Tensor, Tensor]:
    """How many anchors are near a front, and how many would be if they were even."""
    times, cells = fronts.shape[1:]
    rows = torch.linspace(0, times - 1, along.shape[1], device=along.device).round().long()
    at_rows = fronts[:, rows]  # b rows cells
    found = at_rows.gather(2, (along * (cells - 1)).round().long())
    return found.sum(), at_rows.float().mean(dim=2).sum() * along.shape[2]


@torch.no_grad()
def validate(training: Training) -> Row:
    """Mean errors on the measured grid, in float32."""
    job, model, anchors = training.job, training.model.eval(), training.model.predict_anchors
    whole = BurgersSamples.from_solutions(training.held_out)
    measured = whole.on_grid(job.sizes.grid)
    fronts = near_fronts(training.held_out)
    time_cells = tuple(each.to(training.device) for each in measured.held)
    at_grid = fronts[:, time_cells[0]][:, :, time_cells[1]].flatten(1)
    errors: dict[str, list[Tensor]] = {"error": [], "nearest": [], "near": [], "elsewhere": []}
    counts = torch.zeros(2, dtype=torch.float64, device=training.device)
    for rows in torch.arange(len(whole), device=training.device).split(21):
        density = None
        if training.needs_oracle:
            density = oracle.monitor(training.held_out[rows], job.rows, job.rule)
        training.place_anchors(density, len(rows))
        batch = measured.batch(rows)
        answer = model.represent(batch.observations)
        full = answer(batch.queries)
        errors["error"].append(relative_l2(full, batch.targets))
        nearest = answer(batch.queries, neighbors=NEIGHBORS)
        errors["nearest"].append(relative_l2(nearest, batch.targets))
        missed = (full - batch.targets).square()[..., 0]
        reference = batch.targets.square().sum(dim=(1, 2))
        for name, there in (("near", at_grid[rows]), ("elsewhere", ~at_grid[rows])):
            errors[name].append(((missed * there).sum(dim=1) / reference).sqrt())
        along = answer.anchors.positions[..., 1].reshape(len(rows), job.rows, job.per_row)
        counts += torch.stack(crowding(along, fronts[rows])).double()
    means = {name: torch.cat(parts).mean().item() for name, parts in errors.items()}
    return means | {
        "crowding": (counts[0] / counts[1]).item(),
        "grid_near": at_grid.float().mean().item(),
        **anchors.scales.report(),
    }


# Runs


def rows_of(out: Path) -> list[Row]:
    path = out / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for row in rows:  # older ones lack what has a default since
        row["job"]["sizes"] = asdict(Sizes()) | row["job"]["sizes"]
    return rows


def append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")


def execute(job: Job, options: argparse.Namespace) -> Row:
    device = torch.device(options.device)
    started = time.perf_counter()
    solution = load(data_path(options.data, job.viscosity, job.sizes), device)
    deadline = options.started + 60 * options.minutes
    training, row = train(job, solution, device, options.eager, deadline)
    trained = time.perf_counter()
    row |= validate(training)
    ended = time.perf_counter()
    row |= {
        "validation_seconds": ended - trained,
        "seconds": ended - started,
        "rule": asdict(job.rule),
        "workers": options.workers,
        "finished": round(ended - options.started, 1),
    }
    return {"job": job.key} | row


def rehearse(job: Job, device: torch.device) -> None:
    """A step and a validation on noise: kernels are compiled while the data are still made."""
    try:
        job = replace(job, sizes=replace(job.sizes, training=8, validation=4))
        sizes = job.sizes
        noise = torch.randn(sizes.training + sizes.validation, sizes.times, sizes.cells)
        training = Training(job, noise.to(device), device)
        training.step()
        validate(training)
    except Exception:
        traceback.print_exc()


def work(number: int, queue: Any, options: argparse.Namespace) -> None:
    """One process: takes jobs until none is left that would end in time."""
    torch.set_num_threads(1)
    parent, lasted = os.getppid(), dict[int, float]()
    while True:
        job = queue.get()
        if job is None:
            return
        anchors = job.rows * job.per_row
        # Of another size the time is guessed: it grows more slowly than the number of anchors.
        guesses = [lasted[m] * (anchors / m) ** (0.5 if anchors > m else 0.0) for m in lasted]
        expected = lasted.get(anchors, min(guesses, default=0.0))
        if time.perf_counter() - options.started + expected > 60 * options.minutes:
            continue  # a smaller one may still fit
        data = data_path(options.data, job.viscosity, job.sizes)
        if not data.exists():
            rehearse(job, torch.device(options.device))
        while not data.exists():
            if os.getppid() != parent:
                return
            time.sleep(0.2)
        started = time.perf_counter()
        try:
            row = execute(job, options)
        except Exception as problem:
            traceback.print_exc()
            append(options.out / "failures.jsonl", {"job": job.key, "error": repr(problem)})
            continue
        lasted[anchors] = time.perf_counter() - started
        append(options.out / "rows.jsonl", row)
        print(f"[{row['finished']:6.1f} s, worker {number}] {line(row)}", flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()


def line(row: Row) -> str:
    job = row["job"]
    return (
        f"ν {job['viscosity']:<6g} {job['rows']:>2}×{job['per_row']:<2} {job['kind']:28} "
        f"seed {job['seed']}: {row['error']:.4f} all, {row['nearest']:.4f} nearest, "
        f"{row['near']:.4f} near, {row['elsewhere']:.4f} elsewhere, crowding "
        f"{row['crowding']:.2f}, {row['steps_per_second']:.0f} steps/s, {row['seconds']:.0f} s"
    )


def plan(options: argparse.Namespace) -> list[Job]:
    """The most informative runs first: seed by seed, and of a seed 16 × 16 at the lowest viscosity.

    The second controls, told anchors and fixed scales, come after the other kinds and, unless they
    are all that is asked for, with the first seed only.
    """
    sizes = sorted(options.sizes, key=lambda size: size != "16x16")
    jobs = [
        Job(viscosity, *map(int, size.split("x")), kind, seed, options.budget)
        for seed, size, viscosity, kind in itertools.product(
            options.seeds, sizes, sorted(options.viscosities), options.kinds
        )
    ]
    first = options.seeds[0]
    second = [job for job in jobs if job.name in ("told", "fixed")]
    if len(second) == len(jobs):
        second = []
    jobs = [job for job in jobs if job not in second]
    controls = [job for job in second if job.seed == first]
    start = sum(job.seed == first for job in jobs)
    done = [row["job"] for row in rows_of(options.out)]
    ordered = [*jobs[:start], *controls, *jobs[start:]]
    return [job for job in ordered if job.key not in done]


class InTurn:
    """A queue for one process."""

    def __init__(self, jobs: Iterable[Job | None]) -> None:
        self.jobs = iter(jobs)

    def get(self) -> Job | None:
        return next(self.jobs)


def gate(options: argparse.Namespace) -> None:
    jobs = plan(options)
    print(f"{len(jobs)} runs to do, {len(rows_of(options.out))} rows there", flush=True)
    needed = [nu for nu in options.viscosities if any(job.viscosity == nu for job in jobs)]
    device = torch.device(options.device)
    if options.workers == 1:
        for viscosity in needed:
            generate(options.data, viscosity, options.budget, device)
        work(0, InTurn([*jobs, None]), options)
    else:
        context = torch.multiprocessing.get_context("spawn")
        queue = context.Queue()
        for job in [*jobs, *[None] * options.workers]:
            queue.put(job)
        workers = [
            context.Process(target=work, args=(number, queue, options))
            for number in range(options.workers)
        ]
        for worker in workers:
            worker.start()
        for viscosity in needed:  # meanwhile
            generate(options.data, viscosity, options.budget, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        for worker in workers:
            worker.join()
    table(rows_of(options.out))


def table(rows: Iterable[Row]) -> None:
    """Mean over seeds (and their standard deviation) of each setting."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        job = row["job"]
        budget = tuple(job["sizes"][name] for name in COLUMNS)
        key = (job["viscosity"], job["rows"], job["per_row"], *budget, job["kind"])
        groups.setdefault(key, []).append(row)
    names = ("error", "nearest", "near", "elsewhere", "crowding", "steps_per_second")
    print(
        f"\n| ν | anchors | {' | '.join(COLUMNS)} | kind | seeds | error | 16 nearest |",
        end="",
    )
    print(" near fronts | elsewhere | crowding | steps/s |\n|" + "---|" * (9 + len(COLUMNS)))
    for (nu, rows_, per_row, *sizes, kind), found in sorted(groups.items()):
        cells = []
        for name in names:
            values = [row[name] for row in found]
            digits = 0 if name == "steps_per_second" else 2 if name == "crowding" else 4
            text = f"{statistics.mean(values):.{digits}f}"
            if name == "error" and len(values) > 1:
                text += f" ± {statistics.stdev(values):.4f}"
            cells.append(text)
        shown = " | ".join(map(str, (f"{nu:g}", f"{rows_}×{per_row}", *sizes, kind, len(found))))
        print(f"| {shown} | {' | '.join(cells)} |")


# Representation study


def basis(points: Tensor, along: Tensor, scales: Tensor, slopes: bool) -> Tensor:
    """Normalised Gaussians at points (q, 2); with slopes, each also times its two offsets."""
    offsets = (points[:, None] - oracle.spread(along)[0]) / scales[0]  # q m 2
    weights = (-0.5 * offsets.square().sum(dim=-1)).softmax(dim=-1)
    if not slopes:
        return weights
    return torch.cat((weights, *(weights * offset for offset in offsets.unbind(dim=-1))), dim=1)


def best_fit(solution: Tensor, along: Tensor, scales: Tensor, slopes: bool) -> float:
    """Relative L2 error of the least-squares fit of one solution on the measured grid."""
    samples = BurgersSamples.from_solutions(solution[None])
    samples = samples.on_grid(tuple(min(100, size) for size in samples.grid))
    target = samples.targets.reshape(-1, 1)
    matrix = basis(samples.queries, along, scales, slopes)
    square = (matrix.T @ matrix).double()
    square += 1e-6 * square.diagonal().mean() * torch.eye(len(square), dtype=square.dtype)
    found = torch.linalg.solve(square, (matrix.T @ target).double()).float()
    return ((matrix @ found - target).norm() / target.norm()).item()


def fitted(
    solutions: Tensor, rows: int, per_row: int, kind: str, rule: Rule, slopes: bool
) -> float:
    density = oracle.monitor(solutions, rows, rule)
    errors = []
    for index, solution in enumerate(solutions):
        along = oracle.even(1, rows, per_row, solutions.device)
        if kind == "oracle":
            along = oracle.equidistributed(density[index : index + 1], per_row)
        factors = torch.tensor([rule.factor, rule.time_factor])
        scales = oracle.tied_scales(along, rule, *factors)
        if kind == "fixed":
            scales = torch.full_like(scales, FIXED_SCALE)
        errors.append(best_fit(solution, along, scales, slopes))
    return statistics.mean(errors)


STUDIED = {
    "beta": (0.1, 0.3, 1.0, 3.0),
    "width": (0.005, 0.01, 0.02, 0.04),
    "window": (0.0, 0.5, 1.0, 2.0),
    "gap": ("mean", "geometric", "least"),
    "factor": (0.4, 0.6, 0.8, 1.0),
    "time_factor": (0.3, 0.5, 0.7, 1.0),
}


def study(options: argparse.Namespace) -> None:
    """Errors of best fits with each choice of the rule changed alone, and of even anchors."""
    found: list[Row] = []
    for viscosity in options.viscosities:
        initial = burgers.sample_initial(options.solutions, options.budget.cells, SEED)
        times = burgers.saved_times(options.budget.times)
        solutions = burgers.solve(initial, viscosity, times, dtype=torch.float32)
        for size, slopes in itertools.product(options.sizes, (False, True)):
            rows, per_row = (int(number) for number in size.split("x"))
            if rows * per_row * (3 if slopes else 1) > options.largest:
                continue
            scales = itertools.product(STUDIED["factor"], STUDIED["time_factor"])
            cases = [("fixed", {}), *(("oracle", {n: v}) for n in STUDIED for v in STUDIED[n])]
            cases += [("uniform", {"factor": c, "time_factor": t}) for c, t in scales]
            for kind, changes in [("oracle", {}), *cases]:
                rule = replace(Rule(), **changes)
                error = fitted(solutions, rows, per_row, kind, rule, slopes)
                row = {"viscosity": viscosity, "rows": rows, "per_row": per_row}
                found.append(row | {"slopes": slopes, "kind": kind, "error": error, **changes})
            (options.out / "study.json").write_text(json.dumps(found, indent=1) + "\n")
            report_study(found, viscosity, size, slopes)


def report_study(found: list[Row], viscosity: float, size: str, slopes: bool) -> None:
    here = [
        row
        for row in found
        if (row["viscosity"], f"{row['rows']}x{row['per_row']}", row["slopes"])
        == (viscosity, size, slopes)
    ]
    parts = []
    for kind in ("fixed", "uniform", "oracle"):
        best = min((row for row in here if row["kind"] == kind), key=lambda row: row["error"])
        parts.append(f"{kind} {best['error']:.4f}")
        if kind != "fixed":
            parts.append(str({key: best[key] for key in STUDIED if key in best}))
    default = next(row["error"] for row in here if row["kind"] == "oracle")
    print(
        f"ν {viscosity:g} {size} slopes {slopes}: oracle as set {default:.4f};", *parts, flush=True
    )


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the rows")
    add("--study", action="store_true", help="best fits instead of training")
    add("--solutions", type=int, default=4, help="of the study, for each viscosity")
    add("--largest", type=int, default=1024, help="unknowns of the study's fits at most")
    add("--viscosities", type=float, nargs="+", default=[0.001, 0.01])
    add("--sizes", nargs="+", default=["8x8", "16x16", "32x32"], help="rows x anchors per row")
    add("--kinds", nargs="+", default=["oracle", "uniform", "told", "fixed"])
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--minutes", type=float, default=8.5, help="a run starts if it should end before that")
    add("--workers", type=int, default=3, help="processes at once")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--eager", action="store_true", help="do not capture the step as a CUDA graph")
    add("--data", type=Path, default=Path(tempfile.gettempdir()) / "anchor-gate-data")
    for name, value in asdict(Sizes()).items():
        choices = ("mlp", "linear") if name == "decoder" else None
        add(f"--{name}", type=type(value), default=value, choices=choices)
    options = parser.parse_args(given)
    options.budget = Sizes(**{name: getattr(options, name) for name in asdict(Sizes())})
    options.started = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def main(given: list[str] | None = None) -> None:
    options = parse_arguments(given)
    (study if options.study else gate)(options)


if __name__ == "__main__":
    main()
