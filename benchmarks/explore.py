"""Seconds that `fst explore` takes for an answer, on a CPU at the paper's size.

    python benchmarks/explore.py --out results/speed-cpu/explore.json

Each input is new: it is refined once, and its field is asked on one grid after the other, as the
page does. The times on the clock are those of the user; those of the processor are the same on a
machine that has other work. The table gives medians over the inputs.
"""

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter, process_time

import torch

from fst.commands.explore import make_explorer, warm_up
from fst.training.run_folder import describe_environment

STAGES = ("solve", "refine", "decode")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", default="burgers-single")
    parser.add_argument("--inputs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    explorer = make_explorer(asked.weights, device="cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as `fst explore`: the explorer has threads of its own
    warm_up(explorer)
    viscosity = explorer.describe().get("viscosity", {}).get("low")
    rows = []
    for number in range(1, asked.inputs + 1):  # the explorer has warmed up with 0
        request = {"input": explorer.problem.draw(number), "viscosity": viscosity}
        for level, grid in enumerate(explorer.problem.grids):
            clock, processor = perf_counter(), process_time()
            answer = explorer.answer(request | {"level": level, "neighbors": None})
            row = {"input": number, "grid": grid, "seconds": answer["seconds"]}
            row |= {"clock": perf_counter() - clock, "processor": process_time() - processor}
            rows.append(row)
    print(f"{asked.weights}, {threads} threads")
    print("| grid | exact solution | refine | decode | clock | processor |")
    print("|---|---|---|---|---|---|")
    for grid in explorer.problem.grids:
        those = [row for row in rows if row["grid"] == grid]
        parts = [[row["seconds"].get(name, 0.0) for row in those] for name in STAGES]
        parts += [[row[name] for row in those] for name in ("clock", "processor")]
        print(f"| {grid[0]} × {grid[1]} |", *(f"{statistics.median(p):.2f} |" for p in parts))
    if asked.out is not None:
        found = {"environment": describe_environment(), "threads": threads, "rows": rows}
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
