"""What the relative error asks of a user's targets: refused or warned of where files are read."""

from pathlib import Path

import numpy as np
import pytest

from data_examples import DOMAIN
from fst.cli import main
from fst.data import DataError, PointData, PointSample, check_file, write_points
from tiny import TRAINING


def sample(*targets: list[float], mask: list[bool] | None = None) -> PointSample:
    asked = [[1.0, 0.0]] * len(targets)
    return PointSample([[0.5, 0.0]], [[1.0]], asked, list(targets), query_mask=mask)


ONE = sample([3.0])


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "mine.h5"


def with_targets(*numbers: float) -> list[PointSample]:
    return [sample([number], [0.0]) for number in numbers]


class TestTargets:
    """What the relative error cannot measure, or measures badly."""

    SPLITS = {"training": [0, 1], "validation": [2, 3], "test": [4, 5]}  # noqa: RUF012

    @pytest.mark.parametrize("wrong", [0.0, 1e-30, 1e-22, 1e-16, 1e18, 1e30])
    @pytest.mark.parametrize("row", range(6))
    def test_samples_without_a_relative_error_are_named(self, path, wrong, row):
        numbers = [1.0] * 6
        numbers[row] = wrong
        write_points(path, with_targets(*numbers), DOMAIN, splits=self.SPLITS)
        message = rf"mine\.h5: the relative error is undefined for .* in sample {row};"
        with pytest.raises(DataError, match=message):
            (PointData().load if row < 4 else PointData().load_test)(path)
        (PointData().load_test if row < 4 else PointData().load)(path)  # the others are good
        with pytest.raises(DataError, match=message):
            check_file(path)

    def test_a_sample_much_smaller_than_the_others_is_not_learned_from(self, path):
        """Its first gradient would overflow; in a test it is only a large error."""
        write_points(path, with_targets(1.0, 1e-9, 1.0, 1.0, 1e-9, 1.0), DOMAIN, splits=self.SPLITS)
        with pytest.raises(DataError, match="beside the others, as they are in sample 1;"):
            PointData().load(path)
        PointData().load_test(path)

    @pytest.mark.parametrize("size", [1e-14, 1e-4, 1e4, 1e14])
    def test_any_unit_in_between_can_be_learned(self, path, tmp_path, size):
        random = np.random.default_rng(0)
        samples = [
            PointSample([[0.5, 0.0]], [[size]], random.random((4, 2)), size * random.random((4, 1)))
            for _ in range(9)
        ]
        write_points(path, samples, DOMAIN)
        small = "--model.width 16 --model.heads 2 --model.rows 2 --model.anchors-per-row 2 "
        small += "--model.points-from-anchors 4 --model.points-from-sobol 4"
        words = [*small.split(), *TRAINING, "--device", "cpu", "--data", path]
        words += ["--out", tmp_path / "run"]
        assert main(["train", "own/fst", *map(str, words)]) == 0

    def test_all_of_them_are_named_across_blocks(self, path, monkeypatch):
        monkeypatch.setattr("fst.data.point_files.BLOCK", 2)
        write_points(path, with_targets(0.0, 1.0, 1.0, 0.0, 2.0), DOMAIN)
        with pytest.raises(DataError, match="in samples 0, 3;"):
            check_file(path)

    def test_padding_does_not_count(self, path):
        padded = sample([0.0], [5.0], mask=[True, False])
        write_points(path, [ONE, padded, ONE], DOMAIN)
        with pytest.raises(DataError, match="in sample 1;"):
            check_file(path)

    def test_channels_of_very_different_sizes_bring_a_warning(self, path, recwarn):
        def write(*sizes: float) -> None:
            samples = [sample(list(sizes), [-size for size in sizes])] * 10
            write_points(path, samples, DOMAIN, force=True)

        for sizes in ((3.0,), (1.0, 9.5)):
            write(*sizes)
            check_file(path)
            PointData().load(path)
        assert [str(each.message) for each in recwarn] == []
        write(1.0, 0.0)
        for read in (check_file, PointData().load):
            with pytest.warns(UserWarning, match="nothing to learn .* constant: targets 1"):
                read(path)
        write(2.0, 50.0, 10.0)
        for read in (check_file, PointData().load):
            message = r"factor of 25 \(targets 0: 2, targets 1: 50, targets 2: 10\)"
            with pytest.warns(UserWarning, match=message):
                read(path)
