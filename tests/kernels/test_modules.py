"""Fast modules against the plain ones they derive from, in float64: values and gradients.

Without a GPU the kernels run in Triton's interpreter, in float16.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fst
from fst import kernels
from fst.field import Decoder
from fst.kernels import fuse, fused, modules, unfuse
from fst.layer import EvaluateMixWrite, FunctionSpaceLayer, Points, Read
from fst.nn import MLP, Attention, FourierFeatures, ResidualFeedForward
from fst.rbf import Blend
from fst.types import Anchors
from fst.vision import DistanceRead, ImageClassifier, PatchGrid
from images_restatement import small_config as small_image_config
from small import config_on, small_config, small_model, some_observations, some_queries, stirred

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The kernels take what they would take on a GPU."""
    monkeypatch.setattr(modules, "on_gpu", lambda tensor: True)


def differentiated(module, run, given):
    """What `run(module, *given)` gives, and the gradients of parameters and inputs, in float64."""
    learned = [each for each in given if torch.is_tensor(each) and each.is_floating_point()]
    learned = [each.detach().requires_grad_() for each in learned]
    fresh = iter(learned)
    given = [
        next(fresh) if torch.is_tensor(each) and each.is_floating_point() else each
        for each in given
    ]
    out = run(module, *given)
    upstream = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype)
    wanted = [*learned, *module.parameters()]
    found = torch.autograd.grad(out, wanted, upstream.view(out.shape), allow_unused=True)
    names = [f"input {n}" for n in range(len(learned))]
    names += [name for name, _ in module.named_parameters()]
    gradients = {
        name: gradient.double()
        for name, gradient in zip(names, found, strict=True)
        if gradient is not None
    }
    return {"value": out.detach().double()} | gradients


def agree(module, run, *given, factor=2.0):
    """The fast module in half precision is about as exact as the plain one in half precision.

    Both are measured against float64; what is rounded more than once may be a little worse.
    """
    module = module.to(DEVICE)
    given = [each.to(DEVICE) if torch.is_tensor(each) else each for each in given]
    exact = differentiated(module.double(), run, [_cast(each, torch.float64) for each in given])

    def rounded(which):
        halves = [
            _cast(each, HALF if each.ndim == 3 and each.shape[-1] > 3 else torch.float32)
            if torch.is_tensor(each)
            else each
            for each in given
        ]
        with torch.autocast(DEVICE, HALF):
            return differentiated(which, run, halves)

    plain = rounded(module.float())
    fast = fuse(copy.deepcopy(module))
    assert fused(fast)
    found = rounded(fast)
    assert found.keys() == exact.keys()
    largest = max(each.norm() for name, each in exact.items() if name != "value")
    for name, wanted in exact.items():
        size = max(wanted.norm(), 1e-3 * largest)
        if name.endswith("key.bias"):  # it moves no softmax: what is found is rounding alone
            size = exact[name.removesuffix("bias") + "weight"].norm()
        allowed = factor * (plain[name] - wanted).norm() + 4 * torch.finfo(HALF).eps * size
        assert (found[name] - wanted).norm() <= allowed, name


def _cast(each, dtype):
    return each.to(dtype) if torch.is_tensor(each) and each.is_floating_point() else each


