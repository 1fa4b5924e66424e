"""Kernels broken on purpose: ``python -m tests.emulator.kernels.broken [text ...]``.

A mutation is a ``-DBROKEN=`` of one of cuda/*.cu, an edit of a compiler's PTX text, or wrong
data.  What the emulator makes of it over several seeds is an `Outcome`; ``names`` is what the
message must say to have found the true cause, None where only the numbers can tell.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec

import numpy as np

from blockscale.emulator.errors import EmulationError
from tests.emulator.kernels import gemm_cases, scalar_cases
from tests.emulator.kernels.cuda_kernels import Case, equal, nans

SEEDS = 10
Make = Callable[[np.random.Generator], Case]


@dataclass(frozen=True)
class Mutation:
    """One thing that is wrong, and how its finding has to be worded."""

    name: str
    make: Make
    names: str | None
    broken: str | None = None
    edit: Callable[[str], str] | None = None

    def outcome(self, seed: int) -> tuple[str, str]:
        """Return "raised", "reported", "wrong numbers" or "unnoticed", and all messages."""
        case = self.make(np.random.default_rng(seed))
        text = case.ptx(self.broken)
        if self.edit:
            edited = self.edit(text)
            assert edited != text, f"{self.name}: the edit does not fit the PTX text"
            text = edited
        try:
            report = case.run(seed, text=text)
        except EmulationError as error:
            before = getattr(getattr(error, "report", None), "hazards", ())
            return "raised", "\n".join(map(str, (error, *before)))
        said = [str(h) for h in report.hazards if h.severity == "error" or self._named(str(h))]
        if said:
            return "reported", "\n".join(said)
        wrong = case.judge()
        return ("wrong numbers", wrong) if wrong else ("unnoticed", "")

    def _named(self, message: str) -> bool:
        return self.names is not None and re.search(self.names, message) is not None

    def judge(self, seeds: Iterable[int]) -> Outcome:
        """Run it once for each seed."""
        result = Outcome(self)
        for seed in seeds:
            how, message = self.outcome(seed)
            result.counts[how] += 1
            result.named += how in ("raised", "reported") and self._named(message)
            result.messages.append(message)
        return result


@dataclass
class Outcome:
    """How often a mutation was caught, in which way, and how often by its name."""

    mutation: Mutation
    counts: Counter[str] = field(default_factory=Counter)
    named: int = 0
    messages: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        how = ", ".join(f"{count} {way}" for way, count in self.counts.most_common())
        wants = "numbers only" if self.mutation.names is None else f"named {self.named}"
        return f"{self.mutation.name:58} {how:32} {wants}"


def without(pattern: str, count: int = 1, *, skip: int = 0) -> Callable[[str], str]:
    """Return an edit that takes out ``count`` matches of ``pattern`` after the first ``skip``."""

    def edit(text: str) -> str:
        found = list(re.finditer(pattern, text))[skip : skip + count]
        for match in reversed(found):
            text = text[: match.start()] + text[match.end() :]
        return text

    return edit


def tile(rng: np.random.Generator) -> Case:
    """One NVFP4 tile whose ring of two stages goes round."""
    return gemm_cases.nvfp4_tile(rng, 128, 128, 1024)


def swapped(rng: np.random.Generator) -> Case:
    """The same with the codes of A packed high nibble first."""
    return gemm_cases.nvfp4_tile(rng, 128, 128, 256, high_first=True)


def small(rng: np.random.Generator) -> Case:
    """One stage: what does not need the ring."""
    return gemm_cases.nvfp4_tile(rng)


def pair(rng: np.random.Generator) -> Case:
    """Two CTAs, two stages."""
    return gemm_cases.nvfp4_pair(rng)


def pair_swizzle(rng: np.random.Generator) -> Case:
    """Tensor maps without the swizzle that the descriptors name."""
    return gemm_cases.nvfp4_pair(rng, swizzle="NONE")


def cluster(rng: np.random.Generator) -> Case:
    """A cluster of four."""
    return gemm_cases.cluster_sums(rng, 4)


def chained(rng: np.random.Generator) -> Case:
    """Two chained products."""
    return gemm_cases.chained(rng)


def wgmma(rng: np.random.Generator) -> Case:
    """Hopper: TMA, wgmma."""
    return scalar_cases.wgmma(rng)


def mma_sync(rng: np.random.Generator) -> Case:
    """Ampere: cp.async, ldmatrix, mma.sync."""
    return scalar_cases.mma_sync(rng)


def triton_gemm(rng: np.random.Generator) -> Case:
    """Triton's pipelined f16 product of one CTA, three steps along K."""
    from tests.emulator.kernels import triton_kernels

    kernel = triton_kernels.gemm_kernel((128, 64, 192, 128, 64, 64, 4, 3), "fp16")
    a, b = (rng.integers(-16, 17, (rows, 192)).astype(np.float16) / 8 for rows in (128, 64))
    c = nans(128, 64)
    args = [a, b, c, None, None]  # two scratch pointers
    judge = equal((c, a.astype(np.float64) @ b.astype(np.float64).T))
    return Case("", kernel.entry, args, judge, shared=kernel.shared, text=kernel.ptx)


