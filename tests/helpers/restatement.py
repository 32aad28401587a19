"""The paper's equations once more, in plain NumPy and float64, one sample at a time.

Written from the paper and not from the package: loops instead of broadcasting, the RBF weights of
every evaluation point computed anew, concatenations instead of split weights, no reuse across
refinement steps. Only the names of the weights are taken from the model.
"""

from math import erf

import numpy as np

Weights = dict[str, np.ndarray]


def linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def layer_norm(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def mlp(w: Weights, name: str, x: np.ndarray, first: str = "0", second: str = "2") -> np.ndarray:
    return linear(w, f"{name}.{second}", gelu(linear(w, f"{name}.{first}", x)))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(w: Weights, name: str, heads: int, x: np.ndarray, memory: np.ndarray) -> np.ndarray:
    q, k, v = (
        linear(w, f"{name}.{p}", t) for p, t in zip(("query", "key", "value"), (x, memory, memory))
    )
    size = q.shape[-1] // heads
    mixed = []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        mixed.append(softmax(q[:, part] @ k[:, part].T / np.sqrt(size)) @ v[:, part])
    return linear(w, f"{name}.output", np.concatenate(mixed, -1))


def fourier(x: np.ndarray, bands: int) -> np.ndarray:
    rows = []
    for point in x:
        phases = [coordinate * np.pi * k for coordinate in point for k in range(1, bands + 1)]
        rows.append([*point, *np.sin(phases), *np.cos(phases)])
    return np.array(rows)


def rbf_weights(points: np.ndarray, anchors: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Equation 1, with Λ_j as a matrix."""
    logits = np.empty((len(points), len(anchors)))
    for i, x in enumerate(points):
        for j, (a, scale) in enumerate(zip(anchors, scales)):
            logits[i, j] = -0.5 * (x - a) @ np.linalg.inv(np.diag(scale**2)) @ (x - a)
    return softmax(logits)


class Restatement:
    """One sample through the Function-Space Transformer."""

    def __init__(self, config, weights: Weights) -> None:
        self.config, self.w = config, weights

    def embed(self, x: np.ndarray) -> np.ndarray:
        return fourier(x, self.config.fourier_bands)

    def condition(self, raw: np.ndarray | None) -> np.ndarray | None:
        if raw is None:
            return None
        mean, deviation = (
            self.w["condition.standardize.mean"],
            self.w["condition.standardize.deviation"],
        )
        raw = np.log(raw) if self.config.log_condition else raw
        return mlp(self.w, "condition.embed", (raw - mean) / deviation)

    def beside(self, x: np.ndarray, c: np.ndarray | None) -> np.ndarray:
        return x if c is None else np.concatenate([x, np.tile(c, (len(x), 1))], -1)

    def anchors(self, positions, values, c):
        """Equations 8, 9 and 10: positions, refinement scales and decoding scales."""
        config, w, name = self.config, self.w, "predict_anchors"
        inputs = self.beside(np.concatenate([self.embed(positions), values], -1), c)
        observed = mlp(w, f"{name}.tokens.observe", inputs)
        tokens = w[f"{name}.tokens.tokens"]
        for block in range(config.predictor_blocks):
            b = f"{name}.tokens.blocks.{block}"
            normed = layer_norm(w, f"{b}.self_norm", tokens)
            tokens = tokens + attention(
                w, f"{b}.self_attention", config.predictor_heads, normed, normed
            )
            normed = layer_norm(w, f"{b}.cross_norm", tokens)
            tokens = tokens + attention(
                w, f"{b}.cross_attention", config.predictor_heads, normed, observed
            )
            tokens = tokens + mlp(w, f"{b}.feed_forward", layer_norm(w, f"{b}.feed_norm", tokens))
        tokens = layer_norm(w, f"{name}.tokens.norm", tokens)

        scores = linear(w, f"{name}.coordinates.head", tokens)  # j p
        h = linear(w, f"{name}.scales.head", tokens)  # j p*s
        axes, gaps, rows = len(config.low), len(tokens), config.row_count
        h = h.reshape(gaps, rows, axes)
        fixed = [np.linspace(0, 1, n) for n in config.rows]
        coordinates, adjustments = [], []
        for row in range(rows):
            gap = 0.5 * (scores[:, row] + np.sqrt(scores[:, row] ** 2 + 4)) + 0.10
            gap = gap / gap.sum()
            along = [0.0]
            for g in gap:
                along.append(along[-1] + g)
            others = [f[i] for f, i in zip(fixed, np.unravel_index(row, config.rows or (1,)))]
            for j in range(gaps + 1):
                coordinate = list(others)
                coordinate.insert(config.adaptive_axis, along[j])
                coordinates.append(coordinate)
                near = [k for k in (j - 1, j) if 0 <= k < gaps]
                adjustments.append(np.log(4) * np.tanh(np.mean([h[k, row] for k in near], axis=0)))
        bases = (w[f"{name}.scales.{kind}_base"] for kind in ("refinement", "decoding"))
        scales = [np.clip(np.exp(b[:, None] + np.array(adjustments)), 0.015, 0.30) for b in bases]
        return np.array(coordinates), *scales

    def point_mlp(self, name, blended, coordinates, c):
        x = self.beside(np.concatenate([blended, self.embed(coordinates)], -1), c)
        return mlp(self.w, name, x, "first", "second")

    def layer(self, z, tokens, coordinates, scales, c, points):
        """Equations 2 to 5 for one refinement step at the evaluation points given."""
        w, heads = self.w, self.config.heads
        read, update = "layer.read", "layer.update"
        observed = layer_norm(w, f"{read}.norm_h", tokens)
        u = z + attention(
            w, f"{read}.attention", heads, layer_norm(w, f"{read}.norm_a", z), observed
        )
        z = u + mlp(w, f"{read}.feed_forward", layer_norm(w, f"{read}.norm_2", u))

        e = self.point_mlp(
            f"{update}.evaluate", rbf_weights(points, coordinates, scales) @ z, points, c
        )
        normed = layer_norm(w, f"{update}.norm_e", e)
        g = e + attention(w, f"{update}.mix", heads, normed, normed)
        g = g + mlp(w, f"{update}.mix_feed", layer_norm(w, f"{update}.norm_g", g))

        q = self.point_mlp(
            f"{update}.evaluate", rbf_weights(coordinates, coordinates, scales) @ z, coordinates, c
        )
        memory = layer_norm(w, f"{update}.norm_e", g)
        v = z + attention(w, f"{update}.write", heads, layer_norm(w, f"{update}.norm_q", q), memory)
        return v + mlp(w, f"{update}.write_feed", layer_norm(w, f"{update}.norm_v", v))

    def decode(self, z, coordinates, scales, queries, c):
        """Equation 6 and the decoder of the appendix."""
        w = self.w
        x = self.point_mlp(
            "decoder.evaluate", rbf_weights(queries, coordinates, scales) @ z, queries, c
        )
        x = x + mlp(
            w, "decoder.feed_forward.feed_forward", layer_norm(w, "decoder.feed_forward.norm", x)
        )
        return mlp(w, "decoder.output", layer_norm(w, "decoder.norm", x))

    def __call__(self, positions, values, raw_condition, draws, queries):
        """Everything, in the unit box: anchors, features after each step, and values at queries."""
        w = self.w
        values = (values - w["standardize_values.mean"]) / w["standardize_values.deviation"]
        c = self.condition(raw_condition)
        x = mlp(w, "encode_values", np.concatenate([self.embed(positions), values], -1))
        tokens = x + mlp(w, "encode_feed.feed_forward", layer_norm(w, "encode_feed.norm", x))
        coordinates, refinement, decoding = self.anchors(positions, values, c)
        z = linear(w, "initial_position", self.embed(coordinates))
        if c is not None:
            z = z + linear(w, "initial_condition", c)
        steps = []
        for indices, uniform in zip(*draws):
            points = np.concatenate([coordinates[indices], uniform])
            z = self.layer(z, tokens, coordinates, refinement, c, points)
            steps.append(z)
        answer = self.decode(z, coordinates, decoding, queries, c)
        answer = answer * w["standardize_outputs.deviation"] + w["standardize_outputs.mean"]
        return (coordinates, refinement, decoding), steps, answer
