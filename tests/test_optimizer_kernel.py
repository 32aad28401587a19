"""Clipping and Adam's step in kernels of our own: torch's numbers, torch's state.

Without a GPU the kernels run in Triton's interpreter.
"""

import copy
import math

import pytest
import torch
from torch import nn

from fst import kernels
from fst.training.loop import build_accelerator
from fst.training.optimization import ClippedAdam
from fst.training.trainer import Trainer
from training_fakes import TinyConfig, TinyModel, WaveSamples, tiny_settings

adam = pytest.importorskip("fst.kernels.adam")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Shorter and longer than a block, none, and neither blocks nor fours.
SHAPES = [(3, 5), (adam.BLOCK,), (), (7, 600), (1,), (2 * adam.BLOCK + 4,), (0,), (adam.BLOCK - 1,)]
# How far from float64 a run may be that torch began. On a GPU its fused step has β₂ in float32, so
# its 1 - β₂ is off by 1.3e-5 of itself, and with it the average of squares, from which the error
# goes on to the parameters and, where decay is coupled, to the other average. On a CPU, and in our
# own kernels, only rounding counts.
BOUNDS = (
    {"parameters": 1e-5, "exp_avg": 1e-5, "exp_avg_sq": 1.5e-5}
    if DEVICE == "cuda"
    else {"parameters": 2e-6, "exp_avg": 1e-6, "exp_avg_sq": 1e-6}
)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """In the interpreter the kernels take what is not on a GPU."""
    monkeypatch.setattr(kernels, "_on_gpu", lambda _: True)


@pytest.fixture
def launches(monkeypatch):
    """How often the kernels ran."""
    found, step = [], adam.ClippedStep.__call__
    counted = lambda self, *given: found.append(1) or step(self, *given)  # noqa: E731
    monkeypatch.setattr(adam.ClippedStep, "__call__", counted)
    return found


def some_parameters(dtype=torch.float32):
    return [nn.Parameter(torch.randn(shape, device=DEVICE).to(dtype)) for shape in SHAPES]


def in_groups(parameters, decay):
    """Two rates, and one group without decay."""
    rates = (
        (parameters[:3], 1e-2, decay),
        (parameters[3:5], 3e-3, 0.0),
        (parameters[5:], 1, decay),
    )
    return [{"params": some, "lr": lr, "weight_decay": wd} for some, lr, wd in rates]


def optimizer_of(parameters, decoupled, decay=0.1):
    return ClippedAdam(
        in_groups(parameters, decay), eps=1e-6, fused=True, decoupled_weight_decay=decoupled
    )


def exact_twin(parameters, decoupled, decay=0.1):
    """The same weights in float64, under torch's optimiser."""
    twins = [nn.Parameter(parameter.detach().double()) for parameter in parameters]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return twins, kind(in_groups(twins, decay), eps=1e-6, foreach=False)


def set_gradients(step, *lists, without=()):
    """The same for all lists, in their dtypes."""
    generator = torch.Generator().manual_seed(step)
    for index, group in enumerate(zip(*lists)):
        gradient = torch.randn(group[0].shape, generator=generator).to(DEVICE) / (1 + step)
        for parameter in group:
            parameter.grad = None if index in without else gradient.to(parameter.dtype)


def reference_step(twins, optimizer, limit):
    norm = nn.utils.clip_grad_norm_(twins, limit)
    optimizer.step()
    return norm


def assert_close(found, wanted, tolerance=BOUNDS["parameters"]):
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).abs().max() <= tolerance * (1 + other.abs().max())


