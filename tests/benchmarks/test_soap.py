"""SOAP is Adam in another basis, solves what that basis is for, and a stack changes nothing."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def soap() -> object:
    sys.path.insert(0, BENCHMARKS)
    yield importlib.import_module("soap")
    sys.path.remove(BENCHMARKS)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def group(parameters: list[nn.Parameter], matrices: bool = True, decay: float = 0.0) -> dict:
    entries = {"params": parameters, "matrices": matrices, "weight_decay": decay}
    return entries | {"lr": 0.01, "base": 0.01}


def test_in_the_basis_of_the_entries_it_is_adam(soap: ModuleType) -> None:
    torch.manual_seed(0)
    ours = nn.Parameter(random(5, 7))
    theirs = nn.Parameter(ours.detach().clone())
    optimizer = soap.Soap([group([ours], decay=0.1)], frequency=10**9)
    adam = torch.optim.AdamW([theirs], lr=0.01, betas=(0.95, 0.95), weight_decay=0.1)
    ours.grad = random(5, 7)
    optimizer.param_groups[0]["lr"] = 0.0  # the step that finds the bases
    optimizer.clip_and_step(torch.inf)
    optimizer.param_groups[0]["lr"] = 0.01
    (stack,) = optimizer.stacks
    stack.left_basis = torch.eye(5, dtype=torch.float64)[None]
    stack.right_basis = torch.eye(7, dtype=torch.float64)[None]
    for _ in range(25):
        theirs.grad = random(5, 7)
        ours.grad = theirs.grad.clone()
        norm = optimizer.clip_and_step(1.0)
        torch.testing.assert_close(norm, theirs.grad.norm())
        nn.utils.clip_grad_norm_([theirs], 1.0)
        adam.step()
    torch.testing.assert_close(ours, theirs)


def test_the_whole_gradient_is_clipped_and_adam_moves_the_rest(soap: ModuleType) -> None:
    matrix, vector = nn.Parameter(random(4, 4)), nn.Parameter(random(4))
    expected = nn.Parameter(vector.detach().clone())
    optimizer = soap.Soap([group([matrix]), group([vector], matrices=False)])
    adam = torch.optim.Adam([expected], lr=0.01)
    for _ in range(3):
        matrix.grad, vector.grad = random(4, 4), random(4)
        norm = torch.cat((matrix.grad.flatten(), vector.grad)).norm()
        expected.grad = vector.grad * 0.1 / (norm + 1e-6)
        torch.testing.assert_close(optimizer.clip_and_step(0.1), norm)
        adam.step()
    torch.testing.assert_close(vector, expected)


def test_a_badly_conditioned_quadratic_takes_far_fewer_steps(soap: ModuleType) -> None:
    """½ tr(Wᵀ A W B) has the Hessian A ⊗ B, of condition 10⁶ and not along the axes."""
    torch.manual_seed(0)
    bases = [torch.linalg.qr(random(10, 10)).Q for _ in range(2)]
    a, b = (basis * torch.logspace(0, -3, 10).double() @ basis.T for basis in bases)
    start = random(10, 10)

    def distance(by_soap: bool, steps: int, rate: float) -> float:
        """How much is left of the start, at a rate that falls to zero."""
        matrix = nn.Parameter(start.clone())
        adam = torch.optim.Adam([matrix], betas=(0.95, 0.95))
        optimizer = soap.Soap([group([matrix])]) if by_soap else adam
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
            matrix.grad = a @ matrix.detach() @ b
            optimizer.clip_and_step(torch.inf) if by_soap else optimizer.step()
        return float(matrix.detach().norm() / start.norm())

    assert distance(True, 300, 0.3) < 0.02
    assert min(distance(False, 1500, rate) for rate in (0.01, 0.03, 0.1, 0.3)) > 0.05


def test_bases_approach_the_eigenvectors(soap: ModuleType) -> None:
    torch.manual_seed(0)
    exact = torch.linalg.qr(random(3, 6, 6)).Q
    grams = exact * torch.tensor([32.0, 16, 8, 4, 2, 1]).double() @ exact.mT
    basis = torch.eye(6, dtype=torch.float64).expand(3, 6, 6)
    for _ in range(60):
        basis, _ = soap.nearer_basis(grams, basis)
    for found in (basis, soap.eigenbasis(grams)):
        torch.testing.assert_close((exact.mT @ found).abs(), torch.eye(6).double().expand(3, 6, 6))


def test_a_stack_moves_each_matrix_as_if_alone(soap: ModuleType) -> None:
    torch.manual_seed(0)
    together = [nn.Parameter(random(*shape)) for shape in [(6, 4), (3, 5), (6, 4), (6, 2, 2)]]
    alone = [nn.Parameter(each.detach().clone()) for each in together]
    groups = [group(together[:2], decay=0.1), group(together[2:])]
    one = soap.Soap(groups, frequency=3)
    several = [
        soap.Soap([group([each], decay=0.1 if number < 2 else 0.0)], frequency=3)
        for number, each in enumerate(alone)
    ]
    for _ in range(10):
        for each, other in zip(together, alone):
            each.grad = random(*each.shape)
            other.grad = each.grad.clone()
        one.clip_and_step(torch.inf)
        for optimizer in several:
            optimizer.clip_and_step(torch.inf)
    assert [len(stack.members) for stack in one.stacks] == [3, 1]
    torch.testing.assert_close(together, alone)


def test_it_goes_on_from_its_state(soap: ModuleType) -> None:
    torch.manual_seed(0)
    pairs = []
    for _ in range(2):
        parameters = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))]
        groups = [group(parameters[:1]), group(parameters[1:], matrices=False)]
        pairs.append((parameters, soap.Soap(groups, frequency=2)))
    (first, one), (second, other) = pairs
    for number in range(9):
        if number == 5:
            other.load_state_dict(one.state_dict())
            torch._foreach_copy_([each.data for each in second], [each.data for each in first])
        for each, copy in zip(first, second):
            each.grad = torch.randn(each.shape)
            copy.grad = each.grad.clone()
        one.clip_and_step(1.0)
        if number >= 5:
            other.clip_and_step(1.0)
        one.zero_grad()
    assert first[0].grad is None
    torch.testing.assert_close(first, second)
