"""The page of `fst explore` in a real browser, where Chromium is installed."""

from pathlib import Path
from typing import Any

import pytest

from browser import CHROMIUM, browser
from explore_examples import BURGERS, DARCY, points_explorer, served, small_model
from fst.explore.explorer import Explorer
from fst.explore.problems import BurgersProblem, DarcyProblem, Problem

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

READY = "document.getElementById('status').textContent == 'ready'"


def drawn(name: str) -> str:
    """How many colours a canvas shows."""
    return (
        f"(() => {{ const c = document.getElementById('{name}'); const p = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; const s = new Set(); for (let i = 0; "
        "i < p.length; i += 4) s.add(p[i] << 16 | p[i + 1] << 8 | p[i + 2]); return s.size; })()"
    )


def text(page: Any, name: str) -> str:
    return page.evaluate(f"document.getElementById('{name}').textContent")


@pytest.mark.parametrize(
    ("problem", "condition"),
    [(BurgersProblem(BURGERS), 1), (DarcyProblem(DARCY), 0)],
)
def test_draw_point_and_slide(tmp_path: Path, problem: Problem, condition: int) -> None:
    explorer = Explorer(small_model(condition), problem, "tiny")
    with served(explorer) as address, browser(tmp_path) as page:
        page.open(address)
        page.wait(READY)
        first = text(page, "error")
        assert first.endswith("%")
        for name in ("prediction", "reference", "difference"):
            assert page.evaluate(drawn(name)) > 50

        page.drag("input", [(0.3, 0.3), (0.5, 0.7), (0.8, 0.4)])
        page.wait(f"document.getElementById('error').textContent != '{first}' && {READY}")

        before = page.evaluate("document.body.dataset.answers")
        page.point("prediction", 0.5, 0.4)
        assert "predicted" in text(page, "pointer")
        assert page.evaluate(READY)  # a request would say so at once
        assert page.evaluate("document.body.dataset.answers") == before

        plain = page.evaluate("document.getElementById('prediction').toDataURL()")
        page.evaluate("document.getElementById('anchors').click()")
        page.evaluate("document.getElementById('scales').click()")
        assert page.evaluate("document.getElementById('prediction').toDataURL()") != plain

        before, refined = page.evaluate("document.body.dataset.answers"), text(page, "refine")
        assert refined.endswith(" s")
        page.evaluate(
            "(() => { const slider = document.getElementById('neighbors'); slider.value = 0; "
            "slider.dispatchEvent(new Event('input')); slider.dispatchEvent(new Event('change')) "
            "})()"
        )
        page.wait(f"document.body.dataset.answers != '{before}' && {READY}")
        assert text(page, "neighbors-value") == "1"
        assert text(page, "refine") == refined  # the field is the same
        assert [said for said in page.problems if "409" not in said] == []  # overtaken requests


def test_sensors_move_and_go(tmp_path: Path) -> None:
    explorer = points_explorer()
    explorer.problem.grids = ((48, 48), (201, 1024))  # as many values as any page has
    asked = []
    read = explorer.problem.read

    def noted(request: Any) -> Any:
        asked.append(request["input"])
        return read(request)

    explorer.problem.read = noted  # type: ignore[method-assign]
    with served(explorer) as address, browser(tmp_path) as page:
        page.open(address)
        page.wait(READY)
        assert text(page, "input-caption") == f"Test sample {(17, 4)[asked[-1][0]]}"
        sensors = (len(asked[-1]) - 1) // 3
        # The page's own coordinates of the first sensor, as shares of the canvas.
        place = (
            "(([x, y]) => { const {width, height} = document.getElementById('input')"
            ".getBoundingClientRect(); return [(44 + (width - 54) * x) / width, "
            f"(8 + (height - 42) * (1 - y)) / height]; }})({asked[-1][1:3]})"
        )
        x, y = page.evaluate(place)
        before = page.evaluate("document.body.dataset.answers")
        page.drag("input", [(x, y), (0.5, 0.5), (0.55, 0.5)])
        page.wait(f"document.body.dataset.answers != '{before}' && {READY}")
        assert (len(asked[-1]) - 1) // 3 == sensors
        before = page.evaluate("document.body.dataset.answers")
        page.point("input", 0.55, 0.5)
        page.wait(f"document.body.dataset.answers != '{before}' && {READY}")
        assert (len(asked[-1]) - 1) // 3 == sensors - 1


def test_a_menu_leads_to_the_other_models(tmp_path: Path) -> None:
    burgers = Explorer(small_model(1), BurgersProblem(BURGERS), "waves")
    darcy = Explorer(small_model(), DarcyProblem(DARCY), "ground")
    with served(burgers, darcy) as address, browser(tmp_path) as page:
        page.open(address)
        page.wait(READY)
        assert text(page, "title") == "Burgers"
        page.evaluate(
            "(() => { const menu = document.getElementById('models'); menu.value = 'ground'; "
            "menu.dispatchEvent(new Event('change')) })()"
        )
        page.wait("document.getElementById('title')?.textContent == 'Darcy flow'")
        page.wait(READY)
        assert page.evaluate("document.getElementById('models').value") == "ground"
        assert text(page, "error").endswith("%")
        page.drag("input", [(0.3, 0.3), (0.5, 0.7)])
        page.wait(f"document.getElementById('finest').textContent.endsWith('s') && {READY}")
        assert page.problems == [] or all("409" in said for said in page.problems)
