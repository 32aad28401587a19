"""The image models: counts, independent restatements, properties, and learning."""

import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fst.base import Model, parameter_count
from fst.base import build_model as build
from fst.baselines import CNNViTConfig, VisionTransformer, ViTConfig
from fst.classifiers import Classifier
from fst.evaluation_points import PointDraws
from fst.pretrained import PretrainedError
from fst.vision import ImageClassifier, ImageClassifierConfig
from images_restatement import (
    ImageRestatement,
    encode_patch,
    small_cnn_vit,
    small_config,
    small_vit,
)
from small import stirred

THOUSAND = tuple(f"class {number}" for number in range(1000))
SMALL = {"fst": small_config, "vit": small_vit, "cnn-vit": small_cnn_vit}

# SPEC §1, column ImageNet.
COUNTS = {
    "patch CNN": (["encode_patches.encode"], 162_504),
    "position MLP": (["encode_patches.place"], 184_600),
    "encoder residual FFN": (["encode_patches.feed_forward"], 321_400),
    "C_a": (["initial_position"], 26_000),
    "3 attentions": (
        [f"layer.read.attention.{part}" for part in ("query", "key", "value", "output")]
        + ["layer.update.mix", "layer.update.write"],
        482_400,
    ),
    "3 FFNs": (
        ["layer.read.feed_forward", "layer.update.mix_feed", "layer.update.write_feed"],
        963_000,
    ),
    "7 LNs": (
        [f"layer.read.norm_{n}" for n in "ah2"] + [f"layer.update.norm_{n}" for n in "egqv"],
        2_800,
    ),
    "F": (["layer.update.evaluate"], 212_600),
    "predictor: observation MLP": (["predict_anchors.tokens.observe"], 45_344),
    "predictor: decoder": (
        ["predict_anchors.tokens.blocks", "predict_anchors.tokens.norm"],
        350_272,
    ),
    "predictor: head": (["predict_anchors.coordinates.head"], 3_360),
    "scales": (["predict_anchors.scales", "layer.read.attention.bias"], 1_025),
    "classifier": (["head"], 201_400),
}


def small(name: str, **changes: object) -> Classifier:
    """A small model in float64, off its initial values."""
    return stirred(build(SMALL[name](**changes)).double())


def some_images(count: int = 2, size: tuple[int, int] = (8, 12)) -> Tensor:
    return torch.rand(count, 3, *size, dtype=torch.float64)


def weights_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def paper_model() -> Classifier:
    return build(ImageClassifierConfig(THOUSAND))


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_equal_the_specification(name, paper_model):
    modules, count = COUNTS[name]
    assert sum(parameter_count(paper_model.get_submodule(module)) for module in modules) == count


def test_the_counts_are_complete(paper_model):
    assert paper_model.get_parameter("predict_anchors.tokens.tokens").numel() == 3_224
    assert sum(count for _, count in COUNTS.values()) + 3_224 == 2_959_929
    assert parameter_count(paper_model) == 2_959_929


@pytest.mark.parametrize(
    ("config", "count"),
    [(ViTConfig(THOUSAND), 3_095_614), (CNNViTConfig(THOUSAND), 3_158_150)],
)
def test_baseline_counts_equal_the_paper(config, count):
    model = build(config)
    assert model.config_type is type(config)
    assert parameter_count(model) == count


def test_the_paper_settings(paper_model):
    """512 fixed evaluation points, 32 by 32 anchors, scales and σ where the paper starts them."""
    assert paper_model.points.shape == (512, 2)
    assert paper_model.points.min() >= 0
    assert paper_model.points.max() <= 1
    # Sobol points are balanced: every cell of a 16 by 32 grid holds exactly one of 2⁹.
    cells = (paper_model.points * torch.tensor([16, 32])).long()
    assert len(set(map(tuple, cells.tolist()))) == 512
    assert paper_model.config.grid.count == 196
    scales = paper_model.predict_anchors.scales.base
    torch.testing.assert_close(scales.exp(), torch.full((1024,), 0.03))
    sizes = {
        name: sum(p.numel() for p in group) for name, group in paper_model.param_groups().items()
    }
    assert sizes["predictor"] == 45_344 + 3_224 + 350_272 + 3_360
    assert sum(sizes.values()) == 2_959_929


