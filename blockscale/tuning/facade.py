"""``blockscale.build`` and ``blockscale.tune``: the compiler's two verbs, for scripts.

The command line has the same (`cli.command`).  Both need what ``pip install '.[build]'`` brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blockscale.runtime.library import Library, load
from blockscale.specs import Spec

if TYPE_CHECKING:
    from blockscale.tuning.tuner import TuneResult


def build(
    specs: Sequence[Spec | str],
    output: Path | str,
    *,
    target: str | Sequence[str] | None = None,
    logs: Sequence[Path | str] = (),
    ptx: bool = False,
) -> Library:
    """Compile ``specs`` into the library ``output``, load it, and return it.

    Args:
        specs: `blockscale.specs`, or names of kernels (`blockscale list`).
        output: the ``.so`` to write; it appears complete or not at all.
        target: a CPU level, or one or more GPU architectures ("sm_100a"), for which no GPU is
            needed; this machine's CPU when None.
        logs: folders of tuning logs that come before the package's.
        ptx: embed PTX instead of machine code; the driver, or the emulator, compiles it.

    Raises:
        ValueError: an unknown name or target, or no spec at all.
        TypeError: the target has no kernel of a spec's op.
        LogError, LinkError, CompileError: a log is damaged, a compiler is missing or fails.
    """
    from blockscale.build import builder

    levels = target if target is None or isinstance(target, str) else [*target]
    dirs = [*logs, builder.committed_logs()]
    builder.build(specs, output, level=levels, logs_dirs=dirs, ptx=ptx)
    return load(output)


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
        specs: `blockscale.specs`, or names of kernels; all their sizes are tuned.
        target: a CPU level or a GPU architecture that this machine has; its CPU when None.  Without
            a Blackwell GPU, tcgen05 GEMMs for "sm_100a" are ranked by a model, and say so.
        seconds: time for everything; None for no limit.
        trials: most new measurements; None for no limit.
        work_dir: every trial is kept here, and a second call goes on from it; give it to `build` as
            one of its ``logs``.
        progress: show a progress bar.

    Raises:
        ValueError: an unknown name or target, or one that this machine does not have.
    """
    from blockscale.tuning import tuner

    return tuner.tune(
        specs, level=target, seconds=seconds, trials=trials, work_dir=work_dir, progress=progress
    )
