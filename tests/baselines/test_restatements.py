"""The baselines' counts, and their outputs against independent restatements."""

import numpy as np
import pytest
import torch

from fst import Observations, parameter_count
from fst.base import build_model as build
from fst.baselines import (
    FNO,
    DeepONetConfig,
    FNOConfig,
    GridTransolverConfig,
    PerceiverIOConfig,
    TransolverConfig,
)
from restatement import Weights, attention, fourier, layer_norm, linear, mlp, softmax
from small_baselines import (
    GRID,
    SMALL,
    SMALL_ON_GRID,
    grid_queries,
    heat_solutions,
    observe_boundary,
    observe_everywhere,
    stirred_baseline,
)

PAPER = {
    "FNO, Burgers": (FNOConfig(), 2_978_161),
    "FNO, all viscosities": (FNOConfig(condition_channels=1, log_condition=True), 2_978_257),
    "FNO, Darcy": (
        FNOConfig(grid=(128, 128), modes=(16, 16), width=50, mask_channel=False),
        2_911_351,
    ),
    "Transolver, Burgers": (TransolverConfig(), 2_956_424),
    "Transolver, Darcy": (GridTransolverConfig(), 2_955_768),
    "DeepONet, Burgers": (DeepONetConfig(), 2_998_189),
    "DeepONet, Darcy": (
        DeepONetConfig(
            observations=128 * 128, branch=(160, 256, 256, 256), trunk=(256, 256, 256, 256)
        ),
        2_992_545,
    ),
    "Perceiver IO": (PerceiverIOConfig(), 2_936_881),
    "Perceiver IO, all viscosities": (
        PerceiverIOConfig(condition_channels=1, log_condition=True),
        2_995_201,
    ),
}


@pytest.mark.parametrize("name", PAPER)
def test_parameter_counts_equal_the_specification(name):
    config, count = PAPER[name]
    if name.startswith("FNO"):
        pytest.importorskip("neuralop")
    model = build(config)
    assert type(model).config_type is type(config)
    assert model.config == config
    assert parameter_count(model) == count


def weights_of(model: torch.nn.Module) -> Weights:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def standardized(w: Weights, values: np.ndarray) -> np.ndarray:
    return (values - w["standardize_values.mean"]) / w["standardize_values.deviation"]


def restored(w: Weights, values: np.ndarray) -> np.ndarray:
    return values * w["standardize_outputs.deviation"] + w["standardize_outputs.mean"]


def deeponet(w: Weights, observations: Observations, queries: np.ndarray) -> np.ndarray:
    answers = []
    for values, points in zip(observations.values.numpy(), queries, strict=True):
        v = standardized(w, values)[:, 0]
        hidden = np.maximum(linear(w, "branch.0", v), 0)
        coefficients = linear(w, "branch.2", hidden)
        sample = []
        for point in points:
            hidden = np.maximum(linear(w, "trunk.0", point), 0)
            basis = np.maximum(linear(w, "trunk.2", hidden), 0)
            sample.append([sum(coefficients * basis) + w["bias"]])
        answers.append(sample)
    return restored(w, np.array(answers))


def physics_attention(w: Weights, name: str, heads: int, x: np.ndarray) -> np.ndarray:
    """Head by head and slice by slice."""
    assigned, values = linear(w, f"{name}.assign", x), linear(w, f"{name}.value", x)
    size = x.shape[-1] // heads
    mixed = np.empty_like(x)
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        scores = linear(w, f"{name}.assign_slice", assigned[:, part])
        share = softmax(scores / w[f"{name}.temperature"][h, 0, 0])
        tokens = np.stack([s @ values[:, part] / (s.sum() + 1e-5) for s in share.T])
        q, k, v = (linear(w, f"{name}.slice_{kind}", tokens) for kind in ("query", "key", "value"))
        mixed[:, part] = share @ (softmax(q @ k.T / np.sqrt(size)) @ v)
    return linear(w, f"{name}.output", mixed)


def point_network(w: Weights, config: TransolverConfig, points: np.ndarray) -> np.ndarray:
    x = mlp(w, "network.embed", points) + w["network.placeholder"]
    for block in range(config.layers):
        name = f"network.blocks.{block}"
        normed = layer_norm(w, f"{name}.norm", x)
        x = x + physics_attention(w, f"{name}.attention", config.heads, normed)
        x = x + mlp(w, f"{name}.feed_forward", layer_norm(w, f"{name}.feed_norm", x))
    return linear(w, "network.output", layer_norm(w, "network.norm", x))


def perceiver_block(
    w: Weights, name: str, heads: int, x: np.ndarray, read: np.ndarray | None
) -> np.ndarray:
    normed = layer_norm(w, f"{name}.norm", x)
    memory = normed if read is None else layer_norm(w, f"{name}.memory_norm", read)
    x = x + attention(w, f"{name}.attention", heads, normed, memory)
    return x + mlp(w, f"{name}.feed_forward", layer_norm(w, f"{name}.feed_norm", x))


