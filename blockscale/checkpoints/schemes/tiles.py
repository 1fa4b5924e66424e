"""All experts of a layer in one tensor, in the layout of one kernel, and the way back.

Under ``<module>.<layout>.``, w13 has gate and up of every expert, w2 its down:

* "tiles64": codes and scales of `blockscale.ops.moe.tiles`, which `blockscale.nn.FusedMoE` runs on.
* "deepgemm": codes [E, N, K / 2], gate and up rows in turns of 8; scales int32 with the 128-row
  permutation, [E, K / block / 4, N] as `schemes.layout` says.
* "trtllm": INT4 as `schemes.layout` says; w13 has the up columns first, as TensorRT-LLM does.

Global scales are float32, w13 [E, 2] (gate, up) and w2 [E]; where the source divides, what it
divides by is beside them, as their reciprocals are rounded.  What else a checkpoint says (names,
the order of rows) is in config.json: reading gives the weights under the names that they had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from blockscale.base.errors import CheckpointError
from blockscale.base.sizes import ceil_div, round_up
from blockscale.checkpoints.entry import CODES, Tensors
from blockscale.checkpoints.files.safetensors import DTYPES, TensorInfo, read, shown
from blockscale.checkpoints.moves import joined
from blockscale.checkpoints.schemes.layout import (
    OF_EXPERTS,
    SCHEME,
    Kernel,
    Laid,
    kernel_of,
    lay_scales,
    lay_trtllm,
    plain_scales,
    plain_trtllm,
    scale_spec,
    trtllm_spec,
)
from blockscale.checkpoints.weight import E8M0_BIAS, E8M0_NAN, Weight
from blockscale.ops import layouts
from blockscale.ops.moe import tiles as moe_tiles

Tensor = torch.Tensor
Spec = dict[str, tuple[str, tuple[int, ...]]]

_GRANULE = 8
_MAX_ZERO = 15
_TILED_CODES = 1 << 18
"""Codes that are tiled at a time: 3 MiB of temporary memory."""
HALVES = ("F16", "BF16")
"""Scales of INT4 that tiles hold."""
_META = {"fmt": str, "group": int, "experts": int, "hidden": int, "intermediate": int}


class Matrices(NamedTuple):
    """One expert: gate (None: not gated), up [I, H] and down [H, I], each 2-D."""

    gate: Weight | None
    up: Weight
    down: Weight


def specs(layout: str, facts: Mapping[str, Any], kernel: Kernel) -> Spec:
    """Return dtype and shape of each tensor of the experts of a layer, by role."""
    experts, made = facts["experts"], {}
    for name in ("w13", "w2"):
        rows, inner = _sizes(facts, name)
        groups = inner // facts["group"]
        if layout == "tiles64":
            one = _tiled_spec(facts, rows, inner, name)
        elif layout == "deepgemm":
            one = {
                "": ("U8", (rows, inner // 2)),
                "_scale": scale_spec(layout, facts["scale_dtype"], rows, groups),
            }
        else:
            found = trtllm_spec(rows, inner, groups, facts["scale_dtype"], kernel, True)
            one = {"" if k == "codes" else f"_{k}": spec for k, spec in found.items()}
        made.update({name + k: (dtype, (experts, *shape)) for k, (dtype, shape) in one.items()})
    for name in _tops(facts, layout):
        made[f"w13_{name}"] = ("F32", (experts, 2))
        made[f"w2_{name}"] = ("F32", (experts,))
    return made


def _tops(facts: Mapping[str, Any], layout: str) -> list[str]:
    """Return what there is one number of for the gate, the up and the down of an expert."""
    scaled = facts["fmt"] == "nvfp4" or (facts["fmt"] == "mxfp4" and layout == "tiles64")
    return ["global"] * scaled + ["divisor"] * bool(facts.get("divides"))


def _sizes(facts: Mapping[str, Any], name: str) -> tuple[int, int]:
    hidden, inner = facts["hidden"], facts["intermediate"]
    return (hidden, inner) if name == "w2" else (inner * (2 if facts["gated"] else 1), hidden)


def _order_of(facts: Mapping[str, Any], name: str) -> Tensor:
    """Return the row of a matrix at each row of its tiles; -1: padding."""
    if name == "w2":
        return moe_tiles.natural_order(facts["hidden"])
    return moe_tiles.paired_order(facts["intermediate"], facts["gated"])


def _tiled_spec(facts: Mapping[str, Any], rows: int, inner: int, name: str) -> Spec:
    tile, group = moe_tiles.TILE, facts["group"]
    down, across = len(_order_of(facts, name)) // tile, ceil_div(inner, tile)
    width = max(tile, group)
    size = tile * (width // group) * (4 if facts["fmt"] == "int4" else 1)
    return {
        "": ("U8", (down, across, moe_tiles.CODES)),
        "_scale": ("U8", (down, round_up(inner, tile) // width, size)),
    }


# ---- There --------------------------------------------------------------------------------------


def lay_expert(
    layout: str, facts: Mapping[str, Any], expert: Matrices, kernel: Kernel
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one expert by role."""
    gate, up, down = expert
    tops = [_top(w) for w in (gate or up, up, down)]
    for name, parts in (("w13", [w for w in (gate, up) if w]), ("w2", [down])):
        if layout == "trtllm":
            parts.reverse()
        codes, scale, zero = (_joined(parts, field) for field in ("packed", "block_scale", "zero"))
        if layout == "tiles64":
            with torch.device("cpu"):  # tables of tiles are made where torch makes tensors
                power, one = _tiled(facts, name, codes, scale, zero)
            for i in (0, 1) if name == "w13" else (2,):
                tops[i] = tops[i] * power
        elif layout == "deepgemm":
            if name == "w13" and facts["gated"]:
                codes = layouts.interleave_gate_up(codes, _GRANULE)
                raw = layouts.interleave_gate_up(scale.view(torch.uint8), _GRANULE)
                scale = raw.view(scale.dtype)
            one = {"": codes, "_scale": lay_scales(layout, scale, permute=True)}
        else:
            found = lay_trtllm(codes, scale, zero, kernel, moe=True)
            one = {"" if k == "codes" else f"_{k}": value for k, value in found.items()}
        for key, value in one.items():
            yield name + key, value
    numbers: dict[str, Any] = {
        "global": tops,
        "divisor": [w.global_divisor for w in (gate or up, up, down)],
    }
    for name in _tops(facts, layout):
        yield f"w13_{name}", torch.stack(numbers[name][:2])
        yield f"w2_{name}", numbers[name][2]


