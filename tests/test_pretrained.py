"""Models on disk."""

import json
import pickle
import sys
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

import fst
from fst.baselines import PerceiverIO
from fst.model import FunctionSpaceTransformer
from fst.operators import Operator
from fst.pretrained import CONFIG, WEIGHTS, PretrainedError, shipped
from fst.recipes.recipe import recipe_from_json
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
    "width must be a multiple of heads, got 16 and 5 @": lambda d: d["config"].update(heads=5),
    "not a valid FunctionSpaceConfig": lambda d: d.__setitem__("config", 5),
    "weights do not fit": lambda d: d["config"].__setitem__("width", 32),
    "not a model description": lambda d: d.pop("model"),
    "holds a 'Unknown'": lambda d: d.__setitem__("model", "Unknown"),
    "holds a 'Operator', expected": lambda d: d.__setitem__("model", "Operator"),
    "holds a 'Model', expected": lambda d: d.__setitem__("model", "Model"),
    "holds a ..'a'...": lambda d: d.__setitem__("model", ["a"]),
    "refinement_steps must be at most 256": lambda d: d["config"].update(refinement_steps=10**9),
    "points_from_sobol must be at most": lambda d: d["config"].update(points_from_sobol=10**12),
    "predictor_blocks must be at most": lambda d: d["config"].update(predictor_blocks=10**9),
    "rows must be at most 1,048,576": lambda d: d["config"].update(rows=[10**7]),
    "weights do not fit: predict_anchors.tokens": lambda d: d["config"].update(
        rows=[2**20], anchors_per_row=2**10
    ),
    "weights do not fit: .* must be .1048576": lambda d: d["config"].update(width=2**20),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_description_is_named(saved, message):
    _, folder = saved
    damage(folder, DAMAGE[message])
    with pytest.raises(PretrainedError, match=message):
        fst.from_pretrained(folder)


def test_a_description_that_is_nested_beyond_reason_is_named(saved):
    _, folder = saved
    (folder / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(PretrainedError, match="config.json: not a model description: nested"):
        fst.from_pretrained(folder)


def test_a_changed_weight_is_detected(saved):
    _, folder = saved
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(PretrainedError, match="model.safetensors: damaged: its SHA-256 differs"):
        fst.from_pretrained(folder)


def test_weights_of_older_versions_carry_no_digest(saved):
    model, folder = saved
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    loaded = fst.from_pretrained(folder)
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))


def test_the_hub_is_asked_by_its_own_name_alone(monkeypatch, saved):
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(saved[1])

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))
    for name in ("owner/name", "runs/nosuch", "nosuch", "hf:/owner/name"):
        with pytest.raises(PretrainedError, match=f"{name}: there is no such folder"):
            fst.from_pretrained(name)
    for name in ("hf://name", "hf://owner/name/more", "hf://../name?", "hf://"):
        with pytest.raises(PretrainedError, match="a model on the hub is named hf://owner/name"):
            fst.from_pretrained(name)
    assert asked == []
    assert type(fst.from_pretrained("hf://owner/some-name")) is FunctionSpaceTransformer
    assert asked == [("owner/some-name", ["model.safetensors", "config.json"])]
    with pytest.raises(TypeError, match="source must be a folder or hf://owner/name, got int"):
        fst.from_pretrained(3)


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


@pytest.mark.parametrize("name", shipped())
def test_shipped_weights_load_and_answer(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no folder has the name
    folder, model = shipped()[name], fst.from_pretrained(name)
    assert isinstance(model, Operator)
    recipe = recipe_from_json(json.loads((folder / "recipe.json").read_text()), name)
    assert model.config == recipe.model
    card = (folder / "README.md").read_text()
    assert all(word in card for word in (recipe.name, "| Command |", "## Scores", "## Limits"))
    assert {path.name for path in folder.iterdir()} == {
        WEIGHTS, CONFIG, "recipe.json", "README.md", "results"
    }  # fmt: skip
    condition = None if not model.condition_channels else torch.full((1, 1), 0.01)
    positions = torch.rand(1, 50, 2)
    field = model(fst.Observations(positions, torch.ones(1, 50, 1), condition))
    assert field(torch.rand(1, 7, 2)).isfinite().all()
    assert field(torch.rand(1, 7, 2), neighbors=16).isfinite().all()


def test_a_model_in_float64_comes_back_as_it_was(tmp_path):
    model = small_model()
    model.save_pretrained(tmp_path)
    loaded, observations, queries = (
        fst.from_pretrained(tmp_path),
        some_observations(model),
        some_queries(model),
    )
    assert torch.equal(loaded(observations)(queries), model(observations)(queries))


def test_a_configuration_that_cannot_be_written_leaves_the_saved_model_alone(saved):
    model, folder = saved
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    object.__setattr__(model.config, "low", (torch.zeros(()), 0.0))
    with pytest.raises(TypeError, match="not JSON serializable"):
        model.save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
