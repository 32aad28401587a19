"""Tables of rows: every number in its place, in a terminal, in Markdown and in HTML."""

from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from evaluation_fakes import grouped_row, made_row
from fst.evaluation.rows import METRICS, ChannelError, GroupError
from fst.evaluation.tables import (
    Table,
    channel_table,
    cost_table,
    duration,
    error_table,
    full_grid,
    grid_table,
    group_table,
)


def test_ours_stands_beside_the_papers():
    rows = [
        made_row(errors=(0.0439425,), paper_error=0.04185),
        made_row(errors=(0.05,), neighbors=16),
    ]
    table = error_table(rows)
    assert table.lines == (
        ("FST", "201×1024", "all", "1", "0.04394", "0.04185", "+5.0 %"),
        ("FST", "201×1024", "16", "1", "0.05000", "–", "–"),
    )
    assert "burgers-all/fst" in table.title


def test_columns_that_would_be_empty_are_left_out():
    alone = error_table([made_row(errors=(0.05,))])
    assert alone.header == ("Model", "Test grid", "Samples", "Ours")
    assert alone.lines == (("FST", "201×1024", "1", "0.05000"),)
    swept = [made_row(), made_row(neighbors=4), made_row(model="zero")]
    assert [line[2] for line in error_table(swept).lines] == ["all", "4", "–"]


def test_one_line_a_model_and_one_column_a_grid():
    rows = [
        made_row(grid=(32, 32), errors=(0.1,), paper_error=0.2),
        made_row(grid=(201, 1024), errors=(0.3,)),
        made_row(grid=(201, 1024), errors=(0.9,), neighbors=4),  # belongs to another table
        made_row(grid=(201, 1024), errors=(0.4,), model="zero", parameters=0),
    ]
    table = grid_table(rows)
    assert table.header == ("Model", "Run", "Parameters", "Samples", "32×32", "201×1024")
    assert table.lines == (
        ("FST", "run-one", "2,900,721", "1", "0.10000 (0.20000)", "0.30000"),
        ("zero", "run-one", "–", "1", "–", "0.40000"),
    )


def test_runs_of_one_name_are_kept_apart_by_their_weights():
    rows = [made_row(protocol="a"), made_row(protocol="b")]
    assert len(grid_table(rows).lines) == 2
    assert full_grid(rows) == rows


def test_viscosities_by_model():
    groups = (GroupError("0.01", 1, 0.1, 0.12), GroupError("1.0", 1, 0.3, None))
    fst = grouped_row({"0.01": 0.1, "1.0": 0.3}, groups=groups, paper_error=0.25)
    fno = grouped_row({"0.01": 0.2, "1.0": 0.4}, model="FNO")
    table = group_table([fst, fno])
    assert table.header == ("ν", "Samples", "FST, ours", "FST, paper", "FNO, ours")
    assert table.lines == (
        ("0.01", "1", "0.10000", "0.12000", "0.20000"),
        ("1.0", "1", "0.30000", "–", "0.40000"),
        ("all", "2", "0.20000", "0.25000", "0.30000"),
    )


def test_each_channel_has_its_own_errors():
    heat = ChannelError("temperature", "K", 0.01, 2.0, 4.0)
    wind = ChannelError("v", "", None, 3.0, 4.0)
    row = made_row(channels=(heat, wind))
    table = channel_table([row])
    assert table.lines == (
        ("FST", "temperature (K)", "0.01000", "2", "4", "0.500"),
        ("FST", "v", "–", "3", "4", "0.750"),
    )
    assert row.std_error == pytest.approx(((0.5**2 + 0.75**2) / 2) ** 0.5)
    assert error_table([row]).lines[0][-1] == "0.637"
    assert channel_table([made_row()]) is None


def test_channels_of_several_runs_are_told_apart():
    one, two, mean = (ChannelError("T", "K", share, 2.0, 4.0) for share in (0.1, 0.2, 0.5))
    rows = [
        row
        for run, channel in (("a", one), ("b", two))
        for row in (
            made_row(run=run, channels=(channel,)),
            made_row(run=run, channels=(mean,), model="mean", parameters=0),
        )
    ]
    table = channel_table(rows)
    assert table.header[:4] == ("Model", "Run", "Target", "Relative L2")
    assert table.words == 3
    assert [line[:4] for line in table.lines] == [
        ("FST", "a", "T (K)", "0.10000"),
        ("mean", "–", "T (K)", "0.50000"),
        ("FST", "b", "T (K)", "0.20000"),
    ]


def test_one_viscosity_makes_no_table():
    assert group_table([grouped_row({"0.01": 0.1})]) is None
    assert group_table([made_row()]) is None


def test_the_cost_of_training():
    table = cost_table([made_row(), made_row(neighbors=4), made_row(model="zero", training=None)])
    sizes = ("2,900,721", "1,200", "1,000")
    assert table.lines == (("FST", "run-one", "NVIDIA H200", *sizes, "0:01:30", "13.5", "6.7 GiB"),)


def test_differences_are_relative_to_the_paper():
    relative, accuracy = METRICS["relative_l2"], METRICS["top1_error"]
    assert relative.difference(0.9, 1.0) == "-10.0 %"
    assert accuracy.difference(0.3, 0.3047) == "+0.470"
    assert relative.difference(1.0, None) == accuracy.difference(1.0, None) == "–"
    assert duration(3 * 3600 + 62) == "3:01:02"


HOSTILE = Table("a <b> & c", ("x|y", "n"), (("<script>alert(1)</script>", "1|2"),))


def test_markdown_keeps_its_columns():
    lines = HOSTILE.markdown().splitlines()
    assert lines[0] == "| x\\|y | n |"
    assert lines[1] == "| :--- | ---: |"
    assert lines[2].endswith("| 1\\|2 |")


def test_headers_are_broken_in_a_terminal_alone():
    table = Table("errors", ("Model", "Para-\nmeters", "Steps\n/s", "Peak\nGiB"), (("a",) * 4,))
    assert table.markdown().startswith("| Model | Parameters | Steps/s | Peak GiB |\n")
    assert '<th class="number">Parameters</th>' in table.html()


def test_html_is_escaped():
    class Tags(HTMLParser):
        def __init__(self):
            super().__init__()
            self.tags, self.text = [], []

        def handle_starttag(self, tag, attrs):
            self.tags.append(tag)

        def handle_data(self, data):
            self.text.append(data)

    parser = Tags()
    parser.feed(HOSTILE.html())
    assert set(parser.tags) == {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert "<script>alert(1)</script>" in parser.text


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_shows_every_number(width):
    rows = [made_row(errors=(0.0439425,), paper_error=0.04185), made_row(model="[bold]zero")]
    output = StringIO()
    Console(file=output, width=width).print(error_table(rows).terminal())
    for text in ("0.04394", "0.04185", "+5.0 %", "201×1024", "[bold]zero"):
        assert text in output.getvalue()
