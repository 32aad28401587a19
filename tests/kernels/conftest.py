"""Kernels for Hopper have no interpreter and need no GPU to be compiled."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "helpers" / "hopper_kernels.py"
# Shared memory of a multiprocessor that one program may have, in bytes.
SHARED = 227 * 1024


@pytest.fixture(scope="session")
def compiled_for_hopper(request, tmp_path_factory):
    """A function that compiles a family of kernels, each at most once; checks what all must hold.

    Kernels that have not changed since the last run come from a cache.
    """
    pytest.importorskip("triton.experimental.gluon")
    kept = getattr(request.config, "cache", None)
    cache = tmp_path_factory.mktemp("triton") if kept is None else kept.mkdir("triton")

    @functools.cache
    def compiled(family):
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = str(cache)
        run = subprocess.run(
            [sys.executable, str(SCRIPT), family],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-3000:]
        found = [json.loads(line) for line in run.stdout.splitlines()]
        for each in found:
            assert each["shared"] <= SHARED, each
            # Triton takes the memory of a barrier that is not invalidated for other things, over
            # which a GPU that is shared with other processes may write the barrier again.
            assert each["open"] == 0, each
        return found

    return compiled
