"""The batches of a run: what step s holds is a function of the seed and s alone.

Every process draws the same global batch and takes its share, so the number of processes changes
no sample, query or symmetry. Nothing needs to be stored to resume, and the rows of any step can
be named afterwards.
"""

from itertools import count

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from fst.data.samples import Batch, Samples
from fst.training.errors import TrainingError
from fst.training.settings import TrainingSettings

# Streams of one seed: the order of samples by epoch, and the choices within a step.
_ORDER, _CHOICES = 0, 1


class Batches:
    """Batches by step, each the share of one process.

    Samples come in a fresh random order every epoch, one epoch joined to the next, so that every
    batch is full and every sample is seen equally often.
    """

    def __init__(
        self, samples: Samples, settings: TrainingSettings, process: int = 0, processes: int = 1
    ) -> None:
        if len(samples) == 0:
            raise TrainingError("the training split holds no samples")
        if processes > settings.batch_size:
            raise TrainingError(
                f"batch_size must be at least the {processes} processes, got {settings.batch_size}"
            )
        self.samples = samples
        self.settings = settings
        size = settings.batch_size
        self.share = slice(size * process // processes, size * (process + 1) // processes)
        self._generator = torch.Generator(samples.device)
        self._orders: dict[int, Tensor] = {}

    def rows(self, step: int) -> Int[Tensor, " b"]:
        """The samples of the global batch of `step`, counted from 1, on the samples' device."""
        size, total = self.settings.batch_size, len(self.samples)
        first, last = (step - 1) * size, step * size
        parts = []
        for epoch in count(first // total):
            start = epoch * total
            if start >= last:
                break
            parts.append(self._order(epoch)[max(first - start, 0) : last - start])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def at(self, step: int) -> Batch:
        """This process's share of the batch of `step`."""
        settings, samples, share = self.settings, self.samples, self.share
        state = np.random.SeedSequence((settings.seed, _CHOICES, step)).generate_state(1, np.uint64)
        self._generator.manual_seed(int(state[0]))
        chosen = samples.choose(settings.batch_size, settings.queries, self._generator)
        augmentation = None
        if settings.augment:
            augmentation = samples.augmentations(settings.batch_size, self._generator)
        return samples.batch(
            self.rows(step)[share],
            None if chosen is None else chosen[share],
            None if augmentation is None else augmentation[share],
        )

    def _order(self, epoch: int) -> Int[Tensor, " n"]:
        order = self._orders.get(epoch)
        if order is None:
            generator = np.random.default_rng((self.settings.seed, _ORDER, epoch))
            order = torch.from_numpy(generator.permutation(len(self.samples)))
            order = order.to(self.samples.device)
            # A batch reaches into the next epoch at most; older orders are not needed again.
            self._orders = {e: o for e, o in self._orders.items() if e >= epoch - 1}
            self._orders[epoch] = order
        return order
