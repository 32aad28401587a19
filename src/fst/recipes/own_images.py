"""Your own images: the classes come from the folder or the tar files (see docs/images.md).

The three models share data, schedule and budget, so that their accuracies can be compared.
"""

from fst.baselines import CNNViTConfig, ViTConfig
from fst.data.image_data import CLASSES, ImageData
from fst.evaluation.classification import ClassificationSettings
from fst.recipes.recipe import Recipe
from fst.training.schedules import WarmupCosine
from fst.training.settings import CrossEntropy, TrainingSettings
from fst.vision import ImageClassifierConfig

TASK = "own-images"
SIZE, PATCH = (128, 128), 8


def _recipe(
    model_name: str,
    paper_name: str,
    model: ImageClassifierConfig | ViTConfig,
    predictor_learning_rate: float | None = None,
) -> Recipe:
    return Recipe(
        name=f"own/images-{model_name}",
        task=TASK,
        model_name=paper_name,
        model=model,
        # Resized by the paper's ratio of 256 to 224.
        data=ImageData(image_size=SIZE, resize=146, held_out=None),
        data_folder="",
        training=TrainingSettings(
            objective=CrossEntropy(label_smoothing=0.1),
            schedule=WarmupCosine(warmup=500, maximum=5_000),
            learning_rate=1e-3,
            predictor_learning_rate=predictor_learning_rate,
            optimizer="adamw",
            weight_decay=0.05,
            clip=1.0,
            batch_size=256,
            queries=None,
            augment=True,
            validate_every=250,
            validation_batch=100,
            checkpoint_every=1_000,
        ),
        evaluation=ClassificationSettings(),
    )


def fst() -> Recipe:
    """FST on images of your own, in class folders or tar files.

    Command: fst train own/images-fst --data my-images --out runs/mine
    Cost: 5,000 steps of 256 images by default; set --training.schedule.maximum.
    """
    model = ImageClassifierConfig(class_names=CLASSES, image_size=SIZE, patch_size=PATCH)
    return _recipe("fst", "FST", model, predictor_learning_rate=1e-5)


def vit() -> Recipe:
    """A plain vision transformer on images of your own.

    Command: fst train own/images-vit --data my-images --out runs/mine-vit
    Cost: 5,000 steps of 256 images by default; set --training.schedule.maximum.
    """
    return _recipe("vit", "ViT", ViTConfig(class_names=CLASSES, image_size=SIZE, patch_size=PATCH))


def cnn_vit() -> Recipe:
    """The vision transformer behind FST's patch encoder, on images of your own.

    Command: fst train own/images-cnn-vit --data my-images --out runs/mine-cnn-vit
    Cost: 5,000 steps of 256 images by default; set --training.schedule.maximum.
    """
    model = CNNViTConfig(class_names=CLASSES, image_size=SIZE, patch_size=PATCH)
    return _recipe("cnn-vit", "CNN-ViT", model)
