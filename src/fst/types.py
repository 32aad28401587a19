"""What users pass in and get back: observations, the domain they live in, and anchors.

Shapes are checked when an object is made, because that costs nothing. What needs a look at the
numbers themselves (finite, inside the domain) is checked by `check_observations` and
`check_queries`, which the models call on their public entry points.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

Device = torch.device | str

# Coordinates computed in float32 may leave the domain by rounding; anything beyond is a mistake.
DOMAIN_TOLERANCE = 1e-5
# A distance in length scales is squared in float32, which ends at 3e38.
LARGEST_RATIO = 1e18


def check_argument(name: str, value: object, kind: Any, least: int | None = None) -> None:
    """Raise unless an argument is of a kind, given as an annotation; numbers must be usable.

    A number must be at least `least`, where that is given.
    """
    if not _is_kind(value, kind):
        raise TypeError(f"{name} must be {_in_words(kind)}, got {value!r:.80}")
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"{name} must be finite, got {value}")
        if isinstance(number, int) and abs(number) >= 2**63:
            raise ValueError(f"{name} must be below 2**63, got {number:.3e}")
        if least is not None and isinstance(number, Real) and number < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def check_fields(record: Any, **least: int) -> None:
    """Raise unless every field of a dataclass is what its annotation says, and at least so much.

    NumPy's numbers become Python's own, which can be written as JSON.
    """
    hints = get_type_hints(type(record))
    for field in fields(record):
        value = _plain(getattr(record, field.name))
        check_argument(field.name, value, hints[field.name], least.get(field.name))
        object.__setattr__(record, field.name, value)


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    return tuple(map(_plain, value)) if type(value) is tuple else value


def _is_kind(value: object, kind: Any) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_kind(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return len(value) == len(kinds) and all(map(_is_kind, value, kinds))
    if kind in (int, float):  # a bool is an int to Python, but nobody means one
        number = Integral if kind is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    return value is None if kind is NoneType else isinstance(value, kind)


def _in_words(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(_in_words, arguments))
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is tuple:
        several = arguments[-1] is Ellipsis
        return f"a tuple of {'some' if several else len(arguments)}, each {_in_words(arguments[0])}"
    words = {int: "a whole number", float: "a number", bool: "True or False", NoneType: "None"}
    return words.get(kind) or kind.__name__


def check_tensor(name: str, value: object, shape: str, *, dtype: torch.dtype | None = None) -> None:
    """Raise unless `value` is a floating tensor (or of `dtype`) with the rank `shape` spells."""
    wanted = "bool" if dtype is torch.bool else "floating-point"
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a {wanted} tensor ({shape}), got {type(value).__name__}")
    if (dtype is None and not value.is_floating_point()) or (dtype and value.dtype != dtype):
        raise TypeError(f"{name} must be a {wanted} tensor ({shape}), got dtype {value.dtype}")
    if value.ndim != len(shape.split()):
        raise ValueError(f"{name} must have shape ({shape}), got {tuple(value.shape)}")


def check_finite(name: str, value: Tensor, mask: Tensor | None = None) -> None:
    """Raise where a number is NaN or infinite, save at points that a mask hides."""
    finite = torch.isfinite(value).all(dim=-1)
    if mask is not None:
        finite = finite | ~mask
    if not bool(finite.all()):
        where: Sequence[int] = (~finite).nonzero()[0].tolist()
        raise ValueError(f"{name} must be finite, got NaN or infinity at index {tuple(where)}")


def check_alike(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise unless two tensors share their device and, but for masks, their dtype."""
    if value.device != other.device:
        raise ValueError(f"{name} must be on {other.device} like {other_name}, got {value.device}")
    if value.dtype not in (other.dtype, torch.bool):
        raise TypeError(f"{name} must be {other.dtype} like {other_name}, got {value.dtype}")


def product_dtype(like: Tensor) -> torch.dtype:
    """What a matrix product runs in here: the autocast dtype where one is set."""
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype


