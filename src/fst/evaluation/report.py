"""Scored runs as one page: the paper's tables and figures, from rows and saved fields alone."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fst.evaluation import charts, figures, image_figures, point_figures
from fst.evaluation.accuracy_tables import class_table, comparison_table, is_classifier
from fst.evaluation.fields import Fields
from fst.evaluation.image_fields import ImageFields
from fst.evaluation.notes import notes
from fst.evaluation.page import Page, Picture, Section, write_page
from fst.evaluation.point_fields import PointFields
from fst.evaluation.rows import Row
from fst.evaluation.runs import Run, read_run
from fst.evaluation.tables import (
    by_model,
    cost_table,
    grid_table,
    unique,
    viscosity_table,
)


def report(
    folders: Sequence[Path], out: Path, *, title: str = "Function-Space Transformer: results"
) -> Path:
    """Write a page about these run folders into the folder `out`; returns the HTML file."""
    if not folders:
        raise ValueError("folders must name at least one run folder")
    runs = [read_run(folder) for folder in unique(Path(folder).resolve() for folder in folders)]
    return write_page(build_page(distinct(runs), title), out)


def distinct(runs: Sequence[Run]) -> list[Run]:
    """The runs under names that differ: folders in different places may be called the same."""
    seen: dict[str, int] = {}
    named = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        number = f" ({seen[run.name]})" if seen[run.name] > 1 else ""
        named.append(replace(run, name=run.name + number))
    return named


def build_page(runs: Sequence[Run], title: str) -> Page:
    """The page of these runs, task by task, then what each run cost."""
    sections: list[Section] = []
    for task in unique(run.rows[0].task for run in runs):
        those = [run for run in runs if run.rows[0].task == task]
        sections += task_sections(task, those)
    rows = [row for run in runs for row in run.rows]
    sections.append(training_section(runs, rows))
    sections.append(Section("Notes", notes(runs)))
    return Page(title, tuple(map(describe, unique_runs(rows))), tuple(sections))


def task_sections(task: str, runs: Sequence[Run]) -> list[Section]:
    """Errors of all models on one task, then the pictures of each."""
    rows = [row for run in runs for row in run.rows]
    if is_classifier(rows[0]):
        return image_sections(task, runs, rows)
    by_viscosity = viscosity_table(rows)
    tables = [grid_table(rows)] + ([] if by_viscosity is None else [by_viscosity])
    pictures = []
    if (figure := charts.viscosity(rows)) is not None:
        caption = "Test error by viscosity. A bar below zero means that FST has the lower error."
        pictures.append(Picture(f"{_file(task)}-viscosity", caption, figure))
    if (figure := charts.local_decoding(rows)) is not None:
        caption = (
            "Local decoding: test error when each query uses only its k nearest anchors. "
            "Refinement always uses all of them."
        )
        pictures.append(Picture(f"{_file(task)}-local-decoding", caption, figure))
    sections = [Section(f"{task}: test error", (), tuple(tables), tuple(pictures))]
    pictures = field_pictures(
        [(run.name, run.fields) for run in runs if isinstance(run.fields, Fields)]
    )
    pictures += [
        point_picture(run.name, run.fields) for run in runs if isinstance(run.fields, PointFields)
    ]
    if pictures:
        sections.append(Section(f"{task}: predictions", (), (), tuple(pictures)))
    return sections


def image_sections(task: str, runs: Sequence[Run], rows: Sequence[Row]) -> list[Section]:
    """Accuracies of all classifiers on one task, then the anchors of each over a few images."""
    tables = [comparison_table(rows)]
    if (by_class := class_table(rows)) is not None:
        tables.append(by_class)
    sections = [Section(f"{task}: test accuracy", (), tuple(tables))]
    pictures = image_pictures(
        [(run.name, run.fields) for run in runs if isinstance(run.fields, ImageFields)]
    )
    if pictures:
        sections.append(Section(f"{task}: images", (), (), tuple(pictures)))
    return sections


def image_pictures(runs: Sequence[tuple[str, ImageFields]]) -> list[Picture]:
    """Anchors over images where there are anchors, and guesses alone where there are none."""
    pictures = []
    for name, fields in runs:
        says = "the class of each, what it was taken for if another, and the probability of that"
        if fields.anchors.shape[1]:
            figure = image_figures.anchors(fields)
            caption = (
                f"{name}: {fields.anchors.shape[1]:,} anchors over test images ({says}). Below "
                "each image the refinement length scales of the anchors, by colour and as soft "
                f"circles at {figures.ELLIPSE_SCALE}× scale. Vertical rows are fixed; the "
                f"horizontal coordinates of an anchor deviate by {fields.spread():.4f} of the "
                "width, on average over anchors, between these images."
            )
            pictures.append(Picture(f"{_file(name)}-anchors", caption, figure))
        else:
            caption = f"{name}: test images ({says})."
            pictures.append(
                Picture(f"{_file(name)}-guesses", caption, image_figures.guesses(fields))
            )
    return pictures


def field_pictures(runs: Sequence[tuple[str, Fields]]) -> list[Picture]:
    """Solutions, profiles and anchors; profiles of runs on the same samples share a figure."""
    pictures = []
    for name, fields in runs:
        caption = (
            f"{name}: reference, prediction and absolute error. Horizontal axis: "
            f"{fields.axis_names[1]}; vertical axis: {fields.axis_names[0]}."
        )
        pictures.append(Picture(f"{_file(name)}-solutions", caption, figures.solutions(fields)))
    for index, those in enumerate(_same_samples(runs)):
        names = ", ".join(name for name, _ in those)
        first = those[0][1]
        if not len(first.cuts):
            continue
        caption = f"{names}: profiles along {first.axis_names[1]} at fixed {first.axis_names[0]}."
        figure = figures.profiles([fields for _, fields in those])
        pictures.append(Picture(f"{_file(those[0][0])}-profiles-{index + 1}", caption, figure))
    for name, fields in runs:
        if not fields.anchors.shape[1]:
            continue
        caption = (
            f"{name}: anchors over the reference (top), and their decoding length scales as soft "
            f"ellipses at {figures.ELLIPSE_SCALE}× scale (bottom)."
        )
        pictures.append(Picture(f"{_file(name)}-anchors", caption, figures.anchors(fields)))
    return pictures


def point_picture(name: str, fields: PointFields) -> Picture:
    """A few samples of a user's own points, on one or two axes."""
    caption = (
        f"{name}: what was observed (the first value), and reference, prediction and absolute "
        "error at the queries."
    )
    if fields.channels > 1:
        caption += f" Target 1 of {fields.channels} is shown; relative L2 errors are over all."
    draw = point_figures.curves if fields.axes == 1 else point_figures.patches
    return Picture(f"{_file(name)}-points", caption, draw(fields))


