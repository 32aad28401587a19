"""The benchmark command runs, writes what it says and fits what it should. No timing is judged."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from explore_examples import BURGERS, save_run

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
# Not FNO, which takes seconds to import.
CHOSEN = ["fst", "transolver", "fast", "plain", "full", "weight", "MLPs", "field", "×"]
CHOSEN += ["matrix", "copy", "step", "start", "medians"]


@pytest.fixture(scope="module", autouse=True)
def _modules() -> object:
    sys.path.insert(0, BENCHMARKS)
    yield
    sys.path.remove(BENCHMARKS)


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def run(tmp_path: Path, *arguments: str) -> dict:
    out = tmp_path / "rows.json"
    module("speed").main(["--device", "cpu", "--quick", "--out", str(out), *arguments])
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run(tmp_path_factory.mktemp("speed"), "--only", *CHOSEN)


def test_every_section_gives_rows_without_errors(everything: dict) -> None:
    names = "training prediction decoding local growth roofline rounding agreement".split()
    assert list(everything["sections"]) == names
    assert everything["finished"]
    for rows in everything["sections"].values():
        assert rows
        assert [row["error"] for row in rows] == [None] * len(rows)
    assert everything["environment"]["versions"]["torch"] == torch.__version__


def test_the_optimisers_steps_are_the_exact_ones(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--quick", "--rounds", "1"]
    module("optimizer").main(arguments)
    rows = json.loads((tmp_path / "optimizer.json").read_text())["rows"]
    agreement = {row["optimizer"]: row for row in rows if row["section"] == "agreement"}
    assert set(agreement) == {"adam", "adamw", "muon"}
    for row in agreement.values():
        assert row["recorded_equals_eager"]
        assert row["eager_adam_parameters"] < 2e-4
    assert agreement["muon"]["eager_muon_parameters"] < 0.02  # Newton-Schulz in bfloat16
    measured = [row["optimizer"] for row in rows if row["section"] == "training"]
    assert measured == ["adam, eager", "muon, eager", "adam, torch"]


def test_on_a_cpu_both_paths_train_alike(everything: dict) -> None:
    losses = {row["entry"]: row["losses"] for row in everything["sections"]["agreement"]}
    assert losses["fast, start 1"] == losses["plain, start 1"]
    assert losses["plain, start 1"] != losses["plain, start 2"]
    compared = {row["entry"]: row for row in everything["conclusions"]["agreement"]["rows"]}
    assert compared["fast against plain, same start"]["largest"] == 0
    fast, plain = (compared.pop(f"{name}, two starts") for name in ("fast", "plain"))
    assert fast | {"entry": ""} == plain | {"entry": ""}
    assert 0 < plain["largest"] < 0.1
    assert "fast over plain 1.000" in everything["conclusions"]["agreement"]["lines"][0]


def test_gradients_in_float32_are_those_in_float64(everything: dict) -> None:
    (row,) = everything["sections"]["rounding"]
    assert [each["step"] for each in row["found"]] == [0, 1, 2, 3, 4]
    for each in row["found"]:
        for name in ("fast", "plain"):
            assert 0 <= each[f"{name}_loss"] < 1e-5
            assert 0 < each[f"{name}_gradient"] < 1e-4
    # On a CPU both are the same code.
    (line,) = everything["conclusions"]["rounding"]["lines"]
    assert line.endswith("fast over plain 1.00 (geometric mean), above 1 in 0 of 5 checks")
    # The weights have moved between the checks.
    assert len({each["loss"] for each in row["found"]}) == 5


def test_the_blend_by_weight_is_the_full_blend(everything: dict) -> None:
    rows = {row["kind"]: row for row in everything["sections"]["local"]}
    assert rows["by weight"]["difference"] < 1e-5
    assert not rows["by weight"]["trained"]


def test_the_order_is_the_papers() -> None:
    growth = module("speed_growth")
    paper = growth.Counts.of(module("speed_sizes").PAPER)
    assert paper.letters == {"N": 1_424, "M": 1_024, "S": 512, "Q": 2_500}
    pairs = 1_024 * 1_424 + 1_024 * 512 + 512**2 + 1_024**2
    assert paper.order == 4 * pairs + 1_024 * 2_500
    assert paper.grown("M", 2).letters["M"] == 2_048
    assert paper.grown("S", 0.5).letters["S"] == 256


def test_the_exponents_of_the_formula_are_found(everything: dict) -> None:
    fitted = {row["entry"][0]: row for row in everything["conclusions"]["growth"]["rows"]}
    assert fitted["N"]["paper_part"] == pytest.approx(1, abs=0.02)
    assert fitted["Q"]["paper_part"] == pytest.approx(1, abs=0.02)
    assert 1 < fitted["M"]["paper_part"] < 2
    assert fitted["N"]["operations_part"] == pytest.approx(1, abs=0.02)


def test_exponents_of_known_laws() -> None:
    growth = module("speed_growth")
    sizes = [1.0, 2.0, 4.0, 8.0]
    assert growth.part_exponent(sizes, [5 + 3 * x**2 for x in sizes]) == pytest.approx(2, abs=0.02)
    assert growth.local_exponent(sizes, [7 * x**1.5 for x in sizes]) == pytest.approx(1.5)


def test_operations_of_the_decoder_are_those_of_its_matrices() -> None:
    growth, sizes = module("speed_growth"), module("speed_sizes")
    config = sizes.QUICK.fst
    counted = growth.count_flops(growth.Counts(3, 5, 7, config), backward=False)
    d, g, m = config.width, 2 * (1 + 2 * config.fourier_bands), config.anchors
    layers = ((d + g) * 2 * d, 2 * d * d, 4 * d * d, 4 * d * d, 2 * d * d, 2 * d)
    assert counted["decoding"] == 2 * 3 * 7 * (m * d + sum(layers))
    assert counted["backward"] == 0


def test_attention_is_counted() -> None:
    """One more observation costs its own encoding and a key for every query of the reading."""
    growth, sizes = module("speed_growth"), module("speed_sizes")
    config = sizes.QUICK.fst
    few, more = (
        growth.count_flops(growth.Counts(1, count, 7, config), backward=False)["refinement"]
        for count in (5, 6)
    )
    reading = 4 * config.refinement_steps * config.anchors * config.width
    assert more - few > reading


def test_differences_of_loss_curves() -> None:
    agreement = module("speed_agreement")
    curve, step = [2.0] * 500, [2.0] * 400 + [2.2] * 100
    found = agreement.differences([(step, curve), (curve, curve)])
    one = math.log(1.1)
    assert found["window"] == 100
    assert found["largest"] == pytest.approx(one)
    assert found["last"] == pytest.approx(one / 2**0.5)
    assert found["smoothed"] == pytest.approx(one / 10**0.5)
    assert found["first_step"] == found["first_steps"] == 0
    early = agreement.differences([([2.2, *curve[1:]], curve)])
    assert early["first_step"] == pytest.approx(one)
    assert early["first_steps"] == pytest.approx(one / 20**0.5)
    assert early["largest_of_first"] == pytest.approx(0.1)


def test_the_ratio_of_two_paths_and_its_error() -> None:
    agreement = module("speed_agreement")
    curves = {
        "plain": {1: [1.0] * 10, 2: [math.exp(0.2)] * 10},
        "fast": {1: [math.exp(0.5)] * 10, 2: [math.exp(0.5)] * 10},
    }
    last, windows = agreement.verdict(curves)
    assert last.endswith(f"fast over plain {math.exp(0.4):.3f} (standard error 10.0%)")
    assert windows == "means of 5 windows: at most 4.0 standard errors apart"


def test_the_picture_of_loss_curves(
    everything: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, picture = tmp_path / "rows.json", tmp_path / "curves.png"
    rows.write_text(json.dumps(everything))
    module("draw_agreement").main([str(rows), str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "fast over plain 1.000" in capsys.readouterr().out
    failed = {"entry": "fast, start 9", "error": "out of something"}
    everything["sections"]["agreement"].append(failed)
    rows.write_text(json.dumps(everything))
    everything["sections"]["agreement"].remove(failed)
    module("draw_agreement").main([str(rows), str(tmp_path / "again.png")])
    assert (tmp_path / "again.png").read_bytes() == picture.read_bytes()


def test_an_entry_that_fails_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    roofline = module("speed_roofline")

    def fail(setting: object) -> None:
        raise RuntimeError("out of something")

    monkeypatch.setattr(roofline, "copy", fail)
    found = run(tmp_path, "--sections", "roofline", "--only", "matrix", "copy")
    product, copied = found["sections"]["roofline"]
    assert product["error"] is None
    assert copied["error"] == "RuntimeError: out of something"
    assert not found["finished"]
    assert "out of something" in capsys.readouterr().out


def test_one_path_alone_is_compared_with_nothing(tmp_path: Path) -> None:
    found = run(tmp_path, "--sections", "agreement", "--only", "plain, start 2")
    assert found["finished"]
    assert found["conclusions"]["agreement"] == {"rows": [], "lines": []}


def test_what_is_missing_is_measured_and_what_is_known_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--sections", "agreement", "--starts", "2", "--only", "start 1")
    first = run(tmp_path, *arguments)
    with pytest.raises(SystemExit):
        run(tmp_path, *arguments)
    assert "rows.json exists" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="steps was 4, is 3"):
        run(tmp_path, "--sections", "agreement", "--steps", "3", "--resume")
    second = run(tmp_path, "--sections", "agreement", "--starts", "2", "--resume")
    rows = second["sections"]["agreement"]
    assert [row["entry"] for row in rows] == [
        f"{name}, start {start}" for start in (1, 2) for name in ("plain", "fast")
    ]
    assert rows[:2] == first["sections"]["agreement"]
    assert second["earlier"] == [first["environment"]]
    pairs = {row["entry"]: row["pairs"] for row in second["conclusions"]["agreement"]["rows"]}
    assert pairs == {
        "fast against plain, same start": 2,
        "plain, two starts": 1,
        "fast, two starts": 1,
    }


def test_what_failed_is_told_until_it_is_measured(tmp_path: Path) -> None:
    matrix = ("--sections", "roofline", "--only", "matrix")
    run(tmp_path, "--sections", "roofline", "--limit", "1e-9")
    second = run(tmp_path, *matrix, "--resume")
    assert not second["finished"]
    errors = {row["entry"]: row["error"] for row in second["sections"]["roofline"]}
    measured = [entry for entry, error in errors.items() if error is None]
    assert len(errors) > 1
    assert all("matrix" in entry for entry in measured)
    third = run(tmp_path, "--sections", "roofline", "--resume")
    assert third["finished"]
    assert [row["entry"] for row in third["sections"]["roofline"]] == list(errors)


NO_RESULTS = [
    "", "{}", "[1]", "3", '{"setting": {}}',
    '{"environment": {}, "setting": {}, "sections": {"another": []}, "conclusions": {}}',
    '{"environment": {}, "setting": {}, "sections": {"roofline": [{}]}, "conclusions": {}}',
]  # fmt: skip


@pytest.mark.parametrize("content", NO_RESULTS)
def test_only_files_of_this_benchmark_are_resumed_or_drawn(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    file.write_text(content)
    with pytest.raises(SystemExit, match=r"--resume: .*rows\.json"):
        run(tmp_path, "--sections", "roofline", "--resume")
    assert file.read_text() == content
    with pytest.raises(SystemExit):
        module("draw_agreement").main([str(file), str(tmp_path / "curves.png")])
    assert "rows.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "name"), [("environment", "versions"), ("environment", "hardware"), ("setting", "run")]
)
def test_rows_of_other_machines_or_weights_are_not_mixed(
    tmp_path: Path, everything: dict, part: str, name: str
) -> None:
    other = {**everything, part: {**everything[part], name: {"another": 1}}}
    (tmp_path / "rows.json").write_text(json.dumps(other))
    with pytest.raises(SystemExit, match=f"measured otherwise.*{name}.*another was 1, is not set"):
        run(tmp_path, "--sections", "roofline", "--resume")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run", "nowhere"], "--run must be a folder with model.safetensors, got nowhere"),
        (["--out", "."], "--out must be a file"),
        (["--resume"], "--resume needs --out"),
        (["--starts", "0"], "--starts must be at least 1"),
    ],
)
def test_options_that_cannot_be(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        module("speed").main(["--device", "cpu", "--quick", *arguments])
    assert message in capsys.readouterr().err


def test_without_a_gpu_one_line_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        module("speed").main(["--device", "cuda"])
    assert "--device cuda needs a GPU" in capsys.readouterr().err


def test_nothing_begins_after_the_limit(tmp_path: Path) -> None:
    found = run(tmp_path, "--sections", "roofline", "--limit", "1e-9")
    assert all("--limit" in row["error"] for row in found["sections"]["roofline"])


def test_a_trained_model_is_taken_for_the_local_blends(tmp_path: Path) -> None:
    setting, sizes = module("speed_setting"), module("speed_sizes")
    network = setting.operator(sizes.QUICK.local, torch.device("cpu"))
    with torch.no_grad():
        network.predict_anchors.scales.decoding_base.fill_(-2.0)
    network.save_pretrained(tmp_path / "model")
    arguments = ("--sections", "local", "--only", "weight", "--run", str(tmp_path / "model"))
    (row,) = run(tmp_path, *arguments)["sections"]["local"]
    assert row["trained"]
    assert row["length_scales"] == pytest.approx([torch.tensor(-2.0).exp().item()] * 3)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 5.0])
def test_changed_results_on_a_shared_gpu_are_counted(wrong: float) -> None:
    shared_gpu = module("shared_gpu")
    prediction, gradient = torch.zeros(3), torch.ones(4)
    calls = iter(range(1_000_000))

    def replay() -> None:
        number = next(calls)
        prediction.fill_(torch.nan if number == 2 else 0.5)
        gradient[0] = wrong if number == 3 else 1.0

    found = shared_gpu.count(
        replay, (prediction, gradient), (torch.full((3,), 0.5), torch.ones(4)), 0.2
    )
    assert found["passes"] > 4
    assert found["other_predictions"] == 1
    assert found["farthest_gradient"] == (2.0 if wrong == 5.0 else math.inf)


def test_the_page_s_answers_are_timed(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", "burgers-single/fst", BURGERS, condition=1)
    out = tmp_path / "rows.json"
    module("explore").main(["--weights", str(run), "--inputs", "1", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["grid"] for row in rows] == [[41, 96], [51, 128]]
    assert [*rows[0]["seconds"]] == ["solve", "refine", "decode"]
    spent = [sum(row["seconds"].values()) for row in rows]
    assert all(row["clock"] >= each > 0 for row, each in zip(rows, spent, strict=True))


def test_processes_are_timed_and_compared(tmp_path: Path) -> None:
    out = tmp_path / "ddp.json"
    command = [sys.executable, f"{BENCHMARKS}/ddp.py", "--quick", "--device", "cpu"]
    command += ["--seconds", "0.1", "--passes", "1", "--steps", "3", "--out", str(out)]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert set(found["steps_per_second"]) == {"alone", "in a group", "DDP, not compiled"}
    assert found["largest_relative_difference_of_losses"]["fp32"] < 1e-5


def test_streamed_points_are_timed_beside_resident_ones(tmp_path: Path) -> None:
    out = tmp_path / "streaming.json"
    sizes = {"samples": 6, "observations": 5, "queries": 9, "drawn": 4, "batch": 2}
    options = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    options += ["--quick", "--device", "cpu", "--workers", "1", "--steps", "2", "--passes", "1"]
    module("streaming").main([*options, "--out", str(out)])
    found = json.loads(out.read_text())
    assert {name: len(pace) for name, pace in found["steps_per_second"].items()} == {
        "resident": 1,
        "streamed": 1,
    }
    assert found["settings"]["observations"] == 5
