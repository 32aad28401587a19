"""What is said of an error: after training, and by `fst evaluate`."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from evaluation_fakes import SETTINGS, made_row, some_points, some_test
from fst.commands.evaluate import described_facts, show
from fst.data import BurgersData, DarcyData, Labels, PointData, PointSample, write_points
from fst.data.source import TrainingSplit, ValidationSplit
from fst.evaluation.classification import ClassificationSettings
from fst.evaluation.protocol import EvaluationSettings, trivial_rows
from fst.evaluation.rows import RESULTS, ROWS, ChannelError, Origin, write_rows
from fst.evaluation.trivial import TrainingFacts
from fst.types import Domain


def splits_of(samples):
    return TrainingSplit(samples), ValidationSplit(samples)


def test_a_validation_error_stands_beside_the_best_trivial_predictor():
    samples, data = some_test().samples, BurgersData(viscosities=(0.1, 0.2))
    whole = EvaluationSettings(grids=(samples.grid_shape,))
    facts = TrainingFacts((samples.statistics().output_mean.item(),))
    rows = trivial_rows(some_test(), whole, Origin("", "", "", ""), facts)
    best = min(rows, key=lambda row: row.error)
    settings = replace(SETTINGS, paper_errors=(0.1, 0.2), neighbors=(1,))
    words = settings.describe_validation(best.error / 4, splits_of(samples), data, Path())
    assert words.startswith(f"Validation error: {best.error / 4:.5f}, 4.0 times lower than")
    assert f"{best.model} ({best.error:.5f})" in words
    assert "no better than" in SETTINGS.describe_validation(2.0, splits_of(samples), data, Path())


def test_another_quantity_is_not_interpolated():
    samples = some_points().samples
    said = EvaluationSettings(grids=()).describe_validation
    assert "mean of the training targets" in said(9.0, splits_of(samples), DarcyData(), Path())
    said = ClassificationSettings().describe_validation
    assert said(0.25, (None, None), DarcyData(), Path()) == "Validation error: 0.25000."


def test_channels_of_a_users_file_are_interpolated_by_name(tmp_path):
    random, samples = np.random.default_rng(0), []
    for _ in range(4):
        points, values = random.uniform(size=(9, 2)), random.normal((0, 2), size=(9, 2))
        samples.append(PointSample(points, values, points, values[:, ::-1]))
    path, labels = tmp_path / "swapped.h5", Labels(values=["u", "v"], targets=["v", "u"])
    write_points(path, samples, Domain.unit(2), labels=labels)
    splits, settings = PointData().load(path), EvaluationSettings(grids=())
    words = settings.describe_validation(0.1, splits, PointData(), path)
    assert "no better than the best trivial predictor, inverse-distance interpolation" in words


@pytest.mark.parametrize(
    ("mean", "std", "warned"), [(293.0, 4.0, True), (3.0, 4.0, False), (293.0, 0.0, True)]
)
def test_a_large_mean_is_warned_of(tmp_path, mean, std, warned):
    channel = ChannelError("temperature", "K", 0.01, 2.0, std)
    write_rows(tmp_path / RESULTS / ROWS, [made_row(channels=(channel,), grid=None)])
    (tmp_path / "run.json").write_text(
        json.dumps({"output_mean": [mean], "output_deviation": [std]})
    )
    output = StringIO()
    show(tmp_path, Console(file=output, width=200))
    share = "its RMSE is 50.0 % of the targets' standard deviation"
    assert (share in output.getvalue()) == (std > 0)
    dwarfed = f"temperature (mean 293, standard deviation {std:g}) dwarfs"
    assert (dwarfed in output.getvalue()) == warned


def test_what_an_old_run_did_not_record_is_not_known():
    assert described_facts({}) == TrainingFacts()
    assert described_facts({"output_mean": [1.0], "output_std": [2.0]}) == TrainingFacts(
        (1.0,), (2.0,)
    )
