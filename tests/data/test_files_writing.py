"""A file is whole or absent: kills, full disks and second writers leave nothing half."""

import errno
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from rich.console import Console

from data_examples import BURGERS, DARCY, write_fields, write_published
from fst.data import DataError, burgers, darcy
from fst.data.burgers_data import BurgersData
from fst.data.files import Plan, write_rows
from fst.io import publish

QUIET = Console(quiet=True)
HERE = str(Path(__file__).parent)
NAME = "1D_Burgers_Sols_Nu0.1.hdf5"


def make(data: BurgersData, folder: Path, batch_size: int | None = None, force: bool = False):
    return data.make(
        folder / NAME, 0.1, data.test, device="cpu", console=QUIET, batch_size=batch_size,
        force=force,
    )  # fmt: skip


def tensor_of(path: Path) -> np.ndarray:
    with h5py.File(path, "r") as file:
        return file["tensor"][:]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class StoppedError(Exception):
    pass


def interrupt_after(monkeypatch, calls: int) -> None:
    """Make the Burgers solver fail after some calls, as a kill between two blocks would."""
    solve, made = burgers.solve, []

    def failing(*arguments, **options):
        if len(made) == calls:
            raise StoppedError
        made.append(1)
        return solve(*arguments, **options)

    monkeypatch.setattr(burgers, "solve", failing)


class TestMadeFiles:
    def test_the_file_holds_the_law_the_splits_and_the_solutions(self, tmp_path):
        assert make(BURGERS, tmp_path)
        with h5py.File(tmp_path / NAME, "r") as file:
            assert file["tensor"].shape == (11, 21, 64)
            assert file["tensor"].dtype == np.float32
            assert file["t-coordinate"].shape == (22,)
            assert file["split/training"][:].tolist() == [0, 1, 2, 3, 4, 5]
            assert file["split/validation"][:].tolist() == [6, 7, 8]
            assert file["split/test"][:].tolist() == [9, 10]
            law = json.loads(file.attrs["law"])
            stored = file["tensor"][7]
        assert law["seed"] == 0
        assert law["viscosity"] == 0.1
        assert {"initial", "solver", "version", "equation"} <= set(law)
        initial = burgers.sample_initial(1, 64, 0, start=7)
        times = torch.linspace(0, 0.5, 21, dtype=torch.float64)
        expected = burgers.solve(initial, 0.1, times)[0].float()
        np.testing.assert_allclose(stored, expected, atol=1e-6)
        assert names_in(tmp_path) == [NAME]

    @pytest.mark.parametrize("batch_size", [1, 4, 11, 100])
    def test_burgers_data_do_not_depend_on_the_batch_size(self, tmp_path, batch_size):
        (tmp_path / "a").mkdir()
        make(BURGERS, tmp_path / "a", 5)
        make(BURGERS, tmp_path / "b", batch_size)
        np.testing.assert_allclose(
            tensor_of(tmp_path / "a" / NAME), tensor_of(tmp_path / "b" / NAME), atol=1e-6
        )

    @pytest.mark.parametrize("batch_size", [1, 5, 100])
    def test_darcy_data_do_not_depend_on_the_batch_size(self, tmp_path, batch_size):
        path = tmp_path / "darcy_train_16.pt"
        DARCY.make(path, "train", device="cpu", console=QUIET, batch_size=batch_size)
        content = torch.load(path, weights_only=True)
        inputs, solutions = darcy.generate(12, 16, 0, fine=32)
        assert torch.equal(content["x"], inputs)
        torch.testing.assert_close(content["y"], solutions, atol=1e-6, rtol=1e-5)

    def test_another_seed_gives_other_data(self, tmp_path):
        make(BURGERS, tmp_path / "a")
        make(replace(BURGERS, seed=1), tmp_path / "b")
        assert not np.allclose(tensor_of(tmp_path / "a" / NAME), tensor_of(tmp_path / "b" / NAME))

    def test_viscosities_share_their_initial_conditions(self, tmp_path):
        data = replace(BURGERS, viscosities=(0.1, 0.2), test=4)
        data.prepare(tmp_path, "cpu", QUIET)
        first, second = (tensor_of(path) for path in sorted(tmp_path.iterdir()))
        assert np.array_equal(first[:, 0], second[:, 0])
        assert not np.allclose(first[:, -1], second[:, -1])


