"""Checkpoints are complete or absent, verified when read, and never unpickled."""

import errno
import hashlib
import io
import json
import os
import pickle
import re
from pathlib import Path

import pytest
import torch

import fst.training
from fst.io import FileError
from fst.training import CheckpointError, RunFolder, TrainingError
from fst.training.checkpoint import Checkpoint, available, load, prune, save


def example(step: int) -> Checkpoint:
    weights = {
        "weight": torch.randn(4, 3),
        "spectral": torch.randn(2, 2, dtype=torch.complex64),
        "scalar": torch.tensor(0.1),
        "transposed": torch.randn(2, 5).T,
    }
    tensors = {"random.cpu": torch.get_rng_state(), "optimizer.0.step": torch.tensor(7.0)}
    return Checkpoint(weights, tensors, {"step": step, "history": [[1, 0.1 + 0.2]]})


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for step in (1_000, 2_000, 3_000):
        save(example(step), folder, step, {"name": "tiny"})
    return folder


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    written = example(12)
    folder = save(written, tmp_path, 12, {"name": "tiny"})
    found = load(folder)
    assert found.values == written.values
    for before, after in ((written.weights, found.weights), (written.tensors, found.tensors)):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((folder / "recipe.json").read_text()) == {"name": "tiny"}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000012"]


FILES = ("model.safetensors", "state.safetensors", "state.json", "recipe.json", "manifest.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "empty"])
def test_damage_is_found_and_the_previous_checkpoint_offered(
    parent: Path, name: str, damage: str
) -> None:
    newest = available(parent)[-1]
    file = newest / name
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "flipped" and name != "manifest.json":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    else:
        file.write_bytes(data[: -1 - len(data) // 3] if damage == "truncated" else b"")
    with pytest.raises(CheckpointError) as caught:
        load(newest)
    message = str(caught.value)
    assert f"{newest}: {name}" in message
    assert f"fst train --resume {parent.parent} --checkpoint step-00002000" in message


def test_the_offer_skips_what_is_damaged_too(parent: Path) -> None:
    first, second, third = available(parent)
    for folder in (second, third):
        (folder / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="step-00001000 is good"):
        load(third)
    (first / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no other good checkpoint"):
        load(third)


class Bomb:
    """Unpickling this would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("listed", [False, True])
def test_a_pickle_in_place_of_a_state_is_refused(parent: Path, listed: bool) -> None:
    newest = available(parent)[-1]
    mark = parent / "exploded"
    buffer = io.BytesIO()
    torch.save(Bomb(mark), buffer)
    for data in (buffer.getvalue(), pickle.dumps(Bomb(mark))):
        (newest / "state.safetensors").write_bytes(data)
        if listed:  # an attacker can write a manifest as well
            manifest = json.loads((newest / "manifest.json").read_text())
            entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            manifest["files"]["state.safetensors"] = entry
            (newest / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=r"state\.safetensors"):
            load(newest)
    assert not mark.exists()


def test_the_package_never_unpickles() -> None:
    unpickling = re.compile(r"(?<!safetensors\.)torch\.load\(|import pickle|pickle\.load")
    for file in Path(fst.training.__file__).parent.glob("*.py"):
        assert not unpickling.search(file.read_text()), file


def test_the_newest_are_kept_and_a_dead_future_is_not(parent: Path) -> None:
    save(example(2_500), parent, 2_500, {})  # a run resumed from 2,000 makes 3,000 obsolete
    prune(parent, keep=2, step=2_500)
    assert [path.name for path in available(parent)] == ["step-00002000", "step-00002500"]


def test_saving_again_replaces(parent: Path) -> None:
    (parent / "step-00003000" / "state.json").write_text("damaged")
    (parent / ".partial-step-00004000").mkdir()  # left by a killed writer
    save(example(3_000), parent, 3_000, {})
    assert load(parent / "step-00003000").values["step"] == 3_000
    assert {path.name for path in parent.iterdir()} == {f"step-0000{k}000" for k in (1, 2, 3)}


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "no space left"), (errno.EROFS, "read-only")]
)
def test_a_full_or_read_only_disk_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.save_checkpoint(example(1), 1, keep=2)
    written = []

    def fail(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) == 2:
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(FileError, match=words):
            folder.save_checkpoint(example(2), 2, keep=2)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-00000001"]
    assert load(available(folder.checkpoints)[-1]).values["step"] == 1


def test_a_run_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path / "empty", {"a": 1})
    with pytest.raises(TrainingError, match=r"nothing is overwritten.*fst train --resume"):
        RunFolder.create(tmp_path / "empty", {"a": 2})
    assert json.loads((tmp_path / "empty" / "recipe.json").read_text()) == {"a": 1}


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="file is a file, expected a folder"):
        RunFolder.create(tmp_path / "file" / "run", {})
    with pytest.raises(TrainingError, match="no run folder"):
        RunFolder.resume(tmp_path / "nowhere")
    (tmp_path / "recipe.json").write_text("{")
    with pytest.raises(TrainingError, match="damaged"):
        RunFolder.resume(tmp_path)
    run = RunFolder.create(tmp_path / "run", {})
    run.save_checkpoint(example(1), 1, keep=2)
    with pytest.raises(CheckpointError, match=r"no checkpoint 'step-7'; there are: step-00000001"):
        RunFolder.resume(run.path, "step-7")
    (tmp_path / "recipe.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")  # as in RUN/best
    with pytest.raises(TrainingError, match="holds weights and is no run folder"):
        RunFolder.resume(tmp_path)
    assert RunFolder.resume(run.path).resume_from == run.checkpoints / "step-00000001"


@pytest.mark.skipif(not Path("/sys").is_dir(), reason="needs a folder that nobody may write in")
def test_a_read_only_folder_is_named() -> None:
    with pytest.raises(FileError, match="/sys/fst-run is read-only, or not yours to write in"):
        RunFolder.create("/sys/fst-run", {})
