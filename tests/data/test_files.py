"""Published and made files are read alike, a little at a time; bad ones give one clear error."""

import os
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from rich.console import Console

from data_examples import (
    BURGERS,
    DARCY,
    DOMAIN,
    POINTS,
    TIMES,
    point_samples,
    trajectories,
    write_fields,
    write_published,
)
from fst.data import (
    DataError,
    Label,
    Labels,
    PointSample,
    burgers_data,
    check_file,
    check_folder,
    darcy,
    read_points,
    write_points,
)
from fst.data.burgers_data import open_trajectories
from fst.data.darcy_data import open_fields
from fst.data.files import runs
from fst.data.samples import boundary_observation_indices, subset_indices

QUIET = Console(quiet=True)


def one_line(error: pytest.ExceptionInfo[DataError], path: Path) -> str:
    text = str(error.value)
    assert str(path) in text
    assert "\n" not in text
    return text


class TestPublishedBurgers:
    def test_rows_are_drawn_by_seed_and_read_at_the_wanted_places(self, tmp_path):
        write_published(tmp_path)
        training, validation = BURGERS.load(tmp_path)
        rows = training.samples.targets[:, 0, 0].int().numpy()
        assert len(rows) == 6
        stored = trajectories(30)[rows]
        times, cells = subset_indices(TIMES, 5), subset_indices(POINTS, 16)
        assert np.array_equal(training.samples.targets, stored[:, times][:, :, cells])
        time, cell = boundary_observation_indices(TIMES, POINTS).unbind(dim=1)
        assert np.array_equal(training.samples.observed_values, stored[:, time, cell])
        assert validation.samples.grid_shape == (5, 16)
        other, _ = replace(BURGERS, split_seed=1).load(tmp_path)
        assert other.samples.targets[:, 0, 0].int().tolist() != rows.tolist()

    def test_all_viscosities_share_rows_and_carry_their_condition(self, tmp_path):
        data = replace(BURGERS, viscosities=(0.1, 1.0, 2.0), test=7, condition=True)
        for viscosity in data.viscosities:
            write_published(tmp_path, viscosity)
        training, _ = data.load(tmp_path)
        assert training.samples.conditions()[:, 0].tolist() == pytest.approx(
            [0.1] * 6 + [1] * 6 + [2] * 6
        )
        rows = training.samples.targets[:, 0, 0].int().reshape(3, 6)
        assert torch.equal(rows[0], rows[1])
        test = data.load_test(tmp_path)
        assert test.groups == ("0.1",) * 3 + ("1",) * 2 + ("2",) * 2
        assert test.samples.grid_shape == (TIMES, POINTS)

    def test_whole_numbers_may_be_written_short(self, tmp_path):
        path = write_published(tmp_path, 1.0)
        assert path.name == "1D_Burgers_Sols_Nu1.0.hdf5"
        path.rename(tmp_path / "1D_Burgers_Sols_Nu1.hdf5")
        replace(BURGERS, viscosities=(1.0,)).load(tmp_path)

    def test_preparing_keeps_it(self, tmp_path):
        path = write_published(tmp_path)
        before = path.read_bytes()
        BURGERS.prepare(tmp_path, "cpu", QUIET)
        assert path.read_bytes() == before


