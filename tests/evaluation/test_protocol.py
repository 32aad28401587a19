"""The paper's test protocol, restated plainly, against the one that shares its work."""

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch

from evaluation_fakes import (
    GRID,
    ORIGIN,
    SETTINGS,
    Constant,
    ConstantModel,
    burgers_test,
    some_model,
    some_rows,
    some_test,
    waves,
)
from fst.baselines.shared import GridOutput
from fst.data import BurgersData
from fst.data.point_samples import PointSamples, Ragged
from fst.data.source import TestSplit, TrainingSplit, ValidationSplit
from fst.evaluation.protocol import (
    EvaluationError,
    EvaluationSettings,
    evaluate,
)
from fst.types import Domain
from precision_examples import lower_precision
from small import small_config


def restated(model, test, settings, grid, neighbors=None):
    """One grid at a time: reset the seeds, refine every batch, decode, and measure in float64."""
    samples = test.samples.on_grid(grid)
    stream = model.point_stream(settings.anchor_seed, settings.sobol_seed)
    errors = []
    for start in range(0, len(samples), settings.batch_size):
        if settings.reset == "batch":
            stream = model.point_stream(settings.anchor_seed, settings.sobol_seed)
        batch = samples.batch(torch.arange(start, min(start + settings.batch_size, len(samples))))
        with torch.no_grad():
            field = model(batch.observations, stream.draw())
            prediction = field(batch.queries, neighbors).double().numpy()
        truth = batch.targets.double().numpy()
        for wrong, right in zip(prediction - truth, truth, strict=True):
            errors.append(np.linalg.norm(wrong) / np.linalg.norm(right))
    return errors


@pytest.mark.parametrize("reset", ["grid", "batch"])
def test_every_grid_has_the_errors_of_the_protocol_step_by_step(reset):
    model, test, settings = some_model(), some_test(), replace(SETTINGS, reset=reset)
    rows = evaluate(model, test, settings, ORIGIN)
    assert [row.grid for row in rows] == [(5, 6), GRID]
    for row in rows:
        expected = restated(model, test, settings, row.grid)
        np.testing.assert_allclose(row.errors, expected, rtol=1e-5)
        assert row.samples == 10
        assert row.error == fmean(row.errors)


def test_the_two_ways_to_reset_agree_on_the_first_batch_and_on_no_other():
    model, test = some_model(), some_test()
    by_grid, by_batch = (
        evaluate(model, test, replace(SETTINGS, reset=reset), ORIGIN)[-1].errors
        for reset in ("grid", "batch")
    )
    assert by_grid[:4] == by_batch[:4]
    assert all(a != b for a, b in zip(by_grid[4:], by_batch[4:], strict=True))


