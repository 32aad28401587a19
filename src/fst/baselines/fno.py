"""FNO, the Fourier Neural Operator (Li et al., 2021), in the form of the paper's Appendix B.

Enters: observations at points of one grid. Leaves: a prediction on the whole of that grid, which
answers queries by index. The input channels, on the grid, are the standardised values with zeros
where nothing was observed, the mask of what was, the standardised condition as a constant, and
the coordinates. A layer is v -> σ(W v + F⁻¹(R · F v)), as in the neuraloperator package.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fst.baselines.shared import GridOutput, check_observed_once, observed_cells, scatter_to_grid
from fst.config import OperatorConfig
from fst.evaluation_points import PointDraws
from fst.operators import ConditionChannels, Operator
from fst.types import Observations


@dataclass(frozen=True)
class FNOConfig(OperatorConfig):
    """Everything that shapes the model. The defaults are the paper's single-viscosity Burgers."""

    grid: tuple[int, ...] = (201, 1024)
    """Points on each axis of the grid that is observed, predicted and supervised."""
    mask_channel: bool = True
    """Mark the observed points in a channel. Without it, every point must be observed."""
    width: int = 48
    """Features of a token."""
    layers: int = 4
    """Blocks of the network."""
    modes: tuple[int, ...] = (10, 30)
    """Fourier modes kept on each axis, in the order of the axes."""
    odd_axes: Literal["published", "mended"] = "published"
    """With an odd number of points on an axis before the last, neuraloperator 2.0 takes every
    frequency k back as k - 1. `mended` takes it back as k; even axes are the same in both."""

    def __post_init__(self) -> None:
        super().__post_init__()
        axes = self.domain.axes
        for name in ("grid", "modes"):
            numbers = getattr(self, name)
            if len(numbers) != axes or any(number < 2 for number in numbers):
                raise ValueError(f"{name} must give {axes} numbers of at least 2, got {numbers}")
        # The last axis holds the non-negative half of a real transform's frequencies.
        if any(mode > size for mode, size in zip(self.modes, self.grid, strict=True)):
            raise ValueError(f"modes must not exceed the grid {self.grid}, got {self.modes}")


class FNO(Operator):
    """neuraloperator's FNO between observations on a grid and the solution on the same grid."""

    config_type = FNOConfig
    coordinates: Tensor

    def __init__(self, config: FNOConfig) -> None:
        try:
            from fst.baselines.neuralop_network import build_network, grid_embedding
        except ImportError as error:
            raise ImportError(
                "FNO needs the package neuraloperator: "
                "pip install 'function-space-transformer[baselines]'"
            ) from error
        super().__init__(
            config.domain, config.value_channels, config.output_channels, config.condition_channels
        )
        self.config = config
        self.register_buffer("coordinates", grid_embedding(config.grid), persistent=False)
        self.network = build_network(config)
        if config.condition_channels:
            self.condition = ConditionChannels(config.condition_channels, config.log_condition)
        self.register_state_dict_post_hook(_drop_package_metadata)  # type: ignore[no-untyped-call]

    def represent(self, observations: Observations, draws: PointDraws | None = None) -> GridOutput:
        config, batch = self.config, len(observations)
        cells = observed_cells(observations, self.domain, config.grid)
        values = self.standardize_values(observations.values)
        channels = [scatter_to_grid(values, cells, config.grid)]  # b g v
        if config.mask_channel:
            channels.append(scatter_to_grid(torch.ones_like(values[..., :1]), cells, config.grid))
        if observations.condition is not None:
            constant = self.condition(observations.condition)  # b c
            channels.append(constant.unsqueeze(1).expand(-1, prod(config.grid), -1))
        fields = torch.cat(channels, dim=-1).transpose(1, 2).unflatten(-1, config.grid)
        coordinates = self.coordinates.expand(batch, *self.coordinates.shape)
        predicted = self.network(torch.cat((fields, coordinates), dim=1))  # b c *grid
        flat = predicted.flatten(2).transpose(1, 2)  # b g c
        return GridOutput(self.domain, self.config.grid, self.standardize_outputs.restore(flat))

    def check(self, observations: Observations) -> None:
        super().check(observations)
        config = self.config
        if observations.values.dtype != torch.float32:
            raise TypeError(
                "values must be float32: the spectral weights of neuraloperator are complex64, "
                f"got {observations.values.dtype}"
            )
        check_observed_once(
            observations, self.domain, config.grid, everywhere=not config.mask_channel
        )


def _drop_package_metadata(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """neuraloperator adds its constructor's arguments to the weights; only weights belong there."""
    state.pop("_metadata", None)
