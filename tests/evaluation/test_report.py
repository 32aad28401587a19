"""The report: one page of tables and figures, from rows and saved fields alone."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from evaluation_fakes import (
    ORIGIN,
    SETTINGS,
    ConstantModel,
    grouped_row,
    made_row,
    some_model,
    some_test,
)
from fst.data.files import DataError
from fst.evaluation import report as notes
from fst.evaluation.figures import Picture, file_name
from fst.evaluation.protocol import View
from fst.evaluation.report import Page, Section, report, verdict, write_page
from fst.evaluation.rows import (
    RESULTS,
    ChannelError,
    Curves,
    Origin,
    Run,
    read_curves,
    read_origin,
    read_run,
    score_once,
)
from fst.evaluation.trivial import TrainingFacts
from fst.io import FileError

VOID = {"meta", "img", "link", "br"}


class Checked(HTMLParser):
    """Raises unless every tag that opens closes in order; keeps images and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.links, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.images.append(dict(attrs))
        self.links += [value for name, value in attrs if name in ("href", "src")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


def score(folder, model, name, **changes):
    """A scored run, made without training and without weights on the disk."""
    origin = Origin(
        **{**vars(ORIGIN), "run": folder.name, "model": name, "protocol": name, **changes}
    )
    settings = replace(SETTINGS, neighbors=(1, 4), view=View(samples=2))
    test = some_test()

    def compute():
        facts = TrainingFacts((0.1,), (1.2,))
        return settings.score(model, test, origin, facts, None)

    rows = score_once(folder / RESULTS, name, compute)
    lines = [{"kind": "training", "step": step, "loss": 1 / step} for step in (10, 20, 30)]
    lines.append({"kind": "validation", "step": 30, "error": 0.2, "best": 0.2})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"kind": "training", "st')  # killed while writing
    return rows


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    score(folder / "first", some_model(), "FST")
    score(folder / "second", ConstantModel(), "FNO", recipe="burgers-single/<script>")
    page = report([folder / "first", folder / "second"], folder / "out")
    return folder, page


def test_the_page_is_whole_and_carries_its_images(written):
    _, page = written
    text = page.read_text()
    parsed = Checked(text)
    # Histogram, grids, local decoding; of both runs ranked samples, samples by position and errors
    # over the domain, of one its anchors; profiles of both, time and spectra, training.
    assert len(parsed.images) == 13
    for image in parsed.images:
        assert image["src"].startswith("data:image/png;base64,")
        assert len(image["alt"]) > 20
    assert all(link.startswith("data:") for link in parsed.links)
    assert "http" not in re.sub(r"base64,[^\"]*", "", text)


def test_the_page_has_the_numbers_and_the_notes(written):
    folder, page = written
    text = " ".join(Checked(page.read_text()).text)
    for row in read_run(folder / "first").rows:
        if row.neighbors is None:
            assert f"{row.error:.5f}" in text
    for words in ("initial condition held", "NVIDIA H200", "1,200 steps", "seed 7"):
        assert words in text
    for words in (notes.ERRORS, notes.GENERATED, notes.SEEDS, notes.SELECTED, notes.SAMPLES):
        assert words in text


def test_text_from_files_is_escaped(written):
    _, page = written
    assert "<script" not in page.read_text()
    assert "burgers-single/&lt;script&gt;" in page.read_text()


def test_markdown_points_to_its_images(written):
    _, page = written
    text = (page.parent / "report.md").read_text()
    links = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text)
    assert len(links) == 13
    for link in links:
        assert (page.parent / link).read_bytes().startswith(b"\x89PNG")
    assert "| FST | first |" in text


def test_the_report_is_the_same_twice(written):
    folder, page = written
    again = report([folder / "first", folder / "second"], folder / "again")
    assert again.read_bytes() == page.read_bytes()


def test_runs_of_one_name_and_one_run_given_twice(tmp_path):
    for folder in ("a", "b"):
        score(tmp_path / folder / "run", ConstantModel(), "FNO")
    page = report([tmp_path / "a" / "run"] * 2 + [tmp_path / "b" / "run"], tmp_path / "out")
    names = {path.name for path in (page.parent / "figures").iterdir()}
    assert {"run-solutions.png", "run--2--solutions.png"} <= names


def named(*names):
    runs = [Run(name, (made_row(run="old name"),), None, Curves()) for name in names]
    return notes.distinct(runs)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("seed1", "seed1"), ["seed1", "seed1 (2)"]),
        (("a b", "a-b"), ["a b", "a-b (2)"]),
        (("a-b", "a-b", "a-b (2)"), ["a-b", "a-b (3)", "a-b (2)"]),
        (("a-b", "a-b--2-", "a b"), ["a-b", "a-b--2-", "a b (3)"]),
        (("a-b", "a_b", "数据", "模型"), ["a-b", "a_b", "数据", "模型"]),
    ],
)
def test_names_of_runs_and_of_their_rows_and_files_differ(given, expected):
    runs = named(*given)
    assert [run.name for run in runs] == expected
    assert [row.run for run in runs for row in run.rows] == expected
    assert len({file_name(run.name) for run in runs}) == len(runs)


