"""`fst predict`: files in, files out, the model's own answer between them."""

import h5py
import numpy as np
import pytest
import torch

from evaluation_fakes import ConstantModel, parts_left, some_model
from fst.commands import predict as command
from fst.commands.predict import predict
from fst.data.files import DataError
from fst.data.point_files import PointSample, write_points
from fst.pretrained import PretrainedError
from fst.types import Domain, Observations


@pytest.fixture(scope="module")
def model():
    return some_model(low=(0.0, -1.0), high=(2.0, 1.0)).eval()


@pytest.fixture
def run(tmp_path, model):
    model.save_pretrained(tmp_path / "run" / "best")
    return tmp_path / "run"


def some_points(model, count, *shape):
    """Points of the domain with values, as NumPy arrays."""
    unit = torch.rand(*shape, count, model.domain.axes)
    values = torch.randn(*shape, count, model.value_channels)
    return model.domain.from_unit(unit).numpy(), values.numpy()


def answer(model, positions, values, queries, condition=None, mask=None, neighbors=None):
    tensors = [None if each is None else torch.as_tensor(each) for each in (condition, mask)]
    given = Observations(torch.as_tensor(positions), torch.as_tensor(values), *tensors)
    with torch.no_grad():
        return model(given)(torch.as_tensor(queries), neighbors).numpy()


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_samples_and_queries_from_npz(tmp_path, model, run):
    # Eleven samples are more than one batch of the command.
    positions, values = some_points(model, 7, 11)
    queries, _ = some_points(model, 5, 11)
    np.savez(tmp_path / "o.npz", positions=positions, values=values)
    np.savez(tmp_path / "q.npz", queries=queries)
    predict(run, tmp_path / "o.npz", tmp_path / "q.npz", tmp_path / "new" / "p.npz")
    with np.load(tmp_path / "new" / "p.npz") as file:
        assert set(file) == {"queries", "predictions", "anchors", "length_scales"}
        close(file["predictions"], answer(model, positions, values, queries))
        np.testing.assert_array_equal(file["queries"], queries)
        assert file["anchors"].shape == (11, model.config.anchors, 2)
        assert file["anchors"][..., 1].min() == pytest.approx(-1)  # units of the domain
    assert not parts_left(tmp_path)


def test_one_sample_needs_no_batch_axis(tmp_path, model, run):
    positions, values = some_points(model, 7)
    queries, _ = some_points(model, 5)
    np.savez(tmp_path / "o.npz", positions=positions.astype(np.float64), values=values)
    np.savez(tmp_path / "q.npz", queries=queries)
    found = predict(run, tmp_path / "o.npz", tmp_path / "q.npz", tmp_path / "p.npz")
    close(found.predictions, answer(model, positions[None], values[None], queries[None]))


def test_a_grid_covers_the_domain(tmp_path, model, run):
    positions, values = some_points(model, 7, 3)
    np.savez(tmp_path / "o.npz", positions=positions, values=values)
    predict(run, tmp_path / "o.npz", "4x6", tmp_path / "p.h5")
    with h5py.File(tmp_path / "p.h5") as file:
        queries, predictions = file["queries"][:], file["predictions"][:]
        assert file["grid"][:].tolist() == [4, 6]
    assert queries.shape == (1, 24, 2)
    folded = queries.reshape(4, 6, 2)
    np.testing.assert_allclose(folded[:, 0, 0], np.linspace(0, 2, 4), atol=1e-6)
    np.testing.assert_allclose(folded[0, :, 1], np.linspace(-1, 1, 6), atol=1e-6)
    close(predictions, answer(model, positions, values, np.repeat(queries, 3, axis=0)))


