"""The batches of a run: what step s holds is a function of the seed and s alone.

Every process draws the same global batch and takes its share, so the number of processes changes
no sample, query or augmentation. Nothing needs to be stored to resume, and the rows of any step
can be named afterwards. A share comes in `accumulate` parts, as equal as whole numbers allow.
"""

from collections.abc import Generator, Iterator
from itertools import count, islice, pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from fst.data.samples import Asked, Rows
from fst.training.errors import TrainingError
from fst.training.settings import TrainingSettings

# Streams of one seed: the order of samples by epoch, and the choices within a step.
_ORDER, _CHOICES = 0, 1


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
        size, accumulate = settings.batch_size, settings.accumulate
        self.samples = samples
        self.settings = settings
        share = _pieces(slice(0, size), processes)[process]
        self.parts = _pieces(share, accumulate)
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
        parts = []
        for epoch in count(first // total):
            start = epoch * total
            if start >= last:
                break
            parts.append(self._order(epoch)[max(first - start, 0) : last - start])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def at(self, step: int) -> Iterator[Any]:
        """This process's share of the batch of `step`, one part after the other."""
        if self.samples.streamed:
            yield from self._read_ahead(step)
            return
        settings, samples = self.settings, self.samples
        generator = self._generator.manual_seed(self._seed(step))
        chosen = samples.choose(settings.batch_size, settings.queries, generator)
        augmentation = None
        if settings.augment:
            augmentation = samples.augmentations(settings.batch_size, generator)
        rows = self.rows(step)
        for part in self.parts:
            yield samples.batch(
                rows[part],
                None if chosen is None else chosen[part],
                None if augmentation is None else augmentation[part],
            )

    def _read_ahead(self, step: int) -> Iterator[Any]:
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
        order = self._orders.get(epoch)
        if order is None:
            generator = np.random.default_rng((self.settings.seed, _ORDER, epoch))
            order = torch.from_numpy(generator.permutation(len(self.samples)))
            order = order.to(self.planned_on)
            # A batch reaches into the next epoch at most; older orders are not needed again.
            self._orders = {e: o for e, o in self._orders.items() if e >= epoch - 1}
            self._orders[epoch] = order
        return order


def _pieces(whole: slice, pieces: int) -> list[slice]:
    """A slice in so many consecutive ones, as equal as whole numbers allow."""
    start, size = whole.start, whole.stop - whole.start
    ends = [start + size * number // pieces for number in range(pieces + 1)]
    return [slice(*pair) for pair in pairwise(ends)]
