"""The model against the paper's equations, its counts, and its gradients."""

import numpy as np
import pytest
import torch

from fst import FunctionSpaceConfig, FunctionSpaceTransformer, Observations, parameter_count
from fst.ablations import ObserveFirstLayer, StaggeredCoordinates
from restatement import Restatement
from small import config_on, small_config, small_model, some_observations, some_queries

# SPEC §1: module by module, for the single-viscosity and the all-viscosity model.
COUNTS = {
    "encode_values": (54_384, 54_384),
    "encode_feed": (249_040, 249_040),
    "initial_position": (22_880, 22_880),
    "layer.update.evaluate": (170_192, 192_720),
    "predict_anchors.tokens.observe": (39_888, 49_104),
    "predict_anchors.coordinates+scales heads": (13_920, 13_920),
    "decoder.evaluate": (170_192, 192_720),
    "decoder.feed_forward": (249_040, 249_040),
    "decoder.norm+output": (63_009, 63_009),
    "total": (2_830_721, 2_900_721),
}


def counted(model: torch.nn.Module, name: str) -> int:
    part = model.get_submodule
    match name:
        case "total":
            return parameter_count(model)
        case "decoder.norm+output":
            return parameter_count(part("decoder.norm")) + parameter_count(part("decoder.output"))
        case "predict_anchors.coordinates+scales heads":
            return sum(
                parameter_count(part(f"predict_anchors.{kind}.head"))
                for kind in ("coordinates", "scales")
            )
    return parameter_count(part(name))


@pytest.fixture(scope="module")
def paper_models() -> tuple[torch.nn.Module, torch.nn.Module]:
    return FunctionSpaceTransformer(FunctionSpaceConfig()), FunctionSpaceTransformer(
        FunctionSpaceConfig(condition_channels=1, log_condition=True)
    )


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_equal_the_specification(name, paper_models):
    assert tuple(counted(model, name) for model in paper_models) == COUNTS[name]


def test_the_rest_of_the_counts(paper_models):
    single, conditioned = paper_models
    attentions = ["layer.read.attention", "layer.update.mix", "layer.update.write"]
    feeds = ["layer.read.feed_forward", "layer.update.mix_feed", "layer.update.write_feed"]
    norms = [f"layer.read.norm_{n}" for n in "ah2"] + [f"layer.update.norm_{n}" for n in "egqv"]
    tokens = "predict_anchors.tokens"
    for names, count in ((attentions, 373_824), (feeds, 746_064), (norms, 2_464)):
        assert sum(counted(single, name) for name in names) == count
    assert single.get_parameter(f"{tokens}.tokens").numel() == 4_464
    assert counted(single, f"{tokens}.blocks") + counted(single, f"{tokens}.norm") == 669_312
    scales = single.get_submodule("predict_anchors.scales")
    assert scales.refinement_base.numel() + scales.decoding_base.numel() == 2_048
    assert counted(conditioned, "condition") == 4_288
    assert counted(conditioned, "initial_condition") == 11_440


CASES = {
    "two axes": small_config(),
    "one axis": config_on(1),
    "three axes": config_on(3),
    "first axis adapts": small_config(adaptive_axis=0),
    "condition": small_config(condition_channels=2, log_condition=True),
    "channels": small_config(value_channels=3, output_channels=2),
}


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_an_independent_restatement(case):
    model = small_model(CASES[case])
    model.standardize_values.set(0.3, 1.7)
    model.standardize_outputs.set(-0.2, 0.6)
    observations, queries = some_observations(model), some_queries(model)
    draws = model.point_stream(5, 6).draw()
    field = model(observations, draws, record=True)
    answer = field(queries)

    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    restated = Restatement(model.config, weights)
    for b in range(2):
        condition = None if observations.condition is None else observations.condition[b].numpy()
        anchors, steps, values = restated(
            observations.positions[b].numpy(),
            observations.values[b].numpy(),
            condition,
            [part.numpy() for part in draws],
            queries[b].numpy(),
        )
        given = field.anchors
        for ours, theirs in zip(
            (given.positions, given.refinement_length_scales, given.length_scales), anchors
        ):
            np.testing.assert_allclose(ours[b].detach().numpy(), theirs, atol=1e-10, rtol=0)
        for ours, theirs in zip(field.steps, steps, strict=True):
            np.testing.assert_allclose(ours[b].detach().numpy(), theirs, atol=1e-10, rtol=1e-10)
        np.testing.assert_allclose(answer[b].detach().numpy(), values, atol=1e-10, rtol=1e-10)


