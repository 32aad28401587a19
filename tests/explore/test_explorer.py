"""`fst explore`: what it answers, what it refuses, and the page in a browser."""

import base64
import json
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fst
from explore_examples import (
    BURGERS,
    DARCY,
    own_points,
    points_explorer,
    save_run,
    served,
    small_model,
)
from fst.base import build_model
from fst.baselines import GridTransolverConfig
from fst.cli import main
from fst.commands.explore import make_explorer, make_explorers, problem_of, warm_up
from fst.data import PointSample, burgers, darcy, write_points
from fst.explore.explorer import Explorer
from fst.explore.problems import BurgersProblem, DarcyProblem, Given
from fst.recipes import find


@pytest.fixture
def explorer() -> Explorer:
    return Explorer(small_model(condition=1), BurgersProblem(BURGERS), "tiny")


def question(explorer: Explorer, **changes: Any) -> dict[str, Any]:
    asked = {"input": explorer.problem.draw(3), "level": 0, "neighbors": None, "viscosity": 0.05}
    return asked | changes


def unpacked(answer: dict[str, Any], name: str) -> np.ndarray:
    values = np.frombuffer(base64.b64decode(answer[name]), "<f4")
    return values.reshape(answer["grid"])


def test_burgers_observations_are_those_of_the_data(tmp_path: Path) -> None:
    data = replace(BURGERS, training=2, validation=1, test=2)
    data.prepare(tmp_path)
    samples = data.load_test(tmp_path).samples
    stored = samples.batch(torch.tensor([1]))  # ν = 0.1, which this grid resolves
    values = stored.observations.values[0, : data.points, 0].tolist()
    made = BurgersProblem(data).observe(Given(tuple(values), 0.1))
    assert torch.equal(made.positions, stored.observations.positions)
    assert torch.equal(made.condition, stored.observations.condition)
    assert torch.allclose(made.values, stored.observations.values, atol=0.03)


def test_burgers_reference_is_the_solution() -> None:
    problem = BurgersProblem(BURGERS)
    initial = torch.sin(2 * math.pi * burgers.cell_centers(128))
    found = problem.reference(Given(tuple(initial.tolist()), 0.1), 1, lambda: None)
    solved = burgers.solve(initial[None], 0.1, problem.times)[0]
    assert found.shape == problem.grids[1] == (51, 128)
    assert (found - solved).norm() < 0.01 * solved.norm()
    assert torch.allclose(found[0], initial)


def test_darcy_reference_is_the_solution_at_the_nodes_of_the_data() -> None:
    problem = DarcyProblem(DARCY)
    coefficient = torch.full((1, 65, 65), darcy.LOW).double()
    given = problem.read({"input": "0" * 256})
    solved = darcy.subsample(darcy.solve(coefficient), 16)[0]
    found = problem.reference(given, 1, lambda: None)
    assert (found - solved).norm() < 1e-3 * solved.norm()


def test_darcy_is_not_transposed() -> None:
    problem = DarcyProblem(DARCY)
    text = "".join("1" if row < 8 else "0" for row in range(16) for _ in range(16))
    given = problem.read({"input": text})
    found = problem.reference(given, 1, lambda: None)
    assert found[:8].mean() < 0.5 * found[8:].mean()  # u is small where a is high
    observed = problem.observe(given)
    assert observed.values[0, 0, 0] == pytest.approx(darcy.HIGH)
    assert observed.positions[0, 1].tolist() == pytest.approx([0, 1 / 15])


def test_darcy_draws_are_of_the_law() -> None:
    problem = DarcyProblem(DARCY)
    text = problem.draw(0)
    assert problem.draw(0) == text != problem.draw(1)
    assert problem.read({"input": text}).numbers.count(darcy.HIGH) == text.count("1")