def assert_same_state(optimizer, reference):
    """Counts to the last bit, averages to rounding."""
    state, wanted = (o.state_dict()["state"] for o in (optimizer, reference))
    assert state.keys() == wanted.keys()
    for index, entries in wanted.items():
        assert state[index].keys() == entries.keys()
        assert state[index]["step"] == entries["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            error = (state[index][name].double() - entries[name]).norm()
            assert error <= 1e-9 + BOUNDS[name] * entries[name].norm()


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("limit", [math.inf, 1e3, 0.7])
def test_steps_are_those_of_torch_in_float64(decoupled, limit, launches):
    parameters = some_parameters()
    filled = [p for p in parameters if p.numel()]
    optimizer = optimizer_of(filled, decoupled)
    twins, reference = exact_twin(filled, decoupled)
    for step in range(5):
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] *= 0.8
        set_gradients(step, filled, twins)
        norm = optimizer.clip_and_step(limit)
        wanted = reference_step(twins, reference, limit)
        assert norm.shape == ()
        assert norm.item() == pytest.approx(wanted.item(), rel=1e-6)
        assert wanted > 0.7  # the smallest limit clips
    assert len(launches) == 4  # all but the first, which makes the state
    assert_close(filled, twins)
    assert_same_state(optimizer, reference)


def test_without_decay(launches):
    parameters = some_parameters()[:2]
    optimizer = ClippedAdam(parameters, fused=True)
    twins = [nn.Parameter(parameter.detach().double()) for parameter in parameters]
    reference = torch.optim.Adam(twins)
    for step in range(3):
        set_gradients(step, parameters, twins)
        optimizer.clip_and_step(1.0)
        reference_step(twins, reference, 1.0)
    assert len(launches) == 2
    assert_close(parameters, twins, 1e-7)


def test_bias_corrections_after_one_and_after_many_steps(launches):
    """In float32, 1 - β₂ᵗ would be off by 5e-5 at first."""
    for count in (0.0, 9.0, 100_000.0):
        parameters = [nn.Parameter(torch.zeros(16, device=DEVICE))]
        optimizer = ClippedAdam(parameters, lr=1.0, eps=1e-12, fused=True)
        set_gradients(0, parameters)
        gradient = parameters[0].grad.double()
        optimizer.step()
        state = optimizer.state[parameters[0]]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].zero_()
        parameters[0].data.zero_()
        state["step"].fill_(count)
        optimizer.clip_and_step(math.inf)
        t = count + 1
        average = 0.1 * gradient / (1 - 0.9**t)
        square = 0.001 * gradient**2 / (1 - 0.999**t)
        wanted = -average / square.sqrt()
        assert torch.allclose(parameters[0].double(), wanted, rtol=1e-6, atol=0)
        assert state["step"].item() == t
    assert len(launches) == 3


def test_parameters_without_a_gradient_are_left_out(launches):
    parameters = [p for p in some_parameters() if p.numel()]
    optimizer = optimizer_of(parameters, decoupled=True)
    twins, reference = exact_twin(parameters, decoupled=True)
    for step, without in enumerate([(1,), (1, 4), (0,), (), (2, 3)]):
        set_gradients(step, parameters, twins, without=without)
        norm = optimizer.clip_and_step(0.7)
        wanted = reference_step(twins, reference, 0.7)
        assert norm.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert len(launches) == 3  # in the third step a parameter has its first gradient
    assert_close(parameters, twins)
    assert_same_state(optimizer, reference)


def test_empty_parameters_do_no_harm(launches):
    parameters = some_parameters()
    optimizer = optimizer_of(parameters, decoupled=True)
    twins, reference = exact_twin(parameters, decoupled=True)
    for step in range(2):
        set_gradients(step, parameters, twins)
        optimizer.clip_and_step(0.7)
        reference_step(twins, reference, 0.7)
    assert len(launches) == 1
    assert_close([p for p in parameters if p.numel()], [t for t in twins if t.numel()])
    assert_same_state(optimizer, reference)


def test_no_gradient_at_all():
    parameters = some_parameters()
    before = [parameter.clone() for parameter in parameters]
    optimizer = optimizer_of(parameters, decoupled=True)
    assert optimizer.clip_and_step(1.0) == 0
    assert all(map(torch.equal, parameters, before))


