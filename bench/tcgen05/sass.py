"""Machine code of a kernel as nvdisasm prints it: its loops, and what one turn of a loop issues.

A turn is counted as it runs when no wait has to wait: of all ways through the loop's body the one
with the most MMAs (or loads), and of those the shortest.  Retries of a wait, which compilers put
out of line, are therefore not in it; a predicated instruction is, for it takes its issue slot.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

from bench.tcgen05 import loops
from blockscale.base.errors import CompileError

MMA = re.compile(r"UTC[A-Z]*MMA\b")
COMMIT = "UTCBAR"
SCALE_COPY = "UTCCP"
LOAD = "UTMALDG"
WAIT = "SYNCS.PHASECHK"
SHARED = ("LDS", "STS", "LDSM", "STSM", "ATOMS", "LD", "ST")
"""Plain accesses of shared memory (LD and ST: of generic addresses, which may lie there)."""
LOCAL = ("LDL", "STL")
"""Accesses of the stack: spills."""

READ, CLUSTER_READ = "LDTM", "LD"
"""Reads of tensor memory, and of generic addresses: of other CTAs' shared memory."""
BULK_STORE = "UTMASTG"
STORES = ("STS", "STG", "ST", BULK_STORE)
_WIDTHS = {".128": 16, ".64": 8, ".U16": 2, ".16": 2, ".U8": 1, ".8": 1}
_COLUMNS = re.compile(r"\.x(\d+)")

FENCES = ("FENCE", "UTMACMDFLUSH", "DEPBAR")
KINDS = ("tensor", "sync", "move", "uniform", "vector", "control")
_CONTROL = ("BRA", "BSSY", "BSYNC", "BREAK", "YIELD", "NOP", "WARPSYNC", "ELECT", "EXIT", "CALL")


@dataclass(frozen=True)
class Instruction:
    """One line of SASS; ``target`` is the index of the instruction that a branch goes to."""

    address: int
    guard: str
    opcode: str
    operands: str
    target: int | None = None

    @property
    def stem(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".", 1)[0]

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        if self.stem.startswith(("UTC", "UTMA", "LDTM", "STTM")):
            return "tensor"
        if self.stem == "SYNCS":
            return "sync"
        if self.stem == "R2UR":
            return "move"
        if self.stem in _CONTROL:
            return "control"
        return "uniform" if self.stem.startswith("U") else "vector"


@dataclass
class Turn:
    """What one turn of a loop issues."""

    instructions: list[Instruction]
    unrolled: bool = False
    """There is no loop: the part between the first and the last commit of straight code."""

    def count(self, match: Callable[[Instruction], bool]) -> int:
        """Return how many instructions match."""
        return sum(map(match, self.instructions))

    @property
    def kinds(self) -> dict[str, int]:
        """How many instructions there are of each kind."""
        found = Counter(i.kind for i in self.instructions)
        return {kind: found[kind] for kind in KINDS}

    @property
    def mmas(self) -> int:
        """MMA instructions."""
        return self.count(is_mma)

    @property
    def shared_accesses(self) -> int:
        """Plain loads and stores of shared memory."""
        return self.count(lambda i: i.stem in SHARED)

    @property
    def devices(self) -> dict[str, int]:
        """How often tensor units, TMA, mbarriers and fences are told something, by opcode."""
        told = (i for i in self.instructions if i.kind in ("tensor", "sync") or i.stem in FENCES)
        return dict(sorted(Counter(i.opcode for i in told).items()))

    def elements(self, item: int) -> int:
        """Return how many sums a thread takes: reads, or stores as elements of ``item`` bytes."""
        columns = sum(_bytes(i) for i in self.instructions if i.stem == READ) // 4
        return columns or sum(_bytes(i) for i in self.instructions if i.stem == "STG") // item


