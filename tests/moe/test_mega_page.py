"""The page of both GEMMs in one launch: its tables are those of the kernels and of the model."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from tvm.s_tir import Schedule

from blockscale.base.errors import LoweringError
from blockscale.catalog import workloads
from blockscale.lower.pipe.check import checked
from blockscale.lower.pipe.derive import derive
from blockscale.lower.pipe.facts import facts
from blockscale.lower.pipe.kernel import Kernel
from blockscale.lower.pipe.phases import apart
from blockscale.schedules.steps import preferred
from tests.kit.pairwise import exhaustive

mega = pytest.importorskip(
    "bench.tcgen05.mega", reason="bench/ is part of the checkout, not of the wheel"
)
from bench.report import markdown_table  # noqa: E402
from bench.tcgen05 import moe_model, sass  # noqa: E402


def table_of(marker: str) -> list[str]:
    """Lines of the page between two markers."""
    text = mega.PAGE.read_text().split(f"<!-- {marker}:start -->")[1]
    return text.split(f"<!-- {marker}:end -->")[0].strip().splitlines()


def lines(rows: list[list[str]]) -> list[str]:
    """Rows as the page has them."""
    return markdown_table(("",) * len(rows[0]), rows).splitlines()[2:]


def test_what_a_cta_holds() -> None:
    """Barriers and memory of the kernel that is shown."""
    made = mega.both(mega.LAYERS[mega.SHOWN], mega.MANY)
    assert table_of("mega_barriers")[2:] == lines(list(mega.barrier_rows(made)))
    assert table_of("mega_memory")[2:] == lines(list(mega.memory_rows(made)))
    assert f"{made.launch_bytes:,} of 232,448 bytes" in table_of("mega_shown")[0]


def test_two_main_loops() -> None:
    """GEMM 1's comes first: each issues as many MMAs as its stage has."""
    made = mega.both(mega.LAYERS["gpt-oss-120b"], mega.MANY)
    text = mega.emit_phases(made, mega.ENTRY)
    compiled = mega.nvcc.compile_cuda_source(text, mega.ARCH)
    assert compiled.resources[0]["spills"] == 0
    turns = sass.disassemble(compiled.image, mega.ENTRY).main_loops()
    for turn, kernel in zip(turns, (made.first, made.second), strict=True):
        assert turn.mmas % len(kernel.whole.multiplies) == 0
    shown = next(row for row in table_of("mega_kernels") if "gpt-oss-120b | 256" in row)
    per_mma = [f"{len(turn.instructions) / turn.mmas:.2f}" for turn in turns]
    assert [shown.split(" | ")[i] for i in (8, 10)] == per_mma


def some(part: int, bucket: int) -> list[Kernel]:
    """Kernels of the default schedules of some sketches of a GEMM."""
    workload = [w for w in workloads(mega.LAYERS[mega.SHOWN], mega.ARCH) if w.part == part][bucket]
    made = []
    for sketch in workload.sketches(mega.ARCH)[: 10 if bucket == 0 else 5 : 2]:
        sch = Schedule(workload.symbolic(mega.ARCH))
        sketch(sch, preferred)
        made.append(checked(derive(sch.mod["main"])))
    return made


@pytest.mark.parametrize("bucket", [0, -1])
def test_the_model_joins_what_goes_together(bucket: int) -> None:
    said = set()
    for first, second in product(some(1, bucket), some(2, bucket)):
        go = moe_model.together(facts(first), facts(second))
        assert go == (apart(first, second) is None)
        said.add(go)
    assert said == {True, False}


def test_what_comes_to_a_gpu() -> None:
    """Its share of the slots of all GPUs; experts that have some, by chance."""
    flash, *_ = moe_model.PUBLISHED
    assert flash.work(1) == (6, 6)  # 48 slots of 8 tokens on 256 experts; 32 (1 - (250/256)^8)
    assert flash.work(512) == (3072, 32)
    simulated = next(each for each in moe_model.PUBLISHED if each.ranks == 0)
    assert simulated.work(1) == (1, 1)
    assert simulated.work(16) == (16, 13)


@pytest.mark.parametrize("number", [0, -1])
def test_modelled_rows(number: int) -> None:
    """Those of the page are what the model says today."""
    each = moe_model.PUBLISHED[number]
    tokens, us = each.times[0]
    slots, busy = each.work(tokens)
    row = moe_model.modelled(each.layer.spec(busy), tokens, slots)
    shown = [line.split(" | ") for line in table_of("published")[2:]]
    own = next(
        cells for cells in shown if cells[0] == f"| {each.layer.name}" and cells[2] == each.whose
        and cells[1] == each.layer.formats
    )  # fmt: skip
    assert own[3] == row.limits
    assert own[7] == moe_model.us_text(row.us)
    assert own[9] == f"{row.us / us:.2f} |"


@exhaustive
def test_the_picture(tmp_path: Path) -> None:
    """It is of today's kernel, whose results are right."""
    made = mega.draw(tmp_path / "made.svg", 0)
    assert made.read_bytes() == mega.PICTURE.read_bytes()


def test_schedules_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mega, "apart", lambda *_: "no")
    with pytest.raises(ValueError, match=r"no schedules of fused_moe_nvfp4.* go together"):
        mega.bodies(mega.DRAWN, mega.MANY)
    monkeypatch.undo()
    second = mega.both(mega.DRAWN, mega.MANY).second
    with pytest.raises(LoweringError, match="does not store its rows directly"):
        mega.joined(second, second)