def test_an_answer_holds_prediction_reference_error_and_anchors(explorer: Explorer) -> None:
    answer = explorer.answer(question(explorer, level=1))
    prediction, reference = unpacked(answer, "prediction"), unpacked(answer, "reference")
    assert prediction.shape == (51, 128)
    error = np.linalg.norm(prediction - reference) / np.linalg.norm(reference)
    assert answer["error"] == pytest.approx(error, rel=1e-4)
    assert len(base64.b64decode(answer["anchors"]["positions"])) == 16 * 2 * 4
    assert json.dumps(answer)


def test_the_prediction_is_the_model_s(explorer: Explorer) -> None:
    asked = question(explorer)
    answer = explorer.answer(asked)
    given = explorer.problem.read(asked)
    with torch.no_grad():
        field = explorer.model(explorer.problem.observe(given))
        queries = explorer.problem.queries()[:, explorer.problem.points(0)]
        expected = field(queries).reshape(answer["grid"])
    assert np.allclose(unpacked(answer, "prediction"), expected.numpy(), atol=1e-5)


def test_threads_give_the_same_answer(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Explorer(explorer.model, explorer.problem, "tiny", threads=3)
    monkeypatch.setattr("fst.explore.explorer._QUERIES_AT_ONCE", 100)
    answers = [unpacked(each.answer(question(each)), "prediction") for each in (explorer, shared)]
    np.testing.assert_allclose(*answers, atol=1e-6)  # products of other sizes round otherwise


def test_an_input_is_refined_once(explorer: Explorer) -> None:
    refined = []
    explorer.model.register_forward_hook(lambda *_: refined.append(1))
    everything = explorer.answer(question(explorer))
    fewer = explorer.answer(question(explorer, neighbors=2))
    explorer.answer(question(explorer, level=1))
    assert len(refined) == 1
    assert fewer["reference"] == everything["reference"]
    assert fewer["prediction"] != everything["prediction"]
    explorer.answer(question(explorer, viscosity=0.02))
    assert len(refined) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"level": 7},
        {"level": True},
        {"level": "0"},
        {"neighbors": 0},
        {"neighbors": 17},
        {"neighbors": 1.5},
        {"viscosity": None},
        {"viscosity": float("nan")},
        {"viscosity": 1e-9},
        {"input": None},
        {"input": [0.0] * 127},
        {"input": [0.0] * 127 + [float("inf")]},
        {"input": [0.0] * 127 + ["0"]},
        {"input": [0.0] * 127 + [1e9]},
    ],
)
def test_nonsense_is_refused_by_name(explorer: Explorer, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        explorer.answer(question(explorer, **changes))
    with pytest.raises(ValueError, match="object"):
        explorer.answer([1])


def test_darcy_paint_is_checked() -> None:
    problem = DarcyProblem(DARCY)
    for text in (None, "01", "2" * 256, ["0"] * 256):
        with pytest.raises(ValueError, match="256 digits"):
            problem.read({"input": text})


def test_own_points_are_observed_where_they_are_moved() -> None:
    explorer = points_explorer()
    problem = explorer.problem
    drawn = problem.draw(3)
    assert len(drawn) == 1 + 3 * 3
    assert drawn[0] == 1
    observed = problem.observe(problem.read({"input": drawn}))
    assert torch.allclose(observed.positions[0, :, 0], observed.values[0, :, 0], atol=1e-5)
    before = explorer.answer({"input": drawn, "level": 0})
    moved = explorer.answer({"input": [*drawn[:1], 0.5, 0.5, *drawn[3:]], "level": 0})
    assert moved["prediction"] != before["prediction"]
    assert moved["reference"] == before["reference"]
    assert explorer.answer({"input": drawn[:4], "level": 0})["error"] > 0


def test_own_points_are_scored_at_their_targets() -> None:
    explorer = points_explorer()
    drawn = explorer.problem.draw(1)
    known = explorer.problem.targets(explorer.problem.read({"input": drawn}))
    assert known is not None
    assert known.targets.shape == (1, 30, 1)
    with torch.no_grad():
        field = explorer.model(explorer.problem.observe(Given(tuple(drawn))))
        prediction = field(known.queries)
    error = (prediction - known.targets).norm() / known.targets.norm()
    answer = explorer.answer({"input": drawn, "level": 0})
    assert answer["error"] == pytest.approx(error.item(), rel=1e-4)


def test_own_points_have_their_names_units_and_numbers() -> None:
    about = own_points().describe()
    assert [axis["name"] for axis in about["axes"]] == ["x (km)", "y (km)"]
    assert (about["sensed"], about["value"], about["numbers"]) == ("T (K)", "T (K)", (17, 4))


def test_own_points_are_checked() -> None:
    problem = own_points()
    drawn = problem.draw(0)
    for wrong in (
        [],
        [0],
        [2, *drawn[1:]],
        [0.5, *drawn[1:]],
        drawn[:-1],
        [*drawn, *drawn[1:]],
        [0, 1.5, 0.5, 1.0],
        [0, 0.5, 0.5, float("nan")],
    ):
        with pytest.raises(ValueError, match="input"):
            problem.read({"input": wrong})


def test_a_run_on_own_points_finds_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.h5"
    generator = np.random.default_rng(0)
    positions = generator.random((20, 12, 2)).astype(np.float32)
    samples = [PointSample(p, p[:, :1], p, p[:, 1:] + 1) for p in positions]
    write_points(file, samples, fst.Domain.unit(2))
    model = small_model()
    model.save_pretrained(tmp_path / "run" / "best")
    recipe = replace(find("own/fst"), model=model.config)
    (tmp_path / "run" / "recipe.json").write_text(json.dumps(recipe.to_json()))
    (tmp_path / "run" / "run.json").write_text(json.dumps({"data": str(file)}))
    explorer = make_explorer(str(tmp_path / "run"), device="cpu")
    warm_up(explorer)
    assert len(explorer.describe()["numbers"]) == 2


def test_run_folders_and_saved_models_are_found(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", "darcy/fst", DARCY)
    explorer = make_explorer(str(run), device="cpu")
    warm_up(explorer)
    assert explorer.describe()["kind"] == "darcy"
    assert explorer.describe()["name"] == "run"
    with pytest.raises(ValueError, match="--recipe"):
        make_explorer(str(run / "best"))
    named = make_explorer(str(run / "best"), "burgers-single/fst", device="cpu")
    assert named.describe()["kind"] == "burgers"


def test_a_model_of_one_grid_has_no_page(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", "darcy/fst", DARCY)
    model = build_model(GridTransolverConfig(grid=(4, 4), width=16, heads=2, layers=1, slices=4))
    model.save_pretrained(run / "best")
    with pytest.raises(ValueError, match=r"GridTransolver answers on one of \(4, 4\) alone"):
        make_explorer(str(run), device="cpu")


def test_a_name_that_does_not_ship_has_a_clear_message(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    assert main(["explore", "no-such-weights"]) == 2
    assert "the weights that ship with fst are" in capsys.readouterr().err


def test_data_without_a_page_have_a_clear_message() -> None:
    with pytest.raises(ValueError, match="not imagenet/fst"):
        problem_of(find("imagenet/fst"), Path("run"))


def test_the_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["explore", "anything"]) == 2
    assert "pip install 'function-space-transformer[explore]'" in capsys.readouterr().err


HOME = "http://127.0.0.1:8765"


@pytest.fixture
def client(explorer: Explorer) -> Any:
    pytest.importorskip("uvicorn")
    testing = pytest.importorskip("starlette.testclient")
    from fst.explore.server import make_app

    return testing.TestClient(make_app({"tiny": lambda: explorer}, 8765), base_url=HOME)


def test_the_page_its_parts_and_an_answer(client: Any, explorer: Explorer) -> None:
    for path, kind in (("/", "html"), ("/explore.js", "javascript"), ("/explore.css", "css")):
        response = client.get(path)
        assert response.status_code == 200
        assert kind in response.headers["content-type"]
        assert "default-src 'self'" in response.headers["content-security-policy"]
    about = client.get("/about").json()
    assert about["anchors"] == 16
    drawn = client.get("/draw?number=3").json()["input"]
    assert drawn == explorer.problem.draw(3)
    response = client.post("/answer", json=question(explorer), headers={"Origin": HOME})
    assert response.status_code == 200
    assert response.json()["grid"] == list(explorer.problem.grids[0])


def test_nothing_comes_from_another_host() -> None:
    folder = Path(fst.__file__).parent / "explore"
    for name in ("index.html", "explore.js", "plots.js", "explore.css"):
        assert "//" not in (folder / name).read_text().replace("// ", "")


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "example.com"},
        {"Host": "example.com:8765"},
        {"Host": "127.0.0.1:80"},
        {"Host": "127.0.0.1"},
        {"Origin": "http://example.com"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1:8765"},
        {"Origin": "http://127.0.0.1:8766"},
    ],
)
def test_other_hosts_and_origins_are_refused(
    client: Any, explorer: Explorer, headers: dict[str, str]
) -> None:
    assert client.get("/about", headers=headers).status_code == 403
    assert client.post("/answer", json=question(explorer), headers=headers).status_code == 403
    assert client.get("/about", headers={"Host": "localhost:8765"}).status_code == 200


def test_bad_requests_have_a_status_and_a_reason(client: Any, explorer: Explorer) -> None:
    json_headers = {"Content-Type": "application/json"}
    for body, status in (
        (b"{", 400),
        (b"[" * 100_000, 400),
        (b"\xff", 400),
        (b"[]", 400),
        (b"{}", 400),
        (b" " * 2**21, 413),
    ):
        response = client.post("/answer", content=body, headers=json_headers)
        assert (response.status_code, "error" in response.json()) == (status, True)
    text = json.dumps(question(explorer))
    assert client.post("/answer", content=text).status_code == 415
    assert client.get("/answer").status_code == 405
    for number in ("", "-1", "x", "9" * 400, "1000001", "²"):
        assert client.get("/draw", params={"number": number}).status_code == 400
    assert client.get("/../problems.py").status_code == 404


def test_seconds_are_told_once_also_after_a_request_that_was_overtaken(explorer: Explorer) -> None:
    def overtaken() -> None:
        if explorer._output is not None:
            raise InterruptedError

    asked = question(explorer)
    with pytest.raises(InterruptedError):
        explorer.answer(asked, overtaken)
    assert set(explorer.answer(asked)["seconds"]) == {"solve", "refine", "decode"}
    assert set(explorer.answer(asked)["seconds"]) == {"decode"}
    assert set(explorer.answer(asked | {"level": 1})["seconds"]) == {"solve", "decode"}


def test_a_newer_request_overtakes_those_that_wait(explorer: Explorer) -> None:
    httpx = pytest.importorskip("httpx")
    started, go_on = threading.Event(), threading.Event()
    solve = explorer.problem.reference

    def slowly(given: Any, level: int, proceed: Any) -> torch.Tensor:
        started.set()
        go_on.wait(20)
        proceed()
        return solve(given, level, proceed)

    explorer.problem.reference = slowly  # type: ignore[method-assign]
    found: dict[str, int] = {}
    with served(explorer) as address:

        def send(name: str, viscosity: float) -> None:
            body = question(explorer, viscosity=viscosity)
            found[name] = httpx.post(f"{address}/answer", json=body, timeout=30).status_code

        threads = []
        for place, name in enumerate(("running", "waiting", "newest")):
            threads.append(threading.Thread(target=send, args=(name, 0.02 + 0.01 * place)))
            threads[-1].start()
            assert started.wait(20)
            time.sleep(0.3)
        go_on.set()
        for thread in threads:
            thread.join(30)
    assert found == {"running": 409, "waiting": 409, "newest": 200}


def test_a_port_in_use_is_named() -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from fst.explore.server import listen

    with listen(0) as listener:
        listener.listen()
        with pytest.raises(ValueError, match="--port"):
            listen(listener.getsockname()[1])
        assert listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ValueError, match="65535"):
        listen(70000)


