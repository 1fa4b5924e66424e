"""Workers of these tests are there at once, and time a candidate for 20 ms, not for 150."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from blockscale.tuning.task import Task
from blockscale.tuning.worker import Timing
from tests.kit import warm


@pytest.fixture(scope="package", autouse=True)
def _warm() -> Iterator[None]:
    with warm.workers():
        yield


@pytest.fixture(scope="package", autouse=True)
def _short_timing() -> Iterator[None]:
    made = Task.timing.fget

    def timing(task: Task) -> Timing:
        return replace(made(task), rounds=1, repeats=1, min_repeat_ms=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, "timing", property(timing))
        yield
