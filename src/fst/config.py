"""The sizes and choices of a model, as one immutable object; those of FST."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import ClassVar, Literal

from fst.nn import Spacing
from fst.symmetry import SYMMETRIES, SymmetryName
from fst.types import Domain, check_fields

# A Sobol sequence ends there.
LONGEST_SEQUENCE = 2**30


@dataclass(frozen=True)
class Config:
    """The sizes and choices of a model, checked when they are made."""

    least: ClassVar[Mapping[str, int]] = {}
    """The smallest value of each whole number; 1 where it is not named. Seeds may be any."""

    def __post_init__(self) -> None:
        numbers = {each.name: getattr(self, each.name) for each in fields(self)}
        whole = [n for n, value in numbers.items() if type(value) is int and not n.endswith("seed")]
        check_fields(self, **{name: self.least.get(name, 1) for name in whole})
        for heads in ("heads", "predictor_heads"):
            width = heads.replace("heads", "width")
            if heads in numbers and numbers[width] % numbers[heads]:
                got = f"{numbers[width]} and {numbers[heads]}"
                raise ValueError(f"{width} must be a multiple of {heads}, got {got}")


@dataclass(frozen=True)
class DomainConfig(Config):
    """A model on a box."""

    low: tuple[float, ...] = (0.0, 0.0)
    """Lower end of the domain on each axis."""
    high: tuple[float, ...] = (1.0, 1.0)
    """Upper end of the domain on each axis."""
    prediction_symmetry: SymmetryName = "none"
    """A symmetry of the problem: outside training, predictions are the mean of those for the
    observations and for their image. `odd-reflection` reverses the last axis and the sign of all
    values, `even-reflection` the axis alone, and `transpose` exchanges two axes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        domain = self.domain  # low and high are checked here, not when the model is built
        if self.prediction_symmetry != "none":
            grid: tuple[int, ...] | None = getattr(self, "grid", None)
            SYMMETRIES[self.prediction_symmetry].check(domain, grid)

    @property
    def domain(self) -> Domain:
        return Domain(self.low, self.high)


@dataclass(frozen=True)
class ChannelConfig(DomainConfig):
    """A model of values with several channels."""

    value_channels: int = 1
    """Channels of the observed values."""
    output_channels: int = 1
    """Channels of the predicted field."""


@dataclass(frozen=True)
class OperatorConfig(ChannelConfig):
    """A model that can be given a condition."""

    condition_channels: int = 0
    """Numbers of the condition of a sample; 0: there is none."""
    log_condition: bool = False
    """Take the logarithm of the condition first: for positive inputs that span decades."""

    least: ClassVar[Mapping[str, int]] = {"condition_channels": 0}


@dataclass(frozen=True)
class FunctionSpaceConfig(OperatorConfig):
    """Everything that shapes the model. The defaults are the paper's Burgers model.

    `rows` gives the number of fixed positions on each axis but the adaptive one, in axis order;
    their product is the number of rows, and each row carries `anchors_per_row` anchors.
    """

    width: int = 176
    """Features of a token and of an anchor."""
    heads: int = 8
    """Heads of every attention."""
    fourier_bands: int = 32
    """Frequencies by which a coordinate is encoded, on each axis."""
    fourier_spacing: Spacing = "linear"
    """How these frequencies grow: by equal steps or by equal factors."""
    condition_width: int = 64
    """Features into which the condition is encoded."""

    rows: tuple[int, ...] = (32,)
    """Fixed positions on each axis but the adaptive one, in the order of the axes."""
    anchors_per_row: int = 32
    """Anchors that each row places along the adaptive axis."""
    adaptive_axis: int = 1
    """The axis along which anchors move."""
    predictor_width: int = 144
    """Features within the coordinate predictor."""
    predictor_heads: int = 4
    """Heads of its attention."""
    predictor_blocks: int = 2
    """Its blocks."""

    refinement_steps: int = 4
    """Read, mix and write passes; they share their parameters."""
    points_from_anchors: int = 256
    """Evaluation points of a refinement step that lie at anchors."""
    points_from_sobol: int = 256
    """Evaluation points of a refinement step from a Sobol sequence."""
    prediction_points: Literal["as-trained", "all-anchors"] = "as-trained"
    """Evaluation points outside training: as many as in training, or all anchors and as many points
    from the Sobol sequence (none where training has none), which takes longer and may lower the
    error."""
    resample_points: bool = True
    """Draw other evaluation points at every training step."""
    anchor_seed: int = 2026091322
    """Of the evaluation points at anchors, outside training."""
    sobol_seed: int = 2026091323
    """Of those from the Sobol sequence, outside training."""

    coordinates: Literal["adaptive", "learned", "staggered", "uniform"] = "adaptive"
    """Whether anchors move with the observations, are learned for all samples, or lie evenly, with
    neighbouring rows half a gap apart or not."""
    length_scales: Literal["adaptive", "spacing", "local", "learned", "fixed"] = "adaptive"
    """Of the blend: predicted for each sample, or predicted multiples of the distance between
    neighbouring anchors (`local`: narrow ones, for decoding from few anchors), or learned for all
    samples, or fixed."""
    update: Literal["function-space", "anchor-attention"] = "function-space"
    """What a refinement step does; `anchor-attention` is an ablation."""
    observe: Literal["every-step", "first-step"] = "every-step"
    """Read the observations in every refinement step, or in the first alone."""

    least: ClassVar[Mapping[str, int]] = {
        "condition_channels": 0,
        "anchors_per_row": 2,
        "adaptive_axis": 0,
        "points_from_anchors": 0,
        "points_from_sobol": 0,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        axes = self.domain.axes
        if self.adaptive_axis >= axes:
            raise ValueError(f"adaptive_axis must be in 0..{axes - 1}, got {self.adaptive_axis}")
        if len(self.rows) != axes - 1 or any(count < 1 for count in self.rows):
            raise ValueError(
                f"rows must give a positive count for each of the {axes - 1} axes besides the "
                f"adaptive one, got {self.rows}"
            )
        if self.points_from_anchors > self.anchors:
            raise ValueError(
                f"points_from_anchors must be at most the {self.anchors} anchors, "
                f"got {self.points_from_anchors}"
            )
        if self.points_from_sobol * self.refinement_steps > LONGEST_SEQUENCE:
            raise ValueError(
                f"points_from_sobol times refinement_steps must be at most {LONGEST_SEQUENCE:,}, "
                f"got {self.points_from_sobol:,} and {self.refinement_steps:,}"
            )
        if self.points_from_anchors + self.points_from_sobol < 1:
            raise ValueError("points_from_anchors and points_from_sobol cannot both be 0")
        if self.update == "anchor-attention" and self.scales_read_input:
            raise ValueError(
                "update 'anchor-attention' never evaluates the field during refinement, so its "
                "refinement length scales cannot be learned: set length_scales to 'fixed' or "
                "'learned'"
            )

    @property
    def scales_read_input(self) -> bool:
        return self.length_scales in ("adaptive", "spacing", "local")

    def points(self, training: bool) -> tuple[int, int]:
        """Evaluation points of a refinement step: at anchors, and from a Sobol sequence."""
        if training or self.prediction_points == "as-trained":
            return self.points_from_anchors, self.points_from_sobol
        return self.anchors, self.anchors if self.points_from_sobol else 0

    @property
    def row_count(self) -> int:
        return prod(self.rows)

    @property
    def anchors(self) -> int:
        return self.row_count * self.anchors_per_row