class TestResuming:
    def test_an_interrupted_file_goes_on_and_ends_the_same(self, tmp_path, monkeypatch):
        make(BURGERS, tmp_path / "whole", 2)
        with monkeypatch.context() as patch:
            interrupt_after(patch, 3)
            with pytest.raises(StoppedError):
                make(BURGERS, tmp_path / "resumed", 2)
        path = tmp_path / "resumed" / NAME
        part = path.with_name(NAME + ".part")
        assert not path.exists()
        with h5py.File(part, "r") as file:
            assert file.attrs["complete_rows"] == 6
        starts = []
        sample = burgers.sample_initial

        def noted(count, points, seed, start=0):
            starts.append(start)
            return sample(count, points, seed, start=start)

        monkeypatch.setattr(burgers, "sample_initial", noted)
        make(BURGERS, tmp_path / "resumed", 2)
        assert starts == [6, 8, 10]
        assert not part.exists()
        assert path.read_bytes() == (tmp_path / "whole" / NAME).read_bytes()

    def test_an_unfinished_file_is_never_read_as_whole(self, tmp_path, monkeypatch):
        interrupt_after(monkeypatch, 2)
        with pytest.raises(StoppedError):
            make(BURGERS, tmp_path, 2)
        (tmp_path / (NAME + ".part")).rename(tmp_path / NAME)
        with pytest.raises(DataError, match="is unfinished, 4 of 11"):
            BURGERS.load(tmp_path)

    def test_an_unfinished_file_of_another_law_is_refused(self, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            interrupt_after(patch, 1)
            with pytest.raises(StoppedError):
                make(BURGERS, tmp_path, 2)
        other = replace(BURGERS, seed=5)
        with pytest.raises(DataError, match="file of another provenance .seed: 0 there, 5"):
            make(other, tmp_path)
        assert (tmp_path / (NAME + ".part")).exists()
        make(other, tmp_path, force=True)
        BURGERS.load(tmp_path)

    def test_a_damaged_unfinished_file_is_refused(self, tmp_path):
        part = tmp_path / (NAME + ".part")
        part.write_bytes(b"not HDF5")
        with pytest.raises(DataError, match="delete it or use --force") as error:
            make(BURGERS, tmp_path)
        assert str(part) in str(error.value)
        assert make(BURGERS, tmp_path, force=True)

    def test_darcy_goes_on(self, tmp_path, monkeypatch):
        path = tmp_path / "darcy_train_16.pt"
        generate, starts = darcy.generate, []

        def failing(*arguments, start=0, **options):
            starts.append(start)
            if len(starts) == 3:
                raise StoppedError
            return generate(*arguments, start=start, **options)

        monkeypatch.setattr(darcy, "generate", failing)
        for expected in (False, True):
            if not expected:
                with pytest.raises(StoppedError):
                    DARCY.make(path, "train", device="cpu", console=QUIET, batch_size=4)
            else:
                DARCY.make(path, "train", device="cpu", console=QUIET, batch_size=4)
            assert path.exists() == expected
        assert starts == [0, 4, 8, 8]
        assert names_in(tmp_path) == [path.name]
        assert torch.equal(
            torch.load(path, weights_only=True)["x"], generate(12, 16, 0, fine=32)[0]
        )

    def test_darcy_goes_on_when_it_was_stopped_while_the_final_file_was_saved(
        self, tmp_path, monkeypatch
    ):
        path = tmp_path / "darcy_train_16.pt"

        def stopped(content, place):
            place.write_bytes(b"half")
            raise StoppedError

        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", stopped)
            with pytest.raises(StoppedError):
                DARCY.make(path, "train", device="cpu", console=QUIET)
        assert not path.exists()
        monkeypatch.setattr(darcy, "generate", None)  # every row is there already
        DARCY.make(path, "train", device="cpu", console=QUIET)
        assert names_in(tmp_path) == [path.name]
        assert torch.load(path, weights_only=True)["x"].shape == (12, 16, 16)

    def test_a_killed_process_leaves_a_part_that_goes_on(self, tmp_path):
        script = f"""
import sys
sys.path[:0] = {[HERE, *sys.path]!r}
import numpy as np, time
from rich.console import Console
from pathlib import Path
from test_files_writing import slow_plan
from fst.data.files import write_rows
plan, produce = slow_plan(Path({str(tmp_path)!r}))
def slow(start, stop):
    print(start, flush=True)
    time.sleep(0.02)
    return produce(start, stop)
write_rows(plan, slow, batch_size=3, console=Console(quiet=True))
"""
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 150:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        plan, produce = slow_plan(tmp_path)
        with h5py.File(plan.part, "r") as file:
            done = int(file.attrs["complete_rows"])
            assert 0 < done < plan.rows
            assert np.array_equal(file["tensor"][:done], produce(0, done)["tensor"])
        started = []

        def noted(start, stop):
            started.append(start)
            return produce(start, stop)

        publish(write_rows(plan, noted, batch_size=100, console=QUIET), plan.path)
        assert started[0] == done
        whole, _ = slow_plan(tmp_path / "whole")
        publish(write_rows(whole, produce, batch_size=100, console=QUIET), whole.path)
        assert plan.path.read_bytes() == whole.path.read_bytes()


def slow_plan(folder: Path) -> tuple[Plan, object]:
    """A file of 600 rows, and numbers for it that depend on the row alone."""
    columns = {"tensor": np.dtype(("float32", (20, 30)))}
    plan = Plan(folder / "rows.h5", {"seed": 1}, 600, columns, {"x": np.arange(3.0)}, {"Nu": 0.1})

    def produce(start: int, stop: int) -> dict[str, np.ndarray]:
        rows = np.arange(start, stop, dtype=np.float32)[:, None, None]
        return {"tensor": rows + np.linspace(0, 1, 600, dtype=np.float32).reshape(20, 30)}

    return plan, produce


class TestNothingIsOverwritten:
    def test_a_made_file_of_the_same_law_is_kept(self, tmp_path):
        assert make(BURGERS, tmp_path)
        before = (tmp_path / NAME).stat().st_mtime_ns
        assert not make(BURGERS, tmp_path)
        assert (tmp_path / NAME).stat().st_mtime_ns == before

    def test_a_made_file_of_another_law_needs_force(self, tmp_path):
        make(BURGERS, tmp_path)
        other = replace(BURGERS, seed=3)
        with pytest.raises(DataError, match="another provenance .seed: 0 there, 3 asked"):
            make(other, tmp_path)
        assert make(other, tmp_path, force=True)
        with h5py.File(tmp_path / NAME, "r") as file:
            assert json.loads(file.attrs["law"])["seed"] == 3

    def test_published_files_need_force(self, tmp_path):
        path = write_published(tmp_path)
        before = path.read_bytes()
        with pytest.raises(DataError, match="names no provenance; use --force"):
            make(BURGERS, tmp_path)
        assert path.read_bytes() == before
        fields = tmp_path / "darcy_train_16.pt"
        write_fields(fields)
        before = fields.read_bytes()
        with pytest.raises(DataError, match="names no provenance; use --force"):
            DARCY.make(fields, "train", device="cpu", console=QUIET)
        assert fields.read_bytes() == before

    def test_the_old_file_stays_whole_while_force_replaces_it(self, tmp_path, monkeypatch):
        make(BURGERS, tmp_path)
        before = (tmp_path / NAME).read_bytes()
        interrupt_after(monkeypatch, 1)
        with pytest.raises(StoppedError):
            make(replace(BURGERS, seed=3), tmp_path, 2, force=True)
        assert (tmp_path / NAME).read_bytes() == before


class TestDisks:
    def test_a_disk_that_is_too_small_is_noticed_before_any_work(self, tmp_path, monkeypatch):
        usage = shutil._ntuple_diskusage(total=10, used=9, free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        monkeypatch.setattr(burgers, "solve", None)
        with pytest.raises(DataError, match=r"needs 59\.136 kB, but its disk has 1 kB free"):
            make(BURGERS, tmp_path)
        assert names_in(tmp_path) == []

    def test_a_disk_that_fills_up_keeps_what_was_written(self, tmp_path, monkeypatch):
        write = h5py.Dataset.__setitem__

        def full(self, place, rows):
            if self.name == "/tensor" and place.start >= 4:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(self, place, rows)

        with monkeypatch.context() as patch:
            patch.setattr(h5py.Dataset, "__setitem__", full)
            with pytest.raises(DataError, match="cannot be written .no space left") as error:
                make(BURGERS, tmp_path, 2)
        assert str(tmp_path / NAME) in str(error.value)
        with h5py.File(tmp_path / (NAME + ".part"), "r") as file:
            assert file.attrs["complete_rows"] == 4
        assert make(BURGERS, tmp_path, 2)

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(DataError, match="cannot be written") as error:
            make(BURGERS, tmp_path / "file")
        assert "\n" not in str(error.value)

    def test_a_second_writer_is_turned_away_even_with_force(self, tmp_path):
        plan, produce = slow_plan(tmp_path)
        command = [sys.executable, "-c", SECOND_WRITER, str(tmp_path), HERE, *sys.path]
        said = []

        def while_another_writes(start, stop):
            if not said:
                other = subprocess.run(command, capture_output=True, text=True, check=True)
                said.extend(other.stdout.splitlines())
            return produce(start, stop)

        publish(write_rows(plan, while_another_writes, batch_size=300, console=QUIET), plan.path)
        message = f"{plan.path}: cannot be written (another process is writing it)"
        assert said == [message, message]
        with h5py.File(plan.path, "r") as file:
            assert np.array_equal(file["tensor"][:], produce(0, 600)["tensor"])

    def test_a_solution_that_is_not_finite_is_not_written(self, tmp_path):
        plan, produce = slow_plan(tmp_path)

        def spoiled(start, stop):
            block = produce(start, stop)
            if start >= 200:
                block["tensor"][7, 3, 3] = np.nan
            return block

        with pytest.raises(DataError, match="NaN or infinity for row 207 of tensor"):
            write_rows(plan, spoiled, batch_size=100, console=QUIET)
        with h5py.File(plan.part, "r") as file:
            assert file.attrs["complete_rows"] == 200


SECOND_WRITER = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from rich.console import Console
from test_files_writing import slow_plan
from fst.data.files import write_rows
plan, produce = slow_plan(Path(sys.argv[1]))
for force in (False, True):
    try:
        write_rows(plan, produce, batch_size=100, console=Console(quiet=True), force=force)
    except ValueError as error:
        print(error)
"""


def test_progress_is_silent_off_a_terminal(tmp_path, capsys):
    plan, produce = slow_plan(tmp_path)
    write_rows(plan, produce, batch_size=100, console=Console())
    assert capsys.readouterr().out == ""