@dataclass
class Code:
    """The instructions of one kernel."""

    instructions: list[Instruction]
    followers: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.followers = [list(self._followers(i)) for i in range(len(self.instructions))]

    def _followers(self, index: int) -> Iterable[int]:
        ins = self.instructions[index]
        # "BRA.U UP0, `(.L)" and "BRA.DIV UR4, `(.L)" have their condition before the label
        conditional = bool(ins.guard) or "," in ins.operands
        jumps = ins.stem == "BRA" and ins.target is not None
        ends = ins.stem in ("EXIT", "RET", "KILL")
        if jumps and ins.target is not None:
            yield ins.target
        if (conditional or not (jumps or ends)) and index + 1 < len(self.instructions):
            yield index + 1

    def has(self, stems: Sequence[str]) -> int:
        """Return how many instructions of the whole kernel have one of these opcodes."""
        return sum(i.stem in stems for i in self.instructions)

    # ---- Loops ------------------------------------------------------------------------------

    def main_loop(self) -> Turn:
        """Return a turn of the innermost loop that waits, issues MMAs and commits them.

        Straight code, of a K that was unrolled whole, gives the part from the first to the last
        commit.
        """
        turns = self.main_loops()
        return max(turns, key=lambda turn: turn.mmas) if turns else self._straight()

    def main_loops(self) -> list[Turn]:
        """Return a turn of each such loop, in the order of the code."""
        found = sorted(self._loops(is_mma, is_commit, is_wait), key=min)
        return [self._turn(nodes, is_mma) for nodes in found]

    def load_loops(self) -> list[Turn]:
        """Return a turn of each innermost loop that waits and issues TMA loads."""
        return [self._turn(nodes, is_load) for nodes in self._loops(is_load, is_wait)]

    def store_loops(self) -> list[Turn]:
        """Return a turn of each innermost loop that reads sums and stores what it made of them.

        The way is that of a tile inside of d, with all that the epilogue can load.  Split-K has two
        loops: from tensor memory to shared memory, and from all CTAs' shared memory to d.
        """
        reads = (lambda ins: ins.stem == READ), (lambda ins: ins.stem == CLUSTER_READ)
        found = [loop for read in reads for loop in self._loops(read, is_store)]
        return [self._turn(nodes, _worth) for nodes in found]

    def _loops(self, *needs: Callable[[Instruction], bool]) -> list[set[int]]:
        """Return the innermost loops that hold an instruction of each need."""
        places = [{i for i, ins in enumerate(self.instructions) if need(ins)} for need in needs]
        return loops.innermost(self.followers, lambda nodes: all(nodes & at for at in places))

    def _turn(self, nodes: set[int], wanted: Callable[[Instruction], int]) -> Turn:
        header = loops.header(nodes, self.followers)
        latches = {i for i in nodes if header in self.followers[i]}
        return Turn(self._way(nodes, header, latches, wanted))

    def _straight(self) -> Turn:
        """Return what lies between commits in code without a loop."""
        everything = set(range(len(self.instructions)))
        ends = {i for i in everything if not self.followers[i]}
        way = self._way(everything, 0, ends, is_mma)
        commits = [i for i, ins in enumerate(way) if is_commit(ins)]
        parts = [way[a + 1 : b + 1] for a, b in pairwise(commits)]
        # no MMA is before the commit of the accumulator, right after that of the last stage
        issued = [ins for part in parts if any(map(is_mma, part)) for ins in part]
        if not issued:
            raise ValueError(
                "Code.main_loop: no loop and no straight code commits MMAs twice; give the SASS "
                "of a GEMM whose K has at least two stages"
            )
        return Turn(issued, unrolled=True)

    def _way(
        self, nodes: set[int], start: int, ends: set[int], wanted: Callable[[Instruction], int]
    ) -> list[Instruction]:
        code = self.instructions
        path = loops.best_path(nodes, start, ends, self.followers, lambda i: wanted(code[i]))
        return [code[i] for i in path]


def is_mma(ins: Instruction) -> bool:
    """Whether it multiplies."""
    return MMA.match(ins.opcode) is not None


def is_commit(ins: Instruction) -> bool:
    """Whether an mbarrier is to be told when the MMAs before it are done."""
    return ins.stem == COMMIT


