"""A user's own points: what is written is read again, and mistakes are named."""

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from data_examples import DOMAIN, point_samples
from fst.commands.data import check
from fst.data import (
    DataError,
    Label,
    Labels,
    PointData,
    PointSample,
    check_file,
    read_points,
    write_points,
)
from fst.data.point_files import LEAST_STEPS, check_resolution
from fst.types import Domain

ONE = PointSample(
    positions=[[0.5, 0.0], [1.0, 0.5]],
    values=[[1.0], [2.0]],
    queries=[[1.5, -0.5]],
    targets=[[3.0]],
)


def arrays(sample: PointSample) -> list[np.ndarray]:
    fields = (sample.positions, sample.values, sample.queries, sample.targets, sample.condition)
    return [np.asarray(field, np.float32) for field in fields if field is not None]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "mine.h5"


class TestRoundTrip:
    def test_samples_of_many_sizes(self, path):
        samples = point_samples(30)
        write_points(path, samples, DOMAIN)
        file = read_points(path)
        assert len(file) == 30
        assert file.domain == DOMAIN
        channels = (file.value_channels, file.output_channels, file.condition_channels)
        assert channels == (2, 1, 1)
        for got, wanted in zip(file, samples, strict=True):
            for ours, theirs in zip(arrays(got), arrays(wanted), strict=True):
                assert np.array_equal(ours, theirs)

    @pytest.mark.parametrize("nested", [False, True])
    def test_what_a_masked_array_hides_is_left_out(self, path, nested):
        """netCDF readers return such arrays, with any number in the hidden places."""
        hidden = np.ma.array([[1.0], [9e36], [3.0]], mask=[[False], [True], [False]])
        where = np.array([[0.1, 0.0], [0.2, 0.0], [0.3, 0.0]])
        given = list(hidden) if nested else hidden
        sample = PointSample(where, given, np.ma.array(where), given, np.ma.array([2.0]))
        write_points(path, [sample], DOMAIN)
        (got,) = read_points(path)
        for positions, values in ((got.positions, got.values), (got.queries, got.targets)):
            assert np.array_equal(positions, where[[0, 2]].astype(np.float32))
            assert np.array_equal(values, [[1.0], [3.0]])
        masked = PointSample(where, hidden, where, hidden, np.ma.masked_all(1))
        with pytest.raises(
            ValueError, match=r"condition must .* got shape \(1,\) with masked ones"
        ):
            write_points(path, [masked], DOMAIN, force=True)

    def test_samples_arrive_one_at_a_time_and_are_flushed_in_parts(self, path, monkeypatch):
        monkeypatch.setattr("fst.data.point_files._FLUSH_POINTS", 40)
        samples = point_samples(30)
        write_points(path, (sample for sample in samples), DOMAIN)
        for got, wanted in zip(read_points(path), samples, strict=True):
            assert np.array_equal(got.targets, np.asarray(wanted.targets, np.float32))

    def test_names_units_and_splits(self, path):
        labels = Labels(axes=("time", Label("height", "m")), targets=(Label("heat", "W/m²"),))
        splits = {"training": [3, 0], "validation": [1]}
        write_points(path, [ONE] * 4, DOMAIN, labels=labels, splits=splits)
        file = read_points(path)
        assert file.axes == (Label("time"), Label("height", "m"))
        assert file.targets == (Label("heat", "W/m²"),)
        assert file.values == (Label("values 0"),)
        assert file.condition == ()
        assert file.partition is not None
        assert file.partition.training.tolist() == [0, 3]
        assert file.partition.test.tolist() == []

    def test_text_of_other_writers(self, path):
        """MATLAB and others write text of fixed length, and one entry alone."""
        write_points(path, [ONE], DOMAIN)
        with h5py.File(path, "r+") as file:
            file.attrs["format"] = np.bytes_("fst-points")
            file.attrs["axes_names"] = np.array(["time", "höhe".encode()], "S5")
            file.attrs["values_names"], file.attrs["values_units"] = "heat", "W"
        file = read_points(path)
        assert file.axes == (Label("time"), Label("höhe"))
        assert file.values == (Label("heat", "W"),)
        with h5py.File(path, "r+") as file:
            file.attrs["axes_names"] = file.attrs["axes_units"] = []
        assert read_points(path).axes == (Label("x"), Label("y"))

    def test_torch_tensors_and_masks(self, path):
        sample = PointSample(
            torch.tensor([[0.5, 0.0], [9.0, 9.0]]),
            torch.tensor([[1.0], [torch.nan]]),
            torch.tensor([[1.0, 0.0]]),
            torch.tensor([[2.0]]),
            mask=torch.tensor([True, False]),
        )
        write_points(path, [sample], DOMAIN)
        assert np.array_equal(read_points(path)[0].positions, [[0.5, 0.0]])

    def test_arrays_that_the_caller_fills_again(self, path):
        targets = np.empty((1, 1), np.float32)

        def samples():
            for number in (1.0, 2.0, 3.0):
                targets[:] = number
                yield changed(targets=targets)

        write_points(path, samples(), DOMAIN)
        assert [sample.targets.item() for sample in read_points(path)] == [1.0, 2.0, 3.0]

    def test_one_and_three_axes(self, path):
        for axes in (1, 3):
            point = [[0.25] * axes]
            sample = PointSample(point, [[1.0]], point, [[2.0]])
            write_points(path, [sample], Domain.unit(axes), force=True)
            assert read_points(path).domain.axes == axes