def parse_device(name: str | None) -> torch.device:
    """cpu or cuda, as asked for; a GPU where there is one if nothing is asked for.

    Several processes, kernels and CUDA graphs all take the current GPU, so a number is refused:
    the one to use is chosen for the whole process.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        kind, _, number = name.partition(":")
        chosen = kind == "cuda" and number.isdecimal()
        hint = f"; CUDA_VISIBLE_DEVICES={number} before the command chooses that GPU"
        raise ValueError(f"device must be cpu or cuda, got {name!r}{hint if chosen else ''}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu here, got 'cuda': PyTorch sees no GPU")
    return torch.device(name)


@dataclass(frozen=True)
class Observations:
    """The given samples of one batch of functions.

    `condition` is one global input per function, such as a viscosity; `mask` is True where an
    observation is real and False where it only pads the batch.
    """

    positions: Float[Tensor, "b n s"]
    values: Float[Tensor, "b n v"]
    condition: Float[Tensor, "b c"] | None = None
    mask: Bool[Tensor, "b n"] | None = None

    def __post_init__(self) -> None:
        check_tensor("positions", self.positions, "b n s")
        batch, count = self.positions.shape[:2]
        if batch == 0 or count == 0:
            raise ValueError(
                f"positions must hold at least one observation, got {tuple(self.positions.shape)}"
            )
        self._check("values", "b n v")
        if self.condition is not None:
            self._check("condition", "b c")
        if self.mask is not None:
            self._check("mask", "b n", torch.bool)

    def _check(self, name: str, letters: str, dtype: torch.dtype | None = None) -> None:
        value, (batch, count, _) = getattr(self, name), self.positions.shape
        check_tensor(name, value, letters, dtype=dtype)
        check_alike(name, value, "positions", self.positions)
        known = (batch, count) if "n" in letters else (batch,)
        if value.shape[: len(known)] != known:
            shape = letters.replace("b", str(batch)).replace("n", str(count)).replace(" ", ", ")
            raise ValueError(
                f"{name} must have shape ({shape}) to match positions, got {tuple(value.shape)}"
            )

    def to(self, target: torch.device | torch.dtype | str) -> Self:
        """The same observations on another device or in another floating dtype."""
        # A mask stays boolean whatever dtype the numbers take.
        kept = torch.bool if isinstance(target, torch.dtype) else None
        return self.each(lambda tensor: tensor if tensor.dtype == kept else tensor.to(target))

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: Any = {n: t if t is None else change(t) for n, t in vars(self).items()}
        return type(self)(**changed)

    def __len__(self) -> int:
        return self.positions.shape[0]


@dataclass(frozen=True)
class Anchors:
    """Where a model stores features, and how far each reaches.

    `length_scales` belong to decoding, `refinement_length_scales` to the refinement steps.
    """

    positions: Float[Tensor, "b m s"]
    length_scales: Float[Tensor, "b m s"]
    refinement_length_scales: Float[Tensor, "b m s"]


@dataclass(frozen=True)
class Domain:
    """An axis-aligned box. Models work on the unit box and convert coordinates to and from it."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        # Spelled out: a domain is also made inside compiled models.
        if not all(hasattr(number, "__float__") for number in (*self.low, *self.high)):
            raise TypeError(f"low and high must be numbers, got low={self.low}, high={self.high}")
        if len(self.low) != len(self.high) or not 1 <= len(self.low) <= 3:
            raise ValueError(
                "low and high must give one number for each of 1 to 3 axes, "
                f"got low={self.low}, high={self.high}"
            )
        for name in ("low", "high"):
            numbers = getattr(self, name)
            if type(numbers) is not tuple or any(type(number) is not float for number in numbers):
                object.__setattr__(self, name, tuple(float(number) for number in numbers))
        for axis, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise ValueError(f"low must be below high on axis {axis}, got {low} and {high}")

    @classmethod
    def unit(cls, axes: int) -> Self:
        return cls((0.0,) * axes, (1.0,) * axes)

    @property
    def axes(self) -> int:
        return len(self.low)

    def edges(self, like: Tensor) -> tuple[Float[Tensor, " s"], Float[Tensor, " s"]]:
        # Filled in place: a copy from the host would wait for the GPU, and cannot be recorded.
        ends = self.low, self.high
        low, high = (torch.stack([like.new_full((), number) for number in end]) for end in ends)
        return low, high

    def widened(self, share: float) -> Self:
        """The box with so much of its lengths added at either end."""
        slack = [share * (high - low) for low, high in zip(self.low, self.high, strict=True)]
        low = tuple(low - more for low, more in zip(self.low, slack, strict=True))
        high = tuple(high + more for high, more in zip(self.high, slack, strict=True))
        return type(self)(low, high)

    def to_unit(self, positions: Float[Tensor, "*points s"]) -> Float[Tensor, "*points s"]:
        if self == Domain.unit(self.axes):
            return positions
        low, high = self.edges(positions)
        return (positions - low) / (high - low)

    def from_unit(self, positions: Float[Tensor, "*points s"]) -> Float[Tensor, "*points s"]:
        if self == Domain.unit(self.axes):
            return positions
        low, high = self.edges(positions)
        return low + positions * (high - low)

    def stretch(self, lengths: Float[Tensor, "b p s"]) -> Float[Tensor, "b p s"]:
        """Lengths measured in the unit box, in the units of this domain."""
        low, high = self.edges(lengths)
        return lengths * (high - low)