@pytest.mark.parametrize(
    "changes", [{}, {"image_size": (12, 8), "heads": 3}, {"image_size": (8, 8), "rows": 3}]
)
def test_agrees_with_an_independent_restatement(changes):
    model = small("fst", **changes)
    with torch.no_grad():
        model.predict_anchors.scales.base.sub_(0.5 * torch.rand(model.config.anchors))
    images = some_images(2, model.image_size)
    field = model.represent(images, record=True)
    tokens, logits = model.encode(images), model(images)
    restated = ImageRestatement(model.config, weights_of(model))
    for b, image in enumerate(images.numpy()):
        expected_tokens, anchors, steps, expected = restated(image, model.points.numpy())
        pairs = [
            (tokens, expected_tokens),
            (field.anchors.positions, anchors[0]),
            (field.anchors.refinement_length_scales, anchors[1]),
            *zip(field.steps, steps, strict=True),
            (logits, expected),
        ]
        for found, wanted in pairs:
            np.testing.assert_allclose(found[b].detach().numpy(), wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(field.steps[-1], field.features)


def encoder_layer(model: Classifier, block: nn.Module) -> nn.TransformerEncoderLayer:
    """PyTorch's own pre-norm block with the same weights."""
    config = model.config
    layer = nn.TransformerEncoderLayer(
        config.width,
        config.heads,
        config.hidden,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
        dtype=torch.float64,
    )
    attention, feed = block.attention, block.feed_forward
    inputs = [attention.query, attention.key, attention.value]
    layer.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([x.weight for x in inputs]),
            "self_attn.in_proj_bias": torch.cat([x.bias for x in inputs]),
            "self_attn.out_proj.weight": attention.output.weight,
            "self_attn.out_proj.bias": attention.output.bias,
            "linear1.weight": feed.first.weight,
            "linear1.bias": feed.first.bias,
            "linear2.weight": feed.second.weight,
            "linear2.bias": feed.second.bias,
            "norm1.weight": block.norm.weight,
            "norm1.bias": block.norm.bias,
            "norm2.weight": block.feed_norm.weight,
            "norm2.bias": block.feed_norm.bias,
        }
    )
    return layer


@pytest.mark.parametrize("name", ["vit", "cnn-vit"])
def test_baselines_agree_with_an_independent_restatement(name):
    model = small(name)
    images, w = some_images(), weights_of(model)
    image_rows = []
    for image in images.numpy():
        image = (image - w["standardize.mean"]) / w["standardize.deviation"]
        parts = [image[:, y : y + 4, x : x + 4] for y in (0, 4) for x in (0, 4, 8)]
        if name == "vit":
            colours = np.stack([part.transpose(1, 2, 0).ravel() for part in parts])
        else:
            colours = np.stack([encode_patch(w, "embed.0", part) for part in parts])
        embedded = colours @ w["embed.1.weight"].T + w["embed.1.bias"]
        image_rows.append(np.concatenate([w["class_token"], embedded]) + w["positions"])
    tokens = torch.from_numpy(np.stack(image_rows))
    for block in model.blocks:
        tokens = encoder_layer(model, block)(tokens)
    expected = model.output(nn.functional.layer_norm(tokens, (12,), *model.norm.parameters()))[:, 0]
    torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", SMALL)
def test_logits_do_not_depend_on_the_batch(name):
    model, images = small(name), some_images(5)
    together = model(images)
    alone = torch.cat([model(image.unsqueeze(0)) for image in images])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-11)
    assert together.std(dim=0).min() > 1e-4  # and they do depend on the image


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("image_size", "patch_size"), [((4, 4), 4), ((6, 9), 3), ((10, 4), 2)])
def test_any_size_that_divides(name, image_size, patch_size):
    model = small(name, image_size=image_size, patch_size=patch_size)
    assert model.image_size == image_size
    assert model(some_images(1, image_size)).shape == (1, 4)


def test_anchors_keep_rows_and_order():
    model = small("fst")
    positions = model.represent(some_images()).anchors.positions.unflatten(1, (4, 5))  # b p j 2
    rows = torch.linspace(0, 1, 4, dtype=torch.float64)[:, None].expand(2, 4, 5)
    torch.testing.assert_close(positions[..., 0], rows)
    assert (positions[..., 1].diff(dim=-1) > 0).all()
    assert (positions[..., 0, 1] == 0).all()
    assert (positions[..., -1, 1] == 1).all()
    assert (positions[0] - positions[1]).abs().max() > 1e-3  # and follow the image


def test_anchors_start_evenly_spaced_whatever_the_image():
    positions = build(small_config()).represent(some_images().float()).anchors.positions
    even = torch.cartesian_prod(torch.linspace(0, 1, 4), torch.linspace(0, 1, 5))
    torch.testing.assert_close(positions, even.expand(2, -1, -1))


def test_evaluation_points_belong_to_the_model():
    one, other = build(small_config()), build(small_config())
    torch.testing.assert_close(one.points, other.points)
    assert (one.points - build(small_config(sobol_seed=1)).points).abs().max() > 0
    assert one.point_stream(1, 2) is None  # nothing is drawn at random
    assert "points" in one.state_dict()


def test_other_evaluation_points_can_be_given():
    model, images = small("fst"), some_images()
    none = torch.zeros(3, 0, dtype=torch.long)
    same = PointDraws(none, model.points.expand(3, -1, -1))
    torch.testing.assert_close(model(images, same), model(images))
    reordered = PointDraws(none, model.points.flip(0).expand(3, -1, -1))
    torch.testing.assert_close(model(images, reordered), model(images), rtol=0, atol=1e-11)
    others = PointDraws(none, torch.rand(3, 7, 2, dtype=torch.float64))
    assert (model(images, others) - model(images)).abs().max() > 1e-6


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_receives_a_gradient(name):
    model = small(name)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("scales.base"):  # stirred, some may lie beyond the bounds
                parameter.fill_(np.log(0.1))
            if parameter_name.endswith("log_sigma"):
                parameter.fill_(np.log(0.2))
    model(some_images()).square().sum().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # A key's bias adds the same to all logits of a query.
    assert [name for name in without if not name.endswith("key.bias")] == []


