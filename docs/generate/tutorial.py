"""Turn a tutorial into a page: a script whose comments are the text, run with its pictures kept.

A script is cut at the lines `# %%`. The comment lines after one are Markdown, the lines after those
are code, and what a piece of code prints and draws follows it on the page. The docstring opens the
page; its first line is the title. `python docs/generate/tutorial.py SCRIPT FOLDER` writes
`FOLDER/page.md` and `FOLDER/NAME-1.png` and so on.

A line `STEPS = 400  # 2 in tests` has the second value where the script runs at reduced size; the
comment is not shown on the page.
"""

import ast
import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib import pyplot as plt

CUT = re.compile(r"^# %%.*\n", re.MULTILINE)
SIZE = re.compile(r"^(\w+ = )(.+?)  # (.+) in tests$", re.MULTILINE)
LONGEST_OUTPUT = 12  # lines; of more, the first and the last are shown


class Cell(NamedTuple):
    """A piece of a script: its text, its code, and the line that the code starts in."""

    text: str
    code: str
    line: int


def title(script: str) -> str:
    """The first line of a script's docstring."""
    return (ast.get_docstring(ast.parse(script)) or "").partition("\n")[0].rstrip(".")


def cells(script: str) -> list[Cell]:
    """The pieces after the docstring; the first may be code without a text."""
    opening = ast.parse(script).body[0]
    lines = script.splitlines(keepends=True)
    found, line = [], opening.end_lineno or 1
    for number, part in enumerate(CUT.split("".join(lines[line:]))):
        line += 1 if number else 0  # the line of the cut itself
        rows = part.splitlines()
        comments = 0
        if number:
            while comments < len(rows) and rows[comments].startswith("#"):
                comments += 1
        text = "\n".join(row[2:] for row in rows[:comments])
        found.append(Cell(text, "\n".join(rows[comments:]), line + comments))
        line += len(rows)
    return [cell for cell in found if cell.text or cell.code.strip()]


def shown(code: str) -> str:
    """Code as a page shows it: without the sizes for tests."""
    return SIZE.sub(r"\1\2", code).strip("\n")


def execute(path: Path, folder: Path, *, reduced: bool) -> str:
    """Run a script and write its pictures into `folder`; the page's text comes back."""
    script = path.read_text()
    if reduced:
        script = SIZE.sub(r"\1\3", script)
    docstring = ast.get_docstring(ast.parse(script)) or ""
    page = [f"# {title(script)}\n\n{docstring.partition(chr(10))[2].strip()}"]
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    pictures = 0
    with mpl.rc_context({"figure.dpi": 110, "savefig.bbox": "tight", "font.size": 9}):
        plt.switch_backend("agg")
        for cell in cells(script):
            printed = io.StringIO()
            # Empty lines in front: an error names the line of the script.
            code = compile("\n" * cell.line + cell.code, str(path), "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, names)
            page += [cell.text] if cell.text else []
            page += [f"```python\n{shown(cell.code)}\n```"] if cell.code.strip() else []
            page += [f"```text\n{shortened(printed.getvalue())}\n```"] if printed.getvalue() else []
            for number in plt.get_fignums():
                pictures += 1
                picture = f"{path.stem}-{pictures}.png"
                plt.figure(number).savefig(folder / picture)
                page.append(f"![]({picture})")
            plt.close("all")
    page.append(f"The whole script: `tutorials/{path.name}`.")
    return "\n\n".join(page) + "\n"


def shortened(output: str) -> str:
    """Printed lines, the middle left out where there are many."""
    lines = [line.rstrip() for line in output.rstrip().splitlines()]
    if len(lines) <= LONGEST_OUTPUT:
        return "\n".join(lines)
    return "\n".join([*lines[: LONGEST_OUTPUT // 2], "…", *lines[-LONGEST_OUTPUT // 2 :]])


def main(script: Path, folder: Path, *, reduced: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "page.md").write_text(execute(script, folder, reduced=reduced))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), reduced=sys.argv[3:] == ["--reduced"])
