"""Small images that the tests make themselves, and small models for them."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from fst.evaluation.fields import ImageFields

# Overrides that shrink any image recipe to seconds on a CPU.
TRAINING = (
    "--training.batch-size 4 --training.schedule.maximum 6 --training.validate-every 3 "
    "--training.checkpoint-every 3 --training.log-every 1 --training.no-tensorboard "
    "--training.precision fp32 --training.validation-batch 4 --evaluation.batch-size 5"
).split()
DATA = "--data.image-size 16 16 --data.resize 18 --data.storage resident".split()
SIZES = "--model.image-size 16 16 --model.patch-size 8".split()
FST = (
    "--model.width 16 --model.heads 2 --model.fourier-bands 2 --model.rows 4 --model.channels 4 "
    "--model.anchors-per-row 4 --model.predictor-width 8 --model.predictor-heads 2 "
    "--model.predictor-blocks 1 --model.refinement-steps 2 --model.points-from-sobol 4"
).split()
VIT = "--model.width 16 --model.heads 2 --model.layers 1 --model.hidden 8".split()
CNN_VIT = [*VIT, *"--model.channels 4 --model.encoder-width 8".split()]

COLOURS = {"blue": (30, 60, 220), "green": (40, 200, 60), "red": (220, 40, 30)}


def picture(name: str, number: int, size: tuple[int, int] = (24, 20)) -> Image.Image:
    """A noisy image of one colour; width and height as Pillow counts them."""
    noise = np.random.default_rng((number, len(name))).integers(-30, 30, (*size[::-1], 3))
    return Image.fromarray((np.array(COLOURS[name]) + noise).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def image_files(count: int, start: int = 0) -> dict[str, bytes]:
    """`count` images of each class by name; one is grey, and one is cut short."""
    files = {
        f"{name}/{number:02d}.png": encoded(picture(name, number))
        for name in COLOURS
        for number in range(start, start + count)
    }
    files["green/grey.png"] = encoded(picture("green", 99).convert("L"))
    whole = encoded(picture("red", 98), "JPEG")
    files["red/cut.jpg"] = whole[: len(whole) // 2]
    return files


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def made_fields(count: int = 3, anchors: int = 12, size: tuple[int, int] = (32, 48)) -> ImageFields:
    """Fields with chosen contents: anchors on rows, scales that grow from left to right."""
    random = np.random.default_rng(0)
    positions = random.uniform(0, 1, (count, anchors, 2)).astype(np.float32)
    scales = (0.03 + 0.2 * positions[..., 1:]).repeat(2, axis=-1).astype(np.float32)
    return ImageFields(
        model=np.array("FST"),
        rows=np.arange(count) * 7,
        names=np.array([f"red/{number}.png" for number in range(count)]),
        labels=np.array(["red"] * count),
        guesses=np.array((["red", "blue"] * count)[:count]),
        probabilities=np.linspace(0.9, 0.4, count, dtype=np.float32),
        pictures=random.integers(0, 255, (count, *size, 3), dtype=np.uint8),
        anchors=positions,
        length_scales=scales,
    )
