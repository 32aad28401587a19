"""Learning-rate schedules and stopping rules: pure functions of the step and the error history.

Enters: `step`, which counts updates from 1, and `history`, the validation errors so far. Leaves:
the factor that multiplies every base learning rate in update `step`, and, once update `step` is
done, the reason to stop, if there is one. No state is kept between calls, so a resumed run
follows the same schedule as an uninterrupted one.

"The best error improves by less than p over w steps" reads, at a validation of step t,

    best(t) > (1 - p) best(t - w),    best(t) = lowest error validated at or before step t,

and it says nothing before the first validation is w steps old.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from fst.types import check_fields

History = tuple[tuple[int, float], ...]


class Schedule(ABC):
    """A learning-rate schedule with its stopping rule; `maximum` is the last step it allows."""

    maximum: int

    @abstractmethod
    def factor(self, step: int, history: History) -> float:
        """What multiplies every base learning rate in update `step`."""

    def finished(self, step: int, history: History) -> str | None:
        """Why training ends after update `step`, or None."""
        reached = step >= self.maximum
        return f"reached the maximum of {self.maximum:,} steps" if reached else None


@dataclass(frozen=True)
class Stage:
    """One piece of a curve: from `first` to `last`, which update `end` reaches."""

    end: int
    first: float
    last: float
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        check_fields(self)

    def at(self, progress: float) -> float:
        if self.shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.first + (self.last - self.first) * progress


@dataclass(frozen=True)
class Stages(Schedule):
    """Pieces in the order of their ends, then the constant `after`.

    Training stops when the best validation error improves by less than `stop_improvement` over
    `stop_window` steps. The rule is asked at validations whose step is a multiple of `stop_every`,
    from step `minimum` on. With `stop_improvement` 0 only `maximum` ends the run.
    """

    stages: tuple[Stage, ...] = ()
    after: float = 1.0
    stop_improvement: float = 0.0
    stop_window: int = 50_000
    stop_every: int = 1
    minimum: int = 0
    maximum: int = 1_000_000

    def __post_init__(self) -> None:
        check_fields(self)
        ends = [0, *(stage.end for stage in self.stages)]
        if any(end <= begin for begin, end in pairwise(ends)):
            raise ValueError(f"stages must end in increasing order, got the ends {ends[1:]}")

    @property
    def warmup(self) -> int:
        """The steps over which the factor first rises from 0."""
        return self.stages[0].end if self.stages and self.stages[0].first == 0 else 0

    def factor(self, step: int, history: History) -> float:
        begin = 0
        for stage in self.stages:
            if step <= stage.end:
                return stage.at((step - begin) / (stage.end - begin))
            begin = stage.end
        return self.after

    def finished(self, step: int, history: History) -> str | None:
        asked = step >= self.minimum and step % self.stop_every == 0
        stalled = asked and _stalled(step, history, self.stop_window, self.stop_improvement)
        return stalled or super().finished(step, history)


@dataclass(frozen=True)
class Plateau(Schedule):
    """Linear warm-up, then division whenever validation stalls, down to `floor`; then a stop.

    Errors are first averaged over the last `smoothing` checks (1 leaves them as they are). If the
    best of them improves by less than `improvement` over `window` steps, the rate is divided by
    `divisor`; at the floor, training stops when it improves by less than `stop_improvement` over
    `stop_window` steps, not before step `minimum`.

    Our reading, where the paper is silent: each window lies wholly within one learning rate, so
    counting starts anew after every division. The reference stays the best error of the whole run.
    """

    warmup: int = 1_000
    divisor: float = 10.0
    floor: float = 0.01
    improvement: float = 0.01
    window: int = 6_000
    smoothing: int = 1
    stop_improvement: float = 0.005
    stop_window: int = 12_000
    minimum: int = 20_000
    maximum: int = 250_000

    def __post_init__(self) -> None:
        check_fields(self)
        if self.divisor <= 1 or not 0 < self.floor <= 1 or self.smoothing < 1:
            raise ValueError(
                "a plateau needs divisor > 1, 0 < floor <= 1 and smoothing >= 1, got "
                f"divisor={self.divisor}, floor={self.floor}, smoothing={self.smoothing}"
            )

    def factor(self, step: int, history: History) -> float:
        warm = min(1.0, step / self.warmup) if self.warmup else 1.0
        divisions, _ = self._divisions(self._smooth(history))
        return warm * self._rate(divisions)

    def finished(self, step: int, history: History) -> str | None:
        smooth = self._smooth(history)
        divisions, since = self._divisions(smooth)
        asked = step >= self.minimum and self._rate(divisions) <= self.floor
        stalled = asked and _stalled(step, smooth, self.stop_window, self.stop_improvement, since)
        return stalled or super().finished(step, history)

    def _rate(self, divisions: int) -> float:
        return max(self.floor, 1 / self.divisor**divisions)

    def _smooth(self, history: History) -> History:
        if self.smoothing == 1:
            return history
        return tuple(
            (history[end - 1][0], mean_error(history[end - self.smoothing : end], self.smoothing))
            for end in range(self.smoothing, len(history) + 1)
        )

    def _divisions(self, history: History) -> tuple[int, int]:
        """How often the rate was divided, and the step at which it last was."""
        best = _running_best(history)
        divisions, since, before = 0, 0, -1  # `before`: newest check at least one window old
        for now, (step, _) in enumerate(history):
            while history[before + 1][0] <= step - self.window:
                before += 1
            if self._rate(divisions) <= self.floor:
                break
            told = before >= 0 and history[before][0] >= since
            if told and best[now] > (1 - self.improvement) * best[before]:
                divisions, since = divisions + 1, step
        return divisions, since


@dataclass(frozen=True)
class WarmupCosine(Schedule):
    """Linear warm-up, then one cosine to zero at step `maximum`, where training ends."""

    warmup: int = 1_000
    maximum: int = 20_000

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.warmup < self.maximum:
            raise ValueError(
                f"warmup must be below maximum, got warmup={self.warmup}, maximum={self.maximum}"
            )

    def factor(self, step: int, history: History) -> float:
        if step < self.warmup:
            return step / self.warmup
        progress = (step - self.warmup) / (self.maximum - self.warmup)
        return (1 + math.cos(math.pi * progress)) / 2


def mean_error(history: History, checks: int = 3) -> float:
    if len(history) < checks:
        raise ValueError(f"need {checks} validation errors, got {len(history)}")
    return sum(error for _, error in history[-checks:]) / checks


def _running_best(history: History) -> list[float]:
    return list(accumulate((error for _, error in history), min))


def _stalled(
    step: int, history: History, window: int, improvement: float, since: int = 0
) -> str | None:
    """Why to stop, if `step` was validated and improved too little in a window after `since`."""
    if not history or history[-1][0] != step:
        return None
    before = bisect_right(history, step - window, key=lambda check: check[0]) - 1
    if before < 0 or history[before][0] < since:
        return None
    best = _running_best(history)
    if best[-1] <= (1 - improvement) * best[before]:
        return None
    return f"best validation error improved by less than {improvement:.1%} over {window:,} steps"