def training_section(runs: Sequence[Run], rows: Sequence[Row]) -> Section:
    table = cost_table(rows)
    pictures = []
    names = {
        "training": (False, "mean squared relative L2", "mean relative L2"),
        "training-images": (True, "cross-entropy", "share of wrong first guesses"),
    }
    for file, (kind, *measures) in names.items():
        curves = [(run.name, run.curves) for run in runs if is_classifier(run.rows[0]) is kind]
        if (figure := charts.training(curves, *measures)) is not None:
            caption = "Training loss and validation error by step."
            pictures.append(Picture(file, caption, figure))
    return Section("Training", (), (table,) if table.lines else (), tuple(pictures))


def describe(row: Row) -> str:
    """A run in one sentence: recipe, size, steps, time and hardware."""
    parts = [f"{row.run}: {row.model}, recipe {row.recipe}, {row.parameters:,} parameters"]
    if row.seed is not None:
        parts.append(f"seed {row.seed}")
    if row.training is not None:
        minutes = row.training.seconds / 60
        parts.append(
            f"{row.training.steps:,} steps in {minutes:,.1f} minutes on {row.training.device}"
        )
    parts.append(f"scored on {row.device}")
    parts.append(f"fst {row.fst_version}, torch {row.torch_version}")
    if row.git_hash is not None:
        parts.append(
            f"git {row.git_hash[:12]}{' (modified)' if 'modified' in row.git_hash else ''}"
        )
    return ", ".join(parts) + "."


def unique_runs(rows: Iterable[Row]) -> list[Row]:
    """One row for each trained model: predictors without parameters need no description."""
    return [those[0] for those in by_model(rows).values() if those[0].parameters]


def _same_samples(runs: Sequence[tuple[str, Fields]]) -> list[list[tuple[str, Fields]]]:
    """Runs that were asked about the same solutions, together."""
    found: list[list[tuple[str, Fields]]] = []
    for name, fields in runs:
        for those in found:
            other = those[0][1].profile_truth
            if other.shape == fields.profile_truth.shape and np.allclose(
                other, fields.profile_truth
            ):
                those.append((name, fields))
                break
        else:
            found.append([(name, fields)])
    return found


def _file(name: str) -> str:
    """A name that is safe as part of a file name."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