def _joined(parts: list[Weight], name: str) -> Any:
    values = [getattr(weight, name) for weight in parts]
    return values[0] if len(values) == 1 else joined(values)


def _top(weight: Weight) -> Tensor:
    top = weight.global_scale
    return torch.ones((), dtype=torch.float32, device="cpu") if top is None else top.reshape(())


def _tiled(
    facts: Mapping[str, Any], name: str, codes: Tensor, scale: Tensor, zero: Tensor | None
) -> tuple[float, dict[str, Tensor]]:
    """Return the factor of the global scale, and codes and scales in tiles."""
    fmt, top = facts["fmt"], None
    if fmt != "int4":
        scale = scale.view(torch.uint8)
        most = int(scale.max())
        limit = moe_tiles.E4M3_LARGEST if fmt == "nvfp4" else E8M0_NAN - 1
        if most > limit:
            raise CheckpointError(
                f"{facts['names']}: a block scale has the byte {most:#x}, which is NaN or below "
                "zero; layout 'tiles64' holds none, so choose layout linear"
            )
        top = most if fmt == "mxfp4" else None
    if zero is not None and int(zero.max()) > _MAX_ZERO:
        raise CheckpointError(
            f"{facts['names']}: a zero point is {int(zero.max())}, but layout 'tiles64' holds "
            f"those up to {_MAX_ZERO}; choose layout linear"
        )
    order = _order_of(facts, name)
    step = max(1, _TILED_CODES // (2 * codes.shape[1] * moe_tiles.TILE)) * moe_tiles.TILE
    made = []
    for rows in order.split(step):
        taken = rows.clamp(min=0)
        local = torch.where(rows < 0, -1, torch.arange(len(rows), device="cpu"))
        some = codes.index_select(0, taken), scale.index_select(0, taken)
        if fmt == "int4":
            zeros = None if zero is None else zero.index_select(0, taken).to(scale.dtype)
            zeros = torch.full_like(some[1], 8) if zeros is None else zeros
            made.append(moe_tiles.pack_int4(*some, zeros, local))
        else:
            made.append(moe_tiles.pack_fp4(*some, top, local))
    power = 1.0 if top is None else 2.0 ** (top - E8M0_BIAS)
    tiles = [torch.cat([m[i] for m in made]) if len(made) > 1 else made[0][i] for i in (0, 1)]
    return power, {"": tiles[0], "_scale": tiles[1]}


# ---- And back -----------------------------------------------------------------------------------


def find(tensors: Tensors, said: Mapping[str, Any]) -> Iterator[Laid]:
    """Yield the weights of experts that config.json says are in a layout, as once named."""
    heads = said.get("experts")
    for head, facts in heads.items() if isinstance(heads, dict) else ():
        layout = said.get("layout")
        where = f"the experts {shown(head)} of config.json"
        if layout not in OF_EXPERTS or not _sane(facts, layout):
            raise CheckpointError(
                f"{where} are described as {shown(facts)} in layout {shown(layout)}, which is "
                "none of ours; convert the checkpoint again"
            )
        if moe_tiles.outdated(facts["fmt"], layout, said.get("version")):
            raise CheckpointError(
                f"{where} are in version {shown(said.get('version'))} of layout tiles64, but "
                f"kernels read version {moe_tiles.REVISION}; convert the checkpoint again"
            )
        facts = {**facts, "kernel": kernel_of(said)}
        wanted = specs(layout, facts, facts["kernel"])
        parts = {}
        for role, (dtype, shape) in wanted.items():
            info = tensors.by_name.get(f"{head}.{layout}.{role}")
            if info is None or (info.dtype, info.shape) != (dtype, shape):
                got = "missing" if info is None else f"{info.dtype} {list(info.shape)}"
                raise CheckpointError(
                    f"{where}: {head}.{layout}.{role} is {got}, but must be {dtype} "
                    f"{list(shape)}; copy all files of the checkpoint, or convert it again"
                )
            parts[role] = info
        for role in facts["names"]:
            extra = tensors.by_name.get(f"{head}.{layout}.{role}_input_scale")
            if extra is not None and (extra.dtype, extra.shape) == ("F32", (facts["experts"],)):
                parts[f"{role}_input_scale"] = extra
        tensors.used.update(info.name for info in parts.values())
        yield from _entries(layout, facts, parts)


def _sane(facts: Any, layout: str) -> bool:
    """Return whether config.json's description has all that `specs` needs, of sizes that can be."""
    if not isinstance(facts, dict) or any(type(facts.get(k)) is not t for k, t in _META.items()):
        return False
    sizes = [facts[k] for k in ("group", "experts", "hidden", "intermediate")]
    names = facts.get("names")
    roles = {"gate_up", "down"}, {"gate", "up", "down"}, {"up", "down"}
    return (
        all(0 < size <= 1 << 24 for size in sizes)
        and facts["hidden"] % facts["group"] == facts["intermediate"] % facts["group"] == 0
        and facts["fmt"] in CODES
        and facts.get("scale_dtype") in DTYPES
        and (layout, facts["fmt"], facts["scale_dtype"] in HALVES) != ("tiles64", "int4", False)
        and type(facts.get("gated")) is type(facts.get("divides", False)) is bool
        and isinstance(names, dict)
        and set(names) in roles
        and all(isinstance(n, str) and n.count("{}") <= 1 for n in names.values())
        and facts["gated"] == (set(names) != roles[2])
        and facts["experts"] <= 1 << 16
    )


def _entries(layout: str, facts: dict[str, Any], parts: dict[str, TensorInfo]) -> Iterator[Laid]:
    for role, name in facts["names"].items():
        rows, inner = _sizes(facts, "w2" if role == "down" else "w13")
        rows = rows // 2 if role in ("gate", "up") and facts["gated"] else rows
        stem = "w2" if role == "down" else "w13"
        mine = {k: p for k, p in parts.items() if k.split("_")[0] == stem}
        if f"{role}_input_scale" in parts:
            mine["input_scale"] = parts[f"{role}_input_scale"]
        told = {**facts, "role": role, "whole": parts}
        kind = (facts["fmt"], SCHEME)
        if "{}" not in name:
            shape = (facts["experts"], rows, inner)
            yield Laid(name, *kind, mine, shape, facts["group"], layout=layout, facts=told)
            continue
        for e in range(facts["experts"]):
            each = {k: p.piece(e, e + 1, p.shape[0], (1, *p.shape[1:])) for k, p in mine.items()}
            full = name.replace("{}", str(e))
            yield Laid(full, *kind, each, (rows, inner), facts["group"], layout=layout, facts=told)


def undo(entry: Laid) -> Weight:
    """Return the weight of an entry that `find` made."""
    facts, role = entry.facts, entry.facts["role"]
    stem = "w2" if role == "down" else "w13"
    parts = {k.removeprefix(stem): read(info) for k, info in entry.parts.items()}
    count = parts[""].shape[0]
    made = [_undone(entry, {k: v[e] for k, v in parts.items()}, stem) for e in range(count)]
    stacked = [torch.stack(v) if v[0] is not None else None for v in zip(*made, strict=True)]
    if count == 1 and len(entry.shape) == 2:
        stacked = [None if v is None else v[0] for v in stacked]
    packed, scale, zero = stacked
    if facts["fmt"] == "nvfp4" and scale is not None:
        scale = scale.view(torch.float8_e4m3fn)
    single = "{}" in facts["names"][role]
    tops: Any = {}
    for field, leaf in (("global_scale", "_global"), ("global_divisor", "_divisor")):
        if leaf in parts and facts["fmt"] == "nvfp4":
            top = _role_of(parts[leaf], role)
            tops[field] = top[0] if single else top
    inputs = parts.get("input_scale")
    return Weight(
        *(entry.name, entry.fmt, entry.shape),
        packed=packed,
        block_scale=scale,
        zero=zero,
        group_size=entry.group,
        input_scale=inputs[0] if inputs is not None and count == 1 else inputs,
        **tops,
    )


def _role_of(top: Tensor, role: str) -> Tensor:
    """Return [E] of one role, or [E, 2] where gate and up are one weight and differ."""
    if role == "gate_up" and not torch.equal(top[:, 0], top[:, 1]):
        return top
    return top[:, 1 if role == "up" else 0].contiguous() if role != "down" else top


def _undone(entry: Laid, parts: Mapping[str, Tensor], stem: str) -> tuple[Tensor | None, ...]:
    """Return codes, scales as integers or floats, and zeros of one expert in the source's rows."""
    facts, layout = entry.facts, entry.layout
    rows, inner = _sizes(facts, stem)
    if layout == "tiles64":
        with torch.device("cpu"):
            found = _untiled(facts, parts, stem)
    elif layout == "deepgemm":
        scale = plain_scales(layout, parts["_scale"], rows, inner // facts["group"], permute=True)
        codes = parts[""]
        if stem == "w13" and facts["gated"]:
            codes = layouts.deinterleave_gate_up(codes, _GRANULE)
            scale = layouts.deinterleave_gate_up(scale, _GRANULE)
        found = [codes, scale, None]
    else:
        named = {"codes" if not k else k[1:]: v for k, v in parts.items()}
        found = [*plain_trtllm(named, facts["kernel"], moe=True)]
        if stem == "w13" and facts["gated"]:
            found = [None if v is None else v.roll(rows // 2, 0) for v in found]
    return tuple(None if v is None else _rows(v, facts) for v in found)


def _rows(value: Tensor, facts: Mapping[str, Any]) -> Tensor:
    """Return rows gate first as the weight of this role has them."""
    role, inner = facts["role"], len(value) // 2
    if not facts["gated"] or role == "down":
        return value
    if role in ("gate", "up"):
        return value[inner:] if role == "up" else value[:inner]
    if facts.get("interleaved"):
        return torch.stack((value[:inner], value[inner:]), 1).reshape(value.shape)
    return value


def _untiled(
    facts: Mapping[str, Any], parts: Mapping[str, Tensor], stem: str
) -> list[Tensor | None]:
    rows, inner = _sizes(facts, stem)
    order = _order_of(facts, stem)
    int4 = facts["fmt"] == "int4"
    codes = moe_tiles.unpack_codes(parts[""], "int4" if int4 else "e2m1")
    laid, zero = parts["_scale"], None
    if int4:
        values = laid.contiguous().view(DTYPES[facts["scale_dtype"]])
        both = moe_tiles.unpack_scales(values, facts["group"], 2)
        scale, zero = both[..., 0], both[..., 1].to(torch.uint8)
    else:
        byte = moe_tiles.unpack_scales(laid, facts["group"])[..., 0]
        if facts["fmt"] == "nvfp4":
            scale = moe_tiles.e4m3_inverse()[byte.long()]
        else:
            power = parts["_global"].flatten()[0].log2().round().int()
            scale = byte.int() + power + (E8M0_BIAS - moe_tiles.E8M0_TOP)
            scale = scale.clamp(0, E8M0_NAN - 1).to(torch.uint8)

    def plain(value: Tensor | None, width: int) -> Tensor | None:
        if value is None:
            return None
        made = value.new_empty((rows, value.shape[1]))
        made[order[order >= 0]] = value[order >= 0]
        return made[:, :width].contiguous()

    groups = inner // facts["group"]
    return [plain(codes, inner // 2), plain(scale, groups), plain(zero, groups)]