def test_csv_in_both_places(tmp_path, model, run):
    positions, values = some_points(model, 7)
    queries, _ = some_points(model, 5)
    table = np.concatenate([positions, values], axis=1)
    np.savetxt(tmp_path / "o.csv", table, delimiter=",", header="t,x,u", comments="")
    np.savetxt(tmp_path / "q.csv", queries, delimiter=",", header="t,x", comments="")
    found = predict(run, tmp_path / "o.csv", tmp_path / "q.csv", tmp_path / "p.npz")
    close(found.predictions, answer(model, positions[None], values[None], queries[None]))


def test_point_files_in_both_places(tmp_path, model, run):
    samples = [
        PointSample(*some_points(model, count), *some_points(model, asked))
        for count, asked in ((7, 3), (4, 5))
    ]
    write_points(tmp_path / "o.h5", samples, model.domain)
    predict(run, tmp_path / "o.h5", tmp_path / "o.h5", tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz") as file:
        predictions, mask = file["predictions"], file["mask"]
    assert mask.sum(axis=1).tolist() == [3, 5]
    for row, sample in enumerate(samples):  # padding changes nothing
        expected = answer(model, sample.positions[None], sample.values[None], sample.queries[None])
        close(predictions[row][mask[row]], expected[0])


def test_masks_and_neighbours(tmp_path, model, run):
    positions, values = some_points(model, 7, 2)
    mask = np.ones((2, 7), dtype=bool)
    mask[1, 4:] = False
    queries, _ = some_points(model, 5, 2)
    np.savez(tmp_path / "o.npz", positions=positions, values=values, mask=mask)
    np.savez(tmp_path / "q.npz", queries=queries)
    found = predict(run, tmp_path / "o.npz", tmp_path / "q.npz", tmp_path / "p.npz", neighbors=2)
    close(found.predictions, answer(model, positions, values, queries, mask=mask, neighbors=2))


def test_a_condition_from_the_file_or_the_command_line(tmp_path):
    model = some_model(condition_channels=1, log_condition=True).eval()
    model.save_pretrained(tmp_path / "model")  # any folder with a model, not only a run
    positions, values = some_points(model, 7, 2)
    np.savez(tmp_path / "with.npz", positions=positions, values=values, condition=[[0.3], [0.3]])
    np.savez(tmp_path / "without.npz", positions=positions, values=values)
    inside = predict(tmp_path / "model", tmp_path / "with.npz", "3x3", tmp_path / "a.npz")
    given = predict(
        tmp_path / "model", tmp_path / "without.npz", "3x3", tmp_path / "b.npz", condition=(0.3,)
    )
    np.testing.assert_array_equal(inside.predictions, given.predictions)
    with pytest.raises(DataError, match=r"without\.npz: condition is missing"):
        predict(tmp_path / "model", tmp_path / "without.npz", "3x3", tmp_path / "c.npz")
    with pytest.raises(DataError, match="condition must be positive"):
        predict(
            tmp_path / "model", tmp_path / "without.npz", "3x3", tmp_path / "c.npz", condition=(-1,)
        )
    with pytest.raises(DataError, match="another one was given"):
        predict(
            tmp_path / "model", tmp_path / "with.npz", "3x3", tmp_path / "c.npz", condition=(1,)
        )


def test_models_without_anchors(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "load_model", lambda run: ConstantModel(0.25))
    monkeypatch.setattr(command, "run_labels", lambda run: None)
    np.savez(tmp_path / "o.npz", positions=np.zeros((3, 2)), values=np.zeros((3, 1)))
    found = predict("any", tmp_path / "o.npz", "2x3", tmp_path / "p.npz")
    np.testing.assert_array_equal(found.predictions, np.full((1, 6, 1), 0.25))
    assert set(found.arrays()) == {"queries", "predictions", "grid"}
    with pytest.raises(ValueError, match="no anchors to choose from"):
        predict("any", tmp_path / "o.npz", "2x3", tmp_path / "q.npz", neighbors=4)
    monkeypatch.setattr(command, "load_model", lambda run: ConstantModel(float("nan")))
    with pytest.raises(ValueError, match="NaN or infinite"):
        predict("any", tmp_path / "o.npz", "2x3", tmp_path / "q.npz")
    assert not (tmp_path / "q.npz").exists()


def test_nothing_is_overwritten_unasked(tmp_path, model, run):
    positions, values = some_points(model, 7)
    np.savez(tmp_path / "o.npz", positions=positions, values=values)
    (tmp_path / "p.npz").write_text("precious")
    with pytest.raises(DataError, match=r"p\.npz: exists; use --force"):
        predict(run, tmp_path / "o.npz", "3x3", tmp_path / "p.npz")
    assert (tmp_path / "p.npz").read_text() == "precious"
    predict(run, tmp_path / "o.npz", "3x3", tmp_path / "p.npz", force=True)
    assert "predictions" in np.load(tmp_path / "p.npz")


GOOD = {"positions": np.full((3, 2), 0.5), "values": np.zeros((3, 1))}
OBSERVATIONS = {
    "outside": ({**GOOD, "positions": np.full((3, 2), 5.0)}, "must lie in the domain"),
    "nan": ({**GOOD, "values": np.full((3, 1), np.nan)}, "values must be finite"),
    "channels": ({**GOOD, "values": np.zeros((3, 2))}, "1 value channels"),
    "count": ({**GOOD, "values": np.zeros((4, 1))}, "to match positions"),
    "rank": ({**GOOD, "values": np.zeros(3)}, "2 or 3 axes"),
    "large": (
        {**GOOD, "values": np.full((3, 1), -1e39)},
        r"values must be at most 3\.4e\+38 in size, got -1e\+39, which is too large for float32",
    ),
    "text": ({**GOOD, "values": np.array([["a"], ["b"], ["c"]])}, "must be numbers"),
    "missing": ({"positions": GOOD["positions"]}, "has no array values"),
    "mask": ({**GOOD, "mask": np.ones(3)}, "mask must be bool"),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_wrong_observations_are_named(tmp_path, run, name):
    arrays, message = OBSERVATIONS[name]
    np.savez(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(DataError, match=message) as caught:
        predict(run, tmp_path / "wrong.npz", "3x3", tmp_path / "p.npz")
    assert str(caught.value).startswith(str(tmp_path / "wrong.npz"))
    assert not (tmp_path / "p.npz").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "first line must name the columns"),
        ("0.1,0.2,0.3\n0.2,0.2,0.3\n", "first line must name the columns"),
        ("t,x,u\n", "expected lines of 3 numbers"),
        ("t,x\n0.1,0.2\n", "expected lines of 3 numbers"),
        ("t,x,u\n0.1,0.2,high\n", "high"),
        ("t,x,u\n0.1,0.2,0.3\n0.1,0.2\n", "columns"),
    ],
)
def test_wrong_tables_are_named(tmp_path, run, text, message):
    (tmp_path / "o.csv").write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        predict(run, tmp_path / "o.csv", "3x3", tmp_path / "p.npz")
    assert str(caught.value).startswith(str(tmp_path / "o.csv"))


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        ("3x3x3", "each of the 2 axes"),
        ("9", "each of the 2 axes"),
        ("0x4", "positive number"),
        ("full", "or a grid such as 201x1024"),
        ("nowhere.npz", "there is no such file"),
    ],
)
def test_wrong_queries_are_named(tmp_path, run, queries, message):
    np.savez(tmp_path / "o.npz", **GOOD)
    with pytest.raises(DataError, match=message) as caught:
        predict(run, tmp_path / "o.npz", queries, tmp_path / "p.npz")
    assert str(caught.value).startswith(queries)