def test_gradients_agree_with_finite_differences():
    model = small_model(
        small_config(
            width=4,
            fourier_bands=1,
            rows=(2,),
            anchors_per_row=3,
            predictor_width=4,
            predictor_blocks=1,
            refinement_steps=2,
            points_from_anchors=2,
            points_from_sobol=2,
        )
    )
    # Away from the clamp of the length scales, where the derivative jumps.
    for base in (
        model.predict_anchors.scales.refinement_base,
        model.predict_anchors.scales.decoding_base,
    ):
        base.data.fill_(-2.2)
    draws = model.point_stream(1, 2).draw()
    parameters = dict(model.named_parameters())
    positions = torch.rand(1, 3, 2, dtype=torch.float64, requires_grad=True)
    values = torch.randn(1, 3, 1, dtype=torch.float64, requires_grad=True)
    queries = torch.rand(1, 2, 2, dtype=torch.float64, requires_grad=True)

    def answer(positions, values, queries, *weights):
        state = dict(zip(parameters, weights, strict=True))

        class Both(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self):
                return self.model.represent(Observations(positions, values), draws).decode(queries)

        renamed = {f"model.{name}": value for name, value in state.items()}
        return torch.func.functional_call(Both(), renamed, ())

    inputs = (positions, values, queries, *parameters.values())
    assert torch.autograd.gradcheck(answer, inputs, eps=1e-6, atol=1e-6, fast_mode=True)


def test_padding_changes_nothing():
    model = small_model()
    full = some_observations(model, batch=1, count=7)
    queries = some_queries(model, batch=1)
    padding = some_observations(model, batch=1, count=3)
    padded = Observations(
        torch.cat((full.positions, padding.positions), 1),
        torch.cat((full.values, 1e3 * padding.values), 1),
        mask=torch.arange(10)[None] < 7,
    )
    torch.testing.assert_close(model(padded)(queries), model(full)(queries), rtol=0, atol=1e-12)


def test_what_lies_under_the_mask_may_be_anything():
    model = small_model()
    given = some_observations(model, batch=1, count=6)
    positions, values = given.positions.clone(), given.values.clone()
    positions[:, 4:], values[:, 4:] = 99.0, torch.nan
    masked = Observations(positions, values, mask=torch.arange(6)[None] < 4)
    kept = Observations(given.positions[:, :4], given.values[:, :4])
    queries = some_queries(model, batch=1)
    torch.testing.assert_close(model(masked)(queries), model(kept)(queries), rtol=0, atol=1e-12)


