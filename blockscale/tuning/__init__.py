"""The search for fast schedules, and `tune`, which may be looked up without the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blockscale.base import words
from blockscale.specs import Spec

if TYPE_CHECKING:
    from blockscale.tuning.tuner import TuneResult


def tune(
    specs: Sequence[Spec | str],
    *,
    target: str | None = None,
    seconds: float | None = 60.0,
    trials: int | None = None,
    work_dir: Path | str = "logs",
    progress: bool = True,
) -> TuneResult:
    """Search for fast schedules of ``specs`` and return what was found; see `tuner.tune`.

    Args:
        specs: `blockscale.specs`, or names of kernels or overload sets; all sizes are tuned.
        target: a CPU level or a GPU architecture that this machine has; its CPU when None.  Without
            a Blackwell GPU, tcgen05 GEMMs for "sm_100a" are ranked by a model
            (`blockscale.tuning.modelled`); their records and the result say so.
        seconds: time for everything, builds included; None for no limit.
        trials: most new measurements over all workloads; None for no limit.
        work_dir: every trial is kept here, and a second call goes on from it, even when the first
            was killed; give it to `build` as one of its ``logs``.
        progress: show a progress bar.

    ``result.best`` and ``result.default`` have all workloads: one of which nothing was measured, or
    nothing that worked, takes ``math.inf`` microseconds.

    Raises:
        ValueError: an unknown name or target, one that this machine does not have, or seconds below
            0.1.
        RuntimeError: the compiler is not installed.
    """
    try:
        from blockscale.tuning import tuner
    except ModuleNotFoundError as error:
        raise RuntimeError(f"tune: {words.missing(error)}") from error
    if isinstance(specs, str):
        raise TypeError(f"tune: specs is a str; pass a list of names, [{specs!r}]")
    return tuner.tune(
        specs, target=target, seconds=seconds, trials=trials, work_dir=work_dir, progress=progress
    )
