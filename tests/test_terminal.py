"""Names from files are shown as they are spelled: no markup, no escape sequences, no formulas."""

import csv
import io
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from evaluation_fakes import some_rows
from fst.cli import USER_ERROR, main
from fst.commands.predict import Guesses, write_guesses
from fst.data.images import listed
from fst.evaluation.report import Page, Section, describe, png
from fst.evaluation.tables import TEMPLATES, error_table
from fst.terminal import Terminal, markdown, printable, speak_plainly, spreadsheet

HOSTILE = (
    "<script>alert(1)</script>[x](http://a.b)`code`[/bold]\x1b[31mred\x07\u202eoff\udcff|\nend"
)


def plain(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


def test_control_characters_are_spelled_out():
    assert printable("ν = 0.01 × 2, größer") == "ν = 0.01 × 2, größer"
    assert printable("\x1b[2J\x00\u202e\udcff\t") == r"\x1b[2J\x00\u202e\udcff\t"
    assert printable("two\nlines") == "two\nlines"
    assert plain(listed([HOSTILE]))


def test_markdown_shows_what_was_written():
    text = markdown(HOSTILE)
    assert plain(text)
    assert "\n" not in text
    assert "<" not in text
    assert "](" not in text.replace("\\]", "")
    assert markdown("burgers-single/fst, 2 × 3 (a_b*c)") == "burgers-single/fst, 2 × 3 (a_b*c)"


@pytest.mark.parametrize("begin", ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)"])
def test_no_cell_is_a_formula(tmp_path, begin):
    assert spreadsheet(begin) == f"'{begin}"
    assert spreadsheet("red-1+2") == "red-1+2"
    guesses = Guesses((f"{begin}.png", HOSTILE), ((begin, "b"),) * 2, ((0.5, 0.5),) * 2)
    write_guesses(tmp_path / "out.csv", guesses)
    text = (tmp_path / "out.csv").read_text()
    assert plain(text)
    rows = list(csv.reader(io.StringIO(text)))
    assert not any(cell.startswith(("=", "+", "-", "@")) for row in rows for cell in row)


def test_a_console_shows_names_as_they_are():
    file = io.StringIO()
    console = Terminal(file=file, width=200, force_terminal=False)
    console.print(f"rows: {HOSTILE}", style="dim")
    console.rule(HOSTILE)
    rows = [replace(row, model=HOSTILE, recipe=HOSTILE) for row in some_rows()]
    console.print(error_table(rows).terminal())
    assert plain(file.getvalue())
    assert "[/bold]" in file.getvalue()


def test_a_page_in_markdown_holds_no_html_of_others():
    rows = [replace(row, model=HOSTILE, run=HOSTILE, device=HOSTILE) for row in some_rows()]
    section = Section(HOSTILE, (HOSTILE,), (error_table(rows),))
    page = Page(HOSTILE, (describe(rows[0]),), (section,))
    text = TEMPLATES.get_template("report.md").render(page=page)
    assert plain(text)
    assert "<script" not in text
    assert "[x](" not in text.replace("\\]", "")


def test_an_error_about_a_hostile_name_is_one_line(capsys):
    assert main(["evaluate", "runs/\x1b]0;owned\x07\nfst: done"]) == USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert r"\x1b]0;owned\x07" in line


def test_a_run_may_be_called_anything(tmp_path, capsys, monkeypatch):
    from tiny import BURGERS, MODEL, TRAINING

    monkeypatch.chdir(tmp_path)
    run = "[/bold]\x1b[31m"
    words = [*MODEL, *TRAINING, *BURGERS, "--out", run, "--data", "data", "--device", "cpu"]
    assert main(["train", "demo/burgers", *words]) == 0
    assert main(["evaluate", run, "--device", "cpu"]) == 0
    assert main(["report", run, "--out", "[page]"]) == 0
    out, err = capsys.readouterr()
    assert plain(out + err)
    assert "rows: [/bold]" in out
    assert "wrote [page]/index.html" in out
    assert plain((Path("[page]") / "report.md").read_text())


def test_a_dollar_sign_in_a_figure_is_no_mathematics():
    figure = Figure(figsize=(2, 2))
    axes = figure.add_subplot()
    axes.plot([1, 1000], [1, 1000], label=r"$\frac$")
    axes.loglog()
    axes.set_title(r"class $x^$")
    axes.legend()
    assert png(figure).startswith(b"\x89PNG")
    assert axes.title.get_parse_math() is False
    assert all(label.get_parse_math() for label in axes.get_xticklabels())


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_characters_that_an_encoding_lacks_end_no_command(monkeypatch, encoding):
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", output)
    speak_plainly()
    Terminal().print("ν in °C")
    output.flush()
    assert output.buffer.getvalue() in (b"? in ?C\n", b"? in \xb0C\n")


def test_warnings_to_a_user_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    for _ in range(2_000):  # as often as a program asks: nothing piles up
        speak_plainly()
    assert warnings.formatwarning("too large", UserWarning, "a.py", 3) == (
        "fst: warning: too large\n"
    )
    assert "a.py:3" in warnings.formatwarning("old", DeprecationWarning, "a.py", 3)