def test_queries_that_do_not_fit_are_named(tmp_path, run):
    np.savez(tmp_path / "o.npz", **GOOD)
    np.savez(tmp_path / "outside.npz", queries=np.full((3, 2), 7.0))
    with pytest.raises(DataError, match=r"outside\.npz: queries must lie in the domain"):
        predict(run, tmp_path / "o.npz", tmp_path / "outside.npz", tmp_path / "p.npz")
    np.savez(tmp_path / "many.npz", queries=np.full((4, 3, 2), 0.5))
    with pytest.raises(DataError, match="queries for 4 samples"):
        predict(run, tmp_path / "o.npz", tmp_path / "many.npz", tmp_path / "p.npz")


def test_a_pickle_inside_is_not_opened(tmp_path, run):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was opened",))

    np.savez(tmp_path / "o.npz", positions=np.array([Trap()], dtype=object), values=[[0.0]])
    with pytest.raises(DataError, match=r"o\.npz: cannot be read as an \.npz file with"):
        predict(run, tmp_path / "o.npz", "3x3", tmp_path / "p.npz")
    (tmp_path / "o.npz").write_bytes(b"PK not a zip file")
    with pytest.raises(DataError, match=r"o\.npz"):
        predict(run, tmp_path / "o.npz", "3x3", tmp_path / "p.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").replace(tmp_path / "o.npz")
    with pytest.raises(DataError, match=r"o\.npz"):
        predict(run, tmp_path / "o.npz", "3x3", tmp_path / "p.npz")


