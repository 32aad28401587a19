"""Muon: weight matrices move by orthogonal matrices.

A matrix W with gradient G, momentum M and learning rate η moves by (Jordan et al., 2024)

    M ← μ M + (1 - μ) G,   U = μ M + (1 - μ) G,
    W ← (1 - η λ) W - 0.2 η √max(rows, columns) O,

where O is U with its singular values made equal to about one, by Newton-Schulz steps. The factor
0.2 √max(rows, columns) gives O the size of Adam's updates, whose learning rates then carry over
(Liu et al., 2025). This is `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, for many
matrices at once.

Enters: the update U of every matrix, one after the other in one vector. Leaves: the same of O,
scaled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

# A matrix with a shorter side than this has too few directions to make equal.
LEAST_SIDE = 9
# The last layer of each model, by name: its rows are the outputs, not features.
OUTPUT_LAYERS = {
    "decoder.output.2.weight",  # FST
    "head.output.weight",  # FST for images
    "output.weight",  # Perceiver IO, ViT, CNN-ViT
    "network.output.weight",  # Transolver
    "network.projection.fcs.1.weight",  # FNO
}

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LEAST_NORM = 1e-7

# Multiplications that a GPU makes while it would launch the kernels of one more stack, and the
# multiple that the sides of its matrices should be.
WORTH_A_STACK, ALIGNMENT = 2_500_000_000, 16


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that Muon moves; Adam moves all others.

    These are the weights of linear layers and convolutions (a kernel counts as the matrix with one
    row per output channel). Adam keeps

    - biases, norms, length scales: they are no matrices;
    - learned tokens, latents, positions: each row is a vector of its own, not part of a map;
    - the last layer, as is customary: its rows are the outputs, each with a scale of its own;
    - matrices with fewer than `LEAST_SIDE` rows or columns, such as those that read coordinates;
    - complex spectral weights: one matrix per frequency, of which most see little of the data.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return [
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith("weight")
        and name not in OUTPUT_LAYERS
        and id(parameter) not in embeddings
        and parameter.ndim >= 2
        and parameter.is_floating_point()
        and min(matrix_shape(parameter)) >= LEAST_SIDE
    ]


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Rows and columns; the axes of a convolution's kernel count as columns."""
    rows = parameter.shape[0]
    return rows, parameter.numel() // max(rows, 1)


def orthogonalize(matrices: Float[Tensor, "k r c"]) -> Float[Tensor, "k r c"]:
    """Newton-Schulz steps in bfloat16, for r ≤ c; rows and columns of zeros stay zero."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    # Then no singular value is above one.
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


@dataclass
class Stack:
    """Matrices that are orthogonalised together, with zeros up to a common shape."""

    rows: int
    columns: int
    members: list[int] = field(default_factory=list)

    @property
    def work(self) -> int:
        """Multiplications for one matrix."""
        return STEPS * self.rows**2 * (2 * self.columns + self.rows)

    def holds(self, other: "Stack") -> bool:
        return self.rows >= other.rows and self.columns >= other.columns


def stacked(shapes: Sequence[tuple[int, int]], worth: int, alignment: int) -> list[Stack]:
    """Stacks of matrices of one shape, lying on their longer side.

    Smaller ones join larger ones where the zeros cost less than `worth` multiplications: a stack of
    its own would be slower on a GPU, where every kernel has a least time.
    """
    by_shape: dict[tuple[int, int], Stack] = {}
    for member, shape in enumerate(shapes):
        rows, columns = (-(-side // alignment) * alignment for side in sorted(shape))
        by_shape.setdefault((rows, columns), Stack(rows, columns)).members.append(member)
    stacks = sorted(by_shape.values(), key=lambda stack: (stack.work, stack.rows))
    found = []
    for number, stack in enumerate(stacks):
        larger = [other for other in stacks[number + 1 :] if other.holds(stack)]
        nearest = min(larger, key=lambda other: other.work, default=None)
        if nearest and (nearest.work - stack.work) * len(stack.members) < worth:
            nearest.members += stack.members
        else:
            found.append(stack)
    return found


class Orthogonalizer:
    """O of many matrices from their U; both are vectors that hold one matrix after the other."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        device: torch.device,
        worth: int | None = None,
        alignment: int | None = None,
    ) -> None:
        on_gpu = device.type == "cuda"
        worth = (WORTH_A_STACK if on_gpu else 0) if worth is None else worth
        alignment = (ALIGNMENT if on_gpu else 1) if alignment is None else alignment
        sizes = [rows * columns for rows, columns in shapes]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        total = sum(sizes)
        stacks = stacked(shapes, worth, alignment)
        back = torch.empty(total, dtype=torch.long)
        self._sources: list[Tensor] = []
        self._scales: list[Tensor] = []
        before = 0
        for stack in stacks:
            count = len(stack.members)
            # Where each number comes from; the last number of the vector will be zero.
            source = torch.full((count, stack.rows, stack.columns), total)
            index = before + torch.arange(source.numel()).view(source.shape)
            scale = torch.empty(count, 1, 1)
            for number, member in enumerate(stack.members):
                rows, columns = shapes[member]
                own = torch.arange(starts[member], starts[member] + sizes[member])
                own = own.view(rows, columns)
                own = own if rows <= columns else own.mT
                source[number, : own.shape[0], : own.shape[1]] = own
                back[own] = index[number, : own.shape[0], : own.shape[1]]
                scale[number] = 0.2 * math.sqrt(max(rows, columns))
            before += source.numel()
            self._sources.append(source.to(device))
            self._scales.append(scale.to(device))
        self._back = back.to(device)

    def __call__(self, updates: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        half = torch.cat((updates.bfloat16(), updates.new_zeros(1, dtype=torch.bfloat16)))
        found = [
            (orthogonalize(half[source]).to(updates.dtype) * scale).flatten()
            for source, scale in zip(self._sources, self._scales, strict=True)
        ]
        return torch.cat(found)[self._back]
