"""How fast everything is: one command, one table.

    python benchmarks/speed.py --device cuda --out speed.json
    python benchmarks/speed.py --device cuda --sections training roofline --limit 540 --out a.json
    python benchmarks/speed.py --device cuda --run runs/fast/best --out b.json
    python benchmarks/speed.py --device cuda --run runs/fast/best --out b.json --resume
    python benchmarks/speed.py --device cpu --quick

On a GPU the sizes are the paper's (single-viscosity Burgers) and training runs in BF16; on a CPU
everything but the widths is reduced and runs in FP32. Values are waves made up on the spot; what is
about accuracy learns Burgers solutions. On a GPU, whatever trains or compiles runs in a process of
its own, and compiled training without compiler caches, so that the wait for the first step and the
peak of the memory are those of a fresh start. Rows are written as they come: a killed run keeps
what it has, and `--resume` measures what is missing.

`fast` is what users get, `plain` the same with PyTorch's operations only (`fst.kernels.unfuse`).
On a CPU training is the same code in both.

Needs what `fst` imports, and neuraloperator for FNO; PYTHONPATH=src does where the package is not
installed.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import speed_resume
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from speed_agreement import Agreement, Rounding
from speed_growth import Growth
from speed_local import Local
from speed_prediction import Decoding, Prediction
from speed_roofline import Roofline
from speed_setting import Row, Section, Setting
from speed_sizes import PAPER, QUICK, REDUCED
from speed_training import Training

from fst.io import write_atomically
from fst.pretrained import WEIGHTS, to_json
from fst.training.run_folder import describe_environment

# In the order of measurement: the roofline looks at the rows before it.
SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        Training(),
        Prediction(),
        Decoding(),
        Local(),
        Growth(),
        Roofline(),
        Rounding(),
        Agreement(),
    )
}
# Wide enough for every table, whatever the terminal: results are often read in a log.
console = Console(width=160, soft_wrap=True, highlight=False)


class Results:
    """Rows by section, in a file that is always complete."""

    def __init__(self, setting: Setting, file: Path | None, resume: bool = False) -> None:
        self.file = file
        self.rows: dict[str, list[Row]] = {}
        self.conclusions: dict[str, Row] = {}
        environment = describe_environment()
        # Files by their names alone, as the program: where they lie is nobody's business.
        environment["command"] = [Path(each).name for each in environment["command"]]
        self.heading: Row = {"environment": environment, "setting": _plain(setting)}
        self.finished = False
        if resume:
            earlier = speed_resume.read(file, self.heading, SECTIONS)
            self.heading["earlier"] = [*earlier.get("earlier", []), earlier["environment"]]
            self.rows, self.conclusions = earlier["sections"], earlier["conclusions"]

    def add(self, name: str, row: Row) -> None:
        """In the place of an earlier row of this entry, if there is one."""
        rows = self.rows[name]
        entries = [each["entry"] for each in rows]
        if row["entry"] in entries:
            rows[entries.index(row["entry"])] = row
        else:
            rows.append(row)
        self.write()

    def conclude(self, name: str) -> None:
        good = self.good()
        conclusion = SECTIONS[name].conclude(good[name], good)
        self.conclusions[name] = {"rows": conclusion.rows, "lines": conclusion.lines}
        self.write()

    def good(self) -> dict[str, list[Row]]:
        """The rows that hold a measurement."""
        return {name: [row for row in rows if not row["error"]] for name, rows in self.rows.items()}

    def write(self) -> None:
        if self.file is None:
            return
        content = {
            **self.heading,
            "finished": self.finished,
            "sections": self.rows,
            "conclusions": self.conclusions,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, (json.dumps(content, indent=1) + "\n").encode())


def _plain(setting: Setting) -> Row:
    values = asdict(replace(setting, run=None))
    values["sizes"] = to_json(setting.sizes)
    run = None
    if setting.run is not None:
        weights = (setting.run / WEIGHTS).read_bytes()
        run = {"name": setting.run.name, "weights": hashlib.sha256(weights).hexdigest()[:16]}
    return {**values, "device": str(setting.device), "run": run}


def measured(section: Section, entry: str, setting: Setting) -> Row:
    """One row, or why there is none: the others' rows must not be lost."""
    try:
        return {"entry": entry, "error": None, **section.measure(entry, setting)}
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return {"entry": entry, "error": reason}


