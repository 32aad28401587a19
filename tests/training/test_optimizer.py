"""The step of all parameters together: PyTorch's numbers, PyTorch's state, in vectors."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fst.training.optimizer import Optimizer
from fst.training.settings import TrainingSettings
from training_fakes import TinyConfig, TinyModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(3, 5), (2048,), (), (12, 60), (1,), (60, 12), (0,), (12, 12), (20, 12)]


def some_parameters(complex_: bool = False) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if complex_:
        found[1] = torch.randn(7, 5, dtype=torch.complex64, generator=generator)
    return [nn.Parameter(tensor.to(DEVICE)) for tensor in found]


def in_groups(
    parameters: list[nn.Parameter], decay: float, muon: bool = False
) -> list[dict[str, Any]]:
    """Two rates, and one group without decay."""
    parts = (
        (parameters[:5], 1e-2, decay),
        (parameters[5:7], 3e-3, 0.0),
        (parameters[7:], 1, decay),
    )
    return [
        {"params": some, "lr": lr, "weight_decay": wd, "matrices": muon and number == 2}
        for number, (some, lr, wd) in enumerate(parts)
    ]


def exact_twin(parameters: list[nn.Parameter], decoupled: bool, decay: float = 0.1) -> Any:
    """The same weights in float64, under PyTorch's optimiser."""
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    twins = [nn.Parameter(p.detach().to(wide[p.dtype])) for p in parameters]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    groups = [{k: v for k, v in g.items() if k != "matrices"} for g in in_groups(twins, decay)]
    return twins, kind(groups, eps=1e-6, foreach=False)


def set_gradients(step: int, *lists: list[nn.Parameter], without: tuple[int, ...] = ()) -> None:
    """The same for all lists, in their dtypes."""
    generator = torch.Generator().manual_seed(step)
    for index, group in enumerate(zip(*lists, strict=True)):
        wide = torch.complex128 if group[0].is_complex() else torch.float64
        gradient = torch.randn(group[0].shape, dtype=wide, generator=generator) / (1 + step)
        for parameter in group:
            parameter.grad = None if index in without else gradient.to(parameter)


def reference_step(twins: list[nn.Parameter], optimizer: Any, limit: float) -> Tensor:
    norm = nn.utils.clip_grad_norm_(twins, limit)
    optimizer.step()
    return norm


def assert_close(
    found: list[nn.Parameter], wanted: list[nn.Parameter], tolerance: float = 2e-6
) -> None:
    for one, other in zip(found, wanted, strict=True):
        if one.numel():
            assert (one.to(other.dtype) - other).abs().max() <= tolerance * (1 + other.abs().max())


def assert_same_state(optimizer: Optimizer, reference: Any) -> None:
    """Counts to the last bit, averages to rounding."""
    state, wanted = (o.state_dict()["state"] for o in (optimizer, reference))
    assert state.keys() == wanted.keys()
    for index, entries in wanted.items():
        assert state[index].keys() == entries.keys()
        assert state[index]["step"] == entries["step"].cpu()
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[index][name].shape == entries[name].shape
            error = (state[index][name].to(entries[name].dtype) - entries[name]).norm()
            assert error <= 1e-9 + 1e-6 * entries[name].norm()


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("limit", [math.inf, 1e3, 0.7])
@pytest.mark.parametrize("complex_", [False, True])
def test_steps_are_those_of_torch_in_float64(decoupled: bool, limit: float, complex_: bool) -> None:
    parameters = some_parameters(complex_)
    optimizer = Optimizer(in_groups(parameters, 0.1), epsilon=1e-6, decoupled=decoupled)
    twins, reference = exact_twin(parameters, decoupled)
    for step in range(6):
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] *= 0.8
        set_gradients(step, parameters, twins)
        norm = optimizer.clip_and_step(limit)
        wanted = reference_step(twins, reference, limit)
        assert norm.shape == ()
        assert norm.item() == pytest.approx(wanted.item(), rel=1e-6)
        assert wanted > 0.7  # the smallest limit clips
    assert_close(parameters, twins)
    assert_same_state(optimizer, reference)


def test_parameters_without_a_gradient_are_left_alone() -> None:
    """Neither decay nor averages nor counts move, so that the counts of some differ."""
    parameters = some_parameters()
    optimizer = Optimizer(in_groups(parameters, 0.1), epsilon=1e-6)
    twins, reference = exact_twin(parameters, decoupled=True)
    for step, without in enumerate([(1,), (1, 4), (0,), (), (2, 3), ()]):
        set_gradients(step, parameters, twins, without=without)
        norm = optimizer.clip_and_step(0.7)
        assert norm.item() == pytest.approx(reference_step(twins, reference, 0.7).item(), rel=1e-6)
    assert_close(parameters, twins)
    assert_same_state(optimizer, reference)


def test_no_gradient_at_all() -> None:
    parameters = some_parameters()
    before = [parameter.clone() for parameter in parameters]
    assert Optimizer(in_groups(parameters, 0.1)).clip_and_step(1.0) == 0
    assert all(map(torch.equal, parameters, before))


def test_gradients_in_another_order_of_memory() -> None:
    parameters = some_parameters()
    optimizer = Optimizer(in_groups(parameters, 0.1), epsilon=1e-6)
    twins, reference = exact_twin(parameters, decoupled=True)
    for step in range(3):
        set_gradients(step, parameters, twins)
        for parameter in parameters:
            if parameter.ndim == 2:
                parameter.grad = parameter.grad.T.contiguous().T
        optimizer.clip_and_step(0.7)
        reference_step(twins, reference, 0.7)
    assert_close(parameters, twins)