def test_other_mistakes_are_named(tmp_path, run):
    np.savez(tmp_path / "o.npz", **GOOD)
    np.savez(tmp_path / "o.dat", **GOOD)
    ask = (tmp_path / "o.npz", "3x3")
    with pytest.raises(DataError, match=r"written as one of \.npz"):
        predict(run, *ask, tmp_path / "p.txt")
    with pytest.raises(DataError, match=r"must be an \.h5, \.npz, \.csv, \.vtu or \.nc file"):
        predict(run, tmp_path / "o.dat", "3x3", tmp_path / "p.npz")
    with pytest.raises(PretrainedError, match="no such folder"):
        predict(tmp_path / "nowhere", *ask, tmp_path / "p.npz")
    with pytest.raises(ValueError, match="neighbors must be at least 1"):
        predict(run, *ask, tmp_path / "p.npz", neighbors=0)
    for name in ("abacus", "mps", "meta", "cpu:3", "cuda:", "cuda:-1", "cuda:1", ""):
        with pytest.raises(ValueError, match=f"device must be cpu or cuda, got '{name}'"):
            predict(run, *ask, tmp_path / "p.npz", device=name)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="PyTorch sees no GPU"):
            predict(run, *ask, tmp_path / "p.npz", device="cuda")


def test_a_domain_that_float32_cannot_resolve(tmp_path):
    model = some_model(low=(1.7e9, 0.0), high=(1.7e9 + 1024, 1.0)).eval()
    model.save_pretrained(tmp_path / "model")
    positions = np.array([[1.7e9 + 100, 0.5], [1.7e9 + 101, 0.5]])
    np.savez(tmp_path / "o.npz", positions=positions, values=np.zeros((2, 1)))
    np.savetxt(
        tmp_path / "o.csv", [[1.7e9 + 100, 0.5, 1.0]], delimiter=",", header="t,x,u", comments=""
    )
    np.savetxt(tmp_path / "q.csv", positions, delimiter=",", header="t,x", comments="")
    message = "float32 cannot resolve positions in the domain .* 1024 wide, .* 128 apart"
    for observations in ("o.npz", "o.csv"):
        with pytest.raises(DataError, match=message) as caught:
            predict(tmp_path / "model", tmp_path / observations, "3x3", tmp_path / "p.npz")
        assert str(caught.value).startswith(str(tmp_path / observations))
    for queries in (tmp_path / "q.csv", "3x3"):
        with pytest.raises(DataError, match=message) as caught:
            command.read_queries(queries, model.domain)
        assert str(caught.value).startswith(str(queries))
    assert not (tmp_path / "p.npz").exists()


def test_a_domain_on_one_axis(tmp_path):
    assert command.read_queries("5", Domain((1.0,), (3.0,))).positions.flatten().tolist() == [
        1.0,
        1.5,
        2.0,
        2.5,
        3.0,
    ]
