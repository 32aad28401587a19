"""Processes that share a GPU, and other first weights."""

import fcntl
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fst
from small import small_config, small_model

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop("training_search", None)
    import training_search

    return training_search


def free(file, kind: int) -> bool:
    """Whether a lock can be had at once."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def test_one_process_is_alone_or_several_work_beside_each_other(search, tmp_path):
    one, other = search.Turns(tmp_path), search.Turns(tmp_path)
    with one.shared():
        with other.shared():
            pass
        assert not free(other.gpu, fcntl.LOCK_EX)
        assert free(other.gate, fcntl.LOCK_EX)
    with one.alone():
        for file in (other.compiler, other.gate, other.gpu):
            assert not free(file, fcntl.LOCK_SH)
    with one.compiling():
        assert free(other.compiler, fcntl.LOCK_SH)
        assert not free(other.compiler, fcntl.LOCK_EX)
    with other.alone():  # everything was given back
        pass


def test_first_weights_fall_with_the_band_and_grow_with_the_value(search):
    model = small_model(small_config())
    before = {name: each.clone() for name, each in model.state_dict().items()}
    search.rescale(model, search.Course(band_decay=0.5, value_scale=8.0))
    ratio = model.initial_position.weight / before["initial_position.weight"]
    bands = ratio[0, 2:].view(4, -1)  # sine and cosine of both axes
    torch.testing.assert_close(bands[0] / bands[0, 0], torch.arange(1, 5).double() ** -0.5)
    assert torch.allclose(bands, bands[:1])
    assert bands[0].square().mean().item() == pytest.approx(1)
    assert torch.allclose(ratio[:, :2], torch.ones(2).double())
    for name in ("encode_values.0.weight", "predict_anchors.tokens.observe.0.weight"):
        ratio = model.state_dict()[name] / before[name]
        assert torch.allclose(ratio[:, -1], torch.tensor(8.0).double())
        assert torch.allclose(ratio[:, 2:6], bands[0])
    for name in ("layer.update.evaluate.first.weight", "decoder.evaluate.first.weight"):
        changed = (model.state_dict()[name] != before[name]).any(dim=0)
        assert not changed[: model.config.width].any()
        assert changed[model.config.width + 2 :].all()


def test_perceiver_io_takes_the_same_words(search):
    model = fst.build("own/perceiver-io", width=16, heads=2, fourier_bands=4)
    value, position = model.embed_value.weight.clone(), model.embed_position[0].weight.clone()
    search.rescale(model, replace(search.Course(), value_scale=0.5))
    assert torch.equal(model.embed_value.weight, 0.5 * value)
    assert torch.allclose(model.embed_position[0].weight, position)


def test_stratified_targets_are_spread_and_equally_likely(search):
    generator = torch.Generator().manual_seed(0)
    drawn = search.stratified(20_000, 7, 23, generator)
    assert drawn.shape == (20_000, 7)
    assert all(len(set(row)) == 7 for row in drawn[:100].tolist())
    gaps = drawn.sort(dim=1).values.diff(dim=1)
    assert gaps.max() < 2 * 4  # a part has three or four indices
    often = drawn.flatten().bincount(minlength=23) / drawn.numel()
    torch.testing.assert_close(often, torch.full((23,), 1 / 23), rtol=0.06, atol=0)