class TestPointData:
    def test_named_splits_are_used(self, path):
        splits = {"training": [0, 2, 4], "validation": [1, 7], "test": [5]}
        samples = point_samples(8)
        write_points(path, samples, DOMAIN, splits=splits)
        data = PointData()
        training, validation = data.load(path)
        test = data.load_test(path)
        for split, rows in zip((training, validation, test), splits.values(), strict=True):
            wanted = [np.float32(samples[row].condition[0]) for row in rows]
            assert split.samples.conditions()[:, 0].tolist() == wanted

    def test_a_folder_is_searched_for_the_named_file(self, path):
        write_points(path, point_samples(8), DOMAIN)
        assert PointData(file="mine.h5").describe(path.parent).path == path
        assert PointData().describe(path).path == path

    def test_preparing_checks_and_makes_nothing(self, path):
        with pytest.raises(DataError, match="there is no such file"):
            PointData().prepare(path)
        write_points(path, [ONE], DOMAIN)
        with pytest.raises(DataError, match="its training split is empty; the file holds 1 sampl"):
            PointData().prepare(path)

    def test_the_smallest_file_that_can_be_split(self, path):
        write_points(path, [ONE, ONE], DOMAIN)
        training, validation = PointData().load(path)
        assert (len(training.samples), len(validation.samples)) == (1, 1)
        with pytest.raises(DataError, match="its test split is empty"):
            PointData().load_test(path)

    @pytest.mark.parametrize("fractions", [(0.0, 0.1), (0.5, 0.5), (0.1, -0.1), (1.0, 0.0)])
    def test_wrong_fractions(self, fractions):
        with pytest.raises(ValueError, match="validation_fraction must be positive"):
            PointData(validation_fraction=fractions[0], test_fraction=fractions[1])

    def test_augmentation_is_refused(self, path):
        write_points(path, point_samples(8), DOMAIN)
        with pytest.raises(ValueError, match="augment must be off"):
            PointData().load(path, augment=True)


def changed(**changes: object) -> PointSample:
    fields = ("positions", "values", "queries", "targets", "condition", "mask", "query_mask")
    return PointSample(**{name: changes.get(name, getattr(ONE, name)) for name in fields})


