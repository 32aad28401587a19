"""Some of the tokens beside all of them: rows x[:, i] leave, and x for whatever else uses it.

Where x is used twice, PyTorch adds up two whole gradients, one of which is zero but for the rows.
Here the uses are in a chain instead: ∂x is what comes back to the second result, with the rows'
gradients added where they belong.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


class _RowsAndTokens(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tokens: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        return tokens[:, indices], tokens.view_as(tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor, of_tokens: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        # Not `index_add`, which PyTorch's compiler leaves as it is in half precision.
        return torch.ops.aten.index_put(of_tokens, [None, indices], of_rows, True), None


def rows_and_tokens(
    tokens: Float[Tensor, "b p d"], indices: Int[Tensor, " r"]
) -> tuple[Float[Tensor, "b r d"], Float[Tensor, "b p d"]]:
    """Tokens with these indices, which may repeat, and all of them."""
    rows, same = _RowsAndTokens.apply(tokens, indices)
    return rows, same
