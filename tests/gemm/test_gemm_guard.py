"""CPU GEMMs at the end of mapped memory: a read beyond a tensor ends the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.pairwise import few
from tests.kit.paths import ROOT

SCRIPT = """
import ctypes, mmap, sys
import torch
import blockscale as bs

PAGE, held = mmap.PAGESIZE, []

def last(tensor):
    \"\"\"Return a copy of a uint8 tensor that ends where a page without access begins.\"\"\"
    pages = -(-tensor.numel() // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + pages * PAGE), PAGE, 0) == 0
    held.append(memory)
    view = torch.frombuffer(memory, dtype=torch.uint8, count=pages * PAGE)
    view = view[pages * PAGE - tensor.numel() :]
    view.copy_(tensor.reshape(-1))
    return view.reshape(tensor.shape)

for case in sys.argv[1:]:
    fmt, rows = case.split("-")[0], int(case.split("-")[1])
    generator = torch.Generator().manual_seed(rows)
    width = 128 if fmt == "nvfp4" else 256
    codes = lambda n: torch.randint(0, 120, (n, width), generator=generator, dtype=torch.uint8)
    columns = 16 if fmt == "nvfp4" else 8
    scales = lambda n: torch.full((-(-n // 128) * 128, columns), 0x38, dtype=torch.uint8)
    a, b, sa, sb = codes(rows), codes(48), scales(rows), scales(48)
    want = bs.mm_fp4(a, b, sa, sb, fmt=fmt, out_dtype=torch.float32)
    got = bs.mm_fp4(*map(last, (a, b, sa, sb)), fmt=fmt, out_dtype=torch.float32)
    assert torch.equal(got, want)
    ends = torch.tensor([0, 1, rows], dtype=torch.int32)
    both, sas, sbs = torch.stack([b, b]), torch.cat([sa, sa]), torch.stack([sb, sb])
    given = map(last, (a, both, sas, sbs))
    one = bs.grouped_mm_fp4(*given, ends, fmt=fmt, out_dtype=torch.float32)
    assert torch.equal(one, want)
print("right")
"""


@pytest.mark.always
@pytest.mark.parametrize("cases", few(["nvfp4-13", "mxfp8-29", "nvfp4-3"], every=3))
def test_nothing_is_read_beyond_a_tensor(cases):
    """Formats and rows."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *cases.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (0, "right\n"), run.stderr[-2000:]
