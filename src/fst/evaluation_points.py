"""Where the layer evaluates the field and self-attends: anchors drawn at random and Sobol points.

A stream is a function of two seeds and a position, computed on the CPU, so the same seeds give
the same points on every device, and a run resumes by storing the position alone. The draws are
shared by the batch: a prediction does not depend on what else is in its batch.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.quasirandom import SobolEngine


class PointDraws(NamedTuple):
    """Raw random choices of evaluation points for R refinement steps, shared by the batch."""

    anchor_indices: Int[Tensor, "r a"]
    uniform: Float[Tensor, "r u s"]

    def to(self, device: torch.device, dtype: torch.dtype) -> "PointDraws":
        return PointDraws(
            self.anchor_indices.to(device, non_blocking=True),
            self.uniform.to(device, dtype, non_blocking=True),
        )


@dataclass(eq=False)
class ResampledPoints:
    """Fresh evaluation points at every refinement step: subset indices and scrambled Sobol.

    Each step takes the next block of one scrambled Sobol sequence, and a random subset of the
    anchors without replacement.
    """

    steps: int
    anchors: int
    from_anchors: int
    from_sobol: int
    axes: int
    anchor_seed: int
    sobol_seed: int

    def __post_init__(self) -> None:
        self.position = 0
        self._engine = SobolEngine(self.axes, scramble=True, seed=self.sobol_seed)
        # How many passes the finite sequence serves before it repeats.
        self._passes = 2**SobolEngine.MAXBIT // max(self.steps * self.from_sobol, 1)

    def _subset(self, step: int) -> np.ndarray:
        # Philox is addressed by key and counter: the subset of any step without its predecessors.
        counter = np.random.Philox(key=self.anchor_seed, counter=[0, 0, 0, step])
        return np.random.Generator(counter).permutation(self.anchors)[: self.from_anchors]

    def draw(self) -> PointDraws:
        """The points of one pass through the model: all its refinement steps."""
        steps = range(self.position * self.steps, (self.position + 1) * self.steps)
        indices = torch.from_numpy(np.stack([self._subset(step) for step in steps]))
        uniform = torch.zeros(0, self.axes, dtype=torch.float64)
        if self.from_sobol:
            if self.position % self._passes == 0:
                self._engine.reset()  # the sequence is spent, or this is the first pass
            uniform = self._engine.draw(self.steps * self.from_sobol, dtype=torch.float64)
        self.position += 1
        return PointDraws(indices, uniform.view(self.steps, self.from_sobol, self.axes))

    def state(self) -> dict[str, int]:
        return {"position": self.position}

    def restore(self, state: dict[str, int]) -> None:
        self.position = state["position"]
        self._engine.reset()
        self._engine.fast_forward(self.position % self._passes * self.steps * self.from_sobol)


class FixedPoints(ResampledPoints):
    """The same evaluation points at every step and in every pass."""

    def draw(self) -> PointDraws:
        self.restore({"position": 0})
        first = super().draw()
        repeat = (self.steps, 1, 1)
        return PointDraws(
            first.anchor_indices[:1].repeat(repeat[:2]), first.uniform[:1].repeat(repeat)
        )
