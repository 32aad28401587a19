"""Clipping and one step of Adam, AdamW or Muon, for all parameters together.

Gradients are copied into one vector, first those of Muon's matrices and then those of Adam's
parameters, and everything is computed there: a handful of operations, however many parameters there
are. What changes from step to step (rates and Adam's bias corrections) is computed by the host and
sent as a few numbers. So the same operations run in every step, on the same memory: on a GPU they
are captured as one CUDA graph and replayed.

With rate η, decay λ, the norm ‖g‖ of the whole gradient and the count t of steps, Adam's part is

    g ← g min(1, limit / (‖g‖ + 10⁻⁶)),
    m ← β₁ m + (1 - β₁) g,   v ← β₂ v + (1 - β₂) g²,
    θ ← (1 - η λ) θ - η / (1 - β₁ᵗ) m / (√v / √(1 - β₂ᵗ) + ε),

where decay that is coupled has λ θ added to g instead. A matrix W with momentum M moves by Muon
(Jordan et al., 2024),

    M ← μ M + (1 - μ) g,   U = μ M + (1 - μ) g,
    W ← (1 - η λ) W - 0.2 η √max(rows, columns) O,

where O is U with its singular values made equal to about one, by Newton-Schulz steps. The factor
0.2 √max(rows, columns) gives O the size of Adam's updates, whose learning rates then carry over
(Liu et al., 2025). This is `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, for many
matrices at once.
"""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fst.base import Model
from fst.training.settings import TrainingError, TrainingSettings

# Adds the other processes' gradients to the vector it is given.
Exchange = Callable[[Tensor], object]

BETAS = (0.9, 0.999)
# Steps with the same parameters before one is captured.
EAGER_STEPS = 2
# What PyTorch's optimisers call the state of a parameter.
ADAM_NAMES, MUON_NAMES = ("exp_avg", "exp_avg_sq", "step"), ("momentum_buffer",)
# A matrix with a shorter side than this has too few directions to make equal.
LEAST_SIDE = 9
# The last layer of each model, by name: its rows are the outputs, not features.
OUTPUT_LAYERS = {
    "decoder.output.2.weight",  # FST
    "head.output.weight",  # FST for images
    "output.weight",  # Perceiver IO, ViT, CNN-ViT
    "network.output.weight",  # Transolver
    "network.projection.fcs.1.weight",  # FNO
}

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LEAST_NORM = 1e-7

# Multiplications that a GPU makes while it would launch the kernels of one more stack, and the
# multiple that the sides of its matrices should be.
WORTH_A_STACK, ALIGNMENT = 2_500_000_000, 16


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that Muon moves; Adam moves all others.

    These are the weights of linear layers and convolutions (a kernel counts as the matrix with one
    row per output channel). Adam keeps

    - biases, norms, length scales: they are no matrices;
    - learned tokens, latents, positions: each row is a vector of its own, not part of a map;
    - the last layer, as is customary: its rows are the outputs, each with a scale of its own;
    - matrices with fewer than `LEAST_SIDE` rows or columns, such as those that read coordinates;
    - complex spectral weights: one matrix per frequency, of which most see little of the data.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return [
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith("weight")
        and name not in OUTPUT_LAYERS
        and id(parameter) not in embeddings
        and parameter.ndim >= 2
        and parameter.is_floating_point()
        and min(matrix_shape(parameter)) >= LEAST_SIDE
    ]


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Rows and columns; the axes of a convolution's kernel count as columns."""
    rows = parameter.shape[0]
    return rows, parameter.numel() // max(rows, 1)


