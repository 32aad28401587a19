"""The Graetz problem as a file of points: splits, and parameters that enter by their logarithm."""

import sys
from pathlib import Path

import numpy as np
import torch

from fst.data import read_points
from fst.recipes import find, own

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


def test_sixty_of_all_samples_are_learned_from(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop("graetz", None)
    import graetz

    generator = np.random.default_rng(0)
    mesh = np.repeat(generator.uniform(size=(1, 10, 2)), 70, axis=0)
    parameters = 10 ** generator.uniform(-1, 1, size=(70, 2))
    solutions = generator.uniform(size=(70, 10))
    arrays = {"points": mesh, "snapshots": solutions, "params": parameters}
    np.savez(tmp_path / "graetz.npz", **arrays)
    out = tmp_path / "graetz.h5"
    graetz.main([str(tmp_path / "graetz.npz"), "--out", str(out)])
    file = read_points(out)
    partition = file.partition
    sizes = [len(getattr(partition, name)) for name in ("training", "validation", "test")]
    assert sizes == [54, 6, 10]
    row = int(partition.test[0])
    sample = file[row]
    np.testing.assert_allclose(np.ravel(sample.targets), solutions[row], rtol=1e-6)
    np.testing.assert_allclose(np.ravel(sample.condition), parameters[row], rtol=1e-6)
    choice = own.choose(find("own/fst"), out, torch.device("cpu"))
    assert choice.recipe.model.log_condition
