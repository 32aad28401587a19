"""Whether results change while other processes use the same GPU.

    python benchmarks/shared_gpu.py --out shared_gpu.json

A GPU that several processes use is taken from each of them again and again, in the middle of a
kernel. Here a forward and backward pass at the paper's size is recorded as a CUDA graph, and
replayed while others multiply matrices. The prediction must keep its bits, and the gradients may be
little farther off than they are alone. (Their last bits change even so: PyTorch's attention adds
some in any order.)
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from speed_agreement import differentiated
from speed_growth import Counts, problem
from speed_setting import Row, operator, precision, synchronize
from speed_sizes import PAPER
from torch import Tensor

from fst.cuda_graph import capture
from fst.io import write_atomically
from fst.training.run_folder import describe_environment

# How many times as far off as alone, over fewer passes, a gradient may be.
FARTHER = 10
NEIGHBOR = """
import torch
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
begun = False
while True:
    for _ in range(40):
        a @ a
    torch.cuda.synchronize()
    if not begun:
        print("begun", flush=True)
        begun = True
"""


def recorded_pass() -> tuple[Callable[[], None], Tensor, Tensor]:
    """What replays a pass; its prediction, and all gradients in one row."""
    device = torch.device("cuda")
    counts = Counts.of(PAPER)
    network = operator(counts.config, device)
    stream = network.point_stream(0, 1)
    assert stream is not None
    draws = stream.draw().to(device, torch.float32)
    given, queries, targets = problem(counts, device)

    def work() -> tuple[Tensor, Tensor]:
        with precision("bf16", device):
            values = network.represent(given, draws).decode(queries)
        _, gradient = differentiated(network, values, targets)
        return values.detach(), gradient

    replay, found = capture(work, (), device)
    prediction, gradient = found
    assert prediction is not None
    assert gradient is not None
    return replay, prediction, gradient


def count(
    replay: Callable[[], None],
    found: Sequence[Tensor],
    expected: Sequence[Tensor],
    seconds: float,
) -> Row:
    """Passes; how many gave other predictions; how far off the farthest gradient was, relatively.

    A gradient that is not finite is infinitely far off.
    """
    passes, other, farthest = 0, 0, 0.0
    size = expected[1].norm()
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        replay()
        passes += 1
        other += not torch.equal(found[0], expected[0])  # NaN is not equal to itself
        off = ((found[1] - expected[1]).norm() / size).item()
        farthest = max(farthest, off if math.isfinite(off) else math.inf)
    milliseconds = 1e3 * (time.monotonic() - begun) / passes
    return {
        "passes": passes,
        "ms": milliseconds,
        "other_predictions": other,
        "farthest_gradient": farthest,
    }


def neighbor() -> subprocess.Popen[str]:
    """A process that uses the GPU, and says when it has begun to."""
    return subprocess.Popen([sys.executable, "-c", NEIGHBOR], stdout=subprocess.PIPE, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=3, help="that use the GPU as well")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="JSON file for the counts")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("shared_gpu.py needs a GPU")
    environment = describe_environment()
    environment["command"] = [Path(each).name for each in environment["command"]]
    replay, *found = recorded_pass()
    replay()
    expected = [each.clone() for each in found]
    synchronize(torch.device("cuda"))
    rows = {"alone": count(replay, found, expected, options.seconds / 4)}
    print("alone:", rows["alone"], flush=True)
    others = [neighbor() for _ in range(options.processes)]
    try:
        for each in others:
            assert each.stdout is not None
            each.stdout.readline()
        rows["shared"] = count(replay, found, expected, options.seconds)
        rows["shared"]["processes"] = sum(each.poll() is None for each in others)
    finally:
        for each in others:
            each.kill()
    print("shared:", rows["shared"], flush=True)
    if options.out is not None:
        content = {"environment": environment, **rows}
        write_atomically(options.out, (json.dumps(content, indent=1) + "\n").encode())
    alone, shared = (row["farthest_gradient"] for row in rows.values())
    bad = any(row["other_predictions"] for row in rows.values())
    bad |= shared > FARTHER * alone or math.isinf(shared) or math.isinf(alone)
    if rows["shared"]["processes"] < options.processes:
        sys.exit("another process ended too early: nothing is shown")
    sys.exit("results change while other processes use the GPU" if bad else 0)


if __name__ == "__main__":
    main()