def test_runs_of_one_name_have_columns_and_lines_of_their_own(tmp_path):
    for folder, errors in (("a", {"cat": 0.1, "dog": 0.2}), ("b", {"cat": 0.3, "dog": 0.4})):
        row = grouped_row(errors, run="seed1")
        score_once(tmp_path / folder / "seed1" / RESULTS, "p", lambda row=row: ([row], None))
    page = report([tmp_path / "a" / "seed1", tmp_path / "b" / "seed1"], tmp_path / "out")
    text = (page.parent / "report.md").read_text().replace("\\", "")
    assert "| FST (seed1), ours | FST (seed1 (2)), ours |" in text
    assert "| cat | 1 | 0.10000 | 0.30000 |" in text
    assert text.count("| FST | seed1 |") == text.count("| FST | seed1 (2) |") == 2


def test_a_run_without_fields_has_tables(tmp_path):
    rows = [made_row(run="points", grid=None, training=None, errors=(0.1,))]
    score_once(tmp_path / "points" / RESULTS, "p", lambda: (rows, None))
    page = report([tmp_path / "points"], tmp_path / "out")
    assert Checked(page.read_text()).images == []


def noted(*rows, fields=None):
    return " ".join(notes.notes([Run("run", rows, fields, Curves())]))


def test_notes_say_of_own_data_only_what_is_true_of_them():
    own = noted(made_row(recipe="own/fst", task="own", grid=None))
    for words in ("solvers", "published", "paper", "figures"):
        assert words not in own
    assert notes.ERRORS in own
    assert notes.SELECTED in own


def test_notes_speak_of_the_paper_where_it_is_quoted():
    group = replace(grouped_row({"0.1": 0.1, "1": 0.3}).groups[0], paper_error=0.2)
    by_group = replace(made_row(errors=(0.1,)), groups=(group,))
    for row in (made_row(paper_error=0.3), by_group):
        assert notes.PAPER in noted(row)
        assert notes.GENERATED_AND_PAPER in noted(row)
    assert "paper" not in noted(made_row())
    assert notes.GENERATED in noted(made_row())


def test_notes_speak_of_pictures_where_there_are_some(written):
    folder, _ = written
    fields = read_run(folder / "first").fields
    assert notes.SAMPLES in noted(made_row(), fields=fields)
    assert notes.SAMPLES not in noted(made_row())
    guess = made_row(metric="top1_error", task="own-images", grid=None)
    assert "photographs" not in noted(guess)
    assert notes.SELECTED_IMAGES in noted(guess)
    assert notes.SELECTED_IMAGENET not in noted(guess)
    assert notes.SELECTED_IMAGENET in noted(replace(guess, task="imagenet"))


def test_the_first_line_says_how_good_the_model_is(written):
    _, page = written
    words = [text for text in Checked(page.read_text()).text if text.strip()]
    assert words[2].startswith("first: FST has a mean relative L2 error of ")  # after two titles
    channel = ChannelError("T", "K", 0.1, 0.3, 1.0)
    rows = [
        made_row(errors=(0.1,), channels=(channel,)),
        made_row(model="mean of the training targets", parameters=0, errors=(0.5,)),
    ]
    assert verdict(rows) == (
        "FST has a mean relative L2 error of 0.10000 on 1 test samples, 5.0 times lower than the "
        "best trivial predictor, mean of the training targets (0.50000); its RMSE is 30.0 % of the "
        "targets' standard deviation."
    )
    assert verdict(rows[1:]) is None


