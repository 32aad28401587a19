"""Predictions from CUDA graphs: the model's own answers, whatever came before.

Without a GPU a replay is what it stands for: the work, done again on the same tensors.
"""

import gc
import weakref
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch

import fst
from fst import CUDAGraphModel, Domain, Field, FunctionSpaceTransformer, Observations, cuda_graph
from fst.kernels.modules import FusedDecoder
from small import small_config

CAPTURE = cuda_graph.capture
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = small_config(low=(0.0, -1.0), high=(2.0, 3.0))


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """How often something was captured; on a CPU, without a graph."""
    captured = []

    def capture(work, given, device):
        captured.append([each if each is None else tuple(each.shape) for each in given])
        if DEVICE == "cuda":
            return CAPTURE(work, given, device)
        found = work(*given)

        def replay():
            for mine, new in zip(found, work(*given), strict=True):
                if mine is not None:
                    mine.copy_(new)

        return replay, found

    monkeypatch.setattr(cuda_graph, "capture", capture)
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_graph, "_require_gpu", lambda model: None)
        # A CPU's chunks count otherwise.
        monkeypatch.setattr(FusedDecoder, "queries_at_once", lambda *given: 100)
    return captured


def network(**changes):
    model = FunctionSpaceTransformer(replace(CONFIG, **changes)).to(DEVICE).eval()
    model.standardize_outputs.set(0.5, 2.0)
    return model


def points(count, batch=2):
    low, high = Domain(CONFIG.low, CONFIG.high).edges(torch.empty(0))
    return (low + (high - low) * torch.rand(batch, count, 2)).to(DEVICE)


def some(count=20, batch=2, **rest):
    return Observations(points(count, batch), torch.randn(batch, count, 1).to(DEVICE), **rest)


