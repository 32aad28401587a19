"""Small image models, and FST's classifier once more in plain NumPy and float64, image by image.

Written from the paper and not from the package: loops over patches and pixels, the bias of the
read attention added in full with its size term, the pointwise projection before the mean. Only
the names of the weights are taken from the model.
"""

import numpy as np

from fst.baselines import CNNViTConfig, ViTConfig
from fst.vision import ImageClassifierConfig
from restatement import (
    Weights,
    attention,
    fourier,
    gelu,
    layer_norm,
    linear,
    mlp,
    rbf_weights,
    softmax,
)

NAMES = ("ant", "bee", "cat", "dog")
SMALL = {
    "class_names": NAMES,
    "image_size": (8, 12),
    "patch_size": 4,
    "channels": 5,
    "width": 12,
    "heads": 2,
    "fourier_bands": 3,
    "rows": 4,
    "anchors_per_row": 5,
    "predictor_width": 8,
    "predictor_heads": 2,
    "refinement_steps": 3,
    "points_from_sobol": 7,
}
SMALL_VIT = {
    "class_names": NAMES,
    "image_size": (8, 12),
    "patch_size": 4,
    "width": 12,
    "layers": 2,
    "heads": 3,
    "hidden": 21,
}


def small_config(**changes: object) -> ImageClassifierConfig:
    return ImageClassifierConfig(**{**SMALL, **changes})


def small_vit(**changes: object) -> ViTConfig:
    return ViTConfig(**{**SMALL_VIT, **changes})


def small_cnn_vit(**changes: object) -> CNNViTConfig:
    return CNNViTConfig(**{**SMALL_VIT, "channels": 5, "encoder_width": 7, **changes})


def convolve(w: Weights, name: str, maps: np.ndarray) -> np.ndarray:
    """A 3 by 3 convolution of (channels, rows, columns) with zeros beyond the border."""
    weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]
    _, rows, columns = maps.shape
    out = np.zeros((len(weight), rows, columns))
    for y in range(rows):
        for x in range(columns):
            out[:, y, x] = bias
            for dy in (-1, 0, 1):
                for dx in (-1, 0, 1):
                    if 0 <= y + dy < rows and 0 <= x + dx < columns:
                        out[:, y, x] += weight[:, :, dy + 1, dx + 1] @ maps[:, y + dy, x + dx]
    return out


def encode_patch(w: Weights, name: str, patch: np.ndarray) -> np.ndarray:
    """Stages 1 to 4 of the patch encoder: (3, p, p) to one feature."""
    x = gelu(convolve(w, f"{name}.stem", patch))
    for block in range(2):
        b = f"{name}.blocks.{block}"
        x = gelu(x + convolve(w, f"{b}.second", gelu(convolve(w, f"{b}.first", x))))
    pixels = x.reshape(len(x), -1).T
    return np.mean([linear(w, f"{name}.project", pixel) for pixel in pixels], axis=0)