RACE = r"\brace\b|was not waited for"
EARLY = RACE + r"|nobody has written"  # read before anything has come
AGAIN = RACE + r"|wait for the phase before arriving again"
SETUP = RACE + r"|mbarrier\.init comes first"  # the barrier orders init before use
OF_CUDA: tuple[tuple[str, Make, str | None, str | None], ...] = (
    ("mbarrier wait before the MMA dropped", tile, "FULL_WAIT", EARLY),
    ("wait for the empty stage dropped", tile, "EMPTY_WAIT", AGAIN),
    ("wait for the accumulator dropped", tile, "DONE_WAIT", RACE),
    ("tcgen05.wait::ld dropped", small, "LOAD_WAIT", r"wait::ld"),
    ("tcgen05.wait::st dropped", chained, "STORE_WAIT", r"wait::st"),
    ("last tcgen05.commit dropped", small, "COMMIT", r"(?i)deadlock|never"),
    ("proxy fence before tcgen05.cp dropped", small, "PROXY_FENCE", r"(?i)proxy"),
    ("bar.sync after the setup dropped", small, "CTA_BARRIER", SETUP),
    ("bar.sync before the second MMA dropped", chained, "CTA_BARRIER", EARLY),
    ("scales of B one column to the right", small, "SCALE_COLUMN", r"(?i)column|uninit|scale"),
    ("descriptor with another swizzle than TMA", small, "SWIZZLE", r"(?i)swizzle"),
    ("descriptor with half the stride (SBO)", small, "SBO_STRIDE", r"(?i)stride|SBO"),
    ("instruction descriptor with half of N", small, "IDESC_N", r"(?i)uninit|never written"),
    ("instruction descriptor with the other scale format", small, "SCALE_FORMAT", None),
    ("codes of A with swapped nibbles", swapped, None, None),
    ("tensor memory never freed", small, "DEALLOC", r"(?i)dealloc"),
    ("tensor memory used after dealloc", small, "USE_AFTER_DEALLOC", r"(?i)dealloc|allocat"),
    ("expect_tx too small", small, "TX_SMALL", r"(?i)tx"),
    ("expect_tx too large", small, "TX_LARGE", r"(?i)tx|bytes"),
    ("mbarrier initialised with one arrival too many", small, "ARRIVALS", r"(?i)arriv"),
    ("wrong parity", small, "PARITY", RACE + "|parity|phase"),
    ("rows behind the output", small, "OUT_OF_BOUNDS", r"past the end|no allocation"),
    ("16-byte store at 4 bytes", small, "MISALIGNED", r"(?i)align"),
    ("tcgen05.ld of another warp's lanes", small, "OTHER_LANES", r"(?i)lane"),
    ("proxy fence before the TMA store dropped", pair, "STORE_FENCE", r"(?i)proxy"),
    ("store buffer written before TMA has read it", pair, "STORE_GROUP", RACE),
    ("barrier before the TMA store dropped", pair, "CTA_BARRIER", RACE),
    ("peer's TMA on its own barrier", pair, "LEADER", r"(?i)tx|bytes|arriv"),
    ("commit to one CTA of the pair only", pair, "COMMIT_MASK", r"(?i)deadlock"),
    ("tensor maps without the descriptors' swizzle", pair_swizzle, None, r"(?i)swizzle"),
    ("last rows of B with the scale columns of others", pair, "SCALE_COLUMN", r"(?i)column|scale"),
    ("pair: tensor memory never freed", pair, "DEALLOC", r"(?i)dealloc"),
    ("last cluster barrier dropped", cluster, "EXIT_BARRIER", r"the end of CTA|has ended"),
    ("wait for the other CTAs' sums dropped", cluster, "READY_WAIT", RACE),
    ("wait for the multicast dropped", cluster, "FULL_WAIT", RACE),
    ("multicast: expect_tx too small", cluster, "TX_SMALL", r"(?i)tx"),
    ("bar.sync before the remote arrivals dropped", cluster, "CTA_BARRIER", RACE),
    ("wgmma: mbarrier wait dropped", wgmma, "FULL_WAIT", RACE),
    ("wgmma.wait_group dropped", wgmma, "DONE_WAIT", r"wait_group|" + RACE),
    ("cp.async.wait_group dropped", mma_sync, "LOAD_WAIT", r"wait_group|" + RACE),
    ("bar.sync after cp.async.wait_group dropped", mma_sync, "CTA_BARRIER", RACE),
    ("bar.sync before the stage is filled again dropped", mma_sync, "EMPTY_WAIT", RACE),
)
WAIT_LOOP = r"(?s)\{\s*\.reg \.pred complete;.*?\n\}"
OF_TRITON: tuple[tuple[str, Callable[[str], str], str | None], ...] = (
    ("Triton: every mbarrier wait dropped", without(WAIT_LOOP, 99), RACE),
    ("Triton: tcgen05.commit dropped", without(r".*tcgen05\.commit.*", 99), r"(?i)deadlock"),
    ("Triton: proxy fences dropped", without(r"fence\.proxy\.async[^;]*;", 99), r"(?i)proxy"),
    ("Triton: every bar.sync in the loop dropped", without(r"bar\.sync.*", 99, skip=4), SETUP),
)


@cache
def mutations() -> tuple[Mutation, ...]:
    """Return all mutations; those of Triton's text only where triton is installed."""
    ours = [Mutation(name, make, names, broken) for name, make, broken, names in OF_CUDA]
    if find_spec("triton") is None:
        return tuple(ours)
    found = [Mutation(name, triton_gemm, names, edit=edit) for name, edit, names in OF_TRITON]
    return (*ours, *found)


def chosen(texts: list[str]) -> Iterator[Mutation]:
    """Yield the mutations whose name holds one of ``texts``; all without any."""
    for mutation in mutations():
        if not texts or any(text in mutation.name for text in texts):
            yield mutation


def main(arguments: list[str]) -> int:
    """Print the table; return 1 if a mutation went unnoticed in some run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="*", help="only mutations whose name holds one of these")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("-v", "--verbose", action="store_true", help="print the messages")
    options = parser.parse_args(arguments)
    bad = 0
    for mutation in chosen(options.texts):
        outcome = mutation.judge(range(options.seeds))
        bad += outcome.counts["unnoticed"]
        print(outcome, flush=True)
        if options.verbose:
            lines = dict.fromkeys(m.splitlines()[0] for m in outcome.messages if m)
            print("\n".join(f"      {line}" for line in lines))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