class TestWriterMistakes:
    @pytest.mark.parametrize(
        ("sample", "message"),
        [
            (changed(values=[[1.0]]), r"sample 1: observations .* got \(2, 2\) and \(1, 1\)"),
            (changed(positions=[[0.5], [1.0]]), "must have 2 axes, got 1"),
            (changed(queries=[[3.0, 0.0]]), "sample 1: queries must lie in the domain"),
            (changed(targets=[[np.nan]]), "sample 1: queries must be finite"),
            (changed(targets=[[1.0, 2.0]]), "sample 1: queries/targets must have 1 channels"),
            (changed(condition=[1.0]), "sample 1: condition must hold 0 finite numbers"),
            (changed(condition=[np.nan]), r"condition .* got shape \(1,\) with NaN or infinity"),
            (changed(values=np.ones((2, 0))), r"observations must .* got \(2, 2\) and \(2, 0\)"),
            (changed(mask=[False, False]), "must hold at least one point"),
            (changed(mask=[True]), r"mask must be bool of shape \(2,\)"),
            (
                changed(values=[[1j], [2.0]]),
                "sample 1: values must be real numbers, got complex128",
            ),
            (changed(targets=torch.ones(1, 1) * 1j), "sample 1: targets must be real numbers"),
            (changed(positions=np.ones((2, 2), complex)), "sample 1: positions must be real"),
            (changed(condition=np.array([1j])), "sample 1: condition must be real numbers"),
            (
                changed(values=np.array([["2024-01-01"], ["2024-01-02"]], "datetime64[D]")),
                "sample 1: values must be real numbers, got datetime64.D.; give the time since",
            ),
            (changed(targets=np.array([[3]], "timedelta64[s]")), r"divide it by a unit"),
            (changed(values=[["1"], ["2"]]), "sample 1: values must be real numbers, got <U1"),
            (changed(values=[[None], [2.0]]), "sample 1: values must be real numbers, got object"),
            (changed(values=[[1.0], [2.0, 3.0]]), "sample 1: values must be an array of numbers"),
            (changed(targets=np.ma.masked_all((1, 1))), "must hold at least one point"),
        ],
    )
    def test_a_bad_sample_is_named_and_nothing_is_left(self, path, sample, message):
        with pytest.raises(ValueError, match=message):
            write_points(path, [ONE, sample], DOMAIN)
        assert list(path.parent.iterdir()) == []

    def test_bad_channels_are_noticed_after_a_flush(self, path, monkeypatch):
        monkeypatch.setattr("fst.data.point_files._FLUSH_POINTS", 0)
        with pytest.raises(ValueError, match="must have 1 channels like the samples before, got 2"):
            write_points(path, [ONE, changed(targets=[[1.0, 2.0]])], DOMAIN)

    def test_no_samples(self, path):
        with pytest.raises(ValueError, match="at least one sample"):
            write_points(path, [], DOMAIN)

    def test_overlapping_splits(self, path):
        with pytest.raises(ValueError, match="must not overlap"):
            write_points(path, [ONE] * 3, DOMAIN, splits={"training": [0], "test": [0]})

    @pytest.mark.parametrize("splits", [{"training": [0, 1]}, {"training": [0], "validation": []}])
    def test_splits_without_validation(self, path, splits):
        with pytest.raises(DataError, match="its validation split is empty; the file holds 3 samp"):
            write_points(path, [ONE] * 3, DOMAIN, splits=splits)
        assert list(path.parent.iterdir()) == []

    @pytest.mark.parametrize("error", [FileNotFoundError(2, "none", "a.csv"), RuntimeError("boom")])
    def test_errors_of_the_callers_own_code_stay_what_they_are(self, path, error, monkeypatch):
        monkeypatch.setattr("fst.data.point_files._FLUSH_POINTS", 0)

        def samples():
            yield ONE
            raise error

        path.write_text("precious")
        with pytest.raises(type(error)) as caught:
            write_points(path, samples(), DOMAIN, force=True)
        assert caught.value is error
        assert [file.name for file in path.parent.iterdir()] == [path.name]
        assert path.read_text() == "precious"

    @pytest.mark.parametrize("when", ["h5py.File", "h5py.Dataset.resize", "h5py.File.close"])
    def test_a_disk_that_fails_is_blamed_on_the_file(self, path, when, monkeypatch):
        def fail(*arguments, **settings):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(when, fail)
        with pytest.raises(DataError, match=r"mine\.h5: cannot be written \(no space left"):
            write_points(path, [ONE], DOMAIN)

    def test_wrong_number_of_names(self, path):
        with pytest.raises(ValueError, match=r"labels.axes must name 2 of them, got 1"):
            write_points(path, [ONE], DOMAIN, labels=Labels(axes=("x",)))

    def test_repeated_names(self):
        with pytest.raises(ValueError, match="labels.values must not repeat a name, got u, u"):
            Labels(values=("u", Label("u", "m")))

    @pytest.mark.parametrize("axes", [[("x", "m"), "y"], [1, 2], 2])
    def test_labels_that_are_none(self, axes):
        with pytest.raises(TypeError, match="labels.axes must be "):
            Labels(axes=axes)

    def test_nothing_is_overwritten_without_force(self, path):
        path.write_text("precious")
        with pytest.raises(DataError, match="use --force"):
            write_points(path, [ONE], DOMAIN)
        assert path.read_text() == "precious"
        write_points(path, [ONE], DOMAIN, force=True)
        assert len(read_points(path)) == 1