def test_gradients_anywhere_in_memory(launches):
    """Views of one buffer, as in distributed training: neither aligned nor where they were."""
    parameters = [p for p in some_parameters() if p.numel()]
    optimizer = optimizer_of(parameters, decoupled=False)
    twins, reference = exact_twin(parameters, decoupled=False)
    for step in range(4):
        set_gradients(step, parameters, twins)
        buffer = torch.full((sum(p.numel() for p in parameters) + step,), math.nan, device=DEVICE)
        start = step
        for parameter in parameters:
            view = buffer[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
            parameter.grad = view.copy_(parameter.grad)
        optimizer.clip_and_step(0.7)
        reference_step(twins, reference, 0.7)
    assert len(launches) == 3
    assert_close(parameters, twins)


def test_what_stays_in_place_is_described_once(monkeypatch):
    parameters = [p for p in some_parameters() if p.numel()]
    optimizer = optimizer_of(parameters, decoupled=False)
    built, table = [], adam.block_table
    monkeypatch.setattr(adam, "block_table", lambda given: built.append(1) or table(given))
    set_gradients(0, parameters)
    for _ in range(4):
        optimizer.clip_and_step(0.7)
    assert len(built) == 1
    parameters[3].grad = parameters[3].grad.clone()
    optimizer.clip_and_step(0.7)
    assert len(built) == 2


def test_gradients_in_another_order_of_memory(launches):
    parameters = [nn.Parameter(torch.randn(6, 4, device=DEVICE)) for _ in range(2)]
    optimizer = ClippedAdam(parameters, lr=1e-2, fused=True)
    twins = [nn.Parameter(parameter.detach().double()) for parameter in parameters]
    reference = torch.optim.Adam(twins, lr=1e-2)
    for step in range(3):
        set_gradients(step, parameters, twins)
        parameters[0].grad = parameters[0].grad.T.contiguous().T
        assert not parameters[0].grad.is_contiguous()
        norm = optimizer.clip_and_step(0.5)
        assert norm.item() == pytest.approx(reference_step(twins, reference, 0.5).item(), rel=1e-6)
    assert len(launches) == 2
    assert_close(parameters, twins)


def test_parameters_in_another_order_of_memory_are_left_to_torch(launches):
    weight = nn.Parameter(torch.randn(4, 6, device=DEVICE).T)
    optimizer = ClippedAdam([weight], lr=1e-2, fused=True)
    twin = nn.Parameter(weight.detach().double())
    reference = torch.optim.Adam([twin], lr=1e-2)
    for _ in range(3):
        twin.grad = torch.randn(6, 4, device=DEVICE).double()
        weight.grad = torch.empty_like(weight).copy_(twin.grad)
        optimizer.clip_and_step(0.5)
        reference_step([twin], reference, 0.5)
    assert not launches
    assert_close([weight], [twin])


def test_on_request_torch_steps(launches):
    weight = nn.Parameter(torch.ones(8, device=DEVICE))
    optimizer = ClippedAdam([weight], fused=True)
    weight.grad = torch.ones_like(weight)
    for expected in (0, 1, 2):
        optimizer.clip_and_step(1.0)
        assert len(launches) == expected
    with kernels.reference():
        optimizer.clip_and_step(1.0)
    assert len(launches) == 2
    assert optimizer.state[weight]["step"] == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes_are_left_to_torch(dtype, launches):
    weight = nn.Parameter(torch.ones(5, dtype=dtype, device=DEVICE))
    twin = nn.Parameter(weight.detach().clone())
    optimizer = ClippedAdam([weight], lr=1e-2, fused=dtype == torch.float64)
    reference = torch.optim.Adam([twin], lr=1e-2)
    for step in range(3):
        weight.grad = torch.full_like(weight, 1.0 + step)
        twin.grad = weight.grad.clone()
        optimizer.clip_and_step(0.5)
        reference_step([twin], reference, 0.5)
    assert not launches
    assert torch.allclose(weight, twin)


@pytest.mark.parametrize("decoupled", [False, True])
def test_runs_continue_from_one_optimiser_to_the_other(decoupled, launches):
    """States of torch's fused optimiser and of ours are the same."""
    parameters = [p for p in some_parameters() if p.numel()]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    old = kind(in_groups(parameters, 0.1), eps=1e-6, fused=True)
    twins, reference = exact_twin(parameters, decoupled)
    optimizer: torch.optim.Optimizer = old
    for step in range(9):
        if step % 3 == 0 and step > 0:
            saved = copy.deepcopy(optimizer.state_dict())
            fresh = optimizer_of(parameters, decoupled)
            optimizer = fresh if step == 3 else kind(in_groups(parameters, 0.1), fused=True)
            optimizer.load_state_dict(saved)
        set_gradients(step, parameters, twins)
        if isinstance(optimizer, ClippedAdam):
            optimizer.clip_and_step(0.7)
        else:
            reference_step(parameters, optimizer, 0.7)
        reference_step(twins, reference, 0.7)
    assert len(launches) == 3
    assert_close(parameters, twins)
    assert_same_state(optimizer, reference)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("limit", [math.inf, 1.0])
def test_what_is_not_finite_spreads_as_with_torch(bad, limit, launches):
    parameters = [p for p in some_parameters() if p.numel()]
    optimizer = optimizer_of(parameters, decoupled=True)
    twins, reference = exact_twin(parameters, decoupled=True)
    for step in range(2):
        set_gradients(step, parameters, twins)
        if step == 1:
            for some in (parameters, twins):
                some[3].grad[2, 5] = bad
        norm = optimizer.clip_and_step(limit)
        wanted = reference_step(twins, reference, limit)
    assert len(launches) == 1
    assert norm.item() == wanted.item() or (norm.isnan() and wanted.isnan())
    for one, other in zip(parameters, twins):
        assert torch.equal(one.isnan(), other.isnan())
        assert one.isnan().any() or not (math.isnan(bad) or math.isinf(limit))


def test_the_same_bits_again(launches):
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        parameters = [p for p in some_parameters() if p.numel()]
        optimizer = optimizer_of(parameters, decoupled=True)
        for step in range(3):
            set_gradients(step, parameters)
            norm = optimizer.clip_and_step(0.7)
        results.append([norm, *parameters])
    assert len(launches) == 4
    assert all(map(torch.equal, *results))


def test_autograd_notices_the_change(launches):
    weight = nn.Parameter(torch.ones(8, device=DEVICE))
    optimizer = ClippedAdam([weight], fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.clip_and_step(1.0)
    square = (weight * weight).sum()
    optimizer.clip_and_step(1.0)
    assert len(launches) == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def trained(settings, fused):
    """Four updates of one and the same model, with the optimiser fused or not."""
    torch.manual_seed(5)
    samples = WaveSamples.draw(13, seed=1), WaveSamples.draw(7, seed=2)
    accelerator = build_accelerator(settings, torch.device(DEVICE))
    trainer = Trainer(TinyModel(TinyConfig()), *samples, settings, accelerator)
    for options in (trainer.optimizer.defaults, *trainer.optimizer.param_groups):
        options["fused"] = fused
    for _ in range(4):
        trainer.update()
        trainer.read()
    return trainer


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_trainer_with_and_without_the_kernels(accumulate, launches):
    settings = tiny_settings(
        optimizer="adamw", weight_decay=0.1, clip=0.2, accumulate=accumulate, batch_size=6
    )
    plain, own = (trained(settings, fused) for fused in (False, True))
    assert len(launches) == 3
    for found, wanted in zip(own.progression.pending, plain.progression.pending, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    for one, other in zip(own.model.parameters(), plain.model.parameters()):
        assert torch.allclose(one, other, atol=1e-6)