class TestLaziness:
    def test_loading_reads_only_the_rows_of_its_splits_in_small_blocks(self, tmp_path, monkeypatch):
        write_published(tmp_path, rows=200)
        read: list[tuple[int, int]] = []
        original = h5py.Dataset.read_direct

        def counted(self, destination, source_sel=None, dest_sel=None):
            if self.name == "/tensor":
                read.append((source_sel.start, source_sel.stop))
            return original(self, destination, source_sel, dest_sel)

        def whole(self, *arguments):
            assert self.name != "/tensor", "the tensor must be read into a buffer, in blocks"
            return original_item(self, *arguments)

        original_item = h5py.Dataset.__getitem__
        monkeypatch.setattr(h5py.Dataset, "read_direct", counted)
        monkeypatch.setattr(h5py.Dataset, "__getitem__", whole)
        monkeypatch.setattr(burgers_data, "_BLOCK_BYTES", 4 * TIMES * POINTS * 4)
        data = replace(BURGERS, training=40, validation=10, test=20)
        data.load(tmp_path)
        assert sum(stop - start for start, stop in read) == 50
        assert max(stop - start for start, stop in read) <= 4
        loaded = {row for start, stop in read for row in range(start, stop)}
        read.clear()
        data.load_test(tmp_path)
        tested = {row for start, stop in read for row in range(start, stop)}
        assert len(tested) == 20
        assert not loaded & tested

    def test_neighbouring_rows_are_read_together(self):
        rows = np.array([0, 1, 2, 3, 4, 7, 9, 10])
        assert list(runs(rows, 3)) == [slice(0, 3), slice(3, 5), slice(5, 6), slice(6, 8)]

    def test_fields_are_mapped_not_loaded(self, tmp_path):
        path = tmp_path / "darcy_train_16.pt"
        write_fields(path)
        file = open_fields(path)
        maps = Path("/proc/self/maps")
        if not maps.exists():
            pytest.skip("needs /proc")
        assert str(path) in maps.read_text()
        assert file.solutions[0, 0, 0].isfinite()


class TestFields:
    def test_a_published_file_is_read_as_stored(self, tmp_path):
        content = write_fields(tmp_path / "darcy_test_16.pt", rows=5)
        test = replace(DARCY, test=5).load_test(tmp_path)
        assert torch.equal(test.samples.targets, content["y"])
        expected = torch.where(content["x"], darcy.HIGH, darcy.LOW).flatten(1)
        assert torch.equal(test.samples.observed_values, expected)
        assert test.samples.observed_positions.shape == (256, 2)
        assert test.samples.observed_positions[17].tolist() == pytest.approx([1 / 15, 1 / 15])

    def test_a_made_file_has_the_published_layout(self, tmp_path):
        DARCY.prepare(tmp_path, "cpu", QUIET)
        content = torch.load(tmp_path / "darcy_train_16.pt", weights_only=True)
        assert content["x"].dtype == torch.bool
        assert content["y"].dtype == torch.float32
        assert content["x"].shape == content["y"].shape == (12, 16, 16)
        inputs, solutions = darcy.generate(12, 16, DARCY.seed, fine=DARCY.fine)
        assert torch.equal(content["x"], inputs)
        torch.testing.assert_close(content["y"], solutions)
        test = torch.load(tmp_path / "darcy_test_16.pt", weights_only=True)
        assert not any(torch.equal(row, other) for row in content["y"] for other in test["y"])


def spoil_tensor(path: Path, change) -> None:
    """Write a PDEBench file again with one thing changed."""
    with h5py.File(path, "r+") as file:
        change(file)


def replaced(name: str, values: np.ndarray):
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = values

    return change


def dropped(name: str):
    def change(file: h5py.File) -> None:
        del file[name]

    return change


def with_nan(file: h5py.File) -> None:
    file["tensor"][:, 2, 3] = np.nan


def with_overlap(file: h5py.File) -> None:
    file["split/training"], file["split/validation"] = [0, 1, 2, 3, 4, 5], [5, 6, 7]


def unfinished(file: h5py.File) -> None:
    file.attrs["complete_rows"] = 7


BAD_TRAJECTORIES = {
    "no tensor": (dropped("tensor"), "has no tensor"),
    "no coordinates": (dropped("x-coordinate"), "has no x-coordinate"),
    "flat tensor": (replaced("tensor", np.zeros((30, 9))), "must be floating-point of shape"),
    "whole numbers": (replaced("tensor", np.zeros((30, TIMES, POINTS), int)), "got int64"),
    "empty": (replaced("tensor", np.zeros((0, TIMES, POINTS))), r"got float64 of shape \(0, 21"),
    "other grid": (
        lambda file: [
            replaced("tensor", np.zeros((30, TIMES, 32)))(file),
            replaced("x-coordinate", (np.arange(32) + 0.5) / 32)(file),
        ],
        r"\(21, 32\) grid .* expected \(21, 64\)",
    ),
    "axis of another length": (replaced("x-coordinate", np.zeros(5)), "must hold 64 numbers"),
    "axis falls": (replaced("x-coordinate", np.linspace(1, 0, POINTS)), "must increase"),
    "nodes, not cells": (replaced("x-coordinate", np.linspace(0, 1, POINTS)), "x-coordinate runs"),
    "other times": (replaced("t-coordinate", np.arange(TIMES + 1.0)), "t-coordinate runs 0, 1"),
    "NaN": (with_nan, "holds NaN or infinity"),
    "overlapping splits": (with_overlap, "must not overlap"),
    "unfinished": (unfinished, "is unfinished, 7 of 30"),
    "too short": (
        replaced("tensor", trajectories(5)),
        "holds 5 trajectories, expected at least 11",
    ),
}


