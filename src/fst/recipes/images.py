"""ImageNet-1K from scratch at 224×224 (paper, Section 4.5, Appendix D), and images of your own.

The classes are named by the data when training starts; until then they are numbered. On ImageNet
the weights are selected by the error on the validation images, which are also those that the paper
reports on. On your own images (see docs/images.md) the three models share data, schedule and
budget, so that their accuracies can be compared.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fst.baselines import CNNViTConfig, ViTConfig
from fst.data import ImageData
from fst.data.image_data import CLASSES
from fst.evaluation.classification import ClassificationSettings
from fst.recipes.own import CPU_MINUTES, Choice, Size, small
from fst.recipes.recipe import Recipe, short_name
from fst.training.schedules import Stage, Stages, WarmupCosine
from fst.training.settings import CrossEntropy, TrainingSettings
from fst.vision import ImageClassifierConfig

THOUSAND = tuple(f"class {number:03d}" for number in range(1000))
# Images of your own are resized by the paper's ratio of 256 to 224.
SIZE, RESIZE, PATCH = (128, 128), 146, 8
OWN = "own-images"
# Sizes that two CPU cores can train in minutes.
SMALL_DATA: dict[str, Any] = {"image_size": (64, 64), "resize": 73}
SMALL_TRANSFORMER = {"width": 64, "layers": 4, "heads": 4, "hidden": 128}
SMALL_ENCODER = {"channels": 16}
SMALL: dict[type, dict[str, Any]] = {
    ImageClassifierConfig: SMALL_ENCODER | {
        "width": 64, "heads": 4, "fourier_bands": 8, "rows": 8, "anchors_per_row": 8,
        "predictor_width": 32, "predictor_blocks": 1, "refinement_steps": 2,
        "points_from_sobol": 64,
    },
    ViTConfig: SMALL_TRANSFORMER,
    CNNViTConfig: SMALL_TRANSFORMER | SMALL_ENCODER | {"encoder_width": 64},
}  # fmt: skip
# Of Muon: the best of a few for small models on a CPU, and the only one tried at the paper's size.
SMALL_RATE, RATE, MOMENTUM = 3e-3, 2e-3, 0.9
# Every image is seen at most so often, in no fewer and no more steps than these.
MOST_EPOCHS, FEWEST_STEPS, MOST_STEPS = 300, 500, 5_000
OWN_COST = "ten minutes on a CPU, 5,000 steps of 256 images on a GPU; set --minutes or --steps."
# Warm-up, cosine to 5 %, cosine tail to zero, constant 0.25 %.
FALLING = Stages(
    (
        Stage(25_023, 0.0, 1.0),
        Stage(500_456, 1.0, 0.05, "cosine"),
        Stage(550_456, 0.05, 0.0, "cosine"),
    ),
    0.0025,
    0.01,
    50_000,
    maximum=600_456,
)
# Warm-up, then a drop to 5 % and a cosine to 0.25 %.
DROP = (Stage(25_023, 0.0, 1.0), Stage(500_000, 0.05, 0.0025, "cosine"))
DROPPING = replace(FALLING, stages=DROP)
TRAINING = TrainingSettings(
    objective=CrossEntropy(label_smoothing=0.1),
    learning_rate=1e-3,
    optimizer="adamw",
    weight_decay=0.05,
    clip=1.0,
    batch_size=256,
    queries=None,
    augment=True,
    validation_batch=100,
)


def _imagenet(
    paper_name: str,
    kind: type[ImageClassifierConfig | ViTConfig],
    schedule: Stages,
    parameters: int,
    accuracies: tuple[float, float],
    *,
    accumulate: int = 1,
    predictor_learning_rate: float | None = None,
) -> Recipe:
    errors = tuple(round(1 - accuracy, 6) for accuracy in accuracies)
    return Recipe(
        name=f"imagenet/{short_name(paper_name)}",
        task="imagenet",
        model_name=paper_name,
        model=kind(class_names=THOUSAND),
        data=ImageData(),
        data_folder="imagenet",
        training=replace(
            TRAINING,
            schedule=schedule,
            predictor_learning_rate=predictor_learning_rate,
            accumulate=accumulate,
            seed=20260820,
            # About one epoch: 1,281,167 images are 5,005 batches.
            validate_every=5_000,
            checkpoint_every=2_500,
            log_every=100,
        ),
        evaluation=ClassificationSettings(paper_errors=errors),
        paper_parameters=parameters,
        paper_error=errors[0],
    )


def imagenet_fst() -> Recipe:
    """The paper's ImageNet FST: 1,024 anchors over 196 patches.

    Cost: at most 600,456 steps of 256 images (120 epochs), in 4 parts of 64 so that an 80 GB GPU
    holds them; with several GPUs or more memory set --training.accumulate 1.
    Needs: function-space-transformer[vision], and some 150 GB of images in class folders or tar
    files.
    Paper: 69.530 % top-1 and 89.042 % top-5 on the validation images.
    """
    return _imagenet(
        "FST",
        ImageClassifierConfig,
        FALLING,
        2_959_929,
        (0.69530, 0.89042),
        accumulate=4,
        predictor_learning_rate=1e-5,  # one hundredth of the main rate
    )


def imagenet_vit() -> Recipe:
    """A plain vision transformer on linear patches.

    Cost: at most 600,456 steps of 256 images (120 epochs).
    Needs: function-space-transformer[vision].
    Paper: 67.804 % top-1 and 88.126 % top-5 on the validation images.
    """
    return _imagenet("ViT", ViTConfig, FALLING, 3_095_614, (0.67804, 0.88126))


def imagenet_cnn_vit() -> Recipe:
    """The vision transformer behind FST's patch encoder.

    Cost: at most 600,456 steps of 256 images (120 epochs), in 2 parts of 128.
    Needs: function-space-transformer[vision].
    Paper: 61.052 % top-1 and 83.478 % top-5 on the validation images.
    """
    accuracies = 0.61052, 0.83478
    return _imagenet("CNN-ViT", CNNViTConfig, DROPPING, 3_158_150, accuracies, accumulate=2)


def _own(
    paper_name: str,
    kind: type[ImageClassifierConfig | ViTConfig],
    predictor_rate: float | None = None,
) -> Recipe:
    return Recipe(
        name=f"own/images-{short_name(paper_name)}",
        task=OWN,
        model_name=paper_name,
        model=kind(class_names=CLASSES, image_size=SIZE, patch_size=PATCH),
        data=ImageData(image_size=SIZE, resize=RESIZE, held_out=None),
        data_folder="",
        training=replace(
            TRAINING,
            optimizer="muon",
            learning_rate=RATE,
            momentum=MOMENTUM,
            schedule=WarmupCosine(warmup=500, maximum=MOST_STEPS),
            predictor_learning_rate=predictor_rate,
            validate_every=250,
            checkpoint_every=1_000,
        ),
        evaluation=ClassificationSettings(),
    )


def own_fst() -> Recipe:
    """FST on images of your own, in class folders or tar files."""
    return _own("FST", ImageClassifierConfig, predictor_rate=1e-5)


def own_fst_256() -> Recipe:
    """FST with 256 anchors and 256 evaluation points, for shorter steps, on images of your own."""
    recipe = own_fst()
    fewer: dict[str, Any] = {"rows": 16, "anchors_per_row": 16, "points_from_sobol": 256}
    model: Any = recipe.model
    return replace(
        recipe,
        name=f"{recipe.name}-256",
        model_name="FST, 256 anchors",
        model=replace(model, **fewer),
    )


def own_vit() -> Recipe:
    """A plain vision transformer on images of your own."""
    return _own("ViT", ViTConfig)


def own_cnn_vit() -> Recipe:
    """The vision transformer behind FST's patch encoder, on images of your own."""
    return _own("CNN-ViT", CNNViTConfig)


