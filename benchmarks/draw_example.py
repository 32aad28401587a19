"""The picture of the README: new solutions of Burgers, and what shipped weights predict.

    python benchmarks/draw_example.py --weights burgers-single --out docs/images/burgers.png

The initial conditions follow the law of the training data with another seed, so none of them was
trained on. Each row of the picture is one of them: reference, prediction and error.
"""

import argparse
from pathlib import Path

import fst
from fst.data import BurgersData, BurgersSamples, TestSplit, burgers
from fst.evaluation.fields import Fields
from fst.evaluation.figures import solutions
from fst.evaluation.protocol import EvaluationSettings, View, sample_fields
from fst.evaluation.rows import Origin
from fst.operators import Operator

VISCOSITY = 0.01
SIZES = (201, 1024)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--weights", default="burgers-single", help="a name or a folder")
    parser.add_argument("--seed", type=int, default=7, help="of the initial conditions")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("docs/images/burgers.png"))
    options = parser.parse_args(given)
    model = fst.from_pretrained(options.weights)
    assert isinstance(model, Operator)
    initial = burgers.sample_initial(options.samples, 1024, options.seed)
    exact = burgers.solve(initial, VISCOSITY, burgers.saved_times()).float()
    names = BurgersData.value_names, BurgersData.target_names
    test = TestSplit(BurgersSamples.from_solutions(exact), values=names[0], targets=names[1])
    settings = EvaluationSettings(grids=(SIZES,), view=View(samples=options.samples))
    origin = Origin(run="example", recipe="", task="burgers", model=options.weights)
    fields = sample_fields(model, test, settings, origin)
    assert isinstance(fields, Fields)
    for row, error in zip(fields.rows, fields.errors, strict=True):
        print(f"initial condition {row}: relative L2 {error:.5f}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    solutions(fields).savefig(options.out, dpi=130, metadata={"Software": None})
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
