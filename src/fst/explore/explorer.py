"""One model and one problem: refine once, query often.

A new input is refined once; another grid or another number of neighbours only asks the same field
again. What is known already is not solved or decoded again: a finer grid adds the points between.
"""

import base64
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fst.base import parameter_count
from fst.evaluation.protocol import answer, measuring
from fst.explore.problems import LARGEST_DRAW, Given, Problem, Proceed, whole_number
from fst.field import Field
from fst.kernels import fuse
from fst.metrics import relative_l2
from fst.operators import Operator, Output

ANCHOR_PARTS = ("positions", "length_scales")
_QUERIES_AT_ONCE = 2**14  # between two looks whether anybody still waits


class Explorer:
    """Answers the page's questions, one after the other; several threads may decode."""

    def __init__(self, model: Operator, problem: Problem, name: str, threads: int = 1) -> None:
        self.model, self.problem, self.name = fuse(model).eval(), problem, name
        self._threads, self._pool = threads, ThreadPoolExecutor(threads)
        self.device = next(model.parameters()).device
        self.anchors: int | None = getattr(model, "anchor_count", None)
        self._given: Given | None = None
        self._output: Output | None = None
        self._references: dict[int, Tensor] = {}
        # Of what no answer has told yet: one that was overtaken may have solved or refined.
        self._seconds: dict[str, float] = {}
        # On the finest grid, by the number of neighbours that was asked for last; NaN where nobody
        # has asked yet. More of them would let requests fill the memory.
        self._predictions: dict[int | None, Tensor] = {}

    def describe(self) -> dict[str, Any]:
        return self.problem.describe() | {
            "name": self.name,
            "model": type(self.model).__name__,
            "parameters": parameter_count(self.model),
            "anchors": self.anchors,
            "grids": self.problem.grids,
            "draws": LARGEST_DRAW,
        }

    def answer(self, asked: object, proceed: Proceed = lambda: None) -> dict[str, Any]:
        """Prediction, reference and error for a request; ValueError where it asks for nonsense."""
        if not isinstance(asked, Mapping):
            raise ValueError("a request must be a JSON object")
        level = whole_number(asked, "level", 0, len(self.problem.grids) - 1)
        neighbors = None
        if asked.get("neighbors") is not None:
            neighbors = whole_number(asked, "neighbors", 1, self.anchors or 0)
        given = self.problem.read(asked)
        if given != self._given:
            self._given, self._output = given, None
            self._references, self._predictions, self._seconds = {}, {}, {}
        start = perf_counter()
        if level not in self._references:
            self._references[level] = self.problem.reference(given, level, proceed)
            self._seconds["solve"] = perf_counter() - start
        reference = self._references[level]
        start = perf_counter()
        with measuring(self.model):
            if self._output is None:
                observations = self.problem.observe(given)
                proceed()
                self._output = self.model(observations.to(self.device))
                self._seconds["refine"] = perf_counter() - start
            output, start = self._output, perf_counter()
            prediction = self._predicted(output, level, neighbors, proceed)
            ours, truth = (each.double().reshape(1, -1, 1) for each in (prediction, reference))
            if (known := self.problem.targets(given)) is not None:
                ours = self._decoded(output, known.queries, neighbors, proceed)[None]
                truth = known.targets
        seconds = self._seconds | {"decode": perf_counter() - start}
        self._seconds = {}
        anchors = None
        if isinstance(output, Field):
            unit = output.unit_anchors
            anchors = {name: encoded(getattr(unit, name)[0]) for name in ANCHOR_PARTS}
        return {
            "grid": self.problem.grids[level],
            "level": level,
            "prediction": encoded(prediction),
            "reference": encoded(reference),
            "error": relative_l2(ours, truth).item(),
            "anchors": anchors,
            "seconds": seconds,
        }

    def _predicted(
        self, output: Output, level: int, neighbors: int | None, proceed: Proceed
    ) -> Float[Tensor, "h w"]:
        """The first channel on a grid; only points that no coarser grid had are decoded."""
        grids, asked = self.problem.grids, self.problem.points(level)
        values = self._predictions.get(neighbors, torch.full((math.prod(grids[-1]),), math.nan))
        missing = asked[values[asked].isnan()]
        if len(missing):
            queries = self.problem.queries()[:, missing]
            values[missing] = self._decoded(output, queries, neighbors, proceed)[:, 0]
        self._predictions = {neighbors: values}
        return values[asked].reshape(grids[level])

    def _decoded(
        self, output: Output, queries: Tensor, neighbors: int | None, proceed: Proceed
    ) -> Tensor:
        """Values at queries, pieces of equal size for the threads. They wait for one another only
        at the end, where PyTorch's own threads would do so in every operation."""

        @torch.inference_mode()  # which each thread has for itself
        def decode(part: Tensor) -> Tensor:
            proceed()
            return answer(output, part, neighbors)[0].cpu()

        pieces = self._threads * math.ceil(queries.shape[1] / (self._threads * _QUERIES_AT_ONCE))
        parts = queries.to(self.device).chunk(pieces, dim=1)
        prediction = torch.cat(list(self._pool.map(decode, parts)))
        if not bool(prediction.isfinite().all()):
            raise ValueError("the model's prediction is NaN or infinite")
        return prediction  # q c


def encoded(values: Tensor) -> str:
    """Little-endian float32 in base64, which a browser reads without parsing numbers."""
    numbers = values.detach().float().cpu().contiguous().numpy().astype(np.dtype("<f4"))
    return base64.b64encode(numbers.tobytes()).decode()