def perceiver_io(
    w: Weights, config: PerceiverIOConfig, observations: Observations, queries: np.ndarray
) -> np.ndarray:
    answers = []
    for sample, points in enumerate(queries):
        embed = lambda x: mlp(w, "embed_position", fourier(x, config.fourier_bands))  # noqa: E731
        values = standardized(w, observations.values[sample].numpy())
        tokens = embed(observations.positions[sample].numpy()) + linear(w, "embed_value", values)
        log_condition = np.log(observations.condition[sample].numpy())
        mean, deviation = (w[f"condition.standardize.{kind}"] for kind in ("mean", "deviation"))
        latents = w["latents"] + mlp(w, "condition.embed", (log_condition - mean) / deviation)
        latents = perceiver_block(w, "read", config.heads, latents, tokens)
        for layer in range(config.layers):
            latents = perceiver_block(w, f"mix.{layer}", config.heads, latents, None)
        answered = perceiver_block(w, "answer", config.heads, embed(points), latents)
        answers.append(linear(w, "output", layer_norm(w, "norm", answered)))
    return restored(w, np.array(answers))


@pytest.fixture
def problem():
    solutions = heat_solutions(2, GRID).double()
    return observe_boundary(solutions), torch.rand(2, 21, 2, dtype=torch.float64)


def assert_equal_to_ten_digits(prediction: torch.Tensor, restatement: np.ndarray) -> None:
    np.testing.assert_allclose(prediction.detach().numpy(), restatement, rtol=1e-10, atol=1e-10)


def test_deeponet_equals_its_restatement(problem):
    observations, queries = problem
    model = stirred_baseline(SMALL["deeponet"]).double()
    expected = deeponet(weights_of(model), observations, queries.numpy())
    assert_equal_to_ten_digits(model(observations)(queries), expected)


def test_transolver_equals_its_restatement(problem):
    observations, queries = problem
    config = SMALL["transolver"]
    model = stirred_baseline(config).double()
    w = weights_of(model)
    expected = []
    for positions, values, points in zip(
        observations.positions.numpy(), observations.values.numpy(), queries.numpy(), strict=True
    ):
        seen = [[*x, v, 1.0] for x, (v,) in zip(positions, standardized(w, values), strict=True)]
        asked = [[*q, 0.0, 0.0] for q in points]
        expected.append(point_network(w, config, np.array(seen + asked))[len(seen) :])
    assert_equal_to_ten_digits(model(observations)(queries), restored(w, np.array(expected)))


def test_transolver_on_a_grid_equals_its_restatement():
    config = SMALL_ON_GRID["grid-transolver"]
    model = stirred_baseline(config).double()
    w = weights_of(model)
    fields = torch.randn(2, *GRID, dtype=torch.float64)
    observations = observe_everywhere(fields)
    points = np.concatenate(
        [observations.positions.numpy(), standardized(w, observations.values.numpy())], axis=-1
    )
    expected = np.stack([point_network(w, config, sample) for sample in points])
    prediction = model(observations)(observations.positions)
    assert_equal_to_ten_digits(prediction, restored(w, expected))


def test_perceiver_io_equals_its_restatement(problem):
    observations, queries = problem
    condition = torch.tensor([[0.01], [2.0]], dtype=torch.float64)
    observations = Observations(observations.positions, observations.values, condition)
    config = PerceiverIOConfig(
        width=16, heads=2, latents=8, layers=2, fourier_bands=4,
        condition_channels=1, log_condition=True,
    )  # fmt: skip
    model = stirred_baseline(config).double()
    weights = weights_of(model)
    expected = perceiver_io(weights, config, observations, queries.numpy())
    assert_equal_to_ten_digits(model(observations)(queries), expected)


@pytest.mark.parametrize("condition", [None, torch.tensor([[0.01], [2.0]])])
def test_fno_is_the_packages_own_on_the_papers_channels(condition):
    """The package's default model, its own grid embedding included, on channels set by loops."""
    neuralop = pytest.importorskip("neuralop")
    extra = {} if condition is None else {"condition_channels": 1, "log_condition": True}
    config = FNOConfig(grid=GRID, width=8, layers=2, modes=(4, 6), **extra)
    model = stirred_baseline(config)
    solutions = heat_solutions(2, GRID)
    channels = torch.zeros(2, 3 if extra else 2, *GRID)
    for time in range(GRID[0]):
        for cell in range(GRID[1]):
            if time == 0 or cell in (0, GRID[1] - 1):
                channels[:, 0, time, cell] = (solutions[:, time, cell] - 0.3) / 1.7
                channels[:, 1, time, cell] = 1
    if condition is not None:
        channels[:, 2] = ((condition.log() + 2.0) / 1.5)[:, :, None]
    official = neuralop.models.FNO(
        n_modes=(4, 6), in_channels=channels.shape[1], out_channels=1, hidden_channels=8, n_layers=2
    )
    official.load_state_dict(model.network.state_dict())
    expected = official(channels)[:, 0].flatten(1)[..., None] * 2.5 - 0.4
    prediction = model(observe_boundary(solutions, condition))(grid_queries(2, GRID))
    torch.testing.assert_close(prediction, expected, rtol=1e-5, atol=1e-5)
    assert isinstance(model, FNO)
