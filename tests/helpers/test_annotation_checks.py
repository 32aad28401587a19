"""The hook that enforces annotations in tests is there, in every module."""

import importlib.util
import pkgutil

import pytest
import torch
from jaxtyping import TypeCheckError

import fst
from annotation_checks import KERNELS, KernelLoader
from fst.kernels.modules import takes_tokens
from fst.rbf import rbf_blend, rbf_weights


def test_what_pytorch_would_take_is_caught():
    points, anchors = torch.rand(2, 5, 1), torch.rand(2, 3, 1)
    rbf_weights(points, anchors, torch.ones(2, 3, 1))
    with pytest.raises(TypeCheckError):
        rbf_weights(points, anchors, torch.ones(2, 1, 1))  # it broadcasts
    with pytest.raises(TypeCheckError):
        rbf_weights(points, anchors, torch.ones(2, 3, 1), neighbors=2.0**40)


def test_a_function_that_refuses_its_arguments_says_so_itself():
    points, anchors = torch.rand(2, 5, 1), torch.rand(2, 3, 1)
    with pytest.raises(ValueError, match="length_scales must have shape"):
        rbf_blend(points, anchors, torch.ones(2, 1, 1), torch.rand(2, 3, 4))


def test_functions_beside_gpu_code_are_checked():
    assert not takes_tokens(torch.rand(2, 3, 8), 32)
    with pytest.raises(TypeCheckError):
        takes_tokens(torch.rand(2, 3, 8), "32")


def test_every_module_is_hooked():
    assert len(KERNELS) > 5
    for module in pkgutil.walk_packages(fst.__path__, "fst."):
        spec = importlib.util.find_spec(module.name)
        if module.name in KERNELS:
            assert type(spec.loader) is KernelLoader, module.name
        else:
            assert type(spec.loader).__module__.startswith("jaxtyping"), module.name
