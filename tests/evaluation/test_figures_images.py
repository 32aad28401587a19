"""Figures of classifiers draw the saved fields: anchors where they are, circles of their size."""

from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import EllipseCollection, PathCollection
from matplotlib.colors import Normalize

from fst.data.files import DataError
from fst.evaluation import figures
from fst.evaluation.fields import read_fields, save_fields
from fst.evaluation.figures import new_figure
from fst.evaluation.report import png
from image_fakes import made_fields


def is_png(figure):
    data = png(figure)
    return data.startswith(b"\x89PNG") and len(data) > 5_000


def test_anchors_stand_over_their_image():
    fields = made_fields(count=5)
    figure = figures.guesses(fields)
    panel = figure.axes[1]  # the second image
    (picture,) = panel.images
    np.testing.assert_array_equal(picture.get_array(), fields.pictures[1])
    # The first row of pixels is at the top, and the vertical coordinate 0 as well.
    assert tuple(picture.get_extent()) == (0, 1, 1, 0)
    assert panel.get_ylim() == (1, 0)
    (dots,) = (each for each in panel.collections if isinstance(each, PathCollection))
    np.testing.assert_allclose(dots.get_offsets(), fields.anchors[1][:, ::-1], rtol=1e-6)
    assert is_png(figure)


def test_a_title_says_what_the_image_is_and_what_it_was_taken_for():
    fields = made_fields(count=2)
    titles = [panel.get_title() for panel in figures.guesses(fields).axes]
    assert titles[:2] == ["red (0.90)", "red\ntaken for blue (0.40)"]
    long = replace(fields, guesses=np.array(["red", "a" * 80]))
    assert len(max(figures.guesses(long).axes[1].get_title().splitlines(), key=len)) < 45


def test_a_circle_reaches_a_third_of_the_length_scale():
    """Rendered alone, a circle of length scale ℓ covers 2 · 0.35 ℓ of the image on each axis."""
    fields = made_fields(count=1, anchors=1, size=(40, 40))
    scale = np.full((1, 1, 2), 0.4, np.float32)
    fields = replace(fields, anchors=np.full((1, 1, 2), 0.5, np.float32), length_scales=scale)
    figure, axes = new_figure(1, 1, width=4, row_height=3.5)
    figure.set_layout_engine("none")
    axes[0, 0].set_position([0, 0, 1, 1])
    size = np.array([0.4])
    figures.draw_ellipses(
        axes[0, 0], fields.anchors[0], fields.length_scales[0], size, Normalize(0, 1)
    )
    axes[0, 0].set(xlim=(0, 1), ylim=(1, 0))
    axes[0, 0].set_axis_off()
    figure.set_size_inches(4, 4)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    painted = (pixels < 250).any(axis=-1)
    share = painted.any(axis=0).mean(), painted.any(axis=1).mean()
    np.testing.assert_allclose(share, 2 * 0.35 * 0.4, atol=0.01)
    # Soft: the middle is darker than the rim.
    middle, rim = pixels[200, 200].astype(int), pixels[200, 200 + 52].astype(int)
    assert (middle < rim).all()


def test_colours_follow_the_length_scales_over_all_images():
    fields = made_fields(count=2)
    figure = figures.guesses(fields)
    circles = [
        [each for each in panel.collections if isinstance(each, EllipseCollection)]
        for panel in figure.axes
    ]
    drawn = [collections for collections in circles if collections]
    assert len(drawn) == 2
    sizes = fields.length_scales[..., 0]
    darkest = np.unravel_index(sizes.argmin(), sizes.shape)[0]
    # The smallest of all has the first colour of the scale, in its image and in no other.
    first = plt.get_cmap("viridis")(0.0)[:3]
    found = [
        any(np.allclose(color[:3], first, atol=1e-3) for color in collections[0].get_facecolors())
        for collections in drawn
    ]
    assert [index for index, here in enumerate(found) if here] == [darkest]
    assert plt.get_fignums() == []


def test_models_without_anchors_show_their_guesses():
    fields = made_fields(anchors=0)
    (picture,) = figures.pictures(fields, "my run")
    assert picture.name == "my-run-guesses"
    assert is_png(picture.figure)
    (picture,) = figures.pictures(made_fields(), "my run")
    assert picture.name == "my-run-anchors"
    assert "0.35×" in picture.caption


def test_fields_survive_a_file(tmp_path):
    fields = made_fields()
    save_fields(tmp_path / "fields.npz", fields)
    again = read_fields(tmp_path / "fields.npz")
    assert type(again) is type(fields)
    for name, array in vars(fields).items():
        np.testing.assert_array_equal(getattr(again, name), array)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"anchors": np.zeros((2, 12, 2))}, "anchors must have shape"),
        ({"labels": np.array(["red"])}, "labels must have shape"),
        ({"pictures": np.zeros((3, 4, 4, 3))}, "pictures must have shape .* of UInt8"),
        ({"pictures": np.zeros((3, 4, 4), np.uint8)}, "pictures must have shape"),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(tmp_path, change, message):
    path = tmp_path / "fields.npz"
    np.savez(path, **{**vars(made_fields()), **change})
    with pytest.raises(DataError, match=rf"fields.npz: {message}"):
        read_fields(path)


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "fields.npz"
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"fields.npz"):
        read_fields(path)