@pytest.mark.parametrize("decoupled", [False, True])
def test_runs_begun_with_torchs_adam_go_on(decoupled: bool) -> None:
    """Checkpoints of earlier versions hold its state."""
    parameters = some_parameters()
    twins, reference = exact_twin(parameters, decoupled)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    groups = [{k: v for k, v in g.items() if k != "matrices"} for g in in_groups(parameters, 0.1)]
    old = kind(groups, eps=1e-6)
    optimizer = Optimizer(in_groups(parameters, 0.1), epsilon=1e-6, decoupled=decoupled)
    for step in range(6):
        set_gradients(step, parameters, twins)
        reference_step(twins, reference, 0.7)
        if step < 3:
            reference_step(parameters, old, 0.7)
            optimizer.load_state_dict(old.state_dict())
        else:
            optimizer.clip_and_step(0.7)
    assert_close(parameters, twins)
    assert_same_state(optimizer, reference)


@pytest.mark.parametrize("muon", [False, True])
def test_a_loaded_state_goes_on_bit_for_bit(muon: bool) -> None:
    results = []
    for stops in (False, True):
        parameters = some_parameters(complex_=True)
        optimizer = Optimizer(in_groups(parameters, 0.1, muon))
        for step in range(6):
            if stops and step == 3:
                state = optimizer.state_dict()
                optimizer = Optimizer(in_groups(parameters, 0.1, muon))
                optimizer.load_state_dict(state)
            set_gradients(step, parameters)
            norm = optimizer.clip_and_step(0.7)
        results.append([norm, *parameters])
    assert all(map(torch.equal, *results))


def test_a_saved_state_does_not_move() -> None:
    parameters = some_parameters()
    optimizer = Optimizer(in_groups(parameters, 0.1, muon=True))
    set_gradients(0, parameters)
    optimizer.clip_and_step(0.7)
    state = optimizer.state_dict()["state"]
    before = {number: entries | {} for number, entries in state.items()}
    copies = {(n, k): t.clone() for n, entries in before.items() for k, t in entries.items()}
    set_gradients(1, parameters)
    optimizer.clip_and_step(0.7)
    assert all(torch.equal(before[n][k], t) for (n, k), t in copies.items())


def test_states_of_another_optimiser_are_refused() -> None:
    parameters = some_parameters()
    adam, muon = (Optimizer(in_groups(parameters, 0.1, kind)) for kind in (False, True))
    set_gradients(0, parameters)
    adam.clip_and_step(1.0)
    with pytest.raises(ValueError, match="must hold momentum_buffer, got exp_avg"):
        muon.load_state_dict(adam.state_dict())
    state = adam.state_dict()
    state["state"][3]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(
        ValueError, match=r"exp_avg of parameter 3 .* shape \(12, 60\), got \(2, 2\)"
    ):
        adam.load_state_dict(state)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_seen_in_the_norm(bad: float) -> None:
    parameters = some_parameters()
    optimizer = Optimizer(in_groups(parameters, 0.1, muon=True))
    set_gradients(0, parameters)
    parameters[3].grad[2, 5] = bad
    assert not optimizer.clip_and_step(1.0).isfinite()


def test_clipping_comes_before_both() -> None:
    """A gradient of any size moves as one at the limit does."""
    results = []
    for size in (1.0, 1e3):
        parameters = some_parameters()
        optimizer = Optimizer(in_groups(parameters, 0.0, muon=True))
        for step in range(2):
            set_gradients(step, parameters)
            for parameter in parameters:
                parameter.grad *= size if step else 1.0
            optimizer.clip_and_step(0.01)
        results.append(parameters)
    assert all(torch.allclose(*pair, rtol=1e-3, atol=2e-2) for pair in zip(*results, strict=True))


def test_autograd_notices_the_change() -> None:
    parameters = some_parameters()
    optimizer = Optimizer(in_groups(parameters, 0.1))
    for step in range(5):
        square = (parameters[0] * parameters[0]).sum()
        set_gradients(step, parameters)
        optimizer.clip_and_step(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.backward()


def test_parameters_that_move_in_memory_are_followed() -> None:
    parameters = some_parameters()
    optimizer = Optimizer(in_groups(parameters, 0.1), epsilon=1e-6)
    twins, reference = exact_twin(parameters, decoupled=True)
    for step in range(6):
        if step == 4:
            parameters[3].data = parameters[3].data.clone()
        set_gradients(step, parameters, twins)
        optimizer.clip_and_step(0.7)
        reference_step(twins, reference, 0.7)
    assert_close(parameters, twins)


@pytest.mark.parametrize(
    ("name", "value"), [("momentum", 1.0), ("momentum", -0.1), ("matrix_rate", 0.0)]
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        TrainingSettings(**{name: value})


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU captures")
@pytest.mark.parametrize("muon", [False, True])
def test_captured_steps_are_the_eager_ones(muon: bool) -> None:
    results = []
    for capture in (False, True):
        parameters = some_parameters(complex_=True)
        optimizer = Optimizer(in_groups(parameters, 0.1, muon), capture=capture)
        for step in range(8):
            for group in optimizer.param_groups:
                group["lr"] *= 0.8
            set_gradients(step, parameters)
            norm = optimizer.clip_and_step(0.7)
        assert optimizer._update.captured is capture
        results.append([norm, *parameters])
    assert all(map(torch.equal, *results))


def test_one_device_is_asked_for() -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]
    with pytest.raises(ValueError, match="on one device"):
        Optimizer([{"params": parameters, "lr": 1.0, "weight_decay": 0.0, "matrices": False}])


def test_the_tiny_model_has_both_kinds() -> None:
    """What the tests of whole runs rely on."""
    from fst.training.optimizer import build_optimizer

    groups = build_optimizer(
        TinyModel(TinyConfig()), TrainingSettings(optimizer="muon")
    ).param_groups
    assert {group["matrices"] for group in groups} == {False, True}
