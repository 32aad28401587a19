"""Files of a run that are damaged or gone: one line that names them, or they are done without."""

import hashlib
import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from fst.cli import USER_ERROR, main
from fst.training import NonFiniteError, TrainingError, checkpoint
from fst.training.logging import MetricsLog
from fst.training.run_folder import RunFolder
from fst.training.trainer import Trainer
from tiny import BURGERS, MODEL, TRAINING
from training_fakes import WaveSamples, tiny_settings, tiny_train

CPU = ["--device", "cpu"]


@pytest.fixture(scope="module")
def scored(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scored")
    words = [*MODEL, *TRAINING, *BURGERS, "--out", folder / "run", "--data", folder / "data", *CPU]
    assert main(["train", "demo/burgers", *map(str, words)]) == 0
    assert main(["evaluate", str(folder / "run"), *CPU]) == 0
    return folder / "run"


@pytest.fixture
def run(scored, tmp_path) -> Path:
    return Path(shutil.copytree(scored, tmp_path / "run"))


@pytest.fixture
def stopped(run) -> Path:
    """As if killed after its first checkpoint."""
    (run / "summary.json").unlink()
    shutil.rmtree(run / "results")
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    return run


def one_line(capsys, *words) -> str:
    capsys.readouterr()
    assert main([*map(str, words)]) == USER_ERROR
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


NO_OBJECT = ["[]", "3", "null", '"x"', "{", "[" * 100_000, "\0"]
ENVIRONMENTS = [
    '{"hardware": 3}',
    '{"hardware": {"gpus": 5}}',
    '{"hardware": {"gpus": [3]}}',
    '{"git": "x"}',
]


@pytest.mark.parametrize("text", [*NO_OBJECT, *ENVIRONMENTS])
def test_a_damaged_environment_is_named(run, capsys, text):
    (run / "environment.json").write_text(text)
    shutil.rmtree(run / "results")
    assert "environment.json" in one_line(capsys, "evaluate", run, *CPU)


@pytest.mark.parametrize("text", [*NO_OBJECT, '{"resumed": 5}', '{"resumed": {"a": 1}}'])
def test_a_damaged_environment_does_not_stop_a_run(stopped, text):
    (stopped / "environment.json").write_text(text)
    assert main(["train", "--resume", str(stopped), *CPU]) == 0
    assert json.loads((stopped / "environment.json").read_text())["resumed"][-1]["step"] == 3


SUMMARIES = [
    '{"steps": "a"}',
    '{"steps": 3}',
    '{"steps": 3, "seconds": null, "steps_per_second": "x"}',
    '{"steps": null, "seconds": 1, "steps_per_second": 2.0}',
]


@pytest.mark.parametrize("text", [*NO_OBJECT, *SUMMARIES])
def test_a_damaged_summary_is_named(run, capsys, text):
    (run / "summary.json").write_text(text)
    shutil.rmtree(run / "results")
    assert "summary.json" in one_line(capsys, "evaluate", run, *CPU)


LINES = [
    "3",
    "[]",
    '{"step": []}',
    '{"step": "a"}',
    '{"kind": "training", "step": 1e999, "loss": 1}',
    f'{{"kind": "training", "step": 99, "loss": {"9" * 400}}}',
    "[" * 100_000,
    "\0\xff",
]


def test_damaged_lines_of_metrics_are_left_out(stopped, scored, tmp_path):
    text = (scored / "metrics.jsonl").read_text()
    damaged = "".join(f"{line}\n" for line in LINES) + text
    (stopped / "metrics.jsonl").write_text(damaged)
    assert main(["train", "--resume", str(stopped), *CPU]) == 0
    steps = [json.loads(each)["step"] for each in (stopped / "metrics.jsonl").open()]
    assert steps == [json.loads(each)["step"] for each in text.splitlines()]
    copy = Path(shutil.copytree(scored, tmp_path / "copy"))
    (copy / "metrics.jsonl").write_text(damaged)
    assert main(["report", str(copy), "--out", str(tmp_path / "page")]) == 0


def test_damaged_fields_are_named(run, tmp_path, capsys):
    file = run / "results" / "fields.npz"
    good = dict(np.load(file))
    for name, array in good.items():
        wrong = [np.array(3), array[None], np.zeros((0,) * max(1, array.ndim))]
        if array.dtype.kind == "f":
            wrong += [np.full(array.shape, "a"), np.full(array.shape, np.nan)]
            wrong += [np.full(array.shape, 1e300)]
        for each in wrong:
            if each.shape == array.shape and each.dtype.kind == array.dtype.kind and each.size == 0:
                continue  # the same as before
            if (name == "model" and each.shape == ()) or (name == "groups" and each.size == 0):
                continue  # a word, whatever it is; and there may be no groups
            np.savez(file, **{**good, name: each})
            line = one_line(capsys, "report", run, "--out", tmp_path / "page")
            assert str(file) in line
        np.savez(file, **{key: value for key, value in good.items() if key != name})
        assert str(file) in one_line(capsys, "report", run, "--out", tmp_path / "page")


def changed_state(run: Path, name: str, data: bytes) -> None:
    """Replace a file of the newest checkpoint, its manifest with it."""
    folder = checkpoint.available(run / "checkpoints")[-1]
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = hashlib.sha256(data).hexdigest()
    manifest["files"][name] = {"bytes": len(data), "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("text", [*NO_OBJECT, "{}", '{"step": "a"}'])
def test_a_damaged_state_is_named(stopped, capsys, text):
    changed_state(stopped, "state.json", text.encode())
    line = one_line(capsys, "train", "--resume", stopped, *CPU)
    assert "state.json is no JSON object" in line or "does not fit this run" in line


def test_a_damaged_recipe_of_a_checkpoint_hides_no_good_one(run, capsys):
    (run / "summary.json").unlink()
    (run / "checkpoints" / "step-00000006" / "recipe.json").write_text("")
    line = one_line(capsys, "train", "--resume", run, *CPU)
    good = checkpoint.available(run / "checkpoints")[0].name
    assert "recipe.json has 0 bytes" in line
    assert f"{good} is good: fst train --resume {run} --checkpoint {good}" in line


@pytest.mark.parametrize(
    ("prefix", "how"),
    [("random.", "missing"), ("random.", "short"), ("best.", "missing"), ("best.", "short"),
     ("optimizer.", "missing")],
)  # fmt: skip
def test_damaged_tensors_of_the_state_are_named(stopped, capsys, prefix, how):
    folder = checkpoint.available(stopped / "checkpoints")[-1]
    tensors = safetensors.torch.load_file(folder / "state.safetensors")
    first = next(name for name in sorted(tensors) if name.startswith(prefix) and tensors[name].ndim)
    if how == "short":
        tensors[first] = tensors[first].reshape(-1)[:1].clone()
    elif prefix == "best.":
        del tensors[first]
    else:
        tensors = {name: each for name, each in tensors.items() if not name.startswith(prefix)}
    changed_state(stopped, "state.safetensors", safetensors.torch.save(tensors))
    line = one_line(capsys, "train", "--resume", stopped, *CPU)
    assert "the checkpoint does not fit this run" in line


@pytest.mark.parametrize("tensorboard", [False, True])
@pytest.mark.parametrize("step", [2, 7, 23])
def test_a_folder_that_is_moved_ends_the_run(tmp_path, monkeypatch, step, tensorboard):
    """And none with half of its files appears in its place."""
    update = Trainer.update

    def moving(trainer: Trainer) -> None:
        if trainer.state.step == step:
            (tmp_path / "run").rename(tmp_path / "elsewhere")
        update(trainer)

    monkeypatch.setattr(Trainer, "update", moving)
    with pytest.raises(TrainingError, match="run was moved or removed while the run was at work"):
        tiny_train(tmp_path / "run", tiny_settings(tensorboard=tensorboard, log_every=4))
    assert not (tmp_path / "run").exists()


def test_a_writer_whose_folder_is_gone_is_quiet(tmp_path, monkeypatch):
    """TensorBoard's thread may write in the instant that a folder is moved; others' errors show."""
    seen = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    folder = RunFolder.create(tmp_path / "run", {}, {})
    with MetricsLog(folder, tiny_settings(tensorboard=False), 0):

        def fail(error: Exception) -> None:
            raise error

        for gone in (False, True):
            if gone:
                shutil.rmtree(folder.path)
            else:
                (folder.path / "tensorboard").mkdir()
            for error in (FileNotFoundError("events"), KeyError("other")):
                thread = threading.Thread(target=fail, args=(error,))
                thread.start()
                thread.join()
    assert [type(each.exc_value) for each in seen] == [FileNotFoundError, KeyError, KeyError]
    assert threading.excepthook == seen.append


def spoil(monkeypatch, step: int) -> None:
    """One step's targets are not finite, whenever it comes."""
    update, batch = Trainer.update, WaveSamples.batch
    now = []

    def noted(trainer: Trainer) -> None:
        now[:] = [trainer.state.step + 1]
        update(trainer)

    def spoiled(self, *arguments):
        found = batch(self, *arguments)
        if now == [step]:
            found.targets.fill_(float("nan"))
        return found

    monkeypatch.setattr(Trainer, "update", noted)
    monkeypatch.setattr(WaveSamples, "batch", spoiled)


@pytest.mark.parametrize(
    ("step", "advice"),
    [(4, "start anew with a lower --training.learning-rate"), (9, "run --rate-factor 0.5")],
)
def test_a_step_that_is_not_finite_says_how_to_go_on(tmp_path, monkeypatch, step, advice):
    spoil(monkeypatch, step)
    with pytest.raises(NonFiniteError) as error:
        tiny_train(tmp_path / "run", tiny_settings())
    assert advice in str(error.value)
    assert error.value.step == step


def rates(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return [line["learning_rate"] for line in lines if line["kind"] == "training"]


def test_a_run_goes_on_with_lower_rates(stopped, scored, capsys):
    whole = rates(scored)
    assert main(["train", "--resume", str(stopped), "--rate-factor", "0.25", *CPU]) == 0
    assert rates(stopped) == pytest.approx([*whole[:3], *(0.25 * rate for rate in whole[3:])])
    assert json.loads((stopped / "run.json").read_text())["rate_factor"] == 0.25
    # A later start keeps it, and another factor comes on top.
    (stopped / "summary.json").unlink()
    shutil.rmtree(stopped / "checkpoints" / "step-00000006")
    assert main(["train", "--resume", str(stopped), *CPU]) == 0
    assert rates(stopped)[3:] == pytest.approx([0.25 * rate for rate in whole[3:]])
    (stopped / "summary.json").unlink()
    for wrong in ("0", "-1", "nan", "inf", "2"):
        line = one_line(capsys, "train", "--resume", stopped, "--rate-factor", wrong, *CPU)
        assert "rate_factor must be above 0 and at most 1" in line