def check_observations(
    observations: Observations, domain: Domain, values: int, condition: int
) -> None:
    """Raise unless the numbers are finite, inside the domain, and of the channels expected."""
    if not isinstance(observations, Observations):
        raise TypeError(f"observations must be fst.Observations, got {type(observations).__name__}")
    _check_size("positions", observations.positions, domain.axes, "axes")
    _check_size("values", observations.values, values, "value channels")
    if condition and observations.condition is None:
        raise ValueError(f"condition is missing: this model needs {condition} condition channels")
    if observations.condition is not None:
        if not condition:
            raise ValueError("condition was given, but this model takes none")
        _check_size("condition", observations.condition, condition, "condition channels")
        check_finite("condition", observations.condition)
    mask = observations.mask
    if mask is not None and not bool(mask.any(dim=1).all()):
        empty = (~mask.any(dim=1)).nonzero()[0].item()
        raise ValueError(f"mask leaves sample {empty} without a single real observation")
    check_finite("values", observations.values, mask)
    _check_inside("positions", observations.positions, domain, mask)


def check_queries(queries: object, domain: Domain, like: Tensor) -> Tensor:
    """The queries as they came, once they are known to be (b q s) points of the domain."""
    check_tensor("queries", queries, "b q s")
    assert isinstance(queries, Tensor)
    check_alike("queries", queries, "the field", like)
    if queries.shape[0] != like.shape[0]:
        raise ValueError(
            f"queries must have batch size {like.shape[0]} like the observations, "
            f"got {tuple(queries.shape)}"
        )
    _check_size("queries", queries, domain.axes, "axes")
    _check_inside("queries", queries, domain)
    return queries


def check_neighbors(neighbors: int | None) -> None:
    """Raise unless `neighbors` is None (all anchors) or a whole number of at least one."""
    if neighbors is not None:
        check_argument("neighbors", neighbors, int, least=1)


def check_length_scales(
    length_scales: Float[Tensor, "b m s"],
    points: Float[Tensor, "b q s"],
    anchors: Float[Tensor, "b m s"],
) -> None:
    """Raise unless all are positive and no distance over a length scale overflows when squared."""
    shortest = length_scales.min().item()
    if not shortest > 0:
        raise ValueError(f"length_scales must be positive, got {shortest}")
    farthest = max(points.abs().max().item(), anchors.abs().max().item()) if points.numel() else 0
    if farthest / shortest > LARGEST_RATIO:
        raise ValueError(
            f"length_scales must be at least {farthest / LARGEST_RATIO:.3g} for coordinates up to "
            f"{farthest:.3g}, got {shortest}"
        )


def _check_size(name: str, value: Tensor, expected: int, what: str) -> None:
    if value.shape[-1] != expected:
        raise ValueError(
            f"{name} must have {expected} {what} in its last dimension, got {tuple(value.shape)}"
        )


def _check_inside(name: str, value: Tensor, domain: Domain, mask: Tensor | None = None) -> None:
    low, high = domain.widened(DOMAIN_TOLERANCE).edges(value)
    inside = ((value >= low) & (value <= high)).all(dim=-1)
    if mask is not None:
        inside = inside | ~mask
    if not bool(inside.all()):  # nor is NaN or infinity
        check_finite(name, value, mask)
        where = tuple((~inside).nonzero()[0].tolist())
        raise ValueError(
            f"{name} must lie in the domain {domain.low} to {domain.high}, "
            f"got {value[where].tolist()} at index {where}"
        )