def test_unrelated_data_sets_have_tables_of_their_own(tmp_path):
    for name in ("heat.h5 1a", "wind.h5 2b"):
        row = made_row(run=name, task="own", data=name, grid=None)
        score_once(tmp_path / name / RESULTS, "p", lambda row=row: ([row], None))
    report([tmp_path / "heat.h5 1a", tmp_path / "wind.h5 2b"], tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    for name in ("own, heat.h5 1a", "own, wind.h5 2b"):
        assert (
            f"## {name}: relative L2 error on the test set".replace(".", "\\.") in text
            or name in text
        )
    assert text.count("| Model | Run |") == 3  # two of errors, one of costs


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(DataError, match="no such run folder"):
        report([tmp_path / "nowhere"], tmp_path / "out")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text("{}")
    with pytest.raises(DataError, match="score it with: fst evaluate"):
        report([tmp_path / "run"], tmp_path / "out")
    with pytest.raises(ValueError, match="at least one run"):
        report([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_page_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "out").write_text("a file, not a folder")
    with pytest.raises(DataError, match="out: cannot be written"):
        write_page(Page("title", (), ()), tmp_path / "out")


def holds(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["report.md", "index.html", "figures/mine.png", "notes.txt"])
def test_somebody_elses_files_are_left_alone(written, tmp_path, name):
    folder, _ = written
    file = tmp_path / "mine" / name
    file.parent.mkdir(parents=True)
    file.write_text("notes")
    with pytest.raises(DataError, match="mine already holds files that no report wrote"):
        report([folder / "first"], tmp_path / "mine")
    assert holds(tmp_path / "mine") == {name}
    assert file.read_text() == "notes"


@pytest.mark.parametrize("text", ["{}", "[", '{"written_by": "me", "pictures": []}', "[1]"])
def test_a_file_that_is_called_like_the_list_of_a_report_does_not_stand_for_it(tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(DataError, match="no report wrote"):
        write_page(Page("title", (), ()), tmp_path)
    assert holds(tmp_path) == {"report.json"}


def test_a_report_written_again_replaces_its_own_pictures_only(written, tmp_path):
    folder, _ = written
    out = tmp_path / "page"
    out.mkdir()  # empty, which is as good as absent
    report([folder / "first", folder / "second"], out)
    (out / "figures" / "mine.png").write_bytes(b"my picture")
    (out / "notes.txt").write_text("my notes")
    page = report([folder / "first"], out)
    report([folder / "first"], tmp_path / "fresh")
    assert holds(out) == holds(tmp_path / "fresh") | {"figures/mine.png", "notes.txt"}
    assert page.read_bytes() == (tmp_path / "fresh" / "index.html").read_bytes()
    assert (out / "figures" / "mine.png").read_bytes() == b"my picture"


def test_a_list_that_was_tampered_with_reaches_nothing_outside(tmp_path):
    (tmp_path / "precious.png").write_text("precious")
    out = tmp_path / "page"
    write_page(Page("title", (), ()), out)
    listed = json.loads((out / "report.json").read_text())
    listed["pictures"] = ["../../precious", str(tmp_path / "precious")]
    (out / "report.json").write_text(json.dumps(listed))
    write_page(Page("title", (), ()), out)
    assert (tmp_path / "precious.png").exists()


def test_pictures_need_names_of_their_own(written):
    folder, _ = written
    from fst.evaluation.figures import profiles

    figure = profiles([("first", read_run(folder / "first").fields)])
    picture = Picture("same", "caption", figure)
    page = Page("title", (), (Section("a", pictures=(picture, picture)),))
    with pytest.raises(ValueError, match="different names"):
        write_page(page, folder / "nothing")


def test_curves_skip_what_a_killed_writer_left(written):
    folder, _ = written
    curves = read_curves(folder / "first" / "metrics.jsonl")
    assert curves == Curves(((10, 0.1), (20, 0.05), (30, 1 / 30)), ((30, 0.2),))
    assert read_curves(folder / "nothing.jsonl") == Curves()


def test_curves_know_a_measure_of_their_own(tmp_path):
    line = {"kind": "validation", "step": 5, "error": 0.3, "best": 0.3}
    line |= {"standardized_relative_l2": 0.3, "relative_l2": 0.01}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    found = read_curves(tmp_path / "metrics.jsonl")
    assert found == Curves((), ((5, 0.3),), "standardized relative L2")
    assert read_curves(tmp_path / "metrics.jsonl", "relative_l2").validation == ((5, 0.01),)


def test_the_origin_comes_from_the_run_folder(tmp_path):
    words = {"recipe": "burgers-single/fst", "task": "burgers-single", "model": "FST", "seed": 3}
    bare = Origin(run=tmp_path.name, **words)
    assert read_origin(tmp_path, bare) == bare
    environment = {
        "git": {"commit": "abc", "modified": True},
        "hardware": {"gpus": [{"name": "NVIDIA H200"}], "processes": 2},
    }
    summary = {
        "steps": 10,
        "seconds": 4.0,
        "steps_per_second": 2.5,
        "peak_memory_gib": 1.5,
        "selected_step": 8,
        "validation_error": 0.1,
        "reason": "done",
    }
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    origin = read_origin(tmp_path, bare)
    assert origin.git_hash == "abc (modified)"
    assert origin.training.device == "2 × NVIDIA H200"
    assert (origin.training.steps, origin.training.selected_step) == (10, 8)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(FileError, match=r"summary\.json cannot be read"):
        read_origin(tmp_path, bare)
