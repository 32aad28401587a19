"""DeepONet (Lu et al., 2021), in the sizes of the paper's Appendices B and C.

Enters: observed values, always at the same places and in the same order. Leaves: coefficients
that answer queries anywhere. A branch network reads the values, a trunk network a coordinate:

    u(q) = Σ_k branch_k(v_1, ..., v_n) trunk_k(q) + bias

As in the authors' DeepXDE, the trunk's last layer has its activation and the branch's has not.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fst.baselines.inputs import InputLinear
from fst.baselines.outputs import ChunkedOutput
from fst.config import check_sizes
from fst.evaluation_points import PointDraws
from fst.operators import Operator
from fst.types import Domain, Observations, check_fields


@dataclass(frozen=True)
class DeepONetConfig:
    """Everything that shapes the model. The defaults are the paper's single-viscosity Burgers."""

    low: tuple[float, ...] = (0.0, 0.0)
    """Lower end of the domain on each axis."""
    high: tuple[float, ...] = (1.0, 1.0)
    """Upper end of the domain on each axis."""
    observations: int = 1424
    """How many values every sample observes: the inputs of the branch."""
    branch: tuple[int, ...] = (918, 918)
    """Widths of the branch's layers; the last must be the trunk's last."""
    trunk: tuple[int, ...] = (918, 918)
    """Widths of the trunk's layers."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_sizes(self, observations=1)
        for name in ("branch", "trunk"):
            widths = getattr(self, name)
            if not widths or any(width < 1 for width in widths):
                raise ValueError(f"{name} must give at least one positive width, got {widths}")
        if self.branch[-1] != self.trunk[-1]:
            raise ValueError(
                "branch and trunk must end in the same width, "
                f"got {self.branch[-1]} and {self.trunk[-1]}"
            )
        _ = self.domain  # low and high are checked here, not when the model is built

    @property
    def domain(self) -> Domain:
        return Domain(self.low, self.high)


def dense_layers(widths: tuple[int, ...]) -> nn.Sequential:
    """Linear layers with ReLU between them; Glorot-normal weights, zero biases."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        linear = nn.Linear(inputs, outputs) if layers else InputLinear(inputs, outputs)
        nn.init.xavier_normal_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DeepONet(Operator):
    """A branch for the function, a trunk for the place, and their dot product."""

    config_type = DeepONetConfig

    def __init__(self, config: DeepONetConfig) -> None:
        super().__init__(config.domain, value_channels=1, output_channels=1, condition_channels=0)
        self.config = config
        self.branch = dense_layers((config.observations, *config.branch))
        self.trunk = dense_layers((config.domain.axes, *config.trunk))
        self.bias = nn.Parameter(torch.zeros(()))

    def represent(
        self, observations: Observations, draws: PointDraws | None = None
    ) -> "BasisOutput":
        del draws
        values = self.standardize_values(observations.values)
        coefficients = self.branch(values.squeeze(-1))  # b k
        return BasisOutput(self.domain, self, coefficients, observations.positions)

    def decode(
        self, coefficients: Float[Tensor, "b k"], queries: Float[Tensor, "b q s"]
    ) -> Float[Tensor, "b q 1"]:
        basis = self.trunk(self.domain.to_unit(queries)).relu()  # b q k
        predicted = torch.einsum("bqk,bk->bq", basis, coefficients) + self.bias
        return self.standardize_outputs.restore(predicted.unsqueeze(-1))

    def check(self, observations: Observations) -> None:
        super().check(observations)
        count, expected = observations.positions.shape[1], self.config.observations
        if count != expected:
            raise ValueError(
                f"positions must hold the {expected} observations whose order the branch has "
                f"learned, got {count}"
            )
        if observations.mask is not None and not bool(observations.mask.all()):
            raise ValueError("mask must not leave out observations: DeepONet's branch reads all")
        if bool((observations.positions != observations.positions[:1]).any()):
            raise ValueError(
                "positions must be the same for every sample: DeepONet's branch reads values in "
                "a fixed order and never sees where they were observed"
            )


@dataclass(frozen=True)
class BasisOutput(ChunkedOutput):
    """Coefficients of the trunk's basis functions."""

    domain: Domain
    model: DeepONet
    coefficients: Float[Tensor, "b k"]
    positions: Float[Tensor, "b n s"]

    @property
    def like(self) -> Tensor:
        # Not the coefficients: under autocast they are bfloat16, which queries need not be.
        return self.positions

    @property
    def numbers_per_query(self) -> int:
        trunk: tuple[int, ...] = self.model.config.trunk
        return 3 * max(trunk)

    def decode(self, queries: Float[Tensor, "b q s"]) -> Float[Tensor, "b q 1"]:
        return self.model.decode(self.coefficients, queries)