@pytest.mark.parametrize("name", SMALL)
def test_bfloat16_autocast(name):
    model = build(SMALL[name]())
    images = some_images().float()
    exact = model(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model.logits(images)
        if isinstance(model, ImageClassifier):
            assert model.represent(images).anchors.positions.dtype == torch.float32
    torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=0.05 * exact.abs().max().item())


@pytest.mark.parametrize("name", SMALL)
def test_round_trip_through_a_folder(name, tmp_path):
    model = stirred(build(SMALL[name](sobol_seed=3) if name == "fst" else SMALL[name]()))
    images = some_images().float()
    model.save_pretrained(tmp_path)
    for kind in (Model, Classifier, type(model)):
        loaded = kind.from_pretrained(tmp_path)
        assert type(loaded) is type(model)
        assert loaded.config == model.config
        assert loaded.class_names == ("ant", "bee", "cat", "dog")
        torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=0)


def test_loading_checks_the_kind_and_the_configuration(tmp_path):
    build(small_config()).save_pretrained(tmp_path)
    with pytest.raises(PretrainedError, match="holds a 'ImageClassifier', expected one of Vision"):
        VisionTransformer.from_pretrained(tmp_path)
    path = tmp_path / "config.json"
    description = json.loads(path.read_text())
    description["config"]["patch_size"] = 5
    path.write_text(json.dumps(description))
    with pytest.raises(PretrainedError, match="not a valid ImageClassifierConfig"):
        Classifier.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("fst", {"image_size": (8, 10)}, "image_size must be a multiple of patch_size .4."),
        ("vit", {"image_size": (8, 10)}, "image_size must be a multiple of patch_size .4."),
        ("fst", {"patch_size": 0}, "patch_size must be at least 1, got 0"),
        ("fst", {"class_names": ("one",)}, "class_names must be a tuple of two names or more"),
        ("cnn-vit", {"class_names": "ab"}, "class_names must be a tuple of two names or more"),
        ("vit", {"class_names": ("a", "b", "a")}, "class_names must differ .* got 'a' 2 times"),
        ("fst", {"heads": 5}, "width must be a multiple of heads, got 12 and 5"),
        ("vit", {"heads": 5}, "width must be a multiple of heads, got 12 and 5"),
        ("fst", {"predictor_heads": 3}, "predictor_width must be a multiple of predictor_heads"),
        ("fst", {"anchors_per_row": 1}, "anchors_per_row must be at least 2, got 1"),
        ("fst", {"points_from_sobol": 0}, "points_from_sobol must be at least 1, got 0"),
        ("fst", {"channels": 0}, "channels must be at least 1, got 0"),
        ("vit", {"hidden": 0}, "hidden must be at least 1, got 0"),
        ("cnn-vit", {"encoder_width": 0}, "encoder_width must be at least 1, got 0"),
    ],
)
def test_configurations_that_cannot_work_are_named(name, changes, message):
    with pytest.raises(ValueError, match=message):
        SMALL[name](**changes)


def test_build_names_what_it_was_given():
    with pytest.raises(TypeError, match="must describe a model, got str"):
        build("vit")


@pytest.mark.parametrize("name", SMALL)
def test_images_of_another_size_are_refused(name):
    with pytest.raises(ValueError, match=r"\(batch, 3, 8, 12\), got \(2, 3, 12, 8\)"):
        small(name)(some_images(2, (12, 8)))
    with pytest.raises(TypeError, match=r"images must be a torch.Tensor, got list"):
        small(name)([1.0])


def test_the_representation_is_checked_as_the_scores_are():
    with pytest.raises(ValueError, match=r"\(batch, 3, 8, 12\), got \(2, 3, 12, 8\)"):
        small("fst").represent(some_images(2, (12, 8)))


@pytest.mark.parametrize("name", SMALL)
def test_learns_eight_images_by_heart(name):
    sizes = {"image_size": (16, 16), "patch_size": 4, "width": 32}
    sizes |= {"layers": 2, "heads": 4, "hidden": 43} if name != "fst" else {}
    sizes |= {"encoder_width": 16} if name == "cnn-vit" else {}
    model = build(SMALL[name](**sizes))
    images, labels = torch.rand(8, 3, 16, 16), torch.arange(8) % 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = nn.functional.cross_entropy(model(images), labels)
    assert loss > 1  # four classes, told apart by nothing yet
    for _ in range(150):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = nn.functional.cross_entropy(model(images), labels)
        if loss < 0.05:
            break
    assert loss < 0.05
    assert (model(images).argmax(dim=1) == labels).all()
