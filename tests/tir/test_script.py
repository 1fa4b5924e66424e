"""The quick parser makes what TVM's own makes."""

import subprocess
import sys

from tvm.tirx.script.parser import entry

from blockscale import catalog
from blockscale.base import host
from blockscale.specs import Spec
from blockscale.tir import script
from tests.kit.paths import without_torch

NAMES = ("grouped_mm_nvfp4_e3_n48_k256_f32", "quantize_nvfp4_128x4_amax_f32")
"""Kernels with inlined functions."""


def test_same_functions():
    """Parsed here, and in a process whose parser is TVM's own."""
    assert isinstance(entry.inspect, script._Inspect)
    code = (
        "import sys, types; own = types.ModuleType('script'); own.install = lambda: None\n"
        "sys.modules['blockscale.tir.script'] = own\n"
        "from blockscale import catalog; from blockscale.specs import Spec\n"
        "import inspect; from tvm.tirx.script.parser import entry\n"
        "assert entry.inspect is inspect\n"
        "for name in sys.argv[2:]: print(catalog.exported(Spec.parse(name), sys.argv[1], {}))"
    )
    command = [sys.executable, "-c", code, host.level(), *NAMES]
    options = {"capture_output": True, "text": True, "check": True, "env": without_torch()}
    done = subprocess.run(command, **options)
    made = [str(catalog.exported(Spec.parse(name), host.level(), {})) for name in NAMES]
    assert done.stdout == "\n".join([*made, ""])
