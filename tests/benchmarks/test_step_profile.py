"""Where a training step spends its time."""

import json
from pathlib import Path

import pytest

from comparison_recipes import small

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import step_profile

    monkeypatch.setattr(step_profile, "find", small)
    monkeypatch.setattr(step_profile, "UNTIMED", 2)
    return step_profile


def test_operations_are_counted_a_step_and_the_longest_come_first(module, tmp_path, capsys):
    recipes, out = ["burgers-single/fst", "burgers-single/deeponet"], tmp_path / "kept/rows.json"
    words = ["--out", str(out), "--data", str(tmp_path / "data"), "--device", "cpu", "--steps", "3"]
    module.main([*recipes, *words])
    rows = json.loads(out.read_text())
    assert [row["recipe"] for row in rows] == recipes
    for row in rows:
        counts, spent = zip(*row["operations"].values(), strict=True)
        assert list(spent) == sorted(spent, reverse=True)
        assert row["busy_ms"] == pytest.approx(sum(spent))
        assert row["calls"] == pytest.approx(sum(counts))
        assert row["step_ms"] > 0
    transformer, deeponet = (row["operations"] for row in rows)
    # Watching ten steps or one, a step has as many attentions: they are counted by the step.
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert transformer[attention][0] == round(transformer[attention][0]) > 0
    assert attention not in deeponet
    assert "burgers-single/deeponet: step" in capsys.readouterr().out


def test_variants_of_a_kernel_are_one_operation(module):
    assert module.plain("triton_poi_fused_add_gelu_12") == "triton_poi_fused_add_gelu"
    assert module.plain("triton_red_fused_1_sum_2_3") == "triton_red_fused_sum"
    assert module.plain("void at::native::kernel<float, 4>(int)") == "at::native::kernel"
    assert module.plain("aten::mm") == "aten::mm"
