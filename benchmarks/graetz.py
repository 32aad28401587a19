"""The Graetz problem as a file of points: 60 samples to learn from, 140 for the test.

    python benchmarks/graetz.py graetz.npz --out graetz.h5
    fst train own/fst --data graetz.h5 --out runs/graetz
    fst evaluate runs/graetz

`graetz.npz` has the arrays `points`, `snapshots` and `params` of the data set of that name in the
Python package smithers: 200 solutions on one mesh, each with two parameters, which are the
condition. Observations say where the channel is. Six of the 60 are for validation.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fst import Domain
from fst.data import PointSample, write_points

LEARNED, VALIDATION, SEED = 60, 6, 0
EVERY = 5  # of the nodes, one is an observation


def samples(arrays: dict[str, np.ndarray]) -> Iterator[PointSample]:
    columns = (arrays[name].astype(float) for name in ("points", "snapshots", "params"))
    for nodes, solution, parameters in zip(*columns, strict=True):
        seen = nodes[::EVERY]
        yield PointSample(seen, np.ones((len(seen), 1)), nodes, solution[:, None], parameters)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(given)
    with np.load(arguments.file) as stored:
        arrays = dict(stored)
    points = arrays["points"].astype(float)
    domain = Domain(tuple(points.min(axis=(0, 1))), tuple(points.max(axis=(0, 1))))
    rows = np.random.default_rng(SEED).permutation(len(points)).tolist()
    first = LEARNED - VALIDATION
    splits = {"training": rows[:first], "validation": rows[first:LEARNED], "test": rows[LEARNED:]}
    write_points(arguments.out, samples(arrays), domain, splits=splits)


if __name__ == "__main__":
    main()
