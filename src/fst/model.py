"""The Function-Space Transformer: from observations to a field, top to bottom.

Observations enter; a `Field` leaves, which answers queries anywhere in the domain. Inside, all
coordinates live in the unit box and all values are standardised.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fst.anchors import build_predictor
from fst.attention import Attention
from fst.base import PointDraws
from fst.config import FunctionSpaceConfig
from fst.decoder import Decoder
from fst.evaluation_points import FixedPoints, ResampledPoints
from fst.field import Field
from fst.layer import AnchorSelfAttention, EvaluateMixWrite, FunctionSpaceLayer, Points, Read, Scene
from fst.nn import MLP, FourierFeatures, Linear, ResidualFeedForward
from fst.operators import ConditionChannels, Operator
from fst.types import Observations


class ConditionEncoder(ConditionChannels):
    """The global input, standardised and embedded."""

    def __init__(self, channels: int, width: int, logarithm: bool) -> None:
        super().__init__(channels, logarithm)
        self.embed = MLP(channels, width, width)

    def forward(self, condition: Float[Tensor, "b c"]) -> Float[Tensor, "b k"]:
        return self.embed(super().forward(condition))


class FunctionSpaceTransformer(Operator):
    """A neural operator with adaptive anchors."""

    config_type = FunctionSpaceConfig

    def __init__(self, config: FunctionSpaceConfig) -> None:
        super().__init__(
            config.domain, config.value_channels, config.output_channels, config.condition_channels
        )
        self.config = config
        width, heads = config.width, config.heads
        condition = config.condition_width if config.condition_channels else 0
        fourier = FourierFeatures(config.domain.axes, config.fourier_bands, config.fourier_spacing)
        self.fourier = fourier
        self.encode_values = MLP(fourier.size + config.value_channels, width, width)
        self.encode_feed = ResidualFeedForward(width)
        if condition:
            self.condition = ConditionEncoder(
                config.condition_channels, config.condition_width, config.log_condition
            )
            self.initial_condition = nn.Linear(condition, width)  # C_c
        self.predict_anchors = build_predictor(
            config, fourier.size + config.value_channels + condition
        )
        self.initial_position = Linear(fourier.size, width, bias=False)  # C_a
        update = (
            EvaluateMixWrite(width, heads, fourier, condition)
            if config.update == "function-space"
            else AnchorSelfAttention(width, heads)
        )
        self.layer = FunctionSpaceLayer(Read(width, Attention(width, heads)), update)
        self.decoder = Decoder(width, fourier, condition, config.output_channels)

    def represent(
        self, observations: Observations, draws: PointDraws | None = None, record: bool = False
    ) -> Field:
        """The walk: encode, place anchors, refine. `record` keeps the features of every step."""
        draws = self.draws_for(observations, draws)
        mask = observations.mask
        condition = None
        if observations.condition is not None:
            condition = self.condition(observations.condition)  # b c
        positions = self.domain.to_unit(observations.positions)
        values = self.standardize_values(observations.values)
        observed = torch.cat((self.fourier(positions), values), dim=-1)  # b n g+v
        if mask is not None:  # a key that is masked still multiplies its value by zero: no NaN here
            observed = observed.masked_fill(~mask.unsqueeze(-1), 0.0)

        tokens = self.encode_feed(self.encode_values(observed))  # b n d
        anchors = self.predict_anchors(self._with_condition(observed, condition), mask)
        features = self.initial_position(self.fourier(anchors.positions))  # b m d
        if condition is not None:
            features = features + self.initial_condition(condition).unsqueeze(1)
        scene = self.layer.remember(tokens, mask, anchors, condition)
        steps: list[Tensor] = []
        for features in self.refine(features, scene, draws):  # noqa: B020 (each step replaces it)
            if record:
                steps.append(features)
        return Field(
            self.domain,
            anchors,
            features,
            condition,
            self.decoder,
            self.standardize_outputs,
            tuple(steps),
        )

    def refine(
        self, features: Float[Tensor, "b m d"], scene: Scene, draws: PointDraws
    ) -> Iterator[Float[Tensor, "b m d"]]:
        """The features after each step; the parameters are shared across steps."""
        for points in zip(*draws, strict=True):
            features = self.layer(features, scene, Points(*points))
            yield features

    def forward(
        self, observations: Observations, draws: PointDraws | None = None, record: bool = False
    ) -> Field:
        self.check(observations)
        return self.represent(observations, draws, record)

    def point_stream(self, anchor_seed: int, sobol_seed: int) -> ResampledPoints:
        config = self.config
        kind = ResampledPoints if config.resample_points else FixedPoints
        return kind(
            config.refinement_steps,
            config.anchors,
            config.points_from_anchors,
            config.points_from_sobol,
            self.domain.axes,
            anchor_seed,
            sobol_seed,
        )

    def learning_rate_groups(self) -> dict[str, list[nn.Parameter]]:
        predictor = self.predict_anchors.predicting()
        known = {id(parameter) for parameter in predictor}
        main = [parameter for parameter in self.parameters() if id(parameter) not in known]
        return {"main": main, "predictor": predictor} if predictor else {"main": main}

    def undecayed(self) -> list[nn.Parameter]:
        return self.predict_anchors.logarithms()

    def draws_for(self, observations: Observations, draws: PointDraws | None = None) -> PointDraws:
        """The draws given, or those of the configuration's seeds, beside the observations."""
        if draws is None:  # the same call gives the same answer
            stream = self.point_stream(self.config.anchor_seed, self.config.sobol_seed)
            draws = stream.draw()
        return draws.to(observations.positions.device, observations.positions.dtype)

    @staticmethod
    def _with_condition(
        observed: Float[Tensor, "b n i"], condition: Float[Tensor, "b c"] | None
    ) -> Float[Tensor, "b n j"]:
        if condition is None:
            return observed
        spread = condition.unsqueeze(1).expand(-1, observed.shape[1], -1)
        return torch.cat((observed, spread), dim=-1)


class ObserveFirst(FunctionSpaceTransformer):
    """Ablation: only the first refinement step reads the observations."""

    def refine(
        self, features: Float[Tensor, "b m d"], scene: Scene, draws: PointDraws
    ) -> Iterator[Float[Tensor, "b m d"]]:
        step: nn.Module = self.layer
        for points in zip(*draws, strict=True):
            features = step(features, scene, Points(*points))
            step = self.layer.update
            yield features


def build(config: FunctionSpaceConfig) -> FunctionSpaceTransformer:
    """The untrained model a configuration describes."""
    kind = ObserveFirst if config.observe == "first-step" else FunctionSpaceTransformer
    return kind(config)
