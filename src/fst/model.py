"""The Function-Space Transformer: from observations to a field, top to bottom.

Observations enter; a `Field` leaves, which answers queries anywhere in the domain. Inside, all
coordinates live in the unit box and all values are standardised.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fst.ablations import build_layer, build_predictor
from fst.config import FunctionSpaceConfig
from fst.evaluation_points import FixedPoints, PointDraws, ResampledPoints
from fst.field import Decoder, Field
from fst.nn import MLP, FourierFeatures, ResidualFeedForward
from fst.operators import ConditionChannels, Operator, Output
from fst.types import Observations


class ConditionEncoder(ConditionChannels):
    """The global input, standardised and embedded."""

    def __init__(self, channels: int, width: int, logarithm: bool) -> None:
        super().__init__(channels, logarithm)
        self.embed = MLP(channels, width, width)

    def forward(self, condition: Float[Tensor, "b c"]) -> Float[Tensor, "b k"]:
        embedded: Tensor = self.embed(super().forward(condition))
        return embedded


class FunctionSpaceTransformer(Operator):
    """A neural operator with adaptive anchors."""

    config_type = FunctionSpaceConfig

    def __init__(self, config: FunctionSpaceConfig) -> None:
        super().__init__(
            config.domain, config.value_channels, config.output_channels, config.condition_channels
        )
        self.config, self.anchor_count = config, config.anchors
        self._stream: ResampledPoints | None = None  # of a plain training loop
        width = config.width
        condition = config.condition_width if config.condition_channels else 0
        fourier = FourierFeatures(config.domain.axes, config.fourier_bands, config.fourier_spacing)
        inputs = fourier.size + config.value_channels
        self.fourier = fourier
        self.encode_values = MLP(inputs, width, width)
        self.encode_feed = ResidualFeedForward(width)
        if condition:
            self.condition = ConditionEncoder(
                config.condition_channels, condition, config.log_condition
            )
            self.initial_condition = nn.Linear(condition, width)  # C_c
        self.predict_anchors = build_predictor(config, inputs + condition)
        self.initial_position = nn.Linear(fourier.size, width, bias=False)  # C_a
        self.layer = build_layer(config, fourier, condition)
        self.decoder = Decoder(width, fourier, condition, config.output_channels)

    def represent(
        self, observations: Observations, draws: PointDraws | None = None, record: bool = False
    ) -> Field:
        """The walk: encode, place anchors, refine. `record` keeps the features of every step."""
        mask, condition = observations.mask, None
        if observations.condition is not None:
            condition = self.condition(observations.condition)  # b c
        positions = self.domain.to_unit(observations.positions)
        values = self.standardize_values(observations.values)
        observed = torch.cat((self.fourier(positions), values), dim=-1)  # b n g+v
        if mask is not None:  # a key that is masked still multiplies its value by zero: no NaN here
            observed = observed.masked_fill(~mask.unsqueeze(-1), 0.0)

        tokens = self.encode_feed(self.encode_values(observed))  # b n d
        if condition is not None:
            spread = condition.unsqueeze(1).expand(-1, observed.shape[1], -1)
            observed = torch.cat((observed, spread), dim=-1)
        anchors = self.predict_anchors(observed, mask)
        embedded = self.fourier(anchors.positions).to(tokens.dtype)
        features = self.initial_position(embedded)  # b m d
        if condition is not None:
            features = features + self.initial_condition(condition).unsqueeze(1)
        context = self.layer.precompute(tokens, mask, anchors, condition)
        points = self.draws_for(observations, draws)
        steps = tuple(self.layer.refine(features, context, points))
        parts = self.domain, anchors, steps[-1], condition, self.decoder, self.standardize_outputs
        return Field(*parts, steps if record else ())

    def symmetrized(
        self, output: Output, observations: Observations, draws: PointDraws | None
    ) -> Field:
        field = super().symmetrized(output, observations, draws)
        assert isinstance(field, Field)
        return field

    def forward(
        self, observations: Observations, draws: PointDraws | None = None, record: bool = False
    ) -> Field:
        """Observations to a field; in `train()` mode each call takes fresh evaluation points."""
        self.check(observations)
        if draws is None and self.training:
            if self._stream is None:
                self._stream = self.point_stream(self.config.anchor_seed, self.config.sobol_seed)
            draws = self._stream.draw()
        field = self.represent(observations, draws, record)
        return field if self.training else self.symmetrized(field, observations, draws)

    def point_stream(self, anchor_seed: int, sobol_seed: int) -> ResampledPoints:
        """Evaluation points; in `eval()` mode as many as the configuration has for predictions."""
        config = self.config
        kind = ResampledPoints if config.resample_points else FixedPoints
        at_anchors, from_sobol = config.points(self.training)
        return kind(
            config.refinement_steps,
            self.anchor_count,
            at_anchors,
            from_sobol,
            self.domain.axes,
            anchor_seed,
            sobol_seed,
        )

    def draws_for(self, observations: Observations, draws: PointDraws | None = None) -> PointDraws:
        """The draws given, or those of the configuration's seeds, beside the observations."""
        if draws is None:  # the same call gives the same answer
            draws = self.point_stream(self.config.anchor_seed, self.config.sobol_seed).draw()
        return draws.to(observations.positions.device, observations.positions.dtype)

    def predicting(self) -> list[nn.Parameter]:
        return self.predict_anchors.predicting()

    def no_weight_decay(self) -> list[nn.Parameter]:
        return self.predict_anchors.scales.logarithms()
