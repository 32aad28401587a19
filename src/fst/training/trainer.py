"""The parts of training that touch the model: one update, one validation, and the state of both.

An update draws the global batch of its step, of which each process takes a share, and descends on

    loss = 1/B Σ_i ‖prediction_i - target_i‖² / ‖target_i‖²,

the sum running over the B solutions of all processes. The host never waits for the device within
an update: losses and gradient norms stay there until they are read, and a step that was not
finite is named then.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from fst.data.samples import Samples
from fst.operators import Operator, PointDraws, PointStream
from fst.training.batches import Batches
from fst.training.checkpoint import Checkpoint
from fst.training.errors import CheckpointError, NonFiniteError, TrainingError
from fst.training.optimization import Average, build_optimizer, set_rates
from fst.training.schedules import History
from fst.training.settings import TrainingSettings
from fst.training.supervised import Supervised, errors, losses


@dataclass
class Progression:
    """Where a run stands, in plain numbers. `pending` holds what no log line has used yet."""

    step: int = 0
    history: History = ()
    best: tuple[int, float] | None = None
    pending: list[tuple[float, float]] = field(default_factory=list)
    training_seconds: float = 0.0
    other_seconds: float = 0.0

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Progression":
        best = values["best"]
        return cls(
            step=values["step"],
            history=tuple((step, error) for step, error in values["history"]),
            best=None if best is None else (best[0], best[1]),
            pending=[(loss, norm) for loss, norm in values["pending"]],
            training_seconds=values["training_seconds"],
            other_seconds=values["other_seconds"],
        )


class Trainer:
    """A model in training on this process's device."""

    def __init__(
        self,
        model: Operator,
        training: Samples,
        validation: Samples,
        settings: TrainingSettings,
        accelerator: Accelerator,
    ) -> None:
        self.settings = settings
        self.schedule = settings.schedule
        self.accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.processes: int = accelerator.num_processes
        self.batches = Batches(
            training.to(self.device), settings, accelerator.process_index, self.processes
        )
        if len(validation) == 0:
            raise TrainingError("the validation split holds no samples")
        self.validation = validation.to(self.device)
        self.model = model.to(self.device).train()
        # bfloat16 needs no loss scaling, so the optimiser works as it is; wrapped by Accelerate,
        # it would search the disk for optional packages at every step.
        self.optimizer = build_optimizer(model, settings)
        self.module = accelerator.prepare(Supervised(model))
        # After the line above, which gives every process the weights of the first.
        self.average = None if settings.average is None else Average(model, settings.average)
        self.points = model.point_stream(settings.seed + 1, settings.seed + 2)
        self.parameters = list(model.parameters())
        self.progression = Progression()
        self.best_weights: dict[str, Tensor] = {}
        self._unread = 0
        self._table = torch.zeros(settings.log_every, 2, device=self.device)

    @property
    def selected(self) -> Operator:
        """The model that is validated: the moving average where there is one."""
        return self.model if self.average is None else self.average.model

    def update(self) -> None:
        """One optimisation step."""
        self.progression.step += 1
        step, settings = self.progression.step, self.settings
        set_rates(self.optimizer, self.schedule.factor(step, self.progression.history))
        batch = self.batches.at(step)
        prediction = self.module(batch.observations, batch.queries, self._draw(self.points))
        loss = losses(prediction, batch).sum() / settings.batch_size
        # Gradients are averaged over processes, but the loss is a sum over their shares.
        (loss * self.processes if self.processes > 1 else loss).backward()
        limit = math.inf if settings.clip is None else settings.clip
        norm = clip_grad_norm_(self.parameters, limit)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(step)
        torch.stack((loss.detach(), norm), out=self._table[self._unread])
        self._unread += 1

    def read(self) -> None:
        """Bring the losses since the last reading to the host; raise if one is not finite.

        All processes must call this together, at least every `log_every` steps.
        """
        if self._unread == 0:
            return
        table = self._table[: self._unread].clone()
        table[:, 0] = self.accelerator.reduce(table[:, 0].clone(), reduction="sum")
        first = self.progression.step - self._unread + 1
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
            self.progression.pending.append((loss, norm))

    def any_process(self, flag: bool) -> bool:
        """Whether the flag is set on any process; all of them must ask together."""
        if self.processes == 1:
            return flag
        count = torch.tensor(int(flag), device=self.device)
        return bool(self.accelerator.reduce(count, reduction="sum").item())

    @torch.no_grad()
    def validate(self) -> bool:
        """Measure the mean relative L2 error in float32; True if it is the lowest so far."""
        model, settings = self.selected, self.settings
        model.eval()
        seeds = (settings.validation_anchor_seed, settings.validation_sobol_seed)
        stream = model.point_stream(*seeds)
        total, bad = torch.zeros(2, dtype=torch.float64), []
        rows = torch.arange(len(self.validation), device=self.device)
        for number, part in enumerate(rows.split(settings.validation_batch)):
            if settings.validation_reset == "batch":
                stream = model.point_stream(*seeds)
            # Drawn by every process, so that a batch has the same points whoever takes it.
            draws = self._draw(stream)
            if number % self.processes != self.accelerator.process_index:
                continue
            found = errors(model, self.validation.batch(part), draws).double()
            bad += part[~found.isfinite()].tolist()
            total += torch.stack((found.sum(), found.new_tensor(len(part)))).cpu()
        if self.processes > 1:
            total = self.accelerator.reduce(total.to(self.device), reduction="sum")
        self.model.train()
        error = (total[0] / total[1]).item()
        step = self.progression.step
        if not math.isfinite(error):
            raise NonFiniteError(
                f"the validation error of step {step:,} is {error}; "
                f"validation samples with a non-finite error: {bad}",
                step,
                bad,
            )
        self.progression.history += ((step, error),)
        best = self.progression.best
        if best is not None and error >= best[1]:
            return False
        self.progression.best = (step, error)
        self.best_weights = {name: t.clone() for name, t in model.state_dict().items()}
        return True

    def capture(self) -> Checkpoint:
        """Everything that the next steps depend on."""
        optimizer = self.optimizer.state_dict()["state"]
        tensors = {f"best.{name}": tensor for name, tensor in self.best_weights.items()}
        for index, entries in optimizer.items():
            tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in entries.items()}
        if self.average is not None:
            weights = self.average.model.state_dict()
            tensors |= {f"average.{name}": tensor for name, tensor in weights.items()}
        # Updates draw from seeds of their own; a model with dropout draws from these.
        tensors["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
        points = None if self.points is None else self.points.state()
        values = asdict(self.progression) | {"points": points}
        return Checkpoint(self.model.state_dict(), tensors, values)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of the same model and settings."""
        try:
            self.progression = Progression.from_json(checkpoint.values)
            parts = _by_part(checkpoint.tensors)
            self.model.load_state_dict(checkpoint.weights)
            if self.average is not None:
                self.average.model.load_state_dict(parts["average"])
            description = self.optimizer.state_dict()
            description["state"] = _by_index(parts["optimizer"])
            self.optimizer.load_state_dict(description)
            if self.points is not None:
                self.points.restore(checkpoint.values["points"])
            random = parts["random"]
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"the checkpoint does not fit this run: {error}") from error
        self.best_weights = {n: t.to(self.device) for n, t in parts.get("best", {}).items()}
        torch.set_rng_state(random["cpu"])
        if self.device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self.device)

    def _draw(self, stream: PointStream | None) -> PointDraws | None:
        return None if stream is None else stream.draw().to(self.device, torch.float32)


def _by_part(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    return parts


def _by_index(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Optimiser state by the number of its parameter."""
    return {int(index): entries for index, entries in _by_part(tensors).items()}
