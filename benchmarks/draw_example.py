"""The picture of the README: new solutions of Burgers, and what shipped weights predict.

    python benchmarks/draw_example.py --weights burgers-single --out docs/images/burgers.png

Each row of the picture is one initial condition that was not trained on: reference, prediction and
error.
"""

import argparse
from pathlib import Path

from fst.commands.demo import SHIPPED, draw_new_solutions


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--weights", default=SHIPPED, help="a name or a folder")
    parser.add_argument("--seed", type=int, default=7, help="of the initial conditions")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("docs/images/burgers.png"))
    options = parser.parse_args(given)
    fields = draw_new_solutions(
        options.weights, options.out, samples=options.samples, seed=options.seed
    )
    for row, error in zip(fields.rows, fields.errors, strict=True):
        print(f"initial condition {row}: relative L2 {error:.5f}")
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
