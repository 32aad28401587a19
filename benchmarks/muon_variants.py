"""Variants of Muon: trials.

`row_beta` is that of NorMuon (Li et al., 2025): after O is made, the rows of a weight matrix (what
leads to one output each) are divided by a running root mean square of theirs, and the whole is put
back to the size that it had,

    v ← β v + (1 - β) mean_columns(O²),   O ← (‖O‖ / ‖O / √v‖) O / √v.

`polar` takes the coefficients of Polar Express (Amsel et al., 2025), which change from one
Newton-Schulz step to the next, in place of Muon's: small singular values come closer to one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fst.training import optimizer
from fst.training.optimizer import LEAST_NORM, Orthogonalizer, Stack

POLAR = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
# What rounding may add to a singular value of one, beyond which the steps would diverge.
CUSHION = 1.01
EPSILON = 1e-10


def polar_express(matrices: Float[Tensor, "k r c"]) -> Float[Tensor, "k r c"]:
    """As `optimizer.orthogonalize`, with other coefficients."""
    x = matrices.bfloat16()
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / (norm * CUSHION).clamp(min=LEAST_NORM)
    for a, b, c in POLAR:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


class RowScaler:
    """NorMuon's division for one stack, whose matrices lie on their longer side."""

    def __init__(self, stack: Stack, upright: Float[Tensor, "k 1 1"], beta: float) -> None:
        self.upright, self.beta = upright, beta
        size = len(stack.members), stack.rows, stack.columns
        self.rows = upright.new_zeros(size[0], size[1], 1)
        self.columns = upright.new_zeros(size[0], 1, size[2])
        self.started = upright.new_zeros(())

    def __call__(self, update: Float[Tensor, "k r c"]) -> Float[Tensor, "k r c"]:
        squares = update.float().square()
        self.rows.lerp_(squares.mean(dim=2, keepdim=True), 1 - self.beta)
        self.columns.lerp_(squares.mean(dim=1, keepdim=True), 1 - self.beta)
        self.started.lerp_(torch.ones_like(self.started), 1 - self.beta)
        # The outputs of a matrix that was turned are its columns.
        mean = torch.where(self.upright > 0, self.rows, self.columns) / self.started
        scaled = update * (mean + EPSILON).rsqrt()
        norms = (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) for x in (update, scaled))
        before, after = norms
        return scaled * (before / after.clamp(min=LEAST_NORM))


def variant(row_beta: float | None, polar: bool) -> type[Orthogonalizer]:
    """An orthogonaliser for the package's optimiser. Its running means are in no checkpoint."""

    class Variant(Orthogonalizer):
        def __init__(
            self, shapes: Sequence[tuple[int, int]], stacks: Sequence[Stack], device: torch.device
        ) -> None:
            super().__init__(shapes, stacks, device)
            self._scalers: list[Any] = [lambda update: update] * len(stacks)
            if row_beta is not None:
                upright = [
                    [shapes[m][0] <= shapes[m][1] for m in stack.members] for stack in stacks
                ]
                self._scalers = [
                    RowScaler(
                        stack, torch.tensor(each, device=device).float()[:, None, None], row_beta
                    )
                    for stack, each in zip(stacks, upright, strict=True)
                ]

        def __call__(self, updates: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
            half = torch.cat((updates.bfloat16(), updates.new_zeros(1, dtype=torch.bfloat16)))
            make = polar_express if polar else optimizer.orthogonalize
            found = [
                (scaler(make(half[source]).to(updates.dtype)) * scales[:, None, None]).flatten()
                for (source, scales), scaler in zip(self._stacks, self._scalers, strict=True)
            ]
            return torch.cat(found)[self._back]

    return Variant
