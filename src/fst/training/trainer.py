"""The parts of training that touch the model: one update, one validation, and the state of both.

An update draws the global batch of its step, of which each process takes a share, and descends on

    loss = 1/B Σ_i loss_i,

the sum running over the B samples of all processes and of all parts of their shares; the objective
says what loss_i is. The host never waits for the device within an update: losses and gradient norms
stay there until they are read, and a step that was not finite is named then.

What step s holds is a function of the seed and s alone. Every process draws the same global batch
and takes its share, so the number of processes changes no sample, query or augmentation. Nothing
needs to be stored to resume, and the rows of any step can be named afterwards. A share comes in
`accumulate` parts, as equal as whole numbers allow.
"""

import gc
import math
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import count, islice, pairwise
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from jaxtyping import Int
from torch import Tensor, distributed, nn

from fst.base import Model
from fst.data.samples import Asked, Rows
from fst.evaluation_points import ResampledPoints
from fst.io import flat
from fst.kernels import fuse
from fst.precision import full_precision
from fst.pretrained import check_shapes, from_json
from fst.training.checkpoint import Checkpoint, CheckpointError
from fst.training.optimizer import Average, Exchange, build_optimizer
from fst.training.schedules import History
from fst.training.settings import Draws, Loss, Objective, TrainingError, TrainingSettings

# Compiled code is compiled in the first step, and captured and replayed in the next two.
COMPILING_STEPS = 3
# The oldest GPUs that PyTorch's compiler writes code for.
OLDEST_CAPABILITY = (7, 0)

# Streams of one seed: the order of samples by epoch, and the choices within a step.
_ORDER, _CHOICES = 0, 1


class NonFiniteError(TrainingError):
    """A loss, gradient or validation error is NaN or infinite."""

    def __init__(self, message: str, step: int, rows: list[int]) -> None:
        super().__init__(message)
        self.step, self.rows = step, rows