def test_another_domain_is_the_same_problem():
    unit = small_model()
    wide = FunctionSpaceTransformer(small_config(low=(-3.0, 10.0), high=(5.0, 10.5))).double()
    wide.load_state_dict(unit.state_dict())
    observations, queries = some_observations(unit), some_queries(unit)
    moved = Observations(wide.domain.from_unit(observations.positions), observations.values)
    field, moved_field = unit(observations), wide(moved)
    torch.testing.assert_close(
        moved_field(wide.domain.from_unit(queries)), field(queries), rtol=0, atol=1e-9
    )
    torch.testing.assert_close(
        moved_field.anchors.positions, wide.domain.from_unit(field.anchors.positions)
    )
    stretch = torch.tensor([8.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(
        moved_field.anchors.length_scales, field.anchors.length_scales * stretch
    )


def test_the_batch_does_not_matter():
    model = small_model()
    observations, queries = some_observations(model, batch=3), some_queries(model, batch=3)
    together = model(observations)(queries)
    for b in range(3):
        alone = Observations(observations.positions[b : b + 1], observations.values[b : b + 1])
        torch.testing.assert_close(model(alone)(queries[b : b + 1]), together[b : b + 1])


def test_fresh_model_starts_uniform_at_the_initial_scale():
    model = FunctionSpaceTransformer(small_config())
    observations = some_observations(small_model()).to(torch.float32)
    anchors = model(observations).anchors
    rows = anchors.positions.view(2, 4, 5, 2)
    torch.testing.assert_close(rows[..., 1], torch.linspace(0, 1, 5).expand(2, 4, 5))
    torch.testing.assert_close(rows[..., 0], torch.linspace(0, 1, 4)[:, None].expand(2, 4, 5))
    for scales in (anchors.length_scales, anchors.refinement_length_scales):
        torch.testing.assert_close(scales, torch.full_like(scales, 0.03))


ABLATIONS = {
    "uniform, fixed": {"coordinates": "uniform", "length_scales": "fixed"},
    "uniform, adaptive": {"coordinates": "uniform"},
    "adaptive, fixed": {"length_scales": "fixed"},
    "learned scales": {"length_scales": "learned"},
    "learned coordinates": {"coordinates": "learned", "length_scales": "spacing"},
    "staggered": {"coordinates": "staggered"},
    "local scales": {"length_scales": "local"},
    "anchor attention": {"update": "anchor-attention", "length_scales": "fixed"},
    "observe first": {"observe": "first-step"},
    "fixed points": {"resample_points": False},
    "one step": {"refinement_steps": 1},
    "only Sobol": {"points_from_anchors": 0},
    "only anchors": {"points_from_sobol": 0},
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_parameter_of_every_ablation_learns(name):
    model = small_model(small_config(**ABLATIONS[name]))
    model(some_observations(model))(some_queries(model)).square().sum().backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    # The clamp may hold single scales, never all of them; nothing else may be idle.
    assert idle == []


def test_ablations_keep_what_they_say():
    fixed = small_model(small_config(coordinates="uniform", length_scales="fixed"))
    assert parameter_count(fixed.predict_anchors) == 0
    assert list(fixed.param_groups()) == ["main"]
    first, second = (fixed(some_observations(fixed)).anchors for _ in range(2))
    torch.testing.assert_close(first.positions, second.positions)
    adaptive = small_model()
    one, two = (adaptive(some_observations(adaptive)).anchors for _ in range(2))
    assert (one.positions - two.positions).abs().max() > 1e-3
    assert (one.length_scales - two.length_scales).abs().max() > 1e-4


def test_learned_coordinates_start_even_and_move_alike_for_every_input():
    model = small_model(small_config(coordinates="learned", length_scales="fixed"))
    scores = model.predict_anchors.coordinates.scores
    with torch.no_grad():
        scores.zero_()
    even = model(some_observations(model)).anchors.positions.view(2, 4, 5, 2)[..., 1]
    torch.testing.assert_close(even, torch.linspace(0, 1, 5).to(even).expand(2, 4, 5))
    with torch.no_grad():
        scores[0] = 3.0  # the first gap of the first row
    moved = model(some_observations(model)).anchors.positions.view(2, 4, 5, 2)[..., 1]
    assert (moved[:, 0, 1:-1] > even[:, 0, 1:-1]).all()
    torch.testing.assert_close(moved[:, 1:], even[:, 1:])
    torch.testing.assert_close(moved[0], moved[1])


def test_staggered_rows_are_half_a_gap_apart_between_their_ends():
    model = small_model(small_config(coordinates="staggered", length_scales="fixed"))
    along = model(some_observations(model)).anchors.positions.view(2, 4, 5, 2)[..., 1]
    assert (along[..., 0] == 0).all()
    assert (along[..., -1] == 1).all()
    apart = along[:, 1:, 1:-1] - along[:, :-1, 1:-1]
    signs = torch.tensor([1.0, -1.0, 1.0]).to(apart)[:, None]
    torch.testing.assert_close(apart, (signs * 0.5 / 4).expand_as(apart))


@pytest.mark.parametrize(
    ("rows", "moves"),
    [((), [-1]), ((3,), [-1, 1, -1]), ((2, 3), [-1, 1, -1, 1, -1, 1])],
)
def test_rows_are_staggered_on_any_number_of_axes(rows, moves):
    along = StaggeredCoordinates(rows)(torch.zeros(2, 4, 1))
    inner = torch.linspace(0, 1, 5)[1:-1] + torch.tensor(moves)[:, None] / 16
    torch.testing.assert_close(along[:, :, 1:-1], inner.expand(2, -1, -1))


def test_observe_first_reads_once():
    model = small_model(small_config(observe="first-step"))
    assert isinstance(model.layer, ObserveFirstLayer)
    calls = []
    model.layer.read.register_forward_hook(lambda *_: calls.append(1))
    model(some_observations(model))
    assert len(calls) == 1


def test_work_that_does_not_change_is_done_once(monkeypatch):
    model = small_model()
    calls = {"keys": 0, "square": 0}
    import fst.layer

    keys_values = model.layer.read.attention.keys_values

    def counting_keys(*arguments):
        calls["keys"] += 1
        return keys_values(*arguments)

    monkeypatch.setattr(model.layer.read.attention, "keys_values", counting_keys)

    original = fst.layer.rbf_weights

    def counting(points, anchors, scales):
        calls["square"] += points.shape[1] == anchors.shape[1] == model.config.anchors
        return original(points, anchors, scales)

    monkeypatch.setattr(fst.layer, "rbf_weights", counting)
    model(some_observations(model))
    assert calls == {"keys": 1, "square": 1}


def test_predictor_has_its_own_learning_rate_group():
    model = FunctionSpaceTransformer(FunctionSpaceConfig())
    groups = model.param_groups()
    sizes = {name: sum(p.numel() for p in group) for name, group in groups.items()}
    assert sizes["predictor"] == 39_888 + 4_464 + 669_312 + 13_920
    assert sum(sizes.values()) == 2_830_721


def test_autocast_keeps_coordinates_in_float32():
    model = FunctionSpaceTransformer(small_config())
    observations = some_observations(small_model()).to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        field = model.represent(observations)
        values = field.decode(some_queries(small_model()).float())
    assert field.anchors.positions.dtype == torch.float32
    assert values.dtype == torch.float32
    exact = model(observations).anchors.positions
    torch.testing.assert_close(field.anchors.positions, exact, rtol=0, atol=1e-6)


def test_statistics_of_a_condition_without_a_logarithm_are_refused():
    model = small_model(small_config(condition_channels=1, log_condition=True))
    with pytest.raises(ValueError, match="condition must be positive: this model takes its log"):
        model.standardize_condition(torch.tensor([[1.0], [0.0]]))
