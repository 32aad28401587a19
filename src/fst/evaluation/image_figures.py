"""Pictures of a classifier's saved fields: anchors over images, and their length scales.

Enters: `ImageFields`. Leaves: a matplotlib Figure. The vertical coordinate runs downwards, as in
an image, and both coordinates from 0 to 1.
"""

from collections.abc import Sequence

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import EllipseCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from fst.evaluation.figures import ELLIPSE_LEVELS, ELLIPSE_SCALE, STYLE, new_figure
from fst.evaluation.image_fields import ImageFields

COLUMNS = 4
# Longest name over one image.
LETTERS = 24


@matplotlib.rc_context(STYLE)
def guesses(fields: ImageFields, samples: Sequence[int] | None = None) -> Figure:
    """The images with their class, and the model's guess with its probability."""
    samples = range(len(fields)) if samples is None else samples
    lines = -(-len(samples) // COLUMNS)
    figure, axes = new_figure(lines, COLUMNS, width=9.2, row_height=2.7)
    _blank(axes)
    for place, sample in zip(axes.flat, samples, strict=False):
        draw_picture(place, fields, sample)
        place.set_title(_title(fields, sample))
    return figure


@matplotlib.rc_context(STYLE)
def anchors(fields: ImageFields, samples: Sequence[int] | None = None) -> Figure:
    """Anchors over the images, and below each row of images the anchors' length scales."""
    samples = list(range(len(fields)) if samples is None else samples)
    lines = -(-len(samples) // COLUMNS)
    figure, axes = new_figure(2 * lines, COLUMNS, width=9.8, row_height=2.45)
    _blank(axes)
    sizes = np.sqrt(np.prod(fields.length_scales, axis=-1))
    shown = sizes[samples]
    scale = Normalize(shown.min(), max(shown.max(), shown.min() + 1e-6))
    for number, sample in enumerate(samples):
        line, column = divmod(number, COLUMNS)
        top, bottom = axes[2 * line, column], axes[2 * line + 1, column]
        draw_picture(top, fields, sample)
        # A white rim keeps the dots apart from dark parts of the picture.
        vertical, horizontal = fields.anchors[sample].T
        top.scatter(
            *(horizontal, vertical), s=2.2, c="black", edgecolors="white", lw=0.25, clip_on=False
        )
        top.set_title(_title(fields, sample))
        draw_circles(bottom, fields, sample, sizes[sample], scale)
    figure.colorbar(
        ScalarMappable(scale, "viridis"),
        ax=list(axes.flat),
        label="length scale ℓ in the unit square",
        pad=0.01,
        aspect=40,
    )
    return figure


def draw_picture(place: Axes, fields: ImageFields, sample: int) -> None:
    place.set_axis_on()
    place.imshow(fields.pictures[sample], extent=(0, 1, 1, 0), interpolation="bilinear")
    _frame(place, fields)


def draw_circles(
    place: Axes,
    fields: ImageFields,
    sample: int,
    sizes: Float[np.ndarray, " m"],
    scale: Normalize,
) -> None:
    """One soft circle an anchor: nested transparent ones that add up towards the middle."""
    place.set_axis_on()
    colors = matplotlib.colormaps["viridis"](scale(sizes))
    vertical, horizontal = fields.length_scales[sample].T
    # Large circles first, so that small ones are not hidden.
    order = np.argsort(-sizes, kind="stable")
    for level in ELLIPSE_LEVELS:
        collection = EllipseCollection(
            2 * ELLIPSE_SCALE * level * horizontal[order],
            2 * ELLIPSE_SCALE * level * vertical[order],
            np.zeros(len(order)),
            units="xy",
            offsets=fields.anchors[sample][order, ::-1],
            offset_transform=place.transData,
            facecolors=colors[order],
            edgecolors="none",
            alpha=0.3,
        )
        place.add_collection(collection)
    _frame(place, fields)


def _title(fields: ImageFields, sample: int) -> str:
    """The class, what it was taken for if that is another, and how sure the model was."""
    guess, label = (str(names[sample]) for names in (fields.guesses, fields.labels))
    other = "" if guess == label else f"\ntaken for {_shortened(guess)}"
    return f"{_shortened(label)}{other} ({fields.probabilities[sample]:.2f})"


def _shortened(text: str) -> str:
    return text if len(text) <= LETTERS else text[: LETTERS - 1] + "…"


def _blank(axes: np.ndarray) -> None:
    """No frames where there is nothing to show."""
    for place in axes.flat:
        place.set_axis_off()


def _frame(place: Axes, fields: ImageFields) -> None:
    height, width = fields.pictures.shape[1:3]
    place.set_xlim(0, 1)
    place.set_ylim(1, 0)
    place.set_aspect(height / width)
    place.set_xticks([])
    place.set_yticks([])
    for side in ("top", "right"):
        place.spines[side].set_visible(True)
