"""Score a Burgers run on its test set in parts: for machines that `fst evaluate` keeps too long.

    python benchmarks/score_in_parts.py RUN --part 0 --parts 2    (and --part 1, at the same time)
    python benchmarks/score_in_parts.py RUN --parts 2 --trivial OTHER/results/rows.json

RUN is a run folder with `recipe.json` and `best/`. Only the test trajectories are solved, each one
to the digits that `fst data burgers` would store. Batches, evaluation points and errors are those
of `fst evaluate`. Errors are kept as they come, in RUN/parts, under a fingerprint of weights and
settings, so that an interrupted part goes on. Once all are there, the second form writes
RUN/results/rows.json, with the rows of the trivial predictors from an earlier scoring on the same
data.
"""

import argparse
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fst.base import parameter_count
from fst.commands.evaluate import read_recipe
from fst.data import burgers
from fst.data.burgers_data import BurgersData
from fst.data.samples import BurgersSamples
from fst.data.source import TestSplit
from fst.evaluation.protocol import (
    EvaluationSettings,
    Measurement,
    batch_draws,
    make_rows,
    measuring,
    row_batches,
)
from fst.evaluation.rows import RESULTS, Origin, Row, read_origin, read_rows, score_once
from fst.operators import Operator
from fst.pretrained import WEIGHTS
from fst.terminal import Terminal, progress_bar


def test_rows(data: BurgersData) -> list[tuple[float, int]]:
    """Of each test sample its viscosity and its row in that viscosity's file."""
    first = data.training + data.validation
    counted = zip(data.viscosities, data.test_counts, strict=True)
    return [(nu, first + row) for nu, count in counted for row in range(count)]


def samples_of(data: BurgersData, rows: list[tuple[float, int]]) -> BurgersSamples:
    """These test samples, solved now."""
    times = burgers.saved_times(data.times, data.final_time)
    solutions = [
        burgers.solve(burgers.sample_initial(1, data.points, data.seed, start=row), nu, times)
        for nu, row in rows
    ]
    condition = torch.tensor([[nu] for nu, _ in rows]) if data.condition else None
    return BurgersSamples.from_solutions(torch.cat(solutions).float(), condition)


def described(run: Path) -> tuple[BurgersData, EvaluationSettings, Origin]:
    recipe = read_recipe(run)
    data, settings = recipe.data, recipe.evaluation
    if not isinstance(data, BurgersData) or not isinstance(settings, EvaluationSettings):
        raise SystemExit(f"{run}: only operators on Burgers data are scored in parts")
    if settings.grids != (data.grid,) or settings.neighbors:
        raise SystemExit(f"{run}: evaluation must name the grid {data.grid} alone, no neighbors")
    weights = (run / "best" / WEIGHTS).read_bytes()
    protocol = settings.fingerprint(weights, data, recipe.model)
    if Operator.from_pretrained(run / "best").config != recipe.model:
        raise SystemExit(f"{run}: best/config.json and the model of recipe.json differ")
    origin = Origin(
        run=run.resolve().name,
        recipe=recipe.name,
        task=recipe.task,
        model=recipe.model_name,
        seed=recipe.training.seed,
        protocol=protocol,
    )
    return data, settings, read_origin(run, origin)


def batches_of(data: BurgersData, settings: EvaluationSettings) -> list[list[tuple[float, int]]]:
    rows = test_rows(data)
    return [rows[at : at + settings.batch_size] for at in range(0, len(rows), settings.batch_size)]


def part_file(run: Path, part: int, parts: int, protocol: str) -> Path:
    return run / "parts" / f"{part}-of-{parts}-{protocol}.jsonl"


def read_part(path: Path) -> dict[int, dict[str, Any]]:
    """The batches in a file, without a last line that was cut off."""
    if not path.is_file():
        return {}
    whole = path.read_text().rpartition("\n")[0]
    return {found["batch"]: found for found in map(json.loads, whole.splitlines())}


def score(run: Path, part: int, parts: int) -> None:
    """Every `parts`-th batch, from the `part`-th on."""
    data, settings, origin = described(run)
    model, path = (
        Operator.from_pretrained(run / "best"),
        part_file(run, part, parts, origin.protocol),
    )
    batches, known = batches_of(data, settings), read_part(path)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(found) + "\n" for found in known.values()))
    with measuring(model), path.open("a") as file, progress_bar(Terminal()) as progress:
        drawn = zip(batches, batch_draws(model, settings), strict=False)
        numbered = islice(enumerate(drawn), part, None, parts)
        share = len(range(part, len(batches), parts))
        for number, (rows, draws) in progress.track(numbered, total=share):
            if number in known:
                continue
            samples = samples_of(data, rows)
            (every,) = row_batches(samples, settings)
            found = Measurement(samples)
            found.add(model(samples.batch(every).observations, draws), every)
            squares: Tensor = found.squares[0]
            line = {"batch": number, "points": found.points}
            line |= {"errors": found.found[0].tolist(), "squares": squares.tolist()}
            file.write(json.dumps(line) + "\n")
            file.flush()


def finish(run: Path, parts: int, trivial: Path) -> list[Row]:
    """The rows of a run whose parts are complete."""
    data, settings, origin = described(run)
    files = [part_file(run, part, parts, origin.protocol) for part in range(parts)]
    known = {number: found for file in files for number, found in read_part(file).items()}
    batches = batches_of(data, settings)
    if missing := set(range(len(batches))) - set(known):
        raise SystemExit(f"{run}: {len(missing)} of {len(batches)} batches are not scored yet")
    # What was measured is known: only how many samples there are, on which grid, counts here.
    samples = BurgersSamples.from_solutions(torch.zeros(()).expand(data.test, *data.grid))
    measurement = Measurement(samples)
    for _, found in sorted(known.items()):
        measurement.found.append(torch.tensor(found["errors"]))
        measurement.squares.append(torch.tensor(found["squares"], dtype=torch.float64))
        measurement.points += int(found["points"])
    groups = tuple(f"{nu:g}" for nu, _ in test_rows(data))
    test = TestSplit(samples, groups, values=data.value_names, targets=data.target_names)
    others = [row for row in read_rows(trivial) if row.trivial]
    if {(row.task, row.grid, row.samples) for row in others} != {
        (origin.task, data.grid, data.test)
    }:
        raise SystemExit(f"{trivial}: these rows are of another task, grid or number of samples")
    std = [channel.std or 0.0 for channel in others[0].channels]
    parameters = parameter_count(Operator.from_pretrained(run / "best"))
    rows = make_rows([measurement], test, settings, origin, parameters, std)
    named = {name: getattr(origin, name) for name in ("run", "protocol")}
    rows += [replace(row, **named) for row in others]
    return score_once(run / RESULTS, origin.protocol, lambda: (rows, None))


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--part", type=int, help="which part to score, from 0")
    parser.add_argument("--parts", type=int, default=2, help="into how many the test set is cut")
    parser.add_argument("--trivial", type=Path, help="rows of the trivial predictors")
    options = parser.parse_args(given)
    if (options.part is None) == (options.trivial is None):
        parser.error("give either --part or --trivial")
    if options.part is not None:
        score(options.run, options.part, options.parts)
    else:
        rows = finish(options.run, options.parts, options.trivial)
        print(f"{rows[0].model}: {rows[0].error:.5f} on {rows[0].samples:,} test samples")


if __name__ == "__main__":
    main()
