"""Annotations are checked in tests, and only there."""

import os

import pytest
import torch

import annotation_checks

if not torch.cuda.is_available():  # before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

annotation_checks.install()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)