def orthogonalize(matrices: Float[Tensor, "k r c"]) -> Float[Tensor, "k r c"]:
    """Newton-Schulz steps in bfloat16, for r ≤ c; rows and columns of zeros stay zero."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    # Then no singular value is above one.
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


@dataclass
class Stack:
    """Matrices that are orthogonalised together, with zeros up to a common shape."""

    rows: int
    columns: int
    members: list[int] = field(default_factory=list)

    @property
    def work(self) -> int:
        """Multiplications for one matrix."""
        return STEPS * self.rows**2 * (2 * self.columns + self.rows)


def stacked(shapes: Sequence[tuple[int, int]], worth: int, alignment: int) -> list[Stack]:
    """Stacks of matrices of one shape, lying on their longer side.

    Smaller ones join larger ones where the zeros cost less than `worth` multiplications: a stack of
    its own would be slower on a GPU, where every kernel has a least time.
    """
    by_shape: dict[tuple[int, int], Stack] = {}
    for member, shape in enumerate(shapes):
        rows, columns = (-(-side // alignment) * alignment for side in sorted(shape))
        by_shape.setdefault((rows, columns), Stack(rows, columns)).members.append(member)
    stacks = sorted(by_shape.values(), key=lambda stack: (stack.work, stack.rows))
    found = []
    for number, stack in enumerate(stacks):
        others = [each for each in stacks[number + 1 :] if each.rows >= stack.rows]
        larger = [each for each in others if each.columns >= stack.columns]
        nearest = min(larger, key=lambda each: each.work, default=None)
        if nearest and (nearest.work - stack.work) * len(stack.members) < worth:
            nearest.members += stack.members
        else:
            found.append(stack)
    return found


class Orthogonalizer:
    """O of many matrices from their U; both are vectors that hold one matrix after the other."""

    def __init__(
        self, shapes: Sequence[tuple[int, int]], stacks: Sequence[Stack], device: torch.device
    ) -> None:
        total = sum(rows * columns for rows, columns in shapes)
        numbered = _views(torch.arange(total), [torch.Size(shape) for shape in shapes])
        back = torch.empty(total, dtype=torch.long)
        self._stacks: list[tuple[Tensor, Tensor]] = []
        before = 0
        for stack in stacks:
            # Where each number comes from; the last number of the vector will be zero.
            source = torch.full((len(stack.members), stack.rows, stack.columns), total)
            index = before + torch.arange(source.numel()).view(source.shape)
            for number, member in enumerate(stack.members):
                own = numbered[member]
                own = own if own.shape[0] <= own.shape[1] else own.mT
                source[number, : own.shape[0], : own.shape[1]] = own
                back[own] = index[number, : own.shape[0], : own.shape[1]]
            before += source.numel()
            scales = [0.2 * math.sqrt(max(shapes[member])) for member in stack.members]
            self._stacks.append((source.to(device), torch.tensor(scales, device=device)))
        self._back = back.to(device)

    def __call__(self, updates: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        half = torch.cat((updates.bfloat16(), updates.new_zeros(1, dtype=torch.bfloat16)))
        found = [
            (orthogonalize(half[source]).to(updates.dtype) * scales[:, None, None]).flatten()
            for source, scales in self._stacks
        ]
        return torch.cat(found)[self._back]


@dataclass
class Segment:
    """Parameters of one group that have made equally many steps: one part of the vector."""

    group: dict[str, Any]
    steps: int
    numbers: list[int] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    """The parameters, complex ones as pairs of numbers."""
    start: int = 0
    end: int = 0


class Optimizer:
    """Adam or Muon on groups of parameters, with a learning rate of their own each.

    A group is a dictionary with `params`, `lr`, `weight_decay` and `matrices`: whether Muon moves
    them. Only `lr` may change later. Parameters without a gradient are left alone. With `capture`,
    steps on a GPU are replayed from the fourth on.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        epsilon: float = 1e-8,
        momentum: float = 0.95,
        decoupled: bool = True,
        capture: bool = True,
    ) -> None:
        self.param_groups = groups
        self.epsilon, self.momentum, self.decoupled = epsilon, momentum, decoupled
        self.parameters = [(group, each) for group in groups for each in group["params"]]
        if len({parameter.device for _, parameter in self.parameters}) > 1:
            raise ValueError("all parameters must be on one device")
        self.capture = capture
        self._update: Update | None = None
        self._state: dict[int, dict[str, Tensor]] = {}  # of parameters outside the update

    @torch.no_grad()
    def clip_and_step(self, limit: float, exchange: Exchange | None = None) -> Float[Tensor, ""]:
        """Clip the norm of the whole gradient to `limit`, and step; the norm before that.

        `exchange` is given the gradient first, as one vector, to add those of other processes.
        """
        parameters = [each for _, each in self.parameters if each.grad is not None]
        if not parameters:
            return torch.zeros((), device=self.parameters[0][1].device)
        if self._update is None or not self._update.fits(parameters):
            self._state = self.state_dict()["state"]
            self._update = Update(self, self._state)
        return self._update.step(limit, exchange, capture=self.capture)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if set_to_none:
            for _, parameter in self.parameters:
                parameter.grad = None
        elif gradients := [each.grad for _, each in self.parameters if each.grad is not None]:
            torch._foreach_zero_(gradients)

    def state_dict(self) -> dict[str, Any]:
        """By the number of each parameter, with the names of PyTorch's optimisers."""
        moved = {} if self._update is None else self._update.state()
        return {"state": dict(sorted((self._state | moved).items()))}

    def load_state_dict(self, description: dict[str, Any]) -> None:
        """Go on from a state of the same groups; one of PyTorch's Adam will do as well."""
        self._state, self._update = {}, None
        for number, entries in description["state"].items():
            group, parameter = self.parameters[number]
            expected = MUON_NAMES if group["matrices"] else ADAM_NAMES
            if set(entries) != set(expected):
                raise ValueError(
                    f"the optimiser's state of parameter {number} must hold "
                    f"{', '.join(sorted(expected))}, got {', '.join(sorted(entries))}"
                )
            for name, tensor in entries.items():
                if name != "step" and tensor.shape != parameter.shape:
                    raise ValueError(
                        f"{name} of parameter {number} must have the shape "
                        f"{tuple(parameter.shape)}, got {tuple(tensor.shape)}"
                    )
            self._state[number] = {name: tensor.clone() for name, tensor in entries.items()}