@pytest.mark.usefixtures("as_on_a_gpu")
class TestHalfPrecision:
    @pytest.mark.parametrize("head", [6, 8])
    def test_attention_to_oneself(self, head):
        """A head of 6 numbers is widened to 8."""
        attention = Attention(4 * head, 4)
        agree(attention, lambda m, x: m.attend_to_self(x), torch.randn(2, 5, 4 * head))

    @pytest.mark.parametrize("masked", [False, True])
    def test_attention_to_others_that_serves_several_calls(self, masked):
        mask = (torch.arange(7) < torch.tensor([[7], [4]])).to(DEVICE) if masked else None

        def run(attention, tokens, context):
            keys_values = attention.keys_values(context)
            for _ in range(2):
                tokens = tokens + attention(tokens, keys_values, mask)
            return tokens

        agree(Attention(24, 4), run, torch.randn(2, 5, 24), torch.randn(2, 7, 24))

    def test_a_feed_forward(self):
        block = stirred(ResidualFeedForward(16))
        agree(block, lambda m, x: m(x), torch.randn(2, 9, 16))

    @pytest.mark.parametrize("inputs", [5, 13])
    def test_products_of_odd_sizes(self, inputs):
        agree(MLP(inputs, 8, 8), lambda m, x: m(x), torch.randn(2, 9, inputs))

    @pytest.mark.parametrize("masked", [False, True])
    def test_the_read(self, masked):
        mask = (torch.arange(7) < torch.tensor([[7], [4]])).to(DEVICE) if masked else None

        def run(layer, z, tokens):
            context = layer.precompute(tokens, mask, _anchors(len(z), z.device), None)
            for _ in range(2):
                z = layer.read(z, context)
            return z

        layer = FunctionSpaceLayer(Read(16, Attention(16, 2)), Nothing())
        agree(stirred(layer), run, torch.randn(2, 6, 16), torch.randn(2, 7, 16))

    @pytest.mark.parametrize("condition", [0, 3])
    @pytest.mark.parametrize(("most", "count"), [(2048, 5), (3, 5), (2048, 0)])
    def test_evaluating_mixing_and_writing_back(self, monkeypatch, condition, most, count):
        """With the anchor-to-anchor weights stored, or not, when there are too many anchors; and
        with no evaluation points but at anchors."""
        monkeypatch.setattr(modules, "MOST_ANCHORS", most)
        indices, uniform = torch.tensor([4, 1, 1]), torch.rand(count, 2)
        given = torch.randn(2, condition) if condition else None

        def run(update, z, positions, scales, *rest):
            anchors = Anchors(positions, scales, scales)
            shared = rest[0] if rest else None
            at_anchors = update.precompute(anchors, shared)
            context = modules.Context(anchors, shared, None, None, at_anchors)
            points = Points(indices.to(z.device), uniform.to(z.device, positions.dtype))
            for _ in range(2):
                z = update(z, context, points)
            return z

        update = EvaluateMixWrite(16, 2, FourierFeatures(2, 3, "linear"), condition)
        anchors = torch.rand(2, 6, 2), 0.1 + 0.2 * torch.rand(2, 6, 2)
        rest = () if given is None else (given,)
        agree(stirred(update), run, torch.randn(2, 6, 16), *anchors, *rest)

    @pytest.mark.parametrize("condition", [0, 3])
    @pytest.mark.parametrize("outputs", [1, 2])
    def test_the_decoder(self, condition, outputs):
        def run(decoder, queries, positions, scales, features, *rest):
            anchors = Anchors(positions, scales, scales)
            return decoder(queries, anchors, features, rest[0] if rest else None)

        decoder = Decoder(16, FourierFeatures(2, 3, "linear"), condition, outputs)
        given = [torch.rand(2, 9, 2), torch.rand(2, 6, 2), 0.1 + 0.2 * torch.rand(2, 6, 2)]
        rest = [torch.randn(2, condition)] if condition else []
        agree(stirred(decoder), run, *given, torch.randn(2, 6, 16), *rest)

    def test_the_read_of_images(self):
        def run(read, z, patches, positions):
            anchors = Anchors(positions, positions, positions)
            context = modules.Context(anchors, None, None, read.precompute(patches, anchors), None)
            for _ in range(2):
                z = read(z, context)
            return z

        read = stirred(DistanceRead(16, 2, PatchGrid(2, 3)))
        inputs = torch.randn(2, 4, 16), torch.randn(2, 6, 16), torch.rand(2, 4, 2)
        agree(read, run, *inputs, factor=3.0)

    def test_an_embedding_of_ones_own_goes_the_plain_way(self):
        class Shifted(FourierFeatures):
            def forward(self, positions):
                return super().forward(positions + 1)

        def run(decoder, queries, positions, scales, features):
            return decoder(queries, Anchors(positions, scales, scales), features, None)

        given = [torch.rand(2, 9, 2), torch.rand(2, 6, 2), 0.1 + 0.2 * torch.rand(2, 6, 2)]
        decoder = Decoder(16, Shifted(2, 3, "linear"), 0, 1)
        agree(stirred(decoder), run, *given, torch.randn(2, 6, 16))

    def test_other_activations_go_the_plain_way(self):
        block = stirred(ResidualFeedForward(16))
        block.feed_forward[1] = nn.GELU(approximate="tanh")
        agree(block, lambda m, x: m(x), torch.randn(2, 9, 16))

    def test_a_whole_model(self):
        """At every kernel at once; each step's rounding is magnified by the next."""
        model = small_model(small_config(condition_channels=1, refinement_steps=2)).to(DEVICE)
        observations, queries = some_observations(model), some_queries(model)

        def run(model, values):
            given = fst.Observations(
                observations.positions.to(values), values, observations.condition.to(values)
            )
            return model.represent(given).decode(queries.to(values))

        def only_values(model, values):
            return run(model, values.to(next(model.parameters()).dtype))

        agree(model, only_values, observations.values, factor=3.0)

    def test_a_whole_image_model(self):
        model = stirred(ImageClassifier(small_image_config())).to(DEVICE)
        images = torch.rand(2, 3, *model.image_size)

        def run(model, images):
            return model.logits(images)

        agree(model, run, images, factor=3.0)


