"""How far a trained image FST moves its anchors, and whether they gather on objects.

    python benchmarks/anchor_movement.py RUN... --data IMAGES --out anchor_movement.json

Looks at held-out training images (or, where a run held none out, at its validation images), never
at more than `--images` of them, evenly chosen. All distances are shares of the image's width.

`ratio` is the share of the anchors that lie on the object over the share of the image that it
covers: one for anchors without regard to it. Objects are seldom at the border, where many anchors
of every row start, so anchors that never moved are below one: compare with `start_ratio`, and see
`gain`, the share won since, over the area, image by image. A gain may come from a drift to the
middle, alike in all images; `following` is what an image's own anchors have over those of another
image. Two controls stand beside them, grids of the same size: at the centres of equal cells
(`control_ratio`: about one), and along the model's rows with the anchors DENSER times as dense on
the object (`displaced_ratio`: what an effect looks like). What counts as the object is in
`foreground`.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from anchor_oracle import equidistributed
from torch import Tensor

from fst.commands.evaluate import read_recipe
from fst.vision import ImageClassifier, PatchGrid

Row = dict[str, Any]
# As shares of the shorter side: the standard deviation of the blur, the width of the border.
BLUR, BORDER = 1 / 64, 1 / 16
# Colours, between 0 and 1, are known no better than this: it keeps a plain border's model finite.
COLOUR_NOISE = 0.02
DENSER = 4


def foreground(images: Tensor) -> Tensor:
    """Which pixels (b, h, w) of images (b, 3, h, w) look unlike the image's border.

    The colours of the border are modelled by one Gaussian, after a blur against texture; a pixel is
    foreground where its Mahalanobis distance exceeds Otsu's threshold for this image. No learning
    and no labels, so it errs where objects reach the border or have its colours, where the
    background has several colours (a horizon), and where there is no single object: it always
    calls something foreground. It says where an image stands out, not what its class is.
    """
    side = min(images.shape[2:])
    smooth = blurred(images, BLUR * side)
    width = max(1, round(BORDER * side))
    border = torch.ones(images.shape[2:], dtype=torch.bool)
    border[width:-width, width:-width] = False
    colours = smooth[:, :, border]  # b 3 k
    away = smooth.flatten(2) - colours.mean(dim=2, keepdim=True)  # b 3 h*w
    covariance = torch.stack([one.cov() for one in colours]) + COLOUR_NOISE**2 * torch.eye(3)
    distances = (away * torch.linalg.solve(covariance, away)).sum(dim=1).sqrt()
    return (distances > otsu(distances)).unflatten(1, images.shape[2:])


def blurred(images: Tensor, std: float) -> Tensor:
    """A Gaussian blur of that standard deviation, in pixels; the edge pixels are continued."""
    reach = math.ceil(3 * std)
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / std).square())
    weights = weights / weights.sum()
    padded = F.pad(images, (reach,) * 4, mode="replicate").flatten(0, 1).unsqueeze(1)
    smooth = F.conv2d(F.conv2d(padded, weights.view(1, 1, 1, -1)), weights.view(1, 1, -1, 1))
    return smooth.view(images.shape)


def otsu(values: Tensor) -> Tensor:
    """Otsu's threshold of each row (b, 1): the split with most variance between its two sides."""
    ordered = values.double().sort(dim=1).values
    count = ordered.shape[1]
    below = torch.arange(1, count)
    sums = ordered.cumsum(dim=1)
    low, high = sums[:, :-1] / below, (sums[:, -1:] - sums[:, :-1]) / (count - below)
    best = (below * (count - below) * (high - low).square()).argmax(dim=1, keepdim=True)
    return ordered.gather(1, best).to(values.dtype)


def on_object(positions: Tensor, masks: Tensor) -> Tensor:
    """The share of the anchors (b, m, 2) of each image that stand on its mask (b, h, w)."""
    height, width = masks.shape[1:]
    size = torch.tensor([height, width])
    down, along = (positions * size).long().clamp(max=size - 1).unbind(dim=-1)
    return masks.flatten(1).gather(1, down * width + along).float().mean(dim=1)