def agree(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_the_answers_are_the_models(emulated):
    model, queries = network(), points(30)
    predict = CUDAGraphModel(model)
    for number in range(4):
        observations = some()
        field, wanted = predict(observations), model(observations)
        agree(field.features, wanted.features)
        agree(field.anchors.positions, wanted.anchors.positions)
        agree(field.anchors.length_scales, wanted.anchors.length_scales)
        agree(field(queries), wanted(queries))
        assert len(emulated) == (2 if number else 0)  # refinement and decoding, the second time
    assert isinstance(field, Field)


@torch.no_grad()
def test_predictions_with_a_symmetry_are_the_models(emulated):
    model, queries = network(prediction_symmetry="odd-reflection"), points(30)
    predict, plain = CUDAGraphModel(model), network()
    plain.load_state_dict(model.state_dict())
    for _ in range(4):
        observations = some()
        field = predict(observations)
        agree(field(queries), model(observations)(queries))
        assert len(emulated) == 2  # at once: the image has the shapes of its original
    assert (field(queries) - plain(observations)(queries)).abs().max() > 1e-4


@torch.no_grad()
def test_earlier_answers_stay(emulated):
    model, queries = network(), points(30)
    predict = CUDAGraphModel(model)
    given = [some() for _ in range(4)]
    fields = [predict(each) for each in given]
    values = [field(queries) for field in fields]
    for field, value, observations in zip(fields, values, given, strict=True):
        wanted = model(observations)
        agree(field.features, wanted.features)
        agree(value, wanted(queries))
    assert len(emulated) == 2


@torch.no_grad()
def test_new_weights_count(emulated):
    model, observations, queries = network(), some(), points(30)
    predict = CUDAGraphModel(model)
    before = [predict(observations)(queries) for _ in range(2)]
    for parameter in model.parameters():
        parameter.mul_(1.1)
    after = predict(observations)(queries)
    assert not torch.allclose(before[1], after)
    agree(after, model(observations)(queries))
    assert len(emulated) == 2
    layer = model.decoder.output[2]
    layer.bias.data = layer.bias.data + 1  # at another address
    for _ in range(2):
        agree(predict(observations)(queries), model(observations)(queries))
    assert len(emulated) == 4
    layer.bias = torch.nn.Parameter(layer.bias + 1)  # another one
    for _ in range(2):
        agree(predict(observations)(queries), model(observations)(queries))
    assert len(emulated) == 6
    assert len(predict._captures) == 2  # those of before are gone


@torch.no_grad()
def test_every_kind_of_observations_has_a_recording_of_its_own(emulated):
    model = network(condition_channels=1)
    predict, queries = CUDAGraphModel(model), points(30)
    mask = (torch.arange(20) < torch.tensor([[20], [13]])).to(DEVICE)
    nu = torch.rand(2, 1).to(DEVICE)
    for rest in ({}, {"mask": mask}, {}, {"mask": mask.flip(0)}, {}, {"mask": mask}):
        observations = some(condition=nu, **rest)
        agree(predict(observations)(queries), model(observations)(queries))
    assert len(emulated) == 3  # with and without a mask, and the decoding


@torch.no_grad()
def test_the_least_recent_shape_goes_first(emulated, monkeypatch):
    monkeypatch.setattr(cuda_graph, "MOST_SHAPES", 2)
    predict = CUDAGraphModel(network())
    for count in (10, 11, 10, 12, 10, 11, 12, 11):
        predict(some(count))
    assert [shapes[0][1] for shapes in emulated] == [10, 11]


@torch.no_grad()
def test_autocast_is_that_of_the_call(emulated):
    model, observations, queries = network(), some(), points(30)
    predict = CUDAGraphModel(model)
    exact = predict(observations)(queries)
    for _ in range(3):
        with torch.autocast(DEVICE, torch.bfloat16):
            rounded, wanted = predict(observations)(queries), model(observations)(queries)
        agree(rounded, wanted)
        assert not torch.equal(rounded, exact)
        agree(predict(observations)(queries), exact)
    assert len(emulated) == 4


@torch.no_grad()
def test_many_queries_and_few_neighbours_go_the_usual_way(emulated):
    model, observations = network(), some()
    field, wanted = CUDAGraphModel(model)(observations), model(observations)
    few = points(30)
    agree(field(few, neighbors=4), wanted(few, neighbors=4))
    if DEVICE == "cpu":
        many = points(150)
        agree(field(many), wanted(many))
        agree(field(many), wanted(many))
    assert emulated == []


def test_no_gradients_are_kept():
    predict, queries = CUDAGraphModel(network()), points(30)
    for _ in range(2):
        field = predict(some())
        assert not field.features.requires_grad
        assert not field(queries).requires_grad
        assert not field(points(150)).requires_grad
        assert not field(queries, neighbors=4).requires_grad


def test_inference_mode_may_come_and_go():
    model, observations, queries = network(), some(), points(30)
    predict = CUDAGraphModel(model)
    with torch.no_grad():
        wanted = model(observations)(queries)
    for on in (True, True, False, True, False):
        with torch.inference_mode(on):
            agree(predict(observations)(queries), wanted)


@torch.no_grad()
def test_a_field_that_was_changed_is_decoded_as_it_is(emulated):
    model, other, queries = network(), network(), points(30)
    predict = CUDAGraphModel(model)
    for _ in range(3):
        field = predict(some())
        field(queries)
        changed = replace(field, decoder=other.decoder)
        agree(changed(queries), changed.decode(queries))
        assert not torch.allclose(changed(queries), field(queries))
    assert len(emulated) == 2


def test_nothing_holds_on_to_itself():
    """Memory of the GPU comes back with the last name, not with the next collection."""
    predict = CUDAGraphModel(network())
    for _ in range(3):
        predict(some())(points(30))
    gone = weakref.ref(predict)
    gc.disable()
    try:
        del predict
        assert gone() is None
    finally:
        gc.enable()


def test_a_replay_keeps_what_it_works_on(monkeypatch):
    if DEVICE == "cpu":  # a graph in name only: what counts here is who holds what
        nothing, graph = MagicMock(), MagicMock(spec=torch.cuda.CUDAGraph)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
        for name in ("graph", "stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, nothing)
        monkeypatch.setattr(cuda_graph, "_capture_stream", nothing)

    def capture():
        weights, given = torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE)
        replay, _ = CAPTURE(lambda each: (weights * each,), (given,), torch.device(DEVICE))
        return replay, weakref.ref(weights), weakref.ref(given)

    replay, *held = capture()
    assert all(each() is not None for each in held)
    replay()
    del replay
    gc.collect()
    assert all(each() is None for each in held)


def test_what_is_wrong_is_said(monkeypatch):
    predict = CUDAGraphModel(network())
    observations = some()
    observations.values[0, 3] = torch.nan
    with pytest.raises(ValueError, match="values must be finite"):
        predict(observations)
    with pytest.raises(ValueError, match="queries must lie in the domain"):
        predict(some())(points(30) + 100)
    with pytest.raises(TypeError, match="queries must be a floating-point tensor"):
        predict(some())([0.5, 0.5])
    monkeypatch.undo()
    predict.model.cpu()
    with pytest.raises(ValueError, match="model must be on a GPU to be captured, got one on cpu"):
        predict(some())
    with pytest.raises(ValueError, match="model must be on a GPU to be captured, got one on cpu"):
        fst.CUDAGraphModel(FunctionSpaceTransformer(CONFIG))
    with pytest.raises(TypeError, match="model must be a FunctionSpaceTransformer, got Linear"):
        fst.CUDAGraphModel(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_edges_are_rounded_as_tensors_are(dtype):
    low, high = (0.1, -1 / 3, 2.0), (0.7, 1e-3, 1e9 / 7)
    found = Domain(low, high).edges(torch.empty(0, dtype=dtype))
    assert torch.equal(found[0], torch.tensor(low, dtype=dtype))
    assert torch.equal(found[1], torch.tensor(high, dtype=dtype))
