"""ImageNet-1K from scratch at 224×224 (paper, Section 4.5, Appendix D).

The classes are named by the data when training starts; until then they are numbered. The weights
are selected by the error on the validation images, which are also those that the paper reports on.
"""

from fst.baselines import CNNViTConfig, ViTConfig
from fst.data import ImageData
from fst.evaluation.classification import ClassificationSettings
from fst.recipes import paper
from fst.recipes.recipe import Recipe
from fst.training.schedules import Stages, imagenet, imagenet_cnn_vit
from fst.training.settings import CrossEntropy, TrainingSettings
from fst.vision import ImageClassifierConfig

CLASSES = tuple(f"class {number:03d}" for number in range(1000))
SEED = 20260820


def _recipe(
    model_name: str,
    paper_name: str,
    model: ImageClassifierConfig | ViTConfig,
    schedule: Stages,
    parameters: int,
    *,
    accumulate: int = 1,
    predictor_learning_rate: float | None = None,
) -> Recipe:
    errors = paper.imagenet_errors(paper_name)
    return Recipe(
        name=f"imagenet/{model_name}",
        task="imagenet",
        model_name=paper_name,
        model=model,
        data=ImageData(),
        data_folder="imagenet",
        training=TrainingSettings(
            objective=CrossEntropy(label_smoothing=0.1),
            schedule=schedule,
            learning_rate=1e-3,
            predictor_learning_rate=predictor_learning_rate,
            optimizer="adamw",
            weight_decay=0.05,
            clip=1.0,
            batch_size=256,
            accumulate=accumulate,
            queries=None,
            precision="bf16",
            seed=SEED,
            augment=True,
            # About one epoch: 1,281,167 images are 5,005 batches.
            validate_every=5_000,
            validation_batch=100,
            checkpoint_every=2_500,
            log_every=100,
        ),
        evaluation=ClassificationSettings(paper_errors=errors),
        paper_parameters=parameters,
        paper_error=errors[0],
    )


def fst() -> Recipe:
    """The paper's ImageNet FST: 1,024 anchors over 196 patches.

    Command: fst train imagenet/fst --data IMAGENET --out runs/imagenet
    Cost: at most 600,456 steps of 256 images (120 epochs), in 4 parts of 64 so that an 80 GB GPU
    holds them; with several GPUs or more memory set --training.accumulate 1.
    Needs: function-space-transformer[vision], and some 150 GB of images in class folders or tar
    files.
    Paper: 69.530 % top-1 and 89.042 % top-5 on the validation images.
    """
    model = ImageClassifierConfig(class_names=CLASSES)
    return _recipe(
        *("fst", "FST", model, imagenet(), 2_959_929),
        accumulate=4,
        predictor_learning_rate=1e-5,  # one hundredth of the main rate
    )


def vit() -> Recipe:
    """A plain vision transformer on linear patches.

    Command: fst train imagenet/vit --data IMAGENET --out runs/imagenet-vit
    Cost: at most 600,456 steps of 256 images (120 epochs).
    Needs: function-space-transformer[vision].
    Paper: 67.804 % top-1 and 88.126 % top-5 on the validation images.
    """
    return _recipe("vit", "ViT", ViTConfig(class_names=CLASSES), imagenet(), 3_095_614)


def cnn_vit() -> Recipe:
    """The vision transformer behind FST's patch encoder.

    Command: fst train imagenet/cnn-vit --data IMAGENET --out runs/imagenet-cnn-vit
    Cost: at most 600,456 steps of 256 images (120 epochs), in 2 parts of 128.
    Needs: function-space-transformer[vision].
    Paper: 61.052 % top-1 and 83.478 % top-5 on the validation images.
    """
    model = CNNViTConfig(class_names=CLASSES)
    schedule = imagenet_cnn_vit()
    return _recipe("cnn-vit", "CNN-ViT", model, schedule, 3_158_150, accumulate=2)
