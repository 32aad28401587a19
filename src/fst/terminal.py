"""Escapes text from files before it is shown: names contain no markup and no control sequences.

Names of runs, classes, files and channels come from whoever wrote the files. They are escaped for a
terminal (`printable`, `Terminal`), for Markdown and for spreadsheets.
"""

import difflib
import html
import sys
import warnings
from collections.abc import Iterable
from io import TextIOWrapper
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

_PLAIN = warnings.formatwarning


def printable(text: str) -> str:
    """The text with escape sequences, other control characters and lone surrogates spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def one_line(error: BaseException) -> str:
    """The message of an error on one line."""
    return printable(" ".join(str(error).split("\n")))


def _formatted(message: Warning | str, category: type[Warning], *where: Any, **rest: Any) -> str:
    if category is UserWarning:
        return f"fst: warning: {printable(str(message))}\n"
    return _PLAIN(message, category, *where, **rest)


def speak_plainly() -> None:
    """Print warnings to the user as one line, without the line of code that they came from.

    Characters that the encoding of the output lacks become question marks.
    """
    warnings.formatwarning = _formatted
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def did_you_mean(word: str, known: Iterable[str], most: int = 3, cutoff: float = 0.4) -> str:
    """The nearest of the known words as a question; nothing where none is near."""
    near = difflib.get_close_matches(word, known, n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}? " if near else ""


def markdown(text: str) -> str:
    """The text as Markdown shows it: no HTML, no links, no code, no new lines."""
    text = html.escape(printable(text.replace("\n", " ")), quote=False)
    return "".join(f"\\{c}" if c in "\\`[]|" else c for c in text)


def spreadsheet(text: str) -> str:
    """The text of a cell that no spreadsheet takes for a formula."""
    text = printable(text)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def progress_bar(console: Console | None, *, transient: bool = False) -> Progress:
    """How much of something is done, and the time that is left; on a terminal only."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    looks: dict[str, Any] = {"console": console, "transient": transient}
    hidden = console is None or not console.is_terminal
    return Progress(*columns, TimeRemainingColumn(), disable=hidden, **looks)


class Terminal(Console):
    """A console that shows strings as they are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)
