"""The sizes of the image models, each as one immutable object. The defaults are the paper's."""

from collections import Counter
from dataclasses import dataclass

from fst.images.patches import PatchGrid
from fst.nn import Spacing


def patch_grid(image_size: tuple[int, int], patch_size: int) -> PatchGrid:
    """The grid of patches of one size in an image of another."""
    if not isinstance(image_size, tuple) or len(image_size) != 2:
        raise ValueError(f"image_size must be (height, width), got {image_size!r}")
    height, width = image_size
    if patch_size < 1:
        raise ValueError(f"patch_size must be at least 1, got {patch_size}")
    if min(height, width) < 1 or height % patch_size or width % patch_size:
        raise ValueError(
            f"image_size must be a multiple of patch_size ({patch_size}) on both axes, "
            f"got {height} by {width}"
        )
    return PatchGrid(height // patch_size, width // patch_size)


def _check_classes(class_names: tuple[str, ...]) -> None:
    if not isinstance(class_names, tuple) or len(class_names) < 2:
        raise ValueError(f"class_names must be a tuple of two names or more, got {class_names!r}")
    name, times = Counter(class_names).most_common(1)[0]
    if times > 1:
        raise ValueError(f"class_names must differ from each other, got {name!r} {times} times")


def _check_sizes(config: object, **least: int) -> None:
    for name, smallest in least.items():
        if getattr(config, name) < smallest:
            raise ValueError(f"{name} must be at least {smallest}, got {getattr(config, name)}")


def _check_heads(width_name: str, width: int, heads_name: str, heads: int) -> None:
    if width % heads:
        raise ValueError(
            f"{width_name} must be a multiple of {heads_name}, got {width} and {heads}"
        )


@dataclass(frozen=True)
class ImageClassifierConfig:
    """The Function-Space Transformer as a classifier.

    Anchors stand on `rows` fixed horizontal rows of `anchors_per_row` each and move along them.
    """

    class_names: tuple[str, ...]
    image_size: tuple[int, int] = (224, 224)
    """Height and width."""
    patch_size: int = 16
    channels: int = 64
    """Of the patch encoder's convolutions."""

    width: int = 200
    heads: int = 8
    fourier_bands: int = 32
    fourier_spacing: Spacing = "linear"

    rows: int = 32
    anchors_per_row: int = 32
    predictor_width: int = 104
    predictor_heads: int = 4
    predictor_blocks: int = 2

    refinement_steps: int = 4
    points_from_sobol: int = 512
    """Evaluation points, the same in every step and for every image."""
    sobol_seed: int = 2026091323

    def __post_init__(self) -> None:
        _check_classes(self.class_names)
        _ = self.grid  # image_size and patch_size are checked here, not when the model is built
        _check_sizes(
            self,
            channels=1,
            width=1,
            heads=1,
            fourier_bands=1,
            rows=1,
            anchors_per_row=2,
            predictor_width=1,
            predictor_heads=1,
            predictor_blocks=1,
            refinement_steps=1,
            points_from_sobol=1,
        )
        _check_heads("width", self.width, "heads", self.heads)
        _check_heads(
            "predictor_width", self.predictor_width, "predictor_heads", self.predictor_heads
        )

    @property
    def grid(self) -> PatchGrid:
        return patch_grid(self.image_size, self.patch_size)

    @property
    def anchors(self) -> int:
        return self.rows * self.anchors_per_row


@dataclass(frozen=True)
class ViTConfig:
    """A vision transformer on linearly projected patches."""

    class_names: tuple[str, ...]
    image_size: tuple[int, int] = (224, 224)
    """Height and width."""
    patch_size: int = 16
    width: int = 176
    layers: int = 10
    heads: int = 4
    hidden: int = 423
    """Width inside each feed-forward."""

    def __post_init__(self) -> None:
        _check_classes(self.class_names)
        _ = self.grid
        _check_sizes(self, width=1, layers=1, heads=1, hidden=1)
        _check_heads("width", self.width, "heads", self.heads)

    @property
    def grid(self) -> PatchGrid:
        return patch_grid(self.image_size, self.patch_size)


@dataclass(frozen=True)
class CNNViTConfig(ViTConfig):
    """The same transformer on patches encoded by FST's residual CNN."""

    channels: int = 64
    """Of the patch encoder's convolutions."""
    encoder_width: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_sizes(self, channels=1, encoder_width=1)
