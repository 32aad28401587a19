"""Image classifiers: the Function-Space Transformer, and ViT and CNN-ViT beside it."""

from fst.classifiers import Classifier
from fst.images.classifier import ImageClassifier, ImageField
from fst.images.config import CNNViTConfig, ImageClassifierConfig, ViTConfig
from fst.images.vit import CNNVisionTransformer, VisionTransformer

ImageConfig = ImageClassifierConfig | ViTConfig | CNNViTConfig

__all__ = [
    "CNNViTConfig",
    "CNNVisionTransformer",
    "ImageClassifier",
    "ImageClassifierConfig",
    "ImageConfig",
    "ImageField",
    "ViTConfig",
    "VisionTransformer",
    "build",
]


def build(config: ImageConfig) -> Classifier:
    """The untrained model a configuration describes."""
    match config:
        case ImageClassifierConfig():
            return ImageClassifier(config)
        case CNNViTConfig():  # before the kind it derives from
            return CNNVisionTransformer(config)
        case ViTConfig():
            return VisionTransformer(config)
    raise TypeError(f"config must describe an image model, got {type(config).__name__}")