class CompilationError(TrainingError):
    """PyTorch's compiler failed on a training step."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"torch.compile failed ({reason}); to train without it: --training.compile False, or "
            'for a run that is resumed "compile": false in its recipe.json'
        )
        self.reason = reason


def check_batch_size(settings: TrainingSettings, processes: int) -> None:
    """Raise where a batch has fewer samples than parts."""
    size, accumulate = settings.batch_size, settings.accumulate
    if processes * accumulate > size:
        parts = f" times accumulate {accumulate}" if accumulate > 1 else ""
        raise TrainingError(
            f"batch_size must be at least the {processes} processes{parts}, got {size}"
        )


class Batches:
    """Batches by step, each the share of one process.

    Samples come in a fresh random order every epoch, one epoch joined to the next, so that every
    batch is full and every sample is seen equally often.
    """

    def __init__(
        self, samples: Rows, settings: TrainingSettings, process: int = 0, processes: int = 1
    ) -> None:
        if len(samples) == 0:
            raise TrainingError("the training split holds no samples")
        check_batch_size(settings, processes)
        self.samples, self.settings = samples, settings
        share = _pieces(slice(0, settings.batch_size), processes)[process]
        self.parts = _pieces(share, settings.accumulate)
        # Resident data are chosen from on their device; a stream is planned on the host.
        self.planned_on = torch.device("cpu") if samples.streamed else samples.device
        self._generator = torch.Generator(samples.device)
        self._orders: dict[int, Tensor] = {}
        self._stream: Generator[Any, None, None] | None = None
        self._next = 0

    def rows(self, step: int) -> Int[Tensor, " b"]:
        """The samples of the global batch of `step`, counted from 1, where they are planned."""
        size, total = self.settings.batch_size, len(self.samples)
        first, last = (step - 1) * size, step * size
        starts = range(first // total * total, last, total)  # of the epochs that it reaches into
        orders = [(start, self._order(start // total)) for start in starts]
        parts = [order[max(first - start, 0) : last - start] for start, order in orders]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def at(self, step: int) -> Iterator[Any]:
        """This process's share of the batch of `step`, one part after the other."""
        if self.samples.streamed:
            yield from self._prefetch(step)
            return
        settings, samples = self.settings, self.samples
        generator = self._generator.manual_seed(self._seed(step))
        chosen = samples.choose(settings.batch_size, settings.queries, generator)
        augmentation = None
        if settings.augment:
            augmentation = samples.augmentations(settings.batch_size, generator)
        rows = self.rows(step)
        for part in self.parts:
            drawn = (None if each is None else each[part] for each in (chosen, augmentation))
            yield samples.batch(rows[part], *drawn)

    def _prefetch(self, step: int) -> Iterator[Any]:
        """The same plan for samples that are read in the background, some steps ahead."""
        if self._stream is None or step != self._next:  # the first step of a new or resumed run
            self.close()
            self._stream = self.samples.iterate(self._plan(step))
        self._next = step + 1
        return islice(self._stream, len(self.parts))

    def _plan(self, first: int) -> Iterator[Asked]:
        for step in count(first):
            rows, queries = self.rows(step), self.settings.queries
            random = self.settings.augment or queries is not None
            for part in self.parts:
                yield Asked(rows[part], self._seed(step) if random else None, queries)

    def close(self) -> None:
        """End what runs in the background, if anything does."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _seed(self, step: int) -> int:
        state = np.random.SeedSequence((self.settings.seed, _CHOICES, step))
        return int(state.generate_state(1, np.uint64)[0])

    def _order(self, epoch: int) -> Int[Tensor, " n"]:
        if epoch not in self._orders:
            generator = np.random.default_rng((self.settings.seed, _ORDER, epoch))
            order = torch.from_numpy(generator.permutation(len(self.samples)))
            # A batch reaches into the next epoch at most; older orders are not needed again.
            self._orders = {e: o for e, o in self._orders.items() if e >= epoch - 1}
            self._orders[epoch] = order.to(self.planned_on)
        return self._orders[epoch]


def _pieces(whole: slice, pieces: int) -> list[slice]:
    """A slice in so many consecutive ones, as equal as whole numbers allow."""
    start, size = whole.start, whole.stop - whole.start
    ends = [start + size * number // pieces for number in range(pieces + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


@dataclass
class TrainState:
    """Where a run stands, in plain numbers.

    `history` and `best` hold the first error of validations; `errors` and `best_errors` all errors
    of the last and of the best one. `pending` holds what no log line has used yet.
    """

    step: int = 0
    history: History = ()
    best: tuple[int, float] | None = None
    errors: dict[str, float] = field(default_factory=dict)
    best_errors: dict[str, float] = field(default_factory=dict)
    pending: list[tuple[float, float]] = field(default_factory=list)
    training_seconds: float = 0.0
    other_seconds: float = 0.0
    compilation_seconds: float = 0.0


class Trainer:
    """A model in training on this process's device."""

    def __init__(
        self,
        model: Model,
        training: Rows,
        validation: Rows,
        settings: TrainingSettings,
        accelerator: Accelerator,
    ) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.schedule = settings.schedule
        self.objective: Objective = settings.objective
        self.device: torch.device = accelerator.device
        self.processes: int = accelerator.num_processes
        for samples in (training, validation):
            self.objective.check(model, samples)
        share = accelerator.process_index, self.processes
        self.batches = Batches(training.to(self.device), settings, *share)
        if len(validation) == 0:
            raise TrainingError("the validation split holds no samples")
        self.validation = validation.to(self.device)
        self.model = fuse(model).to(self.device).train()
        # bfloat16 needs no loss scaling, so the optimiser works as it is; wrapped by Accelerate,
        # it would search the disk for optional packages at every step.
        self.optimizer = build_optimizer(model, settings)
        # Not wrapped by DistributedDataParallel, whose hooks would divide what is compiled: the
        # gradient is one vector in the optimiser, and processes add theirs up there.
        self.loss = accelerator.prepare_model(Loss(self.objective, model), evaluation_mode=True)
        self.exchange: Exchange | None = None
        if self.processes > 1:
            share_weights(model)
            self.exchange = add_up
        self.average = None if settings.average is None else Average(model, settings.average)
        self.points = model.point_stream(settings.seed + 1, settings.seed + 2)
        if settings.accumulate > 1:
            # Parts add up in tensors of our own: memory of a replayed CUDA graph is overwritten.
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        self.state = TrainState()
        self.best_weights: dict[str, Tensor] = {}
        self._compiling_steps = COMPILING_STEPS if compiles(settings, self.device) else 0
        self._unread = 0
        self._table = torch.zeros(settings.log_every, 2, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def peak_memory_gib(self) -> float | None:
        """Most memory allocated on the GPU since this trainer was made; None on a CPU."""
        on_gpu = self.device.type == "cuda"
        return torch.cuda.max_memory_allocated(self.device) / 2**30 if on_gpu else None

    @property
    def selected(self) -> Model:
        """The model that is validated: the moving average where there is one."""
        return self.model if self.average is None else self.average.model

    def update(self) -> None:
        """One optimisation step; the first ones of this trainer may have to be compiled."""
        if not self._compiling_steps:
            self._update()
            return
        start = time.monotonic()
        with explained(), _without_garbage_collection():
            self._update()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.state.compilation_seconds += time.monotonic() - start
        self._compiling_steps -= 1

    def _update(self) -> None:
        self.state.step += 1
        step, settings = self.state.step, self.settings
        factor = self.schedule.factor(step, self.state.history)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base"] * factor
        draws = self._draw(self.points)  # one for the step, however many parts it has
        losses = [self._backward(batch, draws) for batch in self.batches.at(step)]
        limit = math.inf if settings.clip is None else settings.clip
        norm = self.optimizer.clip_and_step(limit, self.exchange)
        self.optimizer.zero_grad(set_to_none=settings.accumulate == 1)
        if self.average is not None:
            self.average.update(step)
        torch.stack((torch.stack(losses).sum(), norm), out=self._table[self._unread])
        self._unread += 1

    def _backward(self, batch: Any, draws: Draws) -> Tensor:
        loss: Tensor = self.loss(batch, draws) / self.settings.batch_size
        loss.backward()
        return loss.detach()

    def read(self) -> None:
        """Bring the losses since the last reading to the host; raise if one is not finite.

        All processes must call this together, at least every `log_every` steps.
        """
        if self._unread == 0:
            return
        table = self._table[: self._unread].clone()
        table[:, 0] = self.accelerator.reduce(table[:, 0].clone(), reduction="sum")
        first = self.state.step - self._unread + 1
        self._unread = 0
        for step, (loss, norm) in enumerate(table.tolist(), start=first):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                rows = self.batches.rows(step).tolist()
                raise NonFiniteError(
                    f"step {step:,} has loss {loss} and gradient norm {norm}; "
                    f"its batch holds the training samples {rows}",
                    step,
                    rows,
                )
            self.state.pending.append((loss, norm))

    def any_process(self, flag: bool) -> bool:
        """Whether the flag is set on any process; all of them must ask together."""
        if self.processes == 1:
            return flag
        count = torch.tensor(int(flag), device=self.device)
        return bool(self.accelerator.reduce(count, reduction="sum").item())

    @torch.no_grad()
    @full_precision()
    def validate(self) -> bool:
        """Measure the mean errors in float32; True if the first is the lowest so far."""
        model, settings = self.selected, self.settings
        model.eval()
        seeds = (settings.validation_anchor_seed, settings.validation_sobol_seed)
        stream = model.point_stream(*seeds)
        total = torch.zeros(len(self.objective.names) + 1, dtype=torch.float64)
        bad: list[int] = []
        parts = torch.arange(len(self.validation)).split(settings.validation_batch)
        process = self.accelerator.process_index
        batches = self.validation.in_order(parts[process :: self.processes])
        for number, part in enumerate(parts):
            if settings.validation_reset == "batch":
                stream = model.point_stream(*seeds)
            # Drawn by every process, so that a batch has the same points whoever takes it.
            draws = self._draw(stream)
            if number % self.processes != process:
                continue
            found = self.objective.errors(model, next(batches), draws).double().cpu()
            bad += part[~found.isfinite().all(dim=1)].tolist()
            total += torch.cat((found.sum(dim=0), torch.tensor([len(part)])))
        if self.processes > 1:
            total = self.accelerator.reduce(total.to(self.device), reduction="sum")
        self.model.train()
        return self._judge((total[:-1] / total[-1]).tolist(), bad)

    def _judge(self, means: list[float], bad: list[int]) -> bool:
        """Take up the errors of a validation; the first of them decides which weights are best."""
        error, state = means[0], self.state
        step = state.step
        if not all(map(math.isfinite, means)):
            raise NonFiniteError(
                f"the validation error of step {step:,} is {error}; "
                f"validation samples with a non-finite error: {bad}",
                step,
                bad,
            )
        state.errors = dict(zip(self.objective.names, means, strict=True))
        state.history += ((step, error),)
        if state.best is not None and error >= state.best[1]:
            return False
        state.best, state.best_errors = (step, error), state.errors
        self.best_weights = {name: t.clone() for name, t in self.selected.state_dict().items()}
        return True

    def capture(self) -> Checkpoint:
        """Everything that the next steps depend on."""
        # Updates draw from seeds of their own; a model with dropout draws from these.
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        state = self.optimizer.state_dict()["state"]
        tensors = {"optimizer": state, "best": self.best_weights, "random": random}
        if self.average is not None:
            tensors["average"] = self.average.model.state_dict()
        points = None if self.points is None else self.points.state()
        values = asdict(self.state) | {"points": points}
        return Checkpoint(self.model.state_dict(), flat(tensors), values)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of the same model and settings."""
        try:
            values = dict(checkpoint.values)
            points = values.pop("points", None)
            self.state = from_json(values, TrainState, "state")
            parts = _by_part(checkpoint.tensors)
            self.model.load_state_dict(checkpoint.weights)
            if self.average is not None:
                self.average.model.load_state_dict(parts["average"])
            moments = {int(n): state for n, state in _by_part(parts["optimizer"]).items()}
            self.optimizer.load_state_dict({"state": moments})
            if self.points is not None:
                self.points.restore(points)
            random, best = parts["random"], parts.get("best", {})
            if best:
                shapes = {name: tensor.shape for name, tensor in self.model.state_dict().items()}
                check_shapes(best, shapes, "the best weights")
            self.best_weights = {name: tensor.to(self.device) for name, tensor in best.items()}
            torch.set_rng_state(random["cpu"])
            if self.device.type == "cuda" and "cuda" in random:
                torch.cuda.set_rng_state(random["cuda"], self.device)
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"the checkpoint does not fit this run: {error}") from error

    def _draw(self, stream: ResampledPoints | None) -> Draws:
        return None if stream is None else stream.draw().to(self.device, torch.float32)


@torch.no_grad()
def share_weights(model: nn.Module) -> None:
    """Give every process the weights of the first."""
    for tensor in (*model.parameters(), *model.buffers()):
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        sent = numbers.contiguous()
        distributed.broadcast(sent, src=0)
        numbers.copy_(sent)


def add_up(gradient: Tensor) -> None:
    try:
        distributed.all_reduce(gradient)
    except RuntimeError as error:
        raise TrainingError(
            "another process has ended or does not answer: see what it said, then start the run "
            "again by the same launcher, with --resume and its folder"
        ) from error


def compiles(settings: TrainingSettings, device: torch.device) -> bool:
    """As the settings say; where they leave it open, on a GPU that the compiler knows."""
    if settings.compile is not None:
        return settings.compile
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY and _python_is_known()


def _python_is_known() -> bool:
    """Whether the compiler takes this version of Python."""
    from torch._dynamo.eval_frame import is_dynamo_supported  # takes a second: not before

    return is_dynamo_supported()


@contextmanager
def explained() -> Iterator[None]:
    """Within, a failure of the compiler says how to do without it."""
    from torch._dynamo.exc import TorchDynamoException  # takes a second: not before it is needed

    try:
        yield
    except TorchDynamoException as error:
        reason = " ".join(str(error).partition("\n\n")[0].split())  # then come hints for developers
        raise CompilationError(reason or type(error).__name__) from error


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Compilers make so many objects that a tenth of their time goes to looking for garbage."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _by_part(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    return parts