def choose(recipe: Recipe, path: Path, device: torch.device, size: Size | None = None) -> Choice:
    """Fit a recipe to a folder of images and to a device."""
    assert isinstance(recipe.data, ImageData)
    cpu = device.type == "cpu"
    size = size or ("small" if cpu else "paper")
    fitted = recipe
    if size == "small":
        model: Any = recipe.model
        model = replace(model, **SMALL[type(model)], image_size=SMALL_DATA["image_size"])
        fitted = small(recipe, model=model, data=replace(recipe.data, **SMALL_DATA))
    fitted = fitted.data.fit(fitted, path)
    assert isinstance(fitted.data, ImageData)
    images = fitted.data.count_training(path)
    batch = min(32 if cpu else TRAINING.batch_size, images)
    steps = max(FEWEST_STEPS, min(MOST_STEPS, MOST_EPOCHS * images // batch))
    training = replace(
        fitted.training,
        schedule=WarmupCosine(warmup=steps // 10, maximum=steps),
        batch_size=batch,
        learning_rate=SMALL_RATE if size == "small" else RATE,
        precision="fp32" if cpu else "bf16",
        validate_every=max(1, steps // 20),
    )
    where = "a CPU" if cpu else "a GPU"
    height, width = fitted.data.image_size
    reasons = {
        "model": f"{size} size, {height}×{width} pixels, for {where}; --size paper or small",
        "batch": f"{images:,} training images on {where}; --batch-size",
        "steps": f"at most {MOST_EPOCHS} epochs and {MOST_STEPS:,} steps; --steps or --minutes",
        "regularisation": "augmentation and label smoothing",
    }
    return Choice(replace(fitted, training=training), CPU_MINUTES if cpu else None, reasons)
