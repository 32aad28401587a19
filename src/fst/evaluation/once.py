"""Test sets are scored once: a run's rows are stored with it, and asking again reads them.

RUN/results/rows.json    the result rows
RUN/results/fields.npz   a few samples seen closely, for the figures
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from fst.data.errors import writing
from fst.evaluation.arrays import save_fields
from fst.evaluation.fields import Fields
from fst.evaluation.image_fields import ImageFields
from fst.evaluation.point_fields import PointFields
from fst.evaluation.protocol import EvaluationError
from fst.evaluation.rows import Row, read_rows, write_rows

ROWS, FIELDS = "rows.json", "fields.npz"

Scores = tuple[Sequence[Row], Fields | PointFields | ImageFields | None]


def score_once(
    folder: Path, protocol: str, compute: Callable[[], Scores], *, again: bool = False
) -> list[Row]:
    """The rows in `folder`, computed and stored there if it has none.

    Stored rows of another protocol (other weights, or other settings) are an error: choosing
    between them by their test errors would be training on the test set. `again` replaces them.
    """
    path = folder / ROWS
    if path.exists() and not again:
        rows = read_rows(path)
        if {row.protocol for row in rows} == {protocol}:
            return rows
        raise EvaluationError(
            f"{path}: this run was scored before, with other weights or other settings of the "
            "evaluation; a test set is scored once (--again replaces the stored rows)"
        )
    scores, fields = compute()
    if any(row.protocol != protocol for row in scores):
        raise ValueError(f"compute must give rows of protocol {protocol!r}")
    # The rows come last: where they are, the fields beside them are complete and theirs.
    with writing(path):
        path.unlink(missing_ok=True)
        (folder / FIELDS).unlink(missing_ok=True)
    if fields is not None:
        save_fields(folder / FIELDS, fields)
    write_rows(path, scores)
    return list(scores)