class TestBadFiles:
    @pytest.mark.parametrize("case", BAD_TRAJECTORIES)
    def test_trajectories(self, tmp_path, case):
        change, message = BAD_TRAJECTORIES[case]
        path = write_published(tmp_path)
        spoil_tensor(path, change)
        with pytest.raises(DataError, match=message) as error:
            BURGERS.load(tmp_path)
        one_line(error, path)

    @pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.99])
    def test_truncated_trajectories(self, tmp_path, keep):
        path = write_published(tmp_path)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(keep * len(whole))])
        with pytest.raises(DataError, match="expected|cannot be read as a PDEBench") as error:
            BURGERS.load(tmp_path)
        one_line(error, path)
        with pytest.raises(DataError) as error:
            check_file(path)
        one_line(error, path)

    def test_not_hdf5_at_all(self, tmp_path):
        path = tmp_path / "1D_Burgers_Sols_Nu0.1.hdf5"
        path.write_text("<html>404 not found</html>")
        with pytest.raises(DataError, match="cannot be read as a PDEBench HDF5 file") as error:
            BURGERS.load(tmp_path)
        one_line(error, path)
        with pytest.raises(DataError, match="is neither HDF5") as error:
            check_file(path)
        one_line(error, path)

    def test_missing_file(self, tmp_path):
        with pytest.raises(DataError, match="there is no such file") as error:
            BURGERS.load(tmp_path)
        one_line(error, tmp_path / "1D_Burgers_Sols_Nu0.1.hdf5")
        with pytest.raises(DataError, match="there is no such file"):
            check_file(tmp_path / "nothing.pt")

    def test_a_file_under_another_viscositys_name(self, tmp_path):
        BURGERS.prepare(tmp_path, "cpu", QUIET)
        path = tmp_path / "1D_Burgers_Sols_Nu0.2.hdf5"
        (tmp_path / "1D_Burgers_Sols_Nu0.1.hdf5").rename(path)
        with pytest.raises(DataError, match=r"made for viscosity 0\.1, expected 0\.2") as error:
            replace(BURGERS, viscosities=(0.2,)).load(tmp_path)
        one_line(error, path)

    def test_mixed_grids_in_one_folder(self, tmp_path):
        write_published(tmp_path, 0.1)
        second = write_published(tmp_path, 0.2, points=32)
        with pytest.raises(DataError, match="grid") as error:
            list(check_folder(tmp_path))
        one_line(error, second)
        with pytest.raises(DataError, match=r"expected \(21, 64\)") as error:
            replace(BURGERS, viscosities=(0.1, 0.2)).load(tmp_path)
        one_line(error, second)

    def test_too_few_named_rows(self, tmp_path):
        BURGERS.prepare(tmp_path, "cpu", QUIET)
        larger = replace(BURGERS, validation=4)
        for use in (larger.load, larger.prepare):
            with pytest.raises(DataError, match="holds 3 validation trajectories") as error:
                use(tmp_path)
            one_line(error, tmp_path / "1D_Burgers_Sols_Nu0.1.hdf5")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ({"y": torch.zeros(9, 16, 16)}, "has no tensor x, only y"),
            ({"x": torch.zeros(9, 16, 16), "y": torch.zeros(9, 16, 16)}, "x is torch.float32"),
            ({"x": torch.zeros(9, 16, 16) > 0, "y": torch.zeros(9, 16)}, r"y is .* \(9, 16\)"),
            ({"x": torch.zeros(9, 16, 16) > 0, "y": torch.zeros(8, 16, 16)}, "one shape"),
            ({"x": torch.zeros(9, 16, 8) > 0, "y": torch.zeros(9, 16, 8)}, r"\(9, 16, 8\)"),
            ({"x": torch.zeros(9, 8, 8) > 0, "y": torch.zeros(9, 8, 8)}, "8 × 8 grid, expected 16"),
            ({"x": torch.zeros(2, 16, 16) > 0, "y": torch.zeros(2, 16, 16)}, "holds 2 samples"),
            ({"x": torch.zeros(9, 16, 16) > 0, "y": torch.full((9, 16, 16), torch.nan)}, "NaN"),
            ([1, 2, 3], "got a list"),
            (torch.zeros(3), "got a Tensor"),
        ],
    )
    def test_fields(self, tmp_path, content, message):
        path = tmp_path / "darcy_train_16.pt"
        torch.save(content, path)
        with pytest.raises(DataError, match=message) as error:
            DARCY.load(tmp_path)
        one_line(error, path)

    @pytest.mark.parametrize("keep", [0.0, 0.3, 0.95])
    def test_truncated_fields(self, tmp_path, keep):
        path = tmp_path / "darcy_train_16.pt"
        write_fields(path)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(keep * len(whole))])
        with pytest.raises(DataError, match="cannot be read as a NeuralOperator") as error:
            DARCY.load(tmp_path)
        one_line(error, path)

    def test_text_under_the_name_of_fields(self, tmp_path):
        path = tmp_path / "darcy_train_16.pt"
        path.write_text("not a tensor")
        with pytest.raises(DataError, match="cannot be read as a NeuralOperator") as error:
            check_file(path)
        one_line(error, path)