class TestResolution:
    """Positions far from 0 fall together in float32."""

    @pytest.mark.parametrize("width", [600.0, 1024.0])
    def test_times_since_1970_are_refused_by_writer_and_reader(self, path, width):
        early, late = 1.7e9, 1.7e9 + width
        asked = np.linspace(early, late, 61)[:, None]
        assert len(np.unique(asked.astype(np.float32))) < 10  # what would be left of them
        sample = PointSample(asked, np.ones((61, 1)), asked, np.ones((61, 1)))
        message = rf"mine\.h5: float32 cannot resolve .* is {width:g} wide, .* 128 apart.* subtract"
        with pytest.raises(DataError, match=message):
            write_points(path, [sample], Domain((early,), (late,)))
        assert list(path.parent.iterdir()) == []
        shifted = PointSample(asked - early, sample.values, asked - early, sample.targets)
        write_points(path, [shifted], Domain((0.0,), (width,)))
        assert len(np.unique(read_points(path)[0].queries)) == 61
        with h5py.File(path, "r+") as file:
            file.attrs["low"], file.attrs["high"] = (early,), (late,)
        for read in (read_points, check_file):
            with pytest.raises(DataError, match=message):
                read(path)

    @pytest.mark.parametrize("low", [2.0**20, -(2.0**20), 2.0**-10])
    def test_rounding_keeps_points_in_the_smallest_domain_accepted(self, path, low):
        edge = max(abs(low), abs(np.nextafter(low, np.inf)))
        width = float(LEAST_STEPS * np.spacing(np.float32(edge)))
        random = np.random.default_rng(0)
        # Edges that float32 does not hold, and points between them and just on them.
        domain = Domain((0.0, low + width / 7 / LEAST_STEPS), (1.0, low + width * 8 / 7))
        points = random.uniform(domain.low, domain.high, (1000, 2))
        points[:2] = domain.low, domain.high
        write_points(path, [PointSample(points, points, points, points)], domain)
        assert len(read_points(path)[0].positions) == 1000

    def test_the_worst_axis_decides(self):
        check_resolution(Domain((0.0, 1e6), (1.0, 2e6)))
        with pytest.raises(ValueError, match="on axis 1, which is 100 wide, .* 0.0625 apart"):
            check_resolution(Domain((0.0, 1e6), (1.0, 1e6 + 100)))
        with pytest.raises(ValueError, match="float32 cannot resolve"):
            check_resolution(Domain((0.0,), (1e39,)))


def put(name: str, value: object):
    def change(file: h5py.File) -> None:
        if name in file:
            del file[name]
        if value is not None:
            file[name] = value

    return change


def attribute(name: str, value: object):
    def change(file: h5py.File) -> None:
        file.attrs[name] = value

    return change


def poison(name: str, value: float):
    def change(file: h5py.File) -> None:
        file[name][2] = value

    return change


