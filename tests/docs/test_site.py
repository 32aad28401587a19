"""The site without building it: navigation, links, names, snippets, and each tutorial run small."""

import importlib
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
import yaml

import fst
from fst.data import DarcyData, PointSample, write_points
from fst.types import Domain

CPU, ROW = torch.device("cpu"), torch.tensor([0])
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = {
    "command-line.md",
    "gallery.md",
    "result-folders.md",
    "contributing.md",
    "changelog.md",
    "log.md",
}
SCRIPTS = sorted((ROOT / "tutorials").glob("*.py"))
PAGES = sorted(DOCS.rglob("*.md"))
sys.path.insert(0, str(DOCS / "generate"))

import method_figures  # noqa: E402
import tutorial  # noqa: E402


def in_navigation() -> set[str]:
    def walk(entry: object) -> list[str]:
        if isinstance(entry, dict):
            entry = list(entry.values())
        if isinstance(entry, list):
            return [page for each in entry for page in walk(each)]
        return [str(entry)]

    return set(walk(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))


def pages() -> set[str]:
    """Every page of the site, written or made."""
    written = {str(path.relative_to(DOCS)) for path in PAGES}
    made = {f"tutorials/{script.stem}.md" for script in SCRIPTS}
    return written | made | GENERATED


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    assert in_navigation() == pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_between_pages_resolve(page: Path) -> None:
    for _, target in re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", page.read_text()):
        path = target.partition("#")[0]
        if not path or re.match(r"\w+:", path):
            continue
        resolved = (page.parent / path).resolve()
        made = resolved.is_relative_to(DOCS) and (
            str(resolved.relative_to(DOCS)) in pages()
            or re.match(r"tutorials/\w+-\d\.png|images/method/", str(resolved.relative_to(DOCS)))
        )
        assert made or resolved.exists(), f"{page.name} links to {target}, which does not exist"


@pytest.mark.parametrize("name", ["fst", "fst.data", "fst.kernels", "fst.training"])
def test_every_public_name_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    page = DOCS / "api" / f"{name.partition('.')[2] or 'index'}.md"
    listed = set(re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE))
    public = {each for each in module.__all__ if each != "__version__"}
    if name == "fst":  # its modules have pages of their own
        public -= {each for each in public if (DOCS / "api" / f"{each}.md").exists()}
    assert listed == {f"{name}.{each}" for each in public}
    for each in public:
        value = getattr(module, each)
        words = value.__doc__ or f"{each}("
        # A dataclass without a docstring is given one that lists its fields.
        assert not words.startswith(f"{each}("), f"{name}.{each} has no docstring"


def test_snippets_of_the_method_name_code_that_exists() -> None:
    names = re.findall(r"\{\{ source ([\w.]+) \}\}", (DOCS / "method.md").read_text())
    assert len(names) > 8
    for name in names:
        value: object = importlib.import_module("fst")
        for part in name.split(".")[1:]:
            if isinstance(value, types.ModuleType) and not hasattr(value, part):
                value = importlib.import_module(f"{value.__name__}.{part}")
            else:
                value = getattr(value, part)
        assert inspect.getsource(value)  # type: ignore[arg-type]


def test_the_figures_of_the_method_are_drawn_and_shown(tmp_path: Path) -> None:
    drawn = method_figures.draw(tmp_path)
    pages = (DOCS / "method.md").read_text() + (DOCS / "anchors.md").read_text()
    assert set(re.findall(r"images/method/([\w.]+)", pages)) == set(drawn)
    assert all(path.stat().st_size > 8_000 for path in drawn.values())


def test_every_choice_of_anchors_is_on_their_page() -> None:
    import fst

    described = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "anchors.md").read_text(), re.M))
    types = get_type_hints(fst.FunctionSpaceConfig)
    choices = get_args(types["coordinates"]) + get_args(types["length_scales"])
    assert described == set(choices)


def test_the_method_has_all_ten_equations() -> None:
    headings = " ".join(re.findall(r"^## (Equation.*)", (DOCS / "method.md").read_text(), re.M))
    assert {int(number) for number in re.findall(r"\d+", headings)} == set(range(1, 11))


