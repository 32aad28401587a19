"""How far a trained image FST moves its anchors: from even spacing, and from image to image.

    python benchmarks/anchor_movement.py RUN... --data IMAGES --out anchor_movement.json

Looks at held-out training images (or, where a run held none out, at its validation images), never
at more than `--images` of them, evenly chosen. All numbers are shares of the image's width.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from fst.commands.evaluate import read_recipe
from fst.vision import ImageClassifier

Row = dict[str, Any]


@torch.no_grad()
def movement(run: Path, data: Path, count: int) -> Row:
    """Statistics of the horizontal anchor coordinates over some images."""
    model = ImageClassifier.from_pretrained(run / "best").eval()
    recipe = read_recipe(run)
    _, validation = recipe.data.load(data, torch.device("cpu"), augment=False)
    samples = validation.samples
    rows = torch.linspace(0, len(samples) - 1, count).long().unique()
    parts = [model.represent(samples.batch(part).images).anchors for part in rows.split(8)]
    along = torch.cat([anchors.positions[..., 1] for anchors in parts])  # b m
    rows_of_anchors = along.unflatten(1, (-1, model.config.anchors_per_row))
    even = torch.linspace(0, 1, model.config.anchors_per_row)
    away = (rows_of_anchors - even).abs()
    scales = parts[0].refinement_length_scales[0, :, 0]
    return {
        "run": run.name,
        "images": len(rows),
        "predictor_learning_rate": recipe.training.predictor_learning_rate,
        "steps": recipe.training.schedule.maximum,
        "mean_distance_from_even": away.mean().item(),
        "largest_distance_from_even": away.max().item(),
        "mean_deviation_between_images": along.std(dim=0).mean().item(),
        "largest_deviation_between_images": along.std(dim=0).max().item(),
        "length_scales": [scales.min().item(), scales.median().item(), scales.max().item()],
        "read_sigma": model.layer.read.attention.bias.log_sigma.exp().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = [movement(run, options.data, options.images) for run in options.runs]
    for row in found:
        print(json.dumps(row))
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
