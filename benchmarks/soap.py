"""SOAP (Vyas et al., 2024) for the weight matrices and Adam for all other parameters: a trial.

SOAP is Adam in the eigenbasis of Shampoo's preconditioner, a basis that changes slowly. After the
norm of the whole gradient is clipped, a matrix W with gradient G, rate η and decay λ moves by

    G' = Qₗᵀ G Qᵣ,
    M ← β₁ M + (1 - β₁) G',   V ← β₂ V + (1 - β₂) G'²,
    W ← (1 - η λ) W - η Qₗ [M / (1 - β₁ᵗ) / (√(V / (1 - β₂ᵗ)) + ε)] Qᵣᵀ,
    L ← β L + (1 - β) G Gᵀ,   R ← β R + (1 - β) Gᵀ G.

The first step only finds the bases: the eigenvectors of L and R. Every `frequency` steps after it,
they make one step of power iteration,

    Qₗ ← QR(L Qₗ),   Qᵣ ← QR(R Qᵣ),

with columns in the order of their eigenvalues, the largest first, since QR leaves the first column
as it is. M turns with the bases; V, whose numbers are no vector, only takes the new order.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fst.training.optimizer import Exchange, Optimizer, matrix_shape

BETAS = (0.95, 0.95)
GRAM_BETA = 0.95
STATE = ("average", "square", "left", "right", "left_basis", "right_basis")


def eigenbasis(grams: Float[Tensor, "k n n"]) -> Float[Tensor, "k n n"]:
    """Eigenvectors as columns, those of the largest eigenvalues first."""
    return torch.linalg.eigh(grams).eigenvectors.flip(-1)


def nearer_basis(
    grams: Float[Tensor, "k n n"], basis: Float[Tensor, "k n n"]
) -> tuple[Float[Tensor, "k n n"], Int[Tensor, "k n"]]:
    """One step of power iteration, and the order that the columns of the basis were put in."""
    product = grams @ basis
    order = (basis * product).sum(dim=-2).argsort(dim=-1, descending=True)
    return torch.linalg.qr(product.gather(-1, order[:, None, :].expand_as(product))).Q, order


class Stack:
    """Matrices of one shape, with one batched operation for all of them."""

    def __init__(self, members: list[nn.Parameter]) -> None:
        self.members = members
        self.steps = -1  # of Adam; the first step of all has none
        rows, columns = matrix_shape(members[0])
        shape, like = (len(members), rows, columns), members[0].detach()
        self.average, self.square = like.new_zeros(shape), like.new_zeros(shape)
        self.left = like.new_zeros(len(members), rows, rows)
        self.right = like.new_zeros(len(members), columns, columns)
        self.left_basis, self.right_basis = self.left, self.right  # until the first step

    def updates(self, frequency: int, epsilon: float) -> list[Tensor]:
        """By how much each member moves at a rate of one, in its own shape."""
        gradients = [each.grad.flatten() for each in self.members if each.grad is not None]
        gradient = torch.stack(gradients).view_as(self.average)
        self.steps += 1
        update = self._adam(gradient, epsilon) if self.steps else torch.zeros_like(gradient)
        # After the update, so that no gradient is measured in a basis it has had a say in.
        self.left.lerp_(gradient @ gradient.mT, 1 - GRAM_BETA)
        self.right.lerp_(gradient.mT @ gradient, 1 - GRAM_BETA)
        if self.steps == 0:
            self.left_basis, self.right_basis = eigenbasis(self.left), eigenbasis(self.right)
        elif self.steps % frequency == 0:
            self._turn()
        return [each.view_as(member) for each, member in zip(update, self.members, strict=True)]

    def _adam(self, gradient: Float[Tensor, "k r c"], epsilon: float) -> Float[Tensor, "k r c"]:
        turned = self.left_basis.mT @ gradient @ self.right_basis
        self.average.lerp_(turned, 1 - BETAS[0])
        self.square.lerp_(turned.square(), 1 - BETAS[1])
        first, second = (1 - beta**self.steps for beta in BETAS)
        update = self.average / first / ((self.square / second).sqrt() + epsilon)
        return self.left_basis @ update @ self.right_basis.mT

    def _turn(self) -> None:
        average = self.left_basis @ self.average @ self.right_basis.mT
        self.left_basis, rows = nearer_basis(self.left, self.left_basis)
        self.right_basis, columns = nearer_basis(self.right, self.right_basis)
        self.average = self.left_basis.mT @ average @ self.right_basis
        square = self.square.gather(1, rows[:, :, None].expand_as(self.square))
        self.square = square.gather(2, columns[:, None, :].expand_as(square))


class Soap:
    """In place of an `Optimizer`, on its groups: SOAP moves those with `matrices`.

    The matrices that have a gradient in the first step must have one in every step.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, frequency: int = 10, epsilon: float = 1e-8
    ) -> None:
        self.param_groups, self.frequency, self.epsilon = groups, frequency, epsilon
        self.groups = [group for group in groups if group["matrices"]]
        self.matrices = [matrix for group in self.groups for matrix in group["params"]]
        self.adam = Optimizer([each for each in groups if not each["matrices"]], epsilon=epsilon)
        self.stacks: list[Stack] = []

    @torch.no_grad()
    def clip_and_step(self, limit: float, exchange: Exchange | None = None) -> Float[Tensor, ""]:
        """As that of `Optimizer`: the norm of the gradient before it is clipped."""
        parameters = [each for group in self.param_groups for each in group["params"]]
        gradients = [each.grad for each in parameters if each.grad is not None]
        gradients = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
        whole = torch.cat([gradient.flatten() for gradient in gradients])
        if exchange is not None:
            exchange(whole)
        norm = torch.linalg.vector_norm(whole)
        whole.mul_((limit / (norm + 1e-6)).clamp(max=1))
        parts = whole.split([gradient.numel() for gradient in gradients])
        clipped = [part.view_as(each) for part, each in zip(parts, gradients, strict=True)]
        torch._foreach_copy_(gradients, clipped)
        if self.adam.parameters:
            self.adam.clip_and_step(torch.inf)
        self._move_matrices()
        return norm

    def _move_matrices(self) -> None:
        moved = [each for each in self.matrices if each.grad is not None]
        if not self.stacks:
            self.stacks = self._stacked(moved)
        if len(moved) != sum(len(stack.members) for stack in self.stacks):
            raise ValueError("the same matrices must have a gradient in every step")
        updates: dict[nn.Parameter, Tensor] = {}
        for stack in self.stacks:
            found = stack.updates(self.frequency, self.epsilon)
            updates |= dict(zip(stack.members, found, strict=True))
        for group in self.groups:
            rate, members = group["lr"], [each for each in group["params"] if each in updates]
            if not members:
                continue
            if group["weight_decay"]:
                torch._foreach_mul_(members, 1 - rate * group["weight_decay"])
            torch._foreach_sub_(members, [updates[each] for each in members], alpha=rate)

    @staticmethod
    def _stacked(moved: list[nn.Parameter]) -> list[Stack]:
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
        for matrix in moved:
            by_shape.setdefault(matrix_shape(matrix), []).append(matrix)
        return [Stack(members) for members in by_shape.values()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """By the number of each parameter: Adam's, then the matrices."""
        found = dict(self.adam.state_dict()["state"])
        numbers = {matrix: number for number, matrix in enumerate(self.matrices)}
        for stack in self.stacks:
            for index, matrix in enumerate(stack.members):
                entries = {name: getattr(stack, name)[index].clone() for name in STATE}
                entries["step"] = torch.tensor(float(stack.steps))
                found[len(self.adam.parameters) + numbers[matrix]] = entries
        return {"state": dict(sorted(found.items()))}

    def load_state_dict(self, description: dict[str, Any]) -> None:
        first = len(self.adam.parameters)
        adam = {number: each for number, each in description["state"].items() if number < first}
        self.adam.load_state_dict({"state": adam})
        states = {
            self.matrices[number - first]: entries
            for number, entries in description["state"].items()
            if number >= first
        }
        self.stacks = self._stacked([each for each in self.matrices if each in states])
        for stack in self.stacks:
            entries = [states[member] for member in stack.members]
            stack.steps = int(entries[0]["step"])
            for name in STATE:
                together = torch.stack([each[name] for each in entries])
                setattr(stack, name, together.to(stack.average))