def over_area(shares: Tensor, areas: Tensor) -> tuple[float, float]:
    """Mean share over mean area, and its standard error over images, each paired with its area.

    Not the mean of each image's own ratio: a few tiny objects would decide that.
    """
    ratio = shares.mean() / areas.mean()
    error = (shares - ratio * areas).std() / (len(areas) ** 0.5 * areas.mean())
    return ratio.item(), error.item()


def even_like(positions: Tensor, per_row: int) -> Tensor:
    """The same rows with even anchors from edge to edge, as a model starts."""
    along = torch.linspace(0, 1, per_row).repeat(positions.shape[1] // per_row)
    return torch.stack((positions[..., 0], along.expand(positions.shape[:2])), dim=-1)


def displaced(positions: Tensor, per_row: int, masks: Tensor) -> Tensor:
    """The same rows with anchors DENSER times as dense on the mask as beside it."""
    rows = (positions[0, ::per_row, 0] * masks.shape[1]).long().clamp(max=masks.shape[1] - 1)
    along = equidistributed(1 + (DENSER - 1) * masks[:, rows].float(), per_row)  # b rows k
    return torch.stack((positions[..., 0], along.flatten(1)), dim=-1)


def objects(positions: Tensor, per_row: int, images: Tensor) -> Row:
    """How much denser anchors (b, m, 2) stand on objects than elsewhere, beside the controls."""
    masks = foreground(images)
    areas = masks.float().mean(dim=(1, 2))
    grid = PatchGrid(positions.shape[1] // per_row, per_row).centres(positions)
    shares = on_object(positions, masks)
    another = on_object(positions.roll(len(images) // 2, dims=0), masks)  # mostly another class
    start = on_object(even_like(positions, per_row), masks)
    row: Row = {"area": areas.mean().item(), "share": shares.mean().item()}
    for name, share in {
        "ratio": shares,
        "start_ratio": start,
        "control_ratio": on_object(grid.expand_as(positions), masks),
        "displaced_ratio": on_object(displaced(positions, per_row, masks), masks),
        "gain": shares - start,
        "following": shares - another,
    }.items():
        row[name], row[f"{name}_standard_error"] = over_area(share, areas)
    return row


@torch.no_grad()
def movement(run: Path, data: Path, count: int) -> Row:
    """Statistics of the horizontal anchor coordinates over some images, and where objects are."""
    model = ImageClassifier.from_pretrained(run / "best").eval()
    recipe = read_recipe(run)
    _, validation = recipe.data.load(data, torch.device("cpu"), augment=False)
    samples = validation.samples
    rows = torch.linspace(0, len(samples) - 1, count).long().unique()
    images = torch.cat([samples.batch(part).images for part in rows.split(8)])
    parts = [model.represent(part).anchors for part in images.split(8)]
    positions = torch.cat([anchors.positions for anchors in parts])  # b m 2
    along = positions[..., 1]  # b m
    rows_of_anchors = along.unflatten(1, (-1, model.config.anchors_per_row))
    even = torch.linspace(0, 1, model.config.anchors_per_row)
    away = (rows_of_anchors - even).abs()
    scales = parts[0].refinement_length_scales[0, :, 0]
    return {
        "run": run.name,
        "images": len(rows),
        "predictor_learning_rate": recipe.training.predictor_learning_rate,
        "learning_rate": recipe.training.learning_rate,
        "seed": recipe.training.seed,
        "steps": recipe.training.schedule.maximum,
        "validation_error": json.loads((run / "summary.json").read_text())["validation_error"],
        "mean_distance_from_even": away.mean().item(),
        "largest_distance_from_even": away.max().item(),
        "mean_deviation_between_images": along.std(dim=0).mean().item(),
        "largest_deviation_between_images": along.std(dim=0).max().item(),
        "length_scales": [scales.min().item(), scales.median().item(), scales.max().item()],
        "read_sigma": model.layer.read.attention.bias.log_sigma.exp().item(),
        **objects(positions, model.config.anchors_per_row, images),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--hardware", help="what the runs were trained on, for the rows")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = []
    for run in options.runs:
        found.append(movement(run, options.data, options.images) | {"hardware": options.hardware})
        print(json.dumps(found[-1]))
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
