"""Problems, models and a server for tests of `fst explore`."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fst
from fst.data import BurgersData, DarcyData
from fst.data.point_samples import PointSamples, Ragged
from fst.data.source import TestSplit
from fst.explore.explorer import Explorer
from fst.explore.problems import PointsProblem
from fst.recipes import find

BURGERS = BurgersData(viscosities=(0.01, 0.1), condition=True, points=128, times=51)
DARCY = DarcyData(resolution=16, fine=64, training=2, validation=1, test=1, training_file=3)
SMALL = {
    "width": 16,
    "heads": 2,
    "fourier_bands": 4,
    "rows": (4,),
    "anchors_per_row": 4,
    "predictor_width": 8,
    "predictor_heads": 2,
    "predictor_blocks": 1,
    "refinement_steps": 2,
    "points_from_anchors": 4,
    "points_from_sobol": 4,
}


def small_model(condition: int = 0) -> fst.FunctionSpaceTransformer:
    config = fst.FunctionSpaceConfig(
        **SMALL, condition_channels=condition, log_condition=bool(condition)
    )
    return fst.FunctionSpaceTransformer(config)


def save_run(folder: Path, name: str, data: Any, condition: int = 0) -> Path:
    """A run folder as training leaves it, as far as the page reads it."""
    model = small_model(condition)
    model.save_pretrained(folder / "best")
    recipe = replace(find(name), data=data, model=model.config)
    (folder / "recipe.json").write_text(json.dumps(recipe.to_json()))
    return folder


def own_points() -> PointsProblem:
    """Two samples of 5 and 3 sensors on a domain of its own; u = x there."""
    domain = fst.Domain((-1.0, 0.0), (3.0, 2.0))
    low, high = torch.tensor(domain.low), torch.tensor(domain.high)

    def ragged(*sizes: int) -> Ragged:
        positions = low + torch.rand(sum(sizes), 2) * (high - low)
        return Ragged.of(positions, positions[:, :1].clone(), torch.tensor(sizes))

    samples = PointSamples(domain, ragged(5, 3), ragged(40, 30))
    names = {"axes": (("x", "km"), ("y", "km")), "values": (("T", "K"),), "targets": (("T", "K"),)}
    return PointsProblem(TestSplit(samples, numbers=(17, 4), **names))


def points_explorer() -> Explorer:
    config = fst.FunctionSpaceConfig(**SMALL, low=(-1.0, 0.0), high=(3.0, 2.0))
    return Explorer(fst.FunctionSpaceTransformer(config), own_points(), "own")


@contextmanager
def served(*explorers: Explorer) -> Iterator[str]:
    """The page in another thread, on a free port."""
    uvicorn = pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    from fst.explore.server import listen, make_app

    with listen(0) as listener:
        port = listener.getsockname()[1]
        app = make_app({each.name: lambda each=each: each for each in explorers}, port)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(20)