class ImageRestatement:
    """One image through the classifier."""

    def __init__(self, config: ImageClassifierConfig, weights: Weights) -> None:
        self.config, self.w = config, weights

    def embed(self, x: np.ndarray) -> np.ndarray:
        return fourier(x, self.config.fourier_bands)

    def patches(self, image: np.ndarray) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """The patches, and the two corners of each in the unit box."""
        w, p = self.w, self.config.patch_size
        mean, deviation = w["standardize.mean"], w["standardize.deviation"]
        image = (image - mean) / deviation
        _, height, width = image.shape
        parts, low, high = [], [], []
        for y in range(0, height, p):
            for x in range(0, width, p):
                parts.append(image[:, y : y + p, x : x + p])
                low.append((y / height, x / width))
                high.append(((y + p) / height, (x + p) / width))
        return parts, np.array(low), np.array(high)

    def tokens(self, parts: list[np.ndarray], low: np.ndarray, high: np.ndarray) -> np.ndarray:
        w, name = self.w, "encode_patches"
        x = np.array([encode_patch(w, f"{name}.encode", patch) for patch in parts])
        x = x + mlp(w, f"{name}.place", np.concatenate([self.embed(low), self.embed(high)], -1))
        normed = layer_norm(w, f"{name}.feed_forward.norm", x)
        return x + mlp(w, f"{name}.feed_forward.feed_forward", normed)

    def anchors(self, tokens: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions (vertical, horizontal) and scalar length scales, repeated for both axes."""
        config, w, name = self.config, self.w, "predict_anchors"
        inputs = np.concatenate([tokens, self.embed(centres)], -1)
        observed = mlp(w, f"{name}.tokens.observe", inputs)
        x, heads = w[f"{name}.tokens.tokens"], config.predictor_heads
        for block in range(config.predictor_blocks):
            b = f"{name}.tokens.blocks.{block}"
            normed = layer_norm(w, f"{b}.self_norm", x)
            x = x + attention(w, f"{b}.self_attention", heads, normed, normed)
            normed = layer_norm(w, f"{b}.cross_norm", x)
            x = x + attention(w, f"{b}.cross_attention", heads, normed, observed)
            x = x + mlp(w, f"{b}.feed_forward", layer_norm(w, f"{b}.feed_norm", x))
        scores = linear(w, f"{name}.coordinates.head", layer_norm(w, f"{name}.tokens.norm", x))
        coordinates = []
        for row in range(config.rows):
            gaps = 0.5 * (scores[:, row] + np.sqrt(scores[:, row] ** 2 + 4)) + 0.10
            along = np.concatenate([[0.0], np.cumsum(gaps / gaps.sum())])
            coordinates += [(row / (config.rows - 1), x) for x in along]
        scales = np.clip(np.exp(w[f"{name}.scales.base"]), 0.015, 0.30)
        return np.array(coordinates), np.stack([scales, scales], -1)

    def read(self, z, tokens, coordinates, centres, size):
        """Equation 2 with the bias of the images."""
        w, name, heads = self.w, "layer.read", self.config.heads
        sigma = np.clip(np.exp(w[f"{name}.attention.bias.log_sigma"]), 0.03, 0.60)
        bias = np.empty((len(coordinates), len(centres)))
        for j, a in enumerate(coordinates):
            for i, c in enumerate(centres):
                bias[j, i] = -(np.sum((a - c) ** 2) + np.sum(size**2) / 12) / (2 * sigma**2)
        observed = layer_norm(w, f"{name}.norm_h", tokens)
        q = linear(w, f"{name}.attention.query", layer_norm(w, f"{name}.norm_a", z))
        k, v = (linear(w, f"{name}.attention.{kind}", observed) for kind in ("key", "value"))
        width = q.shape[-1] // heads
        mixed = []
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            mixed.append(softmax(q[:, part] @ k[:, part].T / np.sqrt(width) + bias) @ v[:, part])
        u = z + linear(w, f"{name}.attention.output", np.concatenate(mixed, -1))
        return u + mlp(w, f"{name}.feed_forward", layer_norm(w, f"{name}.norm_2", u))

    def update(self, z, coordinates, scales, points):
        """Equations 3 to 5."""
        w, name, heads = self.w, "layer.update", self.config.heads

        def evaluated(at):
            blended = np.concatenate([rbf_weights(at, coordinates, scales) @ z, self.embed(at)], -1)
            return mlp(w, f"{name}.evaluate", blended, "first", "second")

        e = evaluated(points)
        normed = layer_norm(w, f"{name}.norm_e", e)
        g = e + attention(w, f"{name}.mix", heads, normed, normed)
        g = g + mlp(w, f"{name}.mix_feed", layer_norm(w, f"{name}.norm_g", g))
        queries = layer_norm(w, f"{name}.norm_q", evaluated(coordinates))
        v = z + attention(w, f"{name}.write", heads, queries, layer_norm(w, f"{name}.norm_e", g))
        return v + mlp(w, f"{name}.write_feed", layer_norm(w, f"{name}.norm_v", v))

    def __call__(self, image: np.ndarray, points: np.ndarray):
        """Tokens, anchors with scales, features after each step, and logits."""
        w = self.w
        parts, low, high = self.patches(image)
        centres, size = (low + high) / 2, (high - low)[0]
        tokens = self.tokens(parts, low, high)
        coordinates, scales = self.anchors(tokens, centres)
        z, steps = linear(w, "initial_position", self.embed(coordinates)), []
        for _ in range(self.config.refinement_steps):
            z = self.update(
                self.read(z, tokens, coordinates, centres, size), coordinates, scales, points
            )
            steps.append(z)
        pooled = layer_norm(w, "head.norm", z).mean(0)
        return tokens, (coordinates, scales), steps, linear(w, "head.output", pooled)