def is_load(ins: Instruction) -> bool:
    """Whether it is a TMA load of a tensor."""
    return ins.stem == LOAD


def is_store(ins: Instruction) -> bool:
    """Whether it stores to shared or global memory."""
    return ins.stem in STORES


def _bytes(ins: Instruction) -> int:
    """Return what a load or store moves for a thread."""
    columns = _COLUMNS.search(ins.opcode)
    if columns:
        return 4 * int(columns[1])
    parts = re.findall(r"\.\w+", ins.opcode)
    return next((_WIDTHS[part] for part in parts if part in _WIDTHS), 4)


def _worth(ins: Instruction) -> int:
    """Of an instruction of an epilogue: the bytes that it moves; TMA stores before others."""
    if ins.stem == BULK_STORE:
        return 1 << 16
    if ins.stem == "SYNCS" and "ARRIVE" in ins.opcode:
        return 1
    return 16 * _bytes(ins) if is_store(ins) or ins.stem in (READ, CLUSTER_READ, "LDG") else 0


def is_wait(ins: Instruction) -> bool:
    """Whether it asks an mbarrier for its phase."""
    return ins.opcode.startswith(WAIT)


# ---- nvdisasm -------------------------------------------------------------------------------

_LINE = re.compile(r"/\*(?P<at>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<code>[^;]+);")
_LABEL = re.compile(r"^(\.\w+):")
_TARGET = re.compile(r"`\((\.\w+)\)")


def parse(text: str, entry: str) -> Code:
    """Return the code of one kernel in the text that ``nvdisasm -c`` prints."""
    lines: list[tuple[int, str, str]] = []
    labels: dict[str, int] = {}
    inside = False
    for line in text.splitlines():
        if ".section" in line:
            inside = f".text.{entry}," in line.replace("\t", " ") + ","
        label = _LABEL.match(line)
        if inside and label:
            labels[label[1]] = len(lines)
        found = _LINE.search(line)
        if inside and found:
            lines.append((int(found["at"], 16), found["guard"] or "", found["code"].strip()))
    if not lines:
        raise ValueError(f"sass.parse: no code of {entry!r} in the disassembly; name a kernel")
    made = []
    for at, guard, code in lines:
        opcode, _, operands = code.partition(" ")
        label = _TARGET.search(operands)
        target = labels.get(label[1]) if label else None
        # "PT" as a guard is no condition
        made.append(
            Instruction(
                at, guard.replace("UPT", "").replace("PT", ""), opcode, operands.strip(), target
            )
        )
    return Code(made)


@cache
def nvdisasm() -> Path:
    """Return the path of nvdisasm: of CUDA_HOME, PATH, or a Python package.

    Raises:
        CompileError: there is none.
    """
    homes = [Path(home) / "bin" for home in [os.environ.get("CUDA_HOME")] if home]
    on_path = [Path(found).parent for found in [shutil.which("nvdisasm")] if found]
    site = Path(sysconfig.get_path("purelib"))
    packages = [*sorted(site.glob("nvidia/*/bin")), site / "triton" / "backends" / "nvidia" / "bin"]
    for folder in [*homes, *on_path, Path("/usr/local/cuda/bin"), *packages]:
        if (folder / "nvdisasm").is_file():
            return folder / "nvdisasm"
    raise CompileError(
        "nvdisasm: in CUDA_HOME, on PATH and among the Python packages there is none; "
        "pip install nvidia-cuda-nvdisasm"
    )


@cache
def version() -> str:
    """Return nvdisasm's version, for example ``13.1.80``."""
    done = subprocess.run([nvdisasm(), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"V(\d+\.\d+\.\d+)", done.stdout)
    return found[1] if found else "unknown"


def disassemble(cubin: bytes, entry: str) -> Code:
    """Return the code of one kernel of a cubin."""
    with tempfile.TemporaryDirectory(prefix="blockscale-sass-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(nvdisasm()), "-c", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"nvdisasm: ended with status {done.returncode}; {done.stderr.strip()}")
    return parse(done.stdout, entry)
