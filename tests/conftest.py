"""Shape annotations are checked in tests, and only there.

Modules that check what users pass in are left out of the hook: their own errors are under test.
"""

import os

import pytest
import torch
from jaxtyping import install_import_hook

if not torch.cuda.is_available():  # before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

CHECKED = [
    "nn",
    "anchors",
    "ablations",
    "layer",
    "evaluation_points",
    "classifiers",
    "vision",
    "baselines.vit",
    "kernels.modules",
    "kernels.pruned_blend",
]

install_import_hook([f"fst.{name}" for name in CHECKED], "beartype.beartype")


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)
