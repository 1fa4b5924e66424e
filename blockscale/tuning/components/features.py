"""What cost models see of a candidate: its decisions.

MetaSchedule's own extractor reads loops and stores and cannot see annotations (52 configurations of
a tensorized GEMM gave 4 feature vectors); decisions separate every point.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm import runtime
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.cost_model import PyCostModel, RandomModel, XGBModel
from tvm.s_tir.meta_schedule.cost_model.xgb_model import XGBConfig
from tvm.s_tir.meta_schedule.feature_extractor import PyFeatureExtractor
from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

from blockscale.building.space import Point


@derived_object
class DecisionFeatures(PyFeatureExtractor):
    """One row of features for each candidate of a space (`Sketches.space`), none outside of it."""

    def __init__(self, sketches: Any) -> None:
        self._sketches = sketches
        self._rows: dict[Point, Any] = {}

    def extract_from(self, context: Any, candidates: list[MeasureCandidate]) -> list[Any]:
        """Return a tensor [1, features] for each candidate, or [0, 1]."""
        return [self._row(candidate) for candidate in candidates]

    def _row(self, candidate: MeasureCandidate) -> Any:
        point = self._sketches.point(candidate)
        if point is None:
            return runtime.tensor(np.zeros((0, 1), "float32"))
        if point not in self._rows:
            row = np.asarray(self._sketches.space.features([point]), "float32")
            self._rows[point] = runtime.tensor(row)
        return self._rows[point]


def decision_model(sketches: Any) -> Any:
    """Return MetaSchedule's XGBModel over the decisions of one workload."""
    # One thread: on a loaded machine the spinning of several costs seconds.
    config = XGBConfig(max_depth=5, nthread=1, seed=0)
    return XGBModel(
        extractor=DecisionFeatures(sketches),
        config=config,
        num_warmup_samples=8,
        early_stopping_rounds=5,
    )


@derived_object
class PerTask(PyCostModel):
    """A cost model for each task, as `tune_tasks` takes one for all: spaces share no features.

    A model learns when it is asked next: training takes 0.2 s, and the loop waits for it.
    """

    def __init__(self, models: Mapping[str, Any]) -> None:
        self._models = models
        self._untold: dict[str, tuple[list[Any], list[Any]]] = {}

    def update(self, context: Any, candidates: list[Any], results: list[Any]) -> None:
        """Keep what the model of the context's task has to learn."""
        ran, took = self._untold.setdefault(context.task_name, ([], []))
        ran.extend(candidates)  # += would let TVM's arrays make another list
        took.extend(results)

    def predict(self, context: Any, candidates: list[Any]) -> np.ndarray:
        """Return scores [candidates], higher is better, by the model of the context's task."""
        model = self._models[context.task_name]
        if context.task_name in self._untold:
            model.update(context, *self._untold.pop(context.task_name))
        return model.predict(context, candidates)


def cost_model(kind: str, spaces: Mapping[str, Any]) -> Any:
    """Return the model ``kind``, "xgb" or "random", for tasks with these `Sketches`."""
    if kind == "random":
        return RandomModel()
    return PerTask({name: decision_model(sketches) for name, sketches in spaces.items()})