class Nothing(nn.Module):
    def precompute(self, anchors, condition):
        return None


def _anchors(batch, device):
    return Anchors(*torch.rand(3, batch, 6, 2, device=device))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("neighbors", [None, 5])
def test_the_blend_in_float32(neighbors):
    """On a GPU float32 is blended by a kernel too."""
    given = [torch.rand(2, 40, 2), torch.rand(2, 30, 2), 0.05 + 0.1 * torch.rand(2, 30, 2)]
    given = [each.to(DEVICE).requires_grad_() for each in (*given, torch.randn(2, 30, 8))]
    plain, fast = Blend(), fuse(Blend())
    exact = plain(*(each.double() for each in given), neighbors)
    found = fast(*given, neighbors)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(found)
    wanted = torch.autograd.grad(exact, given, upstream.double())
    for gradient, reference in zip(torch.autograd.grad(found, given, upstream), wanted):
        assert (gradient - reference).norm() < 1e-4 * reference.norm()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_queries_in_any_order_are_answered_in_theirs(monkeypatch):
    monkeypatch.setattr(modules, "MANY_POINTS", 100)
    monkeypatch.setattr(modules, "_sortable", lambda queries: True)
    model = small_model().float().to(DEVICE)
    observations = some_observations(model).to(torch.float32).to(DEVICE)
    queries = some_queries(model, count=300).float().to(DEVICE)
    with torch.no_grad():
        wanted = model(observations)(queries)
        found = fuse(model)(observations)(queries)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


# On any device


