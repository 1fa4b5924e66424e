"""Pieces of PTX for the tests of asynchronous instructions, and how their kernels are judged."""

from __future__ import annotations

import itertools
import re

import pytest

from blockscale.emulator.errors import EmulationError
from tests.emulator import kit

NUMBERS = itertools.count()
CAUGHT, SILENT = 10, 20  # seeds that a test runs that names none
LEADER = "setp.eq.u32 %p0, %x, 0;"
SYNC = "bar.sync 0;"
CLUSTER_SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
FENCE = "fence.proxy.async.shared::cta;"
INIT_FENCE = "fence.mbarrier_init.release.cluster;"
QUIET = ("uninitialised read",)


def wait(bar, parity=0):
    """Wait for a phase of the mbarrier at `bar`."""
    n = next(NUMBERS)
    return (
        f"W{n}: mbarrier.try_wait.parity.shared::cta.b64 %p31, [{bar}], {parity};\n@!%p31 bra W{n};"
    )


def init(bar, count=1):
    """Thread 0 initialises an mbarrier; everybody waits for that."""
    return f"{LEADER} @%p0 mbarrier.init.shared::cta.b64 [{bar}], {count}; {INIT_FENCE} {SYNC}"


def bulk(dst, src, size, bar, *, form="shared::cta", expect=None):
    """Thread 0 announces and starts a 1-D copy from global memory."""
    name = f"cp.async.bulk.{form}.global.mbarrier::complete_tx::bytes"
    expected = size if expect is None else expect
    return f"""{LEADER}
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [{bar}], {expected};
    @%p0 {name} [{dst}], [{src}], {size}, [{bar}];"""


def lines(body):
    """Return `body` with one instruction a line: hazards name lines."""
    return re.sub(r";[ \n]*", ";\n", body)


def outcome(body, *args, seed, **options):
    """Return (kinds and messages of all hazards and the error, the report or None)."""
    try:
        report = kit.run(lines(body), *args, seed=seed, **options)
    except EmulationError as error:
        before = getattr(error.report, "hazards", ())
        return "\n".join([f"{type(error).__name__}: {error}", *map(str, before)]), None
    return "\n".join(map(str, report.hazards)), report


def caught(pattern, body, make, *, seeds=None, **options):
    """Every seed has to report or raise what `pattern` says; return the outputs of the runs."""
    results = []
    for seed in seeds or range(CAUGHT):
        args = make()
        text, _ = outcome(body, *args, seed=seed, **options)
        assert re.search(pattern, text), f"seed {seed}: {text or 'silent'}"
        results.append(args)
    return results


def silent(body, make, judge, *, seeds=None, allowed=(), **options):
    """No seed may report anything, and `judge` looks at the arguments after each run."""
    for seed in seeds or range(SILENT):
        args = make()
        report = kit.run(lines(body), *args, seed=seed, **options)
        said = [str(h) for h in report.hazards if h.kind not in allowed]
        assert not said, f"seed {seed}: {said}"
        judge(*args)
    return report


def refused(pattern, body, make, **options):
    """The kernel has to raise an error with a place."""
    with pytest.raises(EmulationError, match=pattern) as info:
        kit.run(lines(body), *make(), **options)
    return info.value


def wait_text(body):
    """Return the text of the first wait loop in `body`."""
    return re.search(r"W\d+: mbarrier\.try_wait[^;]*;[^;]*;", body)[0]
