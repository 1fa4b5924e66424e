"""Which kernels the modules of a checkpoint call, from its headers: for building them ahead."""

from __future__ import annotations

from collections.abc import Iterator

from blockscale.base.errors import CheckpointError
from blockscale.base.formats import MOE, QUANTIZED
from blockscale.checkpoints.checkpoint import Checkpoint
from blockscale.checkpoints.entry import CODES, Entry
from blockscale.checkpoints.experts.modules import ALL, Group
from blockscale.nn.config import dense_activation, moe_options, text_config
from blockscale.specs import FusedMoe, Int4Mm, Linear, MoeRoute, Spec
from blockscale.specs.int4 import TILE_GROUPS

DTYPES = ("bfloat16", "float16", "float32")

GATES = ("gate_proj", "up_proj")
MERGED = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("q_a_proj", "kv_a_proj_with_mqa"): "qkv_a_proj",
    ("q_proj", "kv_a_proj_with_mqa"): "qkv_proj",
    GATES: "gate_up_proj",
}
"""Layers of a module that read the same tensor, by their names, and the name of all of them."""


def kernels_of(ckpt: Checkpoint, *, cuda: bool, dtype: str | None = None) -> list[Spec]:
    """Return the kernels that `Linear`, `Int4Linear` and `FusedMoE` of its 4-bit weights call.

    Layers whose weights are rows of one where models run in an engine (q, k and v; gate and up) are
    there apart and as one, gates with their activation and without; other lists of names, and other
    activations, are not.  INT4 weights with zeros are there with and without: those that are all 8
    need none, which only the data say.  On GPUs they are those of `Int4Linear` and, for engines, of
    `Linear`.

    Args:
        ckpt: the checkpoint; no data are read.
        cuda: for GPUs, else for CPUs.
        dtype: of the activations; None: that of config.json, else "bfloat16".

    Raises:
        CheckpointError: there is no 4-bit weight, or config.json does not say how experts are run.
        ValueError: a size that no kernel takes.
    """
    dtype = dtype or _dtype(ckpt, cuda)
    found: dict[str, Spec] = {}
    members: set[str] = set()
    for name in ckpt.modules:
        group = ckpt.group(name)
        assert group is not None
        stored = [entry for role in group.weights.values() for entry in role.values()]
        if all(entry.fmt in CODES for entry in stored):
            members.update(entry.name for entry in stored)
            found |= {spec.name: spec for spec in _experts(ckpt, name, group, cuda, dtype)}
    for entry in ckpt.entries.values():
        if entry.fmt in CODES and len(entry.shape) == 2 and entry.name not in members:
            for spec in _linear(entry, cuda, dtype):
                found.setdefault(spec.name, spec)
    for entries in _joined(ckpt, members):
        found |= {spec.name: spec for spec in _merged(ckpt, entries, cuda, dtype)}
    if not found:
        raise CheckpointError(
            f"{ckpt.path} has no weight of 4 bits, so its modules call no kernel; quantise it: "
            "blockscale convert"
        )
    return [*found.values()]


def _dtype(ckpt: Checkpoint, cuda: bool) -> str:
    config = ckpt.configs.get("config.json", {})
    said = [c.get(key) for c in (text_config(config), config) for key in ("dtype", "torch_dtype")]
    known = DTYPES[:2] if cuda else DTYPES
    return next((str(dtype) for dtype in said if dtype in known), DTYPES[0])


def _layout(cuda: bool) -> str:
    return "tiles64" if cuda else "linear"


def _joined(ckpt: Checkpoint, members: set[str]) -> Iterator[list[Entry]]:
    """Yield the weights that are rows of one, those with the same names in `MERGED`."""
    for name in ckpt.entries:
        stem, _, leaf = name.removesuffix(".weight").rpartition(".")
        for leaves in MERGED:
            names = [f"{stem}.{each}.weight" for each in leaves]
            entries = [ckpt.entries[each] for each in names if each in ckpt.entries]
            if leaf != leaves[0] or name in members or len(entries) < len(leaves):
                continue
            kinds = {(e.fmt, e.group, e.shape[1:], *sorted(e.parts)) for e in entries}
            if len(kinds) == 1 and entries[0].fmt in CODES and len(entries[0].shape) == 2:
                yield entries
                break


def _merged(ckpt: Checkpoint, entries: list[Entry], cuda: bool, dtype: str) -> Iterator[Spec]:
    """Yield the kernels of weights that are rows of one.

    With a global scale for each row and without: whether those of NVFP4 differ only the data say.
    """
    first, rows = entries[0], sum(entry.shape[0] for entry in entries)
    fmt, gates = first.fmt, first.name.endswith(f".{GATES[0]}.weight")
    if fmt not in QUANTIZED:
        yield from _linear(first, cuda, dtype, rows)
        return
    k, layout = first.shape[1], _layout(cuda)
    act = dense_activation(ckpt.configs.get("config.json", {})) if gates else None
    if act is not None:
        yield Linear(rows, k, fmt, dtype, layout=layout, activation=act, gated=True)
    for by_row in (False, True) if fmt == "nvfp4" else (False,):
        yield Linear(rows, k, fmt, dtype, layout=layout, by_row=by_row)


def _linear(entry: Entry, cuda: bool, dtype: str, rows: int | None = None) -> Iterator[Spec]:
    n, k = rows or entry.shape[0], entry.shape[1]
    if entry.fmt in QUANTIZED:
        yield Linear(n, k, entry.fmt, dtype, layout=_layout(cuda))
        return
    group = entry.group
    if not cuda:
        yield Int4Mm(n, k, group, dtype, dtype, layout="rows", zero="term")
        return
    fit = next((size for size in TILE_GROUPS if group % size == 0), group)
    smooth = "pre_quant_scale" in entry.parts
    yield Int4Mm(n, k, fit, dtype, dtype, layout="tiles64", zero="point", pre_quant=smooth)
    for zero in (False, True) if "zero" in entry.parts else (False,):
        yield Linear(n, k, "int4", dtype, fit, zero, layout="tiles64")


def _experts(ckpt: Checkpoint, name: str, group: Group, cuda: bool, dtype: str) -> Iterator[Spec]:
    down = group.weights["down"]
    first = next(iter(down.values()))
    experts = first.shape[0] if ALL in down else group.experts
    hidden, inner = first.shape[-2:]
    stored = [entry for role in group.weights.values() for entry in role.values()]
    gated = _gated(group, inner)
    said = moe_options(ckpt.configs.get("config.json", {}), gated, {}, name)
    fmt, size = first.fmt, first.group_in(first.fmt)
    size = size if size in MOE[fmt].blocks else 0
    zeros = (False, True) if any("zero" in entry.parts for entry in stored) else (False,)
    for zero in zeros:
        yield FusedMoe(
            *(experts, hidden, inner, said["top_k"], fmt, size, said["activation"], dtype),
            zero=zero,
            bias=bool(group.biases),
            layout=_layout(cuda),
        )
    stem = name.removesuffix(".experts")
    corrected = any(
        entry.startswith(f"{stem}.") and entry.endswith("e_score_correction_bias")
        for entry in ckpt.entries
    )
    yield MoeRoute(
        *(experts, said["top_k"], "float32", said["scoring"], said["renormalize"], corrected),
        *(said.get("n_group", 1), said.get("topk_group", 1)),
    )


def _gated(group: Group, inner: int) -> bool:
    """Return whether there are gates: two roles, or twice the rows."""
    both = group.weights.get("gate_up")
    if both is None:
        return "gate" in group.weights
    return next(iter(both.values())).shape[-2] != inner
