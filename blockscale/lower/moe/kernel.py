"""MoE functions whose GEMMs decode weights -> host C and CUDA C++, with the kernels around these.

The GEMMs are derived from their schedules (`lower.warp`); each distinct one is compiled once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tvm.tirx import PrimFunc

from blockscale.lower.code import KernelCode
from blockscale.lower.cuda import Source, symbol
from blockscale.lower.moe import small as moe_small
from blockscale.lower.moe.host import Bucket, gemm_code, host_code, route_host_code
from blockscale.lower.pipe.host import UNNAMED
from blockscale.lower.warp.derive import derive
from blockscale.lower.warp.emit import emit
from blockscale.lower.warp.kernel import Kernel
from blockscale.specs.moe import FusedMoe, MoeRoute
from blockscale.specs.plans import launches


class Pair(NamedTuple):
    """Scheduled GEMMs 1 and 2 for up to ``limit`` tokens; None: for any number."""

    limit: int | None
    first: PrimFunc
    second: PrimFunc


def sources(pairs: Sequence[Pair], spec: FusedMoe, arch: str) -> Source:
    """Return host and device code of the exported function of ``spec``.

    Args:
        pairs: ascending.
        spec: of layout "tiles64".
        arch: one with `targets.BULK_COPIES`.

    Raises:
        LoweringError: a schedule is no GEMM of `moe_tiles`; the message says where.
    """
    name = spec.name
    assert spec.tiled, "the catalogue checks it"
    kernels = Kernels(f"{name}_gemm")
    found: list[Bucket] = []
    for limit, *gemms in pairs:
        first, second = map(kernels.add, gemms)
        if found and (found[-1].name1, found[-1].name2) == (first, second):
            found.pop()
        found.append(Bucket(limit, kernels.of[first], kernels.of[second], first, second))
    roles = ("prepare", "prepare_many", *(() if spec.slots else ("combine",)))
    small = {role: f"{name}_{role}" for role in roles}
    form = spec.dtype, spec.act_fmt
    texts = [
        *kernels.texts,
        moe_small.HEADER,
        moe_small.prepare_source(small["prepare"], *form, coded=spec.coded),
        moe_small.prepare_source(small["prepare_many"], *form, many=True, coded=spec.coded),
    ]
    codes = [
        *(gemm_code(own, kernel) for own, kernel in kernels.of.items()),
        moe_small.code_of(small["prepare"], launches.PREPARE, shared=True),
        moe_small.code_of(small["prepare_many"], launches.PREPARE, shared=True),
    ]
    if not spec.slots:
        texts.append(moe_small.combine_source(small["combine"], spec.dtype))
        codes.append(moe_small.code_of(small["combine"], launches.COMBINE, follows=True))
    if spec.act_fmt is not None:
        small["requantize"] = f"{name}_requantize"
        texts.append(moe_small.requantize_source(small["requantize"], spec.dtype, spec.act_fmt))
        codes.append(moe_small.code_of(small["requantize"], launches.REQUANTIZE, follows=True))
    if spec.by_bytes:
        made = _by_bytes(spec)
        small |= {role: code.name for role, (code, _) in made.items()}
        codes += [code for code, _ in made.values()]
        texts += [text for _, text in made.values()]
    host = host_code(symbol(name, arch), spec, found, small, arch)
    return Source(host, "\n".join(texts), tuple(codes))


def _by_bytes(spec: FusedMoe) -> dict[str, tuple[KernelCode, str]]:
    """Return the kernels around GEMMs of 8 bits, and their texts."""
    assert spec.act_fmt is not None
    made = {}
    for role, many in (("prepare_bytes", False), ("prepare_many_bytes", True)):
        name = f"{spec.name}_{role}"
        text = moe_small.prepare_source(
            name, spec.dtype, spec.act_fmt, many=many, by_bytes=True, coded=spec.coded
        )
        made[role] = moe_small.code_of(name, launches.PREPARE, shared=True), text
    name = f"{spec.name}_requantize_bytes"
    text = moe_small.requantize_bytes_source(name, spec.dtype, spec.act_fmt)
    code = moe_small.code_of(name, launches.REQUANTIZE_BYTES, follows=True)
    return made | {"requantize_bytes": (code, text)}


class Kernels:
    """Kernels of one function, and their texts; equal ones are one.

    Attributes:
        of: by name.
        texts: of each.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.of: dict[str, Kernel] = {}
        self.texts: list[str] = []
        self._names: dict[str, str] = {}
        self._known: dict[PrimFunc, str] = {}

    def add(self, func: PrimFunc) -> str:
        """Return the name of the kernel that a scheduled function makes."""
        if func not in self._known:
            kernel = derive(func)
            key = emit(kernel, UNNAMED)
            if key not in self._names:
                own = self._names[key] = f"{self.name}{len(self._names)}"
                self.of[own] = kernel
                self.texts.append(key.replace(UNNAMED, own))
            self._known[func] = self._names[key]
        return self._known[func]


def route_sources(spec: MoeRoute, arch: str) -> Source:
    """Return host and device code of the exported function of ``spec``."""
    kernel = f"{spec.name}_kernel"
    constants = {
        "EXPERTS": spec.experts,
        "TOP_K": spec.top_k,
        "SIGMOID": spec.scoring == "sigmoid",
        "NORM": spec.renormalize,
        "BIAS": spec.bias,
        "GROUPS": spec.n_group,
        "KEPT": spec.topk_group,
    }
    text = moe_small.ROUTE_HEADER + moe_small.route_source(kernel, spec.dtype, constants)
    host = route_host_code(symbol(spec.name, arch), spec, kernel)
    return Source(host, text, (moe_small.code_of(kernel, launches.ROUTE),))
