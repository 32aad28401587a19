"""DeepONet (Lu et al., 2021), in the sizes of the paper's Appendices B and C.

Enters: observed values, always at the same points and in the same order. Leaves: coefficients
that answer queries anywhere. A branch network reads the values, a trunk network a coordinate:

    u(q) = Σ_k branch_k(v_1, ..., v_n) trunk_k(q) + bias

As in the authors' DeepXDE, the trunk's last layer has its activation and the branch's has not.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fst.baselines.shared import InputLinear, ModelOutput
from fst.config import DomainConfig
from fst.evaluation_points import PointDraws
from fst.operators import Operator, Output
from fst.types import Observations


@dataclass(frozen=True)
class DeepONetConfig(DomainConfig):
    """Everything that shapes the model. The defaults are the paper's single-viscosity Burgers."""

    observations: int = 1424
    """How many values every sample observes: the inputs of the branch."""
    branch: tuple[int, ...] = (918, 918)
    """Widths of the branch's layers; the last must be the trunk's last."""
    trunk: tuple[int, ...] = (918, 918)
    """Widths of the trunk's layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("branch", "trunk"):
            widths = getattr(self, name)
            if not widths or any(width < 1 for width in widths):
                raise ValueError(f"{name} must give at least one positive width, got {widths}")
        if self.branch[-1] != self.trunk[-1]:
            raise ValueError(
                "branch and trunk must end in the same width, "
                f"got {self.branch[-1]} and {self.trunk[-1]}"
            )


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
    """A branch for the function, a trunk for the position, and their dot product."""

    config_type = DeepONetConfig

    def __init__(self, config: DeepONetConfig) -> None:
        super().__init__(config.domain, value_channels=1, output_channels=1, condition_channels=0)
        self.config = config
        self.branch = dense_layers((config.observations, *config.branch))
        self.trunk = dense_layers((config.domain.axes, *config.trunk))
        self.bias = nn.Parameter(torch.zeros(()))

    def represent(self, observations: Observations, draws: PointDraws | None = None) -> ModelOutput:
        values = self.standardize_values(observations.values)
        coefficients = self.branch(values.squeeze(-1))  # b k
        numbers = 3 * max(self.config.trunk)
        return ModelOutput(self.domain, self, coefficients, observations.positions, numbers)

    def symmetrized(
        self, output: Output, observations: Observations, draws: PointDraws | None
    ) -> Output:
        if self.symmetry is not None:
            image = self.symmetry.observations(observations, self.domain)
            if not torch.equal(image.positions, observations.positions):
                raise ValueError(
                    "prediction_symmetry must map the observed points to one another: DeepONet's "
                    "branch never sees where values were observed"
                )
        return super().symmetrized(output, observations, draws)

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