def test_a_finer_grid_decodes_only_what_is_new(explorer: Explorer) -> None:
    decoded = []
    decode = explorer._decoded

    def counted(output: Any, queries: torch.Tensor, *others: Any) -> torch.Tensor:
        decoded.append(queries.shape[1])
        return decode(output, queries, *others)

    explorer._decoded = counted  # type: ignore[method-assign]
    coarse = explorer.answer(question(explorer))
    fine = explorer.answer(question(explorer, level=1))
    assert decoded == [41 * 96, 51 * 128 - 41 * 96]
    explorer.answer(question(explorer))
    assert len(decoded) == 2
    rows, columns = explorer.problem.rows_and_columns(0)
    among = unpacked(fine, "prediction")[rows][:, columns]
    np.testing.assert_array_equal(among, unpacked(coarse, "prediction"))
    fresh = Explorer(explorer.model, explorer.problem, "tiny").answer(question(explorer, level=1))
    np.testing.assert_allclose(*(unpacked(each, "prediction") for each in (fine, fresh)), atol=1e-5)


@pytest.fixture
def all_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights of three kinds that ship, and some that no page can show without a file."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "weights"
    kinds = {
        "burgers-all": ("burgers-all/fst", BURGERS, 1),
        "burgers-single": ("burgers-single/fst", replace(BURGERS, condition=False), 0),
        "darcy": ("darcy/fst", DARCY, 0),
        "stations": ("own/fst", find("own/fst").data, 0),
    }
    for name, (recipe, data, condition) in kinds.items():
        model = save_run(folder / name, recipe, data, condition) / "best"
        for path in model.iterdir():
            path.rename(folder / name / path.name)
    monkeypatch.setattr("fst.pretrained.SHIPPED", folder)
    return folder