def in_a_child(
    section: Section, entry: str, arguments: list[str], seconds: float | None, caches: Path
) -> Row:
    """The same in a fresh process, with compilers that keep their things in `caches`."""
    if section.forgetful(entry):
        shutil.rmtree(caches, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"
        environment = dict(os.environ)
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
        environment["TRITON_CACHE_DIR"] = str(caches / "triton")
        command = [sys.executable, __file__, *arguments, "--entry", section.name, entry, str(file)]
        try:
            done = subprocess.run(
                command, env=environment, timeout=seconds, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return {"entry": entry, "error": "stopped: the time given by --limit is over"}
        row = json.loads(file.read_text()) if file.exists() else None
        if row is None or row["error"]:
            sys.stderr.write(done.stderr)
        if row is None:
            last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
            return {"entry": entry, "error": f"ended with status {done.returncode}: {last}"}
        return row


def run(
    names: list[str],
    setting: Setting,
    results: Results,
    isolate: bool,
    options: Any,
    caches: Path,
) -> None:
    """Measure, write and show section by section."""
    begun = time.monotonic()

    def left() -> float | None:
        return None if options.limit is None else options.limit - (time.monotonic() - begun)

    def row_of(section: Section, entry: str) -> Row:
        remaining = left()
        if remaining is not None and remaining <= 0:
            return {"entry": entry, "error": "left out: the time given by --limit is over"}
        start = time.monotonic()
        if isolate and section.alone(entry):
            row = in_a_child(section, entry, options.given, remaining, caches)
        else:
            row = measured(section, entry, setting)
        return {**row, "took_seconds": round(time.monotonic() - start, 1)}

    for name in names:
        section = SECTIONS[name]
        known = {row["entry"] for row in results.rows.setdefault(name, []) if not row["error"]}
        entries = [
            entry
            for entry in section.entries(setting)
            if entry not in known
            and (not options.only or any(text in entry for text in options.only))
        ]
        beside = isolate and section.timeless
        with ThreadPoolExecutor() if beside else nullcontext() as pool:
            every = map if pool is None else pool.map
            for row in every(partial(row_of, section), entries):
                results.add(name, row)
                console.print(f"{name}: {_sentence(section, row)}", markup=False)
        results.conclude(name)
    # Once more: what a resumed run has added may belong to sections before and after it.
    for name in results.rows:
        results.conclude(name)
    results.finished = not any(row["error"] for rows in results.rows.values() for row in rows)
    results.write()


def _sentence(section: Section, row: Row) -> str:
    """A row while it goes."""
    if row["error"]:
        return f"{row['entry']}: {row['error']}"
    shown = [f"{name} {_number(row.get(name))}" for name in section.columns[1:] if row.get(name)]
    return f"{row['entry']}: {', '.join(shown)}"


def _number(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def show(results: Results) -> None:
    """Every section as a table, and what follows from it."""
    for name, rows in results.rows.items():
        console.print()
        console.print(_table(name, SECTIONS[name].columns, results.good()[name]))
        for row in rows:
            if row["error"]:
                console.print(f"- {row['entry']}: {row['error']}", markup=False)
        conclusion = results.conclusions.get(name, {"rows": [], "lines": []})
        if conclusion["rows"]:
            columns = tuple(dict.fromkeys(key for row in conclusion["rows"] for key in row))
            console.print(_table(f"{name}, in short", columns, conclusion["rows"]))
        for line in conclusion["lines"]:
            console.print(f"- {line}", markup=False)


def _table(title: str, columns: tuple[str, ...], rows: list[Row]) -> Table:
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    for number, column in enumerate(columns):
        table.add_column(column.replace("_", " "), justify="right" if number else "left")
    for row in rows:
        table.add_row(*(_number(row.get(column)) for column in columns))
    return table


def parse_arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    available = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=available)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="entries with one of these")
    parser.add_argument("--quick", action="store_true", help="tiny: proves that everything runs")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows in --out and measure only what is new"
    )
    parser.add_argument("--limit", type=float, help="seconds after which nothing new begins")
    parser.add_argument(
        "--run", type=Path, help="folder of a trained FST, whose weights ours then has"
    )
    parser.add_argument("--steps", type=int, help="of a training whose accuracy is looked at")
    parser.add_argument("--starts", type=int, help="of each path, where loss curves are compared")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="measure compiled models too; by default on a GPU only",
    )
    parser.add_argument(
        "--isolate",
        action=argparse.BooleanOptionalAction,
        help="a process for each entry that trains or compiles; by default on a GPU only",
    )
    parser.add_argument("--entry", nargs=3, help=argparse.SUPPRESS)  # what a child measures
    options = parser.parse_args(given)
    if options.steps is not None and options.steps < 2:
        parser.error(f"--steps must be at least 2, got {options.steps}")
    if options.starts is not None and options.starts < 1:
        parser.error(f"--starts must be at least 1, got {options.starts}")
    if options.out is not None and options.out.is_dir():
        parser.error(f"--out must be a file, got the folder {options.out}")
    exists = options.out is not None and options.out.exists()
    if options.resume and not exists:
        parser.error(f"--resume needs --out with a file that exists, got {options.out}")
    if exists and not options.resume and options.entry is None:
        parser.error(f"{options.out} exists: choose another --out, or --resume to add to it")
    if options.run is not None and not (options.run / WEIGHTS).is_file():
        parser.error(f"--run must be a folder with {WEIGHTS}, got {options.run}")
    if options.device == "cuda" and available != "cuda":
        parser.error("--device cuda needs a GPU that PyTorch can use; there is none here")
    if options.limit is not None and options.limit <= 0:
        parser.error(f"--limit must be above 0, got {options.limit}")
    return options


def setting_from(options: argparse.Namespace) -> Setting:
    cuda = options.device == "cuda"
    sizes = QUICK if options.quick else PAPER if cuda else REDUCED
    return Setting(
        device=torch.device(options.device),
        sizes=sizes,
        compiled=cuda if options.compile is None else options.compile,
        steps=options.steps or sizes.agreement_steps,
        starts=options.starts or sizes.agreement_starts,
        run=options.run,
    )


def main(given: list[str] | None = None) -> Results | None:
    options = parse_arguments(sys.argv[1:] if given is None else given)
    options.given = sys.argv[1:] if given is None else given
    setting = setting_from(options)
    if options.entry is not None:
        name, entry, file = options.entry
        Path(file).write_text(json.dumps(measured(SECTIONS[name], entry, setting)))
        return None
    try:
        results = Results(setting, options.out, options.resume)
    except ValueError as error:
        raise SystemExit(f"--resume: {error}") from None
    console.print(f"{setting.sizes.name} sizes on {results.heading['environment']['hardware']}")
    isolate = setting.cuda if options.isolate is None else options.isolate
    names = [name for name in SECTIONS if name in options.sections]
    with tempfile.TemporaryDirectory() as folder:
        run(names, setting, results, isolate, options, Path(folder) / "compiled")
    show(results)
    return results


if __name__ == "__main__":
    main()