def test_the_citation_names_this_version() -> None:
    import fst

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fst.__version__
    assert citation["cff-version"] == "1.2.0"


def test_a_script_is_cut_into_text_and_code_and_sizes() -> None:
    script = '"""Title.\n\nOpening.\n"""\n\n# %%\n# Text\n# more\nSTEPS = 9  # 1 in tests\nSTEPS\n'
    (cell,) = tutorial.cells(script)
    assert cell.text == "Text\nmore"
    assert tutorial.shown(cell.code) == "STEPS = 9\nSTEPS"
    assert script.splitlines()[cell.line].startswith("STEPS")
    assert tutorial.title(script) == "Title"


def small_graetz(path: Path) -> Path:
    """A file with the arrays of the Graetz problem, for a mesh of two triangles."""
    random = np.random.default_rng(0)
    nodes = np.concatenate((np.array([[0, 0], [2, 0], [0, 1], [2, 1]]), random.random((57, 2))))
    np.savez(
        path,
        points=np.broadcast_to(nodes, (20, *nodes.shape)).astype(np.float32),
        snapshots=random.random((20, len(nodes)), dtype=np.float32),
        params=random.random((20, 2), dtype=np.float32),
        triangles=np.array([[0, 1, 2], [1, 2, 3]], dtype=np.int32),
    )
    return path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_tutorials_run_at_reduced_size(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FST_GRAETZ", str(small_graetz(tmp_path / "graetz.npz")))
    page = tutorial.execute(script, tmp_path, reduced=True)
    assert page.startswith("# ")
    assert "in tests" not in page
    pictures = re.findall(r"!\[\]\((.+)\)", page)
    assert len(pictures) == {"saving": 0, "mesh": 2}.get(script.stem, max(1, len(pictures)))
    for picture in pictures:
        assert (tmp_path / picture).stat().st_size > 3_000


def test_the_example_of_evaluation_runs_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    samples = [PointSample(p, p, p, p) for p in np.random.default_rng(0).random((10, 8, 1))]
    write_points("my.h5", samples, Domain((0.0,), (1.0,)))
    sizes = {"width": 16, "anchors_per_row": 4, "points_from_anchors": 4, "points_from_sobol": 4}
    fst.build("own/fst", fst.PointDataset("my.h5"), **sizes).save_pretrained("runs/mine/best")
    [example] = re.findall(r"```python\n(.*?)```", (DOCS / "evaluation.md").read_text(), re.DOTALL)
    exec(compile(example, "docs/evaluation.md", "exec"), {})
    assert re.search(r"FST +\|.*points", capsys.readouterr().out)


def test_the_demo_installs_no_linters_and_installing_shows_progress():
    shown = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"], cwd=ROOT, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    [install] = [line for line in shown.stdout.splitlines() if "pip install" in line]
    assert "dev" not in install
    assert "quiet" not in install
    whole = subprocess.run(
        ["make", "--dry-run", "--always-make", "test"], cwd=ROOT, capture_output=True, text=True
    )
    assert "dev" in whole.stdout


def test_the_darcy_tutorial_observes_samples_like_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, seen = fst.from_pretrained, []

    def noting(source: str) -> fst.Model:
        model = load(source)
        model.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        return model

    monkeypatch.setattr(fst, "from_pretrained", noting)
    monkeypatch.chdir(tmp_path)  # where no folder is called darcy
    tutorial.execute(ROOT / "tutorials" / "darcy.py", tmp_path, reduced=True)

    counts = {"training": 1, "validation": 1, "test": 1, "training_file": 2}
    data = DarcyData(resolution=32, fine=64, seed=3, validation_grid=(5, 5), **counts)
    data.prepare(tmp_path / "data")
    batches = [split.samples.batch(ROW) for split in data.load(tmp_path / "data", CPU)[:2]]
    assert any(torch.equal(batch.observations.values, seen[0].values) for batch in batches)
    assert torch.allclose(batches[0].observations.positions, seen[0].positions)
