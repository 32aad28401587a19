"""Bad input: one clear error that names the argument."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fst import Domain, FunctionSpaceConfig, Observations
from fst.base import build_model as build
from fst.types import check_length_scales
from small import config_on, small_config, small_model

MODEL = small_model()
CONDITIONED = small_model(small_config(condition_channels=2, log_condition=True))


def good(batch=2, count=5, axes=2, values=1):
    return {
        "positions": torch.rand(batch, count, axes).double(),
        "values": torch.randn(batch, count, values).double(),
    }


def spoiled(name, index, value):
    given_ = good()
    given_[name][index] = value
    return given_


SHAPES = {
    "positions must have shape": {"positions": torch.rand(5, 2).double()},
    "values must have shape": {"values": torch.rand(2, 5).double()},
    r"values must have shape \(2, 5, v\)": {"values": torch.rand(2, 4, 1).double()},
    "at least one observation": {
        "positions": torch.rand(2, 0, 2).double(),
        "values": torch.rand(2, 0, 1).double(),
    },
    r"condition must have shape \(2, c\)": {"condition": torch.rand(3, 1).double()},
    "condition must have shape": {"condition": torch.rand(2).double()},
    r"mask must have shape \(2, 5\)": {"mask": torch.ones(2, 4, dtype=torch.bool)},
    "values must be on cpu like pos": {"values": torch.rand(2, 5, 1).double().to("meta")},
}
TYPES = {
    "positions must be a floating-point tensor": {"positions": [[0.0, 1.0]]},
    "values must be a floating-point tensor .* got dtype": {"values": torch.ones(2, 5, 1).long()},
    "values must be torch.float64 like positions": {"values": torch.rand(2, 5, 1)},
    "condition must be torch.float64 like positions": {"condition": torch.rand(2, 1)},
    "mask must be a bool tensor": {"mask": torch.ones(2, 5)},
}


@pytest.mark.parametrize("message", SHAPES)
def test_wrong_shapes_are_named(message):
    with pytest.raises(ValueError, match=message):
        Observations(**{**good(), **SHAPES[message]})


@pytest.mark.parametrize("message", TYPES)
def test_wrong_types_are_named(message):
    with pytest.raises(TypeError, match=message):
        Observations(**{**good(), **TYPES[message]})


NUMBERS = {
    r"positions must be finite.*\(1, 3\)": spoiled("positions", (1, 3, 0), torch.nan),
    r"values must be finite.*\(0, 2\)": spoiled("values", (0, 2, 0), torch.inf),
    r"positions must lie in the domain.*\(1, 4\)": spoiled("positions", (1, 4, 1), 1.1),
    "positions must have 2 axes": good(axes=3),
    "values must have 1 value channels": good(values=2),
    "takes none": {**good(), "condition": torch.ones(2, 1).double()},
    "mask leaves sample 1 without": {
        **good(),
        "mask": torch.tensor([[True] * 5, [False] * 5]),
    },
}


@pytest.mark.parametrize("message", NUMBERS)
def test_wrong_numbers_are_named(message):
    with pytest.raises(ValueError, match=message):
        MODEL(Observations(**NUMBERS[message]))


def test_conditions_are_checked():
    with pytest.raises(ValueError, match="condition is missing"):
        CONDITIONED(Observations(**good()))
    with pytest.raises(ValueError, match="condition must have 2 condition channels"):
        CONDITIONED(Observations(**good(), condition=torch.ones(2, 1).double()))
    with pytest.raises(ValueError, match="condition must be finite"):
        CONDITIONED(Observations(**good(), condition=torch.full((2, 2), torch.nan).double()))
    with pytest.raises(ValueError, match="condition must be positive.*got -1"):
        CONDITIONED(Observations(**good(), condition=torch.full((2, 2), -1.0).double()))


def test_the_model_must_match():
    with pytest.raises(TypeError, match="observations must be torch.float64 like the model, got"):
        MODEL(Observations(**good()).to(torch.float32))
    with pytest.raises(TypeError, match="observations must be fst.Observations, got dict"):
        MODEL(good())


QUERIES = {
    r"queries must have shape \(b q s\)": torch.rand(3, 2).double(),
    "queries must have batch size 2": torch.rand(1, 3, 2).double(),
    "queries must have 2 axes": torch.rand(2, 3, 1).double(),
    "queries must be finite": torch.full((2, 3, 2), torch.nan).double(),
    "queries must lie in the domain": 2 * torch.ones(2, 3, 2).double(),
    "queries must be on cpu like the field, got meta": torch.rand(2, 3, 2).double().to("meta"),
}


@pytest.mark.parametrize("message", QUERIES)
def test_wrong_queries_are_named(message):
    field = MODEL(Observations(**good()))
    with pytest.raises(ValueError, match=message):
        field(QUERIES[message])


def test_wrong_query_types_and_neighbours_are_named():
    field = MODEL(Observations(**good()))
    queries = torch.rand(2, 3, 2).double()
    with pytest.raises(TypeError, match="queries must be torch"):
        field(queries.float())
    with pytest.raises(TypeError, match="queries must be a floating-point tensor"):
        field([[0.5, 0.5]])
    for neighbors in (0, -3):
        with pytest.raises(ValueError, match=f"neighbors must be at least 1, got {neighbors}"):
            field(queries, neighbors=neighbors)
    with pytest.raises(TypeError, match="neighbors"):
        field(queries, neighbors=True)


def test_no_queries_no_answers():
    field = MODEL(Observations(**good()))
    assert field(torch.rand(2, 0, 2).double()).shape == (2, 0, 1)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    count=st.integers(1, 20),
    axes=st.integers(1, 3),
    values=st.integers(1, 3),
    outputs=st.integers(1, 3),
    condition=st.integers(0, 2),
    queries=st.integers(0, 12),
    masked=st.booleans(),
)
def test_any_sizes_work(batch, count, axes, values, outputs, condition, queries, masked):
    model = small_model(
        config_on(
            axes, value_channels=values, output_channels=outputs, condition_channels=condition
        )
    )
    given_ = good(batch, count, axes, values)
    mask = torch.rand(batch, count) < 0.5 if masked else None
    if mask is not None:
        mask[:, 0] = True
    constants = torch.rand(batch, condition).double() if condition else None
    field = model(Observations(**given_, condition=constants, mask=mask))
    answer = field(torch.rand(batch, queries, axes).double())
    assert answer.shape == (batch, queries, outputs)
    assert bool(torch.isfinite(answer).all())
    assert field.anchors.positions.shape == (batch, model.config.anchors, axes)
    assert bool(((field.anchors.positions >= 0) & (field.anchors.positions <= 1)).all())


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["positions", "values"]),
    value=st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    where=st.tuples(st.integers(0, 1), st.integers(0, 4)),
    hidden=st.booleans(),
)
def test_a_bad_number_is_found_wherever_it_is(name, value, where, hidden):
    """And it is forgiven under the mask, where it is not an observation."""
    given_ = spoiled(name, (*where, 0), value)
    mask = torch.ones(2, 5, dtype=torch.bool)
    if hidden:
        mask[where] = False
        assert bool(torch.isfinite(MODEL(Observations(**given_, mask=mask)).features).all())
    else:
        with pytest.raises(ValueError, match=rf"{name} must be finite.*\({where[0]}, {where[1]}\)"):
            MODEL(Observations(**given_, mask=mask))


DOMAINS = [((0.0,), (1.0, 1.0)), ((), ()), ((0.0,) * 4, (1.0,) * 4), ((1.0,), (1.0,))]


@pytest.mark.parametrize(("low", "high"), DOMAINS)
def test_a_wrong_domain_is_named(low, high):
    with pytest.raises(ValueError, match="low"):
        Domain(low, high)


CONFIGS = {
    "rows": {"rows": (4, 4)},
    "adaptive_axis": {"adaptive_axis": 2},
    "anchors_per_row": {"anchors_per_row": 1},
    "points_from_anchors": {"points_from_anchors": 21},
    "multiple of heads": {"heads": 3},
    "refinement_steps": {"refinement_steps": 0},
    "cannot both be 0": {"points_from_anchors": 0, "points_from_sobol": 0},
    "length_scales": {"update": "anchor-attention"},
}


@pytest.mark.parametrize("message", CONFIGS)
def test_a_wrong_configuration_is_named(message):
    with pytest.raises(ValueError, match=message):
        small_config(**CONFIGS[message])


def test_rounding_at_the_edge_of_the_domain_is_forgiven():
    given_ = good()
    given_["positions"][0, 0, 0] = 1 + 1e-7
    MODEL(Observations(**given_))


def test_observations_move():
    observations = Observations(
        **good(), condition=torch.ones(2, 1).double(), mask=torch.ones(2, 5, dtype=torch.bool)
    )
    single = observations.to(torch.float32)
    assert single.values.dtype == single.condition.dtype == torch.float32
    assert single.mask.dtype == torch.bool
    assert observations.to("meta").mask.device.type == "meta"
    assert len(observations) == 2


def test_the_paper_configuration_is_the_default():
    config = FunctionSpaceConfig()
    assert (config.anchors, config.row_count, config.domain.axes) == (1024, 32, 2)


@pytest.mark.parametrize("number", [1e16, 1e25, -1e30])
def test_numbers_that_would_become_nan_are_refused(number):
    """Finite, but not any more when a network squares them."""
    model = build(small_config(condition_channels=1))
    given = {"values": torch.randn(2, 5, 1), "condition": torch.rand(2, 1)}
    for name in given:
        changed = {key: value.clone() for key, value in given.items()}
        changed[name][(1, 3)[: changed[name].ndim - 1]] = number
        with pytest.raises(ValueError, match=rf"{name} must be within 1e\+15 standard deviations"):
            model(Observations(torch.rand(2, 5, 2), **changed))
    changed = {"values": given["values"].clone(), "condition": given["condition"]}
    changed["values"][0, 0] = number
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 0] = False  # padding may be anything
    field = model(Observations(torch.rand(2, 5, 2), **changed, mask=mask))
    assert field(torch.rand(2, 3, 2)).isfinite().all()


def test_length_scales_that_would_become_nan_are_refused():
    points, anchors = torch.rand(1, 3, 2), torch.rand(1, 4, 2)
    check_length_scales(torch.full((1, 4, 2), 1e-15), points, anchors)
    for wrong, message in ((0.0, "must be positive"), (1e-30, "must be at least")):
        scales = torch.full((1, 4, 2), 0.1)
        scales[0, 2, 1] = wrong
        with pytest.raises(ValueError, match=f"length_scales {message}"):
            check_length_scales(scales, points, anchors)


def unchecked(kind: type, **given: object) -> object:
    """As users make one: annotations are checked in tests alone."""
    made = object.__new__(kind)
    for name, value in given.items():
        object.__setattr__(made, name, value)
    made.__post_init__()
    return made


def test_numbers_of_numpy_become_pythons():
    edges = np.array([[-3.0, 10.0], [5.0, 10.5]], np.float32)
    domain = unchecked(Domain, low=tuple(edges[0]), high=edges[1].tolist())
    assert domain == Domain((-3.0, 10.0), (5.0, 10.5))
    wanted = small_config(low=(-3.0, 10.0), high=(5.0, 10.5))
    given = vars(wanted) | {"low": tuple(edges[0]), "high": tuple(edges[1])}
    config = unchecked(FunctionSpaceConfig, **given | {"width": np.int64(16), "heads": np.int8(2)})
    assert config == wanted
    json.dumps(vars(config))
    with pytest.raises(TypeError, match=r"width must be a whole number, got 16\.0"):
        unchecked(FunctionSpaceConfig, **given | {"width": np.float32(16)})