def test_all_weights_that_ship_are_offered(all_shipped: Path) -> None:
    offered = make_explorers("burgers-single", device="cpu")
    assert list(offered) == ["burgers-single", "burgers-all", "darcy"]
    kinds = [make().describe()["kind"] for make in offered.values()]
    assert kinds == ["burgers", "burgers", "darcy"]
    assert [make().describe().get("viscosity", {}).get("free") for make in offered.values()] == [
        False,
        True,
        None,
    ]
    assert offered["darcy"]() is offered["darcy"]()  # loaded once
    assert next(iter(make_explorers("darcy"))) == "darcy"
    assert list(make_explorers(str(all_shipped / "darcy"))) == [str(all_shipped / "darcy")]


def test_a_request_names_its_model(all_shipped: Path) -> None:
    pytest.importorskip("uvicorn")
    testing = pytest.importorskip("starlette.testclient")
    from fst.explore.server import make_app

    offered = make_explorers("burgers-single", device="cpu")
    client = testing.TestClient(make_app(offered, 8765), base_url=HOME)
    assert client.get("/about").json()["name"] == "burgers-single"
    about = client.get("/about?model=darcy").json()
    assert (about["kind"], about["models"]) == ("darcy", list(offered))
    drawn = client.get("/draw?number=3&model=darcy").json()["input"]
    answer = client.post("/answer?model=darcy", json={"input": drawn, "level": 1})
    assert answer.json()["grid"] == [16, 16]
    assert client.post("/answer", json={"input": drawn, "level": 1}).status_code == 400
    refused = client.get("/about?model=../darcy")
    assert refused.status_code == 400
    assert "model must be one of burgers-single" in refused.json()["error"]


def test_requests_cannot_fill_the_memory(explorer: Explorer) -> None:
    asked = question(explorer)
    for count in range(1, 17):
        explorer.answer(asked | {"neighbors": count})
    assert len(explorer._predictions) == 1
