"""Kernels for Hopper have no interpreter and need no GPU to be compiled."""

import os
import subprocess
import sys
from pathlib import Path

# Shared memory of a multiprocessor that one program may have, in bytes.
SHARED = 227 * 1024


def printed_by(words: list[str], cache: Path) -> str:
    """What another Python process prints: where Triton's interpreter is on, nothing compiles."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    run = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def unended_barriers(cache: Path) -> list[str]:
    """Kernels compiled there in which a barrier is made and not ended.

    Triton then takes its memory for other things, over which a GPU that is shared with other
    processes may write the barrier again.
    """
    found = {path.stem: path.read_text() for path in cache.glob("*/*.ptx")}
    assert any("mbarrier.init" in text for text in found.values())
    return [
        name
        for name, text in found.items()
        if text.count("mbarrier.init") != text.count("mbarrier.inval")
    ]


def shared_memory(child: str, cache: Path) -> list[int]:
    """What each kernel needs that a script beside this one compiles."""
    return list(map(int, printed_by([str(Path(__file__).parent / child)], cache).split()))