class Update:
    """The step for parameters with a gradient, in fixed memory; takes them out of `state`."""

    def __init__(self, optimizer: Optimizer, state: dict[int, dict[str, Tensor]]) -> None:
        self._optimizer = optimizer
        segments: dict[tuple[int, int], Segment] = {}
        for number, (group, parameter) in enumerate(optimizer.parameters):
            if parameter.grad is not None:
                # Muon counts no steps.
                steps = int(state.get(number, {}).get("step", 0))
                segment = segments.setdefault((id(group), steps), Segment(group, steps))
                segment.numbers.append(number)
                segment.targets.append(_real(parameter.detach()))
        muon = [segment for segment in segments.values() if segment.group["matrices"]]
        adam = [segment for segment in segments.values() if not segment.group["matrices"]]
        self._segments, self._adam_segments = muon + adam, adam
        total = 0
        for segment in self._segments:
            segment.start = total
            total += sum(target.numel() for target in segment.targets)
            segment.end = total
        numbers = [number for segment in self._segments for number in segment.numbers]
        self._parameters = [optimizer.parameters[number][1] for number in numbers]
        given = [optimizer.parameters[number][1] for number in sorted(numbers)]
        self._known = [(id(parameter), parameter.data_ptr()) for parameter in given]
        self._targets = [target for segment in self._segments for target in segment.targets]
        of_muon = muon[-1].end if muon else 0
        self._muon, self._adam = slice(0, of_muon), slice(of_muon, total)
        like = self._targets[0]
        self._gradient, self._average = like.new_zeros(total), like.new_zeros(total)
        self._square = like.new_zeros(total - of_muon)
        self._norm = like.new_zeros(())
        # Of each segment what `_numbers` says; the last row has the limit.
        self._sent = like.new_zeros(len(self._segments) + 1, 3)
        every = [target.shape for target in self._targets]
        self._gradients, averages = _views(self._gradient, every), _views(self._average, every)
        of_matrices = sum(len(segment.targets) for segment in muon)
        squares = _views(self._square, every[of_matrices:])
        views = [{"momentum_buffer": average} for average in averages[:of_matrices]] + [
            {"exp_avg": average, "exp_avg_sq": square}
            for average, square in zip(averages[of_matrices:], squares, strict=True)
        ]
        self._views = dict(zip(numbers, views, strict=True))
        for number in numbers:
            for name, tensor in state.pop(number, {}).items():
                if name != "step":
                    self._views[number][name].copy_(_real(tensor))
        self._orthogonalizer: Orthogonalizer | None = None
        if shapes := [matrix_shape(target) for target in self._targets[:of_matrices]]:
            worth, alignment = (WORTH_A_STACK, ALIGNMENT) if like.is_cuda else (0, 1)
            stacks = stacked(shapes, worth, alignment)
            self._orthogonalizer = Orthogonalizer(shapes, stacks, like.device)
        self._eager_steps = 0
        self._replay: Callable[[], None] | None = None

    def state(self) -> dict[int, dict[str, Tensor]]:
        """A copy of what is held here, as PyTorch's optimisers name it."""
        found = {}
        for segment in self._segments:
            for number in segment.numbers:
                entries = {name: view.clone() for name, view in self._views[number].items()}
                if self._optimizer.parameters[number][1].is_complex():
                    entries = {name: torch.view_as_complex(each) for name, each in entries.items()}
                if not segment.group["matrices"]:
                    entries["step"] = torch.tensor(float(segment.steps))
                found[number] = entries
        return found

    @property
    def captured(self) -> bool:
        return self._replay is not None

    def fits(self, parameters: list[nn.Parameter]) -> bool:
        """Whether these are the parameters, in the same memory."""
        return [(id(each), each.data_ptr()) for each in parameters] == self._known

    def step(
        self, limit: float, exchange: Exchange | None = None, *, capture: bool
    ) -> Float[Tensor, ""]:
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        torch._foreach_copy_(self._gradients, [_real(gradient) for gradient in gradients])
        if exchange is not None:
            exchange(self._gradient)
        for segment in self._segments:
            segment.steps += 1
        rows = [*map(self._numbers, self._segments), (limit, 0.0, 0.0)]
        numbers = torch.tensor(rows, dtype=self._sent.dtype, pin_memory=self._sent.is_cuda)
        self._sent.copy_(numbers, non_blocking=True)  # the host does not wait for the device
        if self._replay is not None:
            self._replay()
            increment_version(self._parameters)  # autograd does not see what a graph changes
        elif capture and self._gradient.is_cuda and self._eager_steps == EAGER_STEPS:
            self._replay = self._captured()
        else:
            self._compute()
        self._eager_steps += 1
        return self._norm.clone()

    def _numbers(self, segment: Segment) -> tuple[float, float, float]:
        """What parameters are multiplied by, and the update; and Adam's √v, in float64."""
        rate, steps = segment.group["lr"], segment.steps
        shrinkage = 1 - rate * segment.group["weight_decay"] if self._optimizer.decoupled else 1.0
        if segment.group["matrices"]:
            return shrinkage, rate, 1.0
        first, second = (1 - beta**steps for beta in BETAS)
        return shrinkage, rate / first, 1 / math.sqrt(second)

    def _compute(self) -> None:
        """The whole step; it depends on nothing but the contents of tensors."""
        gradient, numbers = self._gradient, self._sent
        torch.linalg.vector_norm(gradient, out=self._norm)
        gradient.mul_((numbers[-1, 0] / (self._norm + 1e-6)).clamp(max=1))
        update = torch.empty_like(gradient)
        if self._orthogonalizer is not None:
            momentum, average = self._optimizer.momentum, self._average[self._muon]
            average.lerp_(gradient[self._muon], 1 - momentum)
            nesterov = gradient[self._muon].lerp(average, momentum)
            update[self._muon].copy_(self._orthogonalizer(nesterov))
        if self._adam_segments:
            self._adam_update(update[self._adam])
        for segment, number in zip(self._segments, numbers[:-1], strict=True):
            update[segment.start : segment.end].mul_(number[1])
            if self._optimizer.decoupled and segment.group["weight_decay"]:
                torch._foreach_mul_(segment.targets, number[0])
        shapes = [target.shape for target in self._targets]
        torch._foreach_sub_(self._targets, _views(update, shapes))

    def _adam_update(self, out: Float[Tensor, " n"]) -> None:
        gradient, average = self._gradient[self._adam], self._average[self._adam]
        for segment in self._adam_segments:
            decay = segment.group["weight_decay"]
            if decay and not self._optimizer.decoupled:  # the decay is part of the gradient
                values = torch.cat([target.flatten() for target in segment.targets])
                self._gradient[segment.start : segment.end].add_(values, alpha=decay)
        average.lerp_(gradient, 1 - BETAS[0])
        self._square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        root, before = self._square.sqrt(), self._adam.start
        numbers = self._sent[-1 - len(self._adam_segments) : -1]
        for segment, number in zip(self._adam_segments, numbers, strict=True):
            root[segment.start - before : segment.end - before].mul_(number[2])
        torch.div(average, root.add_(self._optimizer.epsilon), out=out)

    def _captured(self) -> Callable[[], None] | None:
        """Make this step, and capture it for those that follow; None where that fails."""
        device = self._gradient.device
        here, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        side.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.stream(side):
            self._compute()  # libraries make their plans on this stream
            try:
                # Other threads may go on with the GPU meanwhile.
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    self._compute()
            except RuntimeError as error:
                warnings.warn(f"the optimiser's step is not captured: {error}", stacklevel=2)
                return None
            finally:
                here.wait_stream(side)
        return graph.replay


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, which is how Adam takes them."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _views(vector: Shaped[Tensor, " n"], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The parts of a vector in these shapes."""
    parts = vector.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def build_optimizer(model: Model, settings: TrainingSettings) -> Optimizer:
    """Each group keeps its base rate under `base`, which the schedule multiplies."""
    rates = {"main": settings.learning_rate, "predictor": settings.learning_rate}
    if settings.predictor_learning_rate is not None:
        rates["predictor"] = settings.predictor_learning_rate
    by_name = model.param_groups()
    grouped = [parameter for members in by_name.values() for parameter in members]
    if {id(p) for p in grouped} != {id(p) for p in model.parameters()} or not grouped:
        raise TrainingError(f"param_groups of {type(model).__name__} must cover every parameter")
    spared = {id(parameter) for parameter in model.no_weight_decay()}
    muon = {id(matrix) for matrix in matrices(model)} if settings.optimizer == "muon" else set()
    groups = []
    for name, members in by_name.items():
        for by_muon in (False, True):
            rate = rates[name] * (settings.matrix_rate if by_muon else 1.0)
            chosen = [p for p in members if (id(p) in muon) is by_muon]
            decayed = [p for p in chosen if id(p) not in spared]
            others = [p for p in chosen if id(p) in spared]
            for each, decay in ((decayed, settings.weight_decay), (others, 0.0)):
                group = {"params": each, "matrices": by_muon, "weight_decay": decay, "name": name}
                groups += [group | {"lr": rate, "base": rate}] if each else []
    epsilon, momentum = settings.epsilon, settings.momentum
    decoupled = settings.optimizer != "adam"
    return Optimizer(groups, epsilon=epsilon, momentum=momentum, decoupled=decoupled)


class Average:
    """An exponential moving average of a model's weights, kept as a second model.

    In step s the average moves by 1 - min(decay, (1 + s) / (10 + s)) towards the weights: it
    starts short, so that the untrained weights are soon forgotten.
    """

    def __init__(self, model: Model, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self._averaged: list[Tensor] = list(self.model.parameters())
        self._current: list[nn.Parameter] = list(model.parameters())

    @torch.no_grad()
    def update(self, step: int) -> None:
        move = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
        move(self._averaged, self._current, None)