def test_seeds_decide_the_errors():
    model, test = some_model(), some_test()
    first, again, other = (
        evaluate(model, test, replace(SETTINGS, sobol_seed=seed), ORIGIN)[-1].errors
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_local_decoding_is_measured_on_the_last_grid():
    model, test = some_model(), some_test()
    anchors = model.config.anchors
    settings = replace(SETTINGS, neighbors=(1, 4, anchors))
    rows = evaluate(model, test, settings, ORIGIN)
    assert [(row.grid, row.neighbors) for row in rows[2:]] == [
        (GRID, 1),
        (GRID, 4),
        (GRID, anchors),
    ]
    for row in rows[2:]:
        expected = restated(model, test, settings, GRID, row.neighbors)
        np.testing.assert_allclose(row.errors, expected, rtol=1e-5)
    assert rows[-1].errors == rows[1].errors  # all anchors are near enough
    assert rows[2].errors != rows[1].errors


def test_a_batch_is_refined_once_for_all_grids_and_neighbours(monkeypatch):
    model, test = some_model(), some_test()
    sizes = []
    represent = model.represent
    monkeypatch.setattr(
        model, "represent", lambda o, *more: sizes.append(len(o)) or represent(o, *more)
    )
    evaluate(model, test, replace(SETTINGS, neighbors=(1, 2)), ORIGIN)
    assert sizes == [4, 4, 2]


def test_models_without_anchors_have_no_local_decoding():
    rows = evaluate(ConstantModel(), some_test(), replace(SETTINGS, neighbors=(1, 2)), ORIGIN)
    assert [(row.grid, row.neighbors) for row in rows] == [((5, 6), None), (GRID, None)]


def test_a_constant_has_the_error_that_pen_and_paper_give():
    fields = torch.stack([torch.full(GRID, 2.0), torch.full(GRID, -1.0)])
    rows = evaluate(ConstantModel(0.5), burgers_test(fields), SETTINGS, ORIGIN)
    for row in rows:
        assert row.errors == (0.75, 1.5)  # |0.5 - 2| / 2 and |0.5 + 1| / 1
        assert row.error == 1.125


def test_a_model_that_knows_one_grid_is_read_at_its_indices():
    # As the paper reads FNO: predictions at coarser grids are taken from the original one.
    fields = waves(10)

    class OnGrid(ConstantModel):
        def represent(self, observations, draws=None):
            rows = slice(len(self.calls), len(self.calls) + len(observations))
            self.calls += [{}] * len(observations)
            values = 1.5 * fields[rows].flatten(1)[..., None]
            return GridOutput(self.domain, GRID, values)

    for row in evaluate(OnGrid(), burgers_test(fields), SETTINGS, ORIGIN):
        np.testing.assert_allclose(row.errors, 0.5, rtol=1e-5)


def test_padding_does_not_count():
    def ragged(sizes, value):
        count = sum(sizes)
        return Ragged.of(torch.rand(count, 2), torch.full((count, 1), value), torch.tensor(sizes))

    samples = PointSamples(Domain.unit(2), ragged([3, 2], 1.0), ragged([2, 5], 2.0))
    settings = EvaluationSettings(grids=(), batch_size=2)
    (row,) = evaluate(ConstantModel(1.0), TestSplit(samples), settings, ORIGIN)
    assert row.grid is None
    assert row.errors == (0.5, 0.5)
    with pytest.raises(EvaluationError, match="lie on no grid"):
        evaluate(ConstantModel(1.0), TestSplit(samples), SETTINGS, ORIGIN)


@pytest.mark.parametrize("kind", [TrainingSplit, ValidationSplit, lambda samples: samples])
def test_only_a_test_split_is_scored(kind):
    with pytest.raises(TypeError, match="test must be a TestSplit"):
        evaluate(ConstantModel(), kind(some_test().samples), SETTINGS, ORIGIN)


def test_everything_runs_in_full_precision_and_is_put_back():
    model = ConstantModel().train()
    with lower_precision():
        evaluate(model, some_test(), SETTINGS, ORIGIN)
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert model.training
    assert len(model.calls) == 3
    for call in model.calls:
        assert call == {
            "draws": None,
            "training": False,
            "inference": True,
            "product": torch.float32,
            "matmul": "highest",
            "convolution": False,
        }


def test_a_prediction_that_is_not_finite_names_its_sample(monkeypatch):
    def represent(self, observations, draws=None):
        value = self.value.expand(len(observations), 1, 1).clone()
        if len(observations) == 2:  # the last batch
            value[1] = torch.nan
        return Constant(observations, value)

    monkeypatch.setattr(ConstantModel, "represent", represent)
    with pytest.raises(EvaluationError, match=r"test sample 9 on the 5×6 grid is not finite"):
        evaluate(ConstantModel(), some_test(), SETTINGS, ORIGIN)


def test_groups_have_their_own_means_and_the_papers_beside_them():
    groups = ("0.01",) * 6 + ("1.0",) * 4
    settings = replace(SETTINGS, paper_errors=(0.3, 0.4), paper_groups=(("0.01", 0.5), ("1", 0.25)))
    coarse, fine = evaluate(some_model(), burgers_test(waves(10), groups), settings, ORIGIN)
    assert (coarse.paper_error, fine.paper_error) == (0.3, 0.4)
    assert [(group.name, group.samples) for group in fine.groups] == [("0.01", 6), ("1.0", 4)]
    assert [group.error for group in fine.groups] == [
        fmean(fine.errors[:6]),
        fmean(fine.errors[6:]),
    ]
    # The paper's numbers by group belong to the last grid; "1" and "1.0" are one viscosity.
    assert [group.paper_error for group in fine.groups] == [0.5, 0.25]
    assert [group.paper_error for group in coarse.groups] == [None, None]


def test_a_row_says_where_it_came_from():
    model = some_model()
    row = some_rows(model)[0]
    assert (row.run, row.recipe, row.model) == ("run-one", "burgers-single/fst", "FST")
    assert (row.seed, row.git_hash, row.split) == (7, "abc123", "test")
    assert row.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert row.torch_version == torch.__version__
    assert row.training == ORIGIN.training


def test_the_fingerprint_knows_weights_and_settings_but_not_the_papers_numbers():
    data, model = BurgersData(), small_config()
    first = SETTINGS.fingerprint(b"weights", data, model)
    assert replace(SETTINGS, paper_errors=(0.1, 0.2)).fingerprint(b"weights", data, model) == first
    others = {
        SETTINGS.fingerprint(b"other", data, model),
        replace(SETTINGS, sobol_seed=1).fingerprint(b"weights", data, model),
        replace(SETTINGS, grids=(GRID,)).fingerprint(b"weights", data, model),
        replace(SETTINGS, neighbors=(1,)).fingerprint(b"weights", data, model),
        SETTINGS.fingerprint(b"weights", data, replace(model, prediction_points="all-anchors")),
        SETTINGS.fingerprint(
            b"weights", data, replace(model, prediction_symmetry="odd-reflection")
        ),
        first,
    }
    assert len(others) == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"neighbors": (4, 0)}, "neighbors must be at least 1"),
        ({"neighbors": (4, 4)}, "neighbors must not repeat"),
        ({"grids": ((4, 4), (4, 4))}, "grids must not repeat"),
        ({"paper_errors": (0.1,)}, "one error for each of the 2 grids"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SETTINGS, **change)