CONFIGS = {
    "small": small_config(),
    "condition": small_config(condition_channels=2),
    "one axis": config_on(1),
    "three axes": config_on(3),
    "uniform": small_config(coordinates="uniform", length_scales="fixed"),
    "anchor attention": small_config(update="anchor-attention", length_scales="learned"),
    "first step": small_config(observe="first-step"),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("neighbors", [None, 4])
def test_in_float64_a_fused_model_is_the_plain_one(monkeypatch, name, neighbors):
    monkeypatch.setattr(modules, "MANY_POINTS", 10)
    monkeypatch.setattr(modules, "MANY_ANCHORS", 2)
    model = small_model(CONFIGS[name])
    observations, queries = some_observations(model), some_queries(model, count=70)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            wanted = unfuse(model)(observations)(queries, neighbors)
            found = fuse(model)(observations)(queries, neighbors)
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_fusing_twice_is_fusing_once_and_unfusing_gives_the_plain_model():
    model = small_model()
    kinds = [type(module) for module in model.modules()]
    assert not fused(model)
    assert fuse(model) is model
    assert fused(model)
    once = [type(module) for module in model.modules()]
    assert once != kinds
    assert [type(module) for module in fuse(model).modules()] == once
    assert [type(module) for module in unfuse(model).modules()] == kinds
    assert not fused(unfuse(model))


def test_every_fast_module_derives_from_the_plain_one_and_adds_no_parameter():
    for plain, fast in kernels.FAST.items():
        assert issubclass(fast, plain)
        assert "__init__" not in vars(fast)


def test_parameters_are_shared_and_named_as_before(tmp_path):
    model = small_model().float()
    before = dict(model.named_parameters())
    names = list(model.state_dict())
    fuse(model)
    assert list(model.state_dict()) == names
    assert all(before[name] is each for name, each in model.named_parameters())
    model.save_pretrained(tmp_path)
    loaded = fst.from_pretrained(tmp_path)
    assert not fused(loaded)
    observations, queries = some_observations(model).to(torch.float32), some_queries(model).float()
    torch.testing.assert_close(
        loaded(observations)(queries), model(observations)(queries), rtol=1e-4, atol=1e-5
    )
    loaded.load_state_dict(model.state_dict())


def test_copies_of_a_fused_model_are_fused_and_independent():
    model = fuse(small_model())
    other = copy.deepcopy(model)
    assert [type(module) for module in other.modules()] == [type(m) for m in model.modules()]
    observations, queries = some_observations(model), some_queries(model)
    torch.testing.assert_close(other(observations)(queries), model(observations)(queries))
    with torch.no_grad():
        other.decoder.output[2].bias += 1
    assert not torch.allclose(other(observations)(queries), model(observations)(queries))


COMPILED = """
import torch
from fst.kernels import fuse
from small import small_model, some_observations, some_queries
model = small_model()
observations, queries = some_observations(model), some_queries(model)
expected = model.represent(observations).decode(queries)
fuse(model)
run = torch.compile(lambda o, q: model.represent(o).decode(q), backend="eager")
torch.testing.assert_close(run(observations, queries), expected, rtol=1e-11, atol=1e-12)
"""


def test_a_fused_model_can_be_compiled():
    """In another process: the compiler does not look into checked annotations."""
    folder = str(Path(__file__).parents[1] / "helpers")
    words = [sys.executable, "-c", COMPILED]
    paths = os.pathsep.join([folder, *filter(None, sys.path)])
    subprocess.run(words, check=True, env=os.environ | {"PYTHONPATH": paths})


def test_somebody_elses_subclass_is_left_alone():
    class Louder(Attention):
        def forward(self, tokens, keys_values, mask=None):
            return 2 * super().forward(tokens, keys_values, mask)

    assert type(fuse(Louder(8, 2))) is Louder


def test_baselines_may_be_fused():
    model = fst.build("burgers-single/perceiver-io")
    assert not fused(model)
    assert fused(fuse(model))


def test_what_is_no_module_is_named():
    for function in (fuse, unfuse, fused):
        with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
            function("model")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize("neighbors", [None, 4])
def test_many_queries_in_float32_on_a_cpu(monkeypatch, neighbors):
    """Blend and MLP tile by tile, the products oneDNN's; another GELU goes the plain way."""
    monkeypatch.setattr(modules, "MANY_POINTS", 10)
    monkeypatch.setattr(modules, "MANY_ANCHORS", 2)
    model = small_model(CONFIGS["condition"])
    observations, queries = some_observations(model), some_queries(model, count=170)
    calls = []
    monkeypatch.setattr(
        modules, "onednn_mlp", lambda *given, own=modules.onednn_mlp: calls.append(1) or own(*given)
    )
    for activation, number in (("none", 3 * len(queries)), ("tanh", 0)):
        model.decoder.output[1].approximate = activation
        with torch.no_grad():
            wanted = unfuse(model).double()(observations)(queries, neighbors)
            found = fuse(model).float()(observations.to(torch.float32))(queries.float(), neighbors)
        assert (found - wanted).norm() < 1e-5 * wanted.norm()
        assert len(calls) == number
        calls.clear()
