"""The quick parser makes what TVM's own makes."""

import runpy
import subprocess
import sys

import pytest
import tvm
from tvm.error import DiagnosticError
from tvm.script import tirx as T
from tvm.tirx.script.parser import entry

from blockscale import catalog
from blockscale.base import host
from blockscale.specs import Spec
from blockscale.tir import script
from tests.kit.paths import without_torch

NAMES = ("grouped_mm_nvfp4_e3_n48_k256_f32", "quantize_nvfp4_128x4_amax_f32")
"""Kernels with inlined functions."""


def odd(wide, sizes=(2, 3)):
    """Return a function with every kind of expression that kernels have, and some that none has."""
    names = {"pair": (4, 8), "scale": 3}
    rows, *rest = sizes

    @T.inline
    def twice(to, at, *, by=1):
        to[at] = to[at] * T.int32(2 * by)

    @T.prim_func(private=True, s_tir=True)
    def main(x_ptr: T.handle, y: T.Buffer((rows * 8,), "int32")):
        n = T.int64()
        x = T.match_buffer(x_ptr, (n, *rest, 4 if wide else 1), "int32")
        low, *more = sizes
        T.func_attr(
            {
                "name": f"odd{names['scale']}_{sizes[0]}",
                "padded": f"{names['pair'][0]:02d} {names!r}",
                "chained": 1 < len(names) + 1 < names["scale"],
            }
        )
        for i, j in T.grid(n, rest[-1]):
            with T.sblock(f"copy{sizes[0]}{'_wide' if wide and names['scale'] > 2 else ''}"):
                vi, vj = T.axis.remap("SS", [i, j])
                T.reads(x[vi, vj, 0 : 4 if wide else 1], y[0:2])
                T.writes(y[vi * 2 : vi * 2 + 2])
                value = T.if_then_else(vj < 1 and vi > 0, -x[vi, vj, 0], ~x[vi, vj, 0])
                y[vi * 2] = value if not wide else T.max(value, T.int32(low))
                twice(y, vi * 2 + 1, by=sum([k for k in names["pair"] if k > 4]))
                y[vi * 2] = y[vi * 2] + T.Select(vi < n // 2, T.cast(vi % 3, "int32"), more[0])

    return main


@pytest.mark.always
def test_same_functions():
    """Parsed here, and in a process whose parser is TVM's own."""
    assert isinstance(entry.inspect, script._Inspect)
    code = (
        "import sys, types; own = types.ModuleType('script'); own.install = lambda: None\n"
        "sys.modules['blockscale.tir.script'] = own\n"
        "from blockscale import catalog; from blockscale.specs import Spec\n"
        "import inspect; from tvm.tirx.script.parser import entry\n"
        "assert entry.inspect is inspect\n"
        "for name in sys.argv[2:]: print(catalog.exported(Spec.parse(name), sys.argv[1], {}))\n"
        "from tests.tir.test_script import odd; print(odd(True), odd(False, (4, 5)))"
    )
    command = [sys.executable, "-c", code, host.level(), *NAMES]
    options = {"capture_output": True, "text": True, "check": True, "env": without_torch()}
    done = subprocess.run(command, **options)
    made = [str(catalog.exported(Spec.parse(name), host.level(), {})) for name in NAMES]
    made.append(f"{odd(True)} {odd(False, (4, 5))}")
    assert done.stdout == "\n".join([*made, ""])


def test_equal_code_may_have_other_annotations(tmp_path):
    """In files whose functions differ in nothing else, down to the lines."""
    for size in (4, 8):
        (tmp_path / f"of_{size}.py").write_text(
            "from tvm.script import tirx as T\n\n\n@T.prim_func(s_tir=True)\n"
            f'def main(x: T.Buffer(({size},), "int32")):\n    x[1] = 0\n'
        )
        found = runpy.run_path(str(tmp_path / f"of_{size}.py"))["main"]
        assert list(found.params[0].ty.shape) == [size]


def test_no_function_says_where_it_is_written():
    assert '"line":' not in tvm.ir.save_json(odd(True))


@pytest.mark.parametrize(
    ("expression", "said", "column"),
    [
        ("nothing", "Undefined variable: nothing", 21),
        ("x[0] + nothing", "Undefined variable: nothing", 21),
        ("x[0].nothing", "has no attribute 'nothing'", 21),
        ("T.nothing(x[0])", "has no attribute 'nothing'", 21),
        ("min(x[0], *1)", "not iterable", 31),
        ("x[0:4:2]", "non-unit step", 21),
        ("1 // 0", "division", 21),
    ],
)
def test_what_is_wrong_is_said_with_its_place(expression, said, column):
    text = f"""
@T.prim_func(s_tir=True)
def main(x: T.Buffer((4,), "int32")):
    x[1] = T.max(1, {expression})
"""
    with pytest.raises(Exception, match=said) as failed:
        tvm.script.from_source(text, {"T": T})
    if "Undefined" not in said:
        assert isinstance(failed.value, DiagnosticError)
        assert f"--> <str>:4:{column}\n" in str(failed.value)