BAD_FILES = {
    "another format": (attribute("format", "other"), "has no attribute format = 'fst-points'"),
    "a later version": (attribute("version", 9), "format version 9, expected 1"),
    "no targets": (put("queries/targets", None), "has no queries/targets"),
    "offsets fall": (put("queries/offsets", [0, 2, 1, 4]), "queries/offsets must rise"),
    "offsets too long": (put("queries/offsets", [0, 1, 2, 3, 99]), "queries/offsets must rise"),
    "fewer queried samples": (put("queries/offsets", [0, 1, 4]), "are of 4 samples, queries of 2"),
    "fewer values": (put("observations/values", np.zeros((3, 1))), "8 positions but 3 values"),
    "channels": (put("queries/targets", np.zeros((4, 2))), r"must be .* of shape \(n, 1\)"),
    "domain": (attribute("high", (0.0, 1.0)), "low must be below high on axis 0"),
    "outside": (poison("queries/positions", 7.0), "queries/positions leave the domain"),
    "NaN": (poison("observations/values", np.nan), "observations/values of sample 1 holds NaN"),
    "splits": (put("split/training", [0, 11]), "rows 0 to 3"),
    "one name twice": (attribute("axes_names", ["x", "x"]), "labels.axes must not repeat a name"),
    "a name for two axes": (
        lambda file: file.attrs.update(axes_names=["x"], axes_units=[""]),
        "labels.axes must name 2 of them, got 1",
    ),
    "no names": (lambda file: file.attrs.pop("axes_names"), "cannot be read as an fst point"),
}


class TestBadFiles:
    @pytest.mark.parametrize("case", BAD_FILES)
    def test_each_gives_one_line_with_the_files_name(self, path, case):
        change, message = BAD_FILES[case]
        write_points(path, [ONE] * 4, DOMAIN)
        with h5py.File(path, "r+") as file:
            change(file)
        with pytest.raises(DataError, match=message) as error:
            for _ in read_points(path):
                pass
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("keep", [0.0, 0.2, 0.9])
    def test_truncated(self, path, keep):
        write_points(path, [ONE] * 4, DOMAIN)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(keep * len(whole))])
        with pytest.raises(DataError, match="cannot be read as an fst point file"):
            read_points(path)

    def test_a_check_refuses_splits_that_training_would(self, path):
        write_points(path, [ONE] * 4, DOMAIN, splits={"training": [0], "validation": [1]})
        with h5py.File(path, "r+") as file:
            del file["split/validation"]
        for read in (check_file, PointData().load):
            with pytest.raises(DataError, match="its validation split is empty"):
                read(path)

    @pytest.mark.parametrize(("samples", "empty"), [(1, "training and test"), (3, "test")])
    def test_a_check_says_what_a_file_is_too_small_for(self, path, samples, empty):
        write_points(path, point_samples(samples), DOMAIN)
        with pytest.warns(UserWarning, match=f"holds no samples for {empty}: fst train needs"):
            facts = dict(check_file(path).facts)
        counts = f"{max(0, samples - 1)} training, 1 validation, 0 test"
        assert facts["splits"] == f"none named, drawn by seed: {counts}"

    def test_rows_outside_the_file(self, path):
        write_points(path, [ONE] * 4, DOMAIN)
        with pytest.raises(IndexError, match="row must lie between 0 and 3, got 4"):
            read_points(path)[4]


def test_the_documented_example_works(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/data.md", "exec"), {})
    file = read_points("waves.h5")
    assert len(file) == 200
    assert file.axes == (Label("x", "m"),)
    training, validation = PointData().load(Path("waves.h5"))
    assert (len(training.samples), len(validation.samples)) == (160, 20)
    check(Path("waves.h5"))
    assert "x [m]" in capsys.readouterr().out


def test_reading_one_sample_reads_only_its_points(path, monkeypatch):
    write_points(path, point_samples(30), DOMAIN)
    file = read_points(path)
    read = []
    original = h5py.Dataset.read_direct

    def counted(self, destination, source_sel=None, dest_sel=None):
        read.append(source_sel.stop - source_sel.start)
        return original(self, destination, source_sel, dest_sel)

    monkeypatch.setattr(h5py.Dataset, "read_direct", counted)
    sample = file[17]
    observed, queried = len(np.asarray(sample.positions)), len(np.asarray(sample.queries))
    assert read == [observed, observed, queried, queried]
