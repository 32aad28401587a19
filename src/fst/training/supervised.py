"""Prediction against targets: the loss of a training step and the error of a validation.

The loss is the mean over solutions of the squared relative L2 error in original units; validation
reports the mean relative L2 error (paper, Equation 7).
"""

from jaxtyping import Float
from torch import Tensor, nn

from fst.data.samples import Batch
from fst.metrics import relative_l2, squared_relative_l2
from fst.operators import Operator, PointDraws
from fst.types import Observations


class Supervised(nn.Module):
    """A model as training calls it: one module for the distributed wrapper and the compiler."""

    def __init__(self, model: Operator) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        observations: Observations,
        queries: Float[Tensor, "b q s"],
        draws: PointDraws | None,
    ) -> Float[Tensor, "b q c"]:
        return self.model.represent(observations, draws).decode(queries)


def losses(prediction: Float[Tensor, "b q c"], batch: Batch) -> Float[Tensor, " b"]:
    """What a training step averages; float32 whatever the precision of the prediction."""
    return squared_relative_l2(prediction, batch.targets, batch.mask)


def errors(model: Operator, batch: Batch, draws: PointDraws | None) -> Float[Tensor, " b"]:
    """What a validation averages. The checked, chunked path: any number of queries fits."""
    prediction = model.represent(batch.observations, draws)(batch.queries)
    return relative_l2(prediction, batch.targets, batch.mask)
