"""One door to speed: `fuse(model)` gives a model's modules their fast versions.

    model = fst.kernels.fuse(fst.build("burgers-single/fst").cuda())

A fast module is a subclass of the plain one with the same parameters: modules change their class
and nothing else, so weights, optimisers, hooks, copies and saved files are as before, and `unfuse`
takes it back. On a GPU there are Triton and, on Hopper, Gluon kernels; on a CPU the blend is made
from the anchors that matter. Where a fast way does not apply, the plain module answers.
"""

from typing import TypeVar

from torch import nn

from fst.field import Decoder
from fst.kernels import modules
from fst.kernels.modules import ALIGNMENT
from fst.layer import EvaluateMixWrite, Read
from fst.nn import Attention, ResidualFeedForward
from fst.rbf import Blend
from fst.vision import DistanceRead

__all__ = ["fuse", "fused", "unfuse"]

FAST: dict[type[nn.Module], type[nn.Module]] = {
    Attention: modules.FusedAttention,
    ResidualFeedForward: modules.FusedResidualFeedForward,
    Blend: modules.FusedBlend,
    Read: modules.FusedRead,
    EvaluateMixWrite: modules.FusedEvaluateMixWrite,
    Decoder: modules.FusedDecoder,
    DistanceRead: modules.FusedDistanceRead,
    nn.Linear: modules.AlignedLinear,
}
PLAIN = {fast: plain for plain, fast in FAST.items()}

Module = TypeVar("Module", bound=nn.Module)


def fuse(model: Module) -> Module:
    """The same model, its modules fast; subclasses that somebody else made stay as they are."""
    for module in _modules(model):
        fast = FAST.get(type(module))
        aligned = isinstance(module, nn.Linear) and module.in_features % ALIGNMENT == 0
        if fast is not None and not aligned:
            module.__class__ = fast
    return model


def unfuse(model: Module) -> Module:
    """The same model, its modules plain again."""
    for module in _modules(model):
        module.__class__ = PLAIN.get(type(module), type(module))
    return model


def fused(model: nn.Module) -> bool:
    """Whether any module is a fast one."""
    return any(type(module) in PLAIN for module in _modules(model))


def _modules(model: nn.Module) -> list[nn.Module]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return list(model.modules())
