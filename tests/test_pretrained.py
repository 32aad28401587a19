"""Models on disk."""

import json
import pickle

import pytest
import torch

import fst
from fst.baselines import PerceiverIO
from fst.model import FunctionSpaceTransformer
from fst.pretrained import PretrainedError
from small import small_config, small_model, some_observations, some_queries


@pytest.fixture
def saved(tmp_path):
    model = small_model(small_config(observe="first-step", condition_channels=1)).float()
    model.standardize_values.set(0.25, 3.0)
    model.condition.standardize.set(-1.0, 0.5)
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


@pytest.mark.parametrize("load", [fst.from_pretrained, FunctionSpaceTransformer.from_pretrained])
def test_a_model_comes_back_whole(saved, load):
    model, folder = saved
    loaded = load(folder)
    assert type(loaded) is FunctionSpaceTransformer
    assert loaded.config == model.config
    observations, queries = some_observations(model).to(torch.float32), some_queries(model).float()
    assert torch.equal(loaded(observations)(queries), model(observations)(queries))


def test_a_model_of_another_kind_is_refused(saved, tmp_path):
    plain = small_model().float()
    plain.save_pretrained(tmp_path / "plain")
    with pytest.raises(PretrainedError, match="holds a 'FunctionSpaceTransformer', expected"):
        PerceiverIO.from_pretrained(tmp_path / "plain")


def test_models_saved_under_a_former_name_load(saved):
    """`observe="first-step"` was a class of its own."""
    model, folder = saved
    damage(folder, lambda d: d.__setitem__("model", "ObserveFirst"))
    loaded = fst.from_pretrained(folder)
    assert loaded.config == model.config


def damage(folder, change):
    description = json.loads((folder / "config.json").read_text())
    change(description)
    (folder / "config.json").write_text(json.dumps(description))


DAMAGE = {
    "width": lambda d: d["config"].__setitem__("width", 16.5),
    "extra fields found .surprise": lambda d: d["config"].__setitem__("surprise", 1),
    "coordinates": lambda d: d["config"].__setitem__("coordinates", "elsewhere"),
    "not a valid FunctionSpaceConfig": lambda d: d.__setitem__("config", 5),
    "weights do not fit": lambda d: d["config"].__setitem__("width", 32),
    "not a model description": lambda d: d.pop("model"),
    "holds a 'Unknown'": lambda d: d.__setitem__("model", "Unknown"),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_description_is_named(saved, message):
    _, folder = saved
    damage(folder, DAMAGE[message])
    with pytest.raises(PretrainedError, match=message):
        fst.from_pretrained(folder)


def test_truncated_weights_are_detected(saved):
    _, folder = saved
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(PretrainedError, match="model.safetensors: damaged or incomplete"):
        fst.from_pretrained(folder)


def test_a_pickle_is_never_opened(saved):
    _, folder = saved

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was executed",))

    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(PretrainedError, match="damaged or incomplete"):
        fst.from_pretrained(folder)


def test_missing_files_and_folders_are_named(saved, tmp_path):
    _, folder = saved
    (folder / "config.json").unlink()
    with pytest.raises(PretrainedError, match="config.json is missing"):
        fst.from_pretrained(folder)
    with pytest.raises(PretrainedError, match="no such folder"):
        fst.from_pretrained(tmp_path / "nowhere")


def test_a_run_folder_points_to_its_best_weights(saved, tmp_path):
    saved[0].save_pretrained(tmp_path / "run" / "best")
    with pytest.raises(PretrainedError, match="missing; its best weights are in .*run/best"):
        fst.from_pretrained(tmp_path / "run")