class Malicious:
    """Unpickling this creates a file: the proof that code ran."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return Path.touch, (self.proof,)


class TestNothingIsUnpickled:
    def test_the_attack_works_on_a_plain_unpickler(self, tmp_path):
        proof = tmp_path / "proof"
        pickle.loads(pickle.dumps(Malicious(proof)))
        assert proof.exists()

    @pytest.mark.parametrize("form", ["torch", "torch legacy", "pickle", "zip"])
    def test_a_malicious_file_is_refused_and_does_not_run(self, tmp_path, form):
        proof, path = tmp_path / "proof", tmp_path / "darcy_train_16.pt"
        content = {"x": torch.zeros(9, 16, 16) > 0, "y": Malicious(proof)}
        if form == "torch":
            torch.save(content, path)
        elif form == "torch legacy":
            torch.save(content, path, _use_new_zipfile_serialization=False)
        elif form == "pickle":
            path.write_bytes(pickle.dumps(content))
        else:
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("archive/data.pkl", pickle.dumps(content))
        for use in (lambda: DARCY.load(tmp_path), lambda: check_file(path)):
            with pytest.raises(DataError, match="cannot be read as a NeuralOperator") as error:
                use()
            one_line(error, path)
        assert not proof.exists()


class TestCheck:
    def facts(self, path: Path) -> dict[str, str]:
        return dict(check_file(path).facts)

    def test_a_published_burgers_file(self, tmp_path):
        facts = self.facts(write_published(tmp_path))
        assert facts["trajectories"] == "30"
        assert facts["times"] == "21, 0 to 0.5"
        assert facts["splits"] == "none named, drawn by seed"
        mean = trajectories(30).astype(np.float64).mean()
        assert f"mean {mean:.4g}" in facts["values"]

    def test_made_files_tell_their_law(self, tmp_path):
        BURGERS.prepare(tmp_path, "cpu", QUIET)
        DARCY.prepare(tmp_path, "cpu", QUIET)
        facts = self.facts(tmp_path / "1D_Burgers_Sols_Nu0.1.hdf5")
        assert facts["splits"] == "6 training, 3 validation, 2 test"
        assert facts["seed"] == "0"
        assert facts["viscosity"] == "0.1"
        assert self.facts(tmp_path / "darcy_test_16.pt")["start"] == "12"
        assert len(list(check_folder(tmp_path))) == 3

    def test_points(self, tmp_path):
        path = tmp_path / "mine.h5"
        write_points(path, point_samples(9), DOMAIN)
        facts = self.facts(path)
        assert facts["samples"] == "9"
        assert facts["domain"] == "(0.0, -1.0) to (2.0, 1.0)"

    def test_points_channel_by_channel(self, tmp_path):
        points = [[0.5, 0.0], [1.0, 0.5]]
        targets = [[292.0, -1.0], [294.0, 3.0]]
        sample = PointSample(points, [[1.0], [2.0]], points, targets, condition=[0.25])
        labels = Labels(targets=[Label("T", "K"), Label("u", "m/s")], condition=["viscosity"])
        write_points(tmp_path / "mine.h5", [sample] * 3, DOMAIN, labels=labels)
        with pytest.warns(UserWarning, match="mean of the targets is far larger") as warned:
            facts = self.facts(tmp_path / "mine.h5")
        assert any("root mean squares differ" in str(each.message) for each in warned)
        temperature, speed = facts["targets"].splitlines()
        assert temperature == "T [K]: 292 to 294, mean 293, standard deviation 1"
        assert speed == "u [m/s]: -1 to 3, mean 1, standard deviation 2"
        assert facts["condition"].startswith("viscosity: 0.25 to 0.25")

    def test_every_number_is_looked_at(self, tmp_path):
        path = write_published(tmp_path)
        with h5py.File(path, "r+") as file:
            file["tensor"][29, 20, 63] = np.inf
        with pytest.raises(DataError, match="trajectory 29 holds NaN or infinity"):
            check_file(path)

    def test_an_empty_folder(self, tmp_path):
        with pytest.raises(DataError, match="holds no data file"):
            list(check_folder(tmp_path))


def test_opening_reads_the_layout(tmp_path):
    file = open_trajectories(write_published(tmp_path))
    assert (file.rows, file.grid) == (30, (TIMES, POINTS))
    assert file.partition is file.provenance is None


OUTSIDE = {
    "an external link": lambda file, other: file.__setitem__(
        "t-coordinate", h5py.ExternalLink(other, "t-coordinate")
    ),
    "a link to a pipe": lambda file, other: file.__setitem__(
        "t-coordinate", h5py.ExternalLink(other.with_name("pipe"), "/")
    ),
    "external storage": lambda file, other: file.create_dataset(
        "t-coordinate", (22,), "float32", external=[(str(other), 0, h5py.h5f.UNLIMITED)]
    ),
    "a virtual dataset": lambda file, other: file.create_virtual_dataset(
        "t-coordinate", virtual_layout(other)
    ),
    "a link in a group": lambda file, other: file.create_group("split").__setitem__(
        "training", h5py.ExternalLink(other, "t-coordinate")
    ),
}


def virtual_layout(other: Path) -> h5py.VirtualLayout:
    layout = h5py.VirtualLayout((22,), "float32")
    layout[:] = h5py.VirtualSource(other, "t-coordinate", (22,), "float32")
    return layout


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", OUTSIDE)
def test_nothing_outside_an_hdf5_file_is_read(tmp_path, name):
    other = write_published(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "given").mkdir()
    given = write_published(tmp_path / "given")
    with h5py.File(given, "r+") as file:
        if name != "a link in a group":
            del file["t-coordinate"]
        OUTSIDE[name](file, other)
    for read in (open_trajectories, check_file, read_points):
        with pytest.raises(
            DataError, match=rf"{given.name}: .* lies in another file, which is not read"
        ):
            read(given)


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.h5")
    with pytest.raises(DataError, match="is not a regular file"):
        read_points(tmp_path / "pipe.h5")


NOT_STORED = {
    "sparse": torch.ones(3, 4, 4).to_sparse(),
    "meta": torch.ones(3, 4, 4, device="meta"),
    "repeated": torch.ones(1, 1, 1).expand(10_000, 4_000, 4_000),
}


@pytest.mark.parametrize("name", NOT_STORED)
def test_tensors_that_are_not_stored_are_refused(tmp_path, name):
    path = tmp_path / "darcy_train_4.pt"
    torch.save({"x": torch.ones(3, 4, 4) > 0, "y": NOT_STORED[name]}, path)
    with pytest.raises(DataError) as error:
        open_fields(path)
    assert "the numbers of y are not all stored" in one_line(error, path)
