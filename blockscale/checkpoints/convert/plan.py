"""What `blockscale convert` will write: every tensor's name, dtype and shape, from headers alone.

Names are those of ModelOpt: P.weight, P.weight_scale, P.weight_scale_2; INT4 adds P.weight_zero
and, in act-order, P.weight_group_index.  Weights whose name has no ".weight" (all experts in one
tensor) get X, X_weight_scale, …, with K last.  What is in a layout has names of its own:
`schemes.layout`, `schemes.tiles`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from blockscale.base.errors import CheckpointError
from blockscale.base.formats import QUANTIZED
from blockscale.checkpoints.checkpoint import Checkpoint
from blockscale.checkpoints.convert.writer import Output
from blockscale.checkpoints.entry import CODES, PLAIN, Entry, alternates, named
from blockscale.checkpoints.experts.modules import ROUTERS, Bundle, bundles
from blockscale.checkpoints.files.safetensors import file_dtype
from blockscale.checkpoints.schemes import layout as layout_of_one
from blockscale.checkpoints.schemes import tiles
from blockscale.checkpoints.schemes.layout import LAYOUTS, LINEAR, OF_EXPERTS, Kernel

KEPT = (
    *("*embed*", "*wte.weight", "*wpe.weight", "shared.weight", "*.shared.weight"),  # GPT-2, T5
    *("*lm_head*", "output.weight", "*.output_layer.weight", "head.weight"),  # Llama's own, GLM
    *("*norm*", "*router*", "*shared_expert_gate*", *(f"*.{leaf}.weight" for leaf in ROUTERS)),
)
"""Weights that are never quantised: few bytes, or much loss."""
FORMATS = tuple(QUANTIZED)
SHARD_BYTES = 4 << 30
TARGETS = {
    **dict.fromkeys(("cpu", "llvm"), (LINEAR,)),
    **dict.fromkeys(("sm_75", "sm_80", "sm_86", "sm_89"), (LINEAR, "marlin", "trtllm")),
    "sm_90a": ("tiles64", LINEAR, "marlin", "trtllm"),
    **dict.fromkeys(("sm_100a", "sm_100f", "sm_103a"), ("128x4", "deepgemm", LINEAR, "trtllm")),
    **dict.fromkeys(("sm_120a", "sm_121a"), ("128x4", LINEAR, "trtllm")),
}
"""Layouts that have a meaning on a target; the first is the one that our kernels read there."""
_ANY = Kernel()
_NUMBER = re.compile(r"\.\d+(?=\.)")
_NEAREST = 3
"""Names that an error lists."""
_FORMAT_VERSION = 3
"""Goes up when the bytes change that the same checkpoint is converted to."""
_SHARED = re.compile(
    r"(?P<head>.*[._]|)(?:(?P<qkv>[qkv]_proj)|(?P<gate_up>gate_proj|up_proj)|(?P<w13>w1|w3))"
    r"(\.weight)?"
)


@dataclass(frozen=True)
class Options:
    """What a conversion is told.

    Attributes:
        fmt: what weights of a plain checkpoint become; 4-bit weights keep their format.
        keep: patterns of names of weights that are copied as they are, or stay linear.
        shard_bytes: how many bytes of tensors a file has at most, if it has more than one.
        layout: of `LAYOUTS`; None: what ``target`` reads.
        target: of `TARGETS`; None: any.
        activation: "trtllm" only: "a16" or "a8".
    """

    fmt: str = "nvfp4"
    keep: tuple[str, ...] = ()
    shard_bytes: int = SHARD_BYTES
    layout: str | None = None
    target: str | None = None
    activation: str = "a16"

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        choices = {"fmt": FORMATS, "layout": (*LAYOUTS, None), "target": (*TARGETS, None)}
        for name, values in choices.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"convert: {name} is {getattr(self, name)!r}, but must be one of "
                    f"{', '.join(filter(None, values))}"
                )
        if self.shard_bytes <= 0:
            raise ValueError(f"convert: shard_bytes is {self.shard_bytes}, but must be positive")
        if self.target is not None and self.chosen not in TARGETS[self.target]:
            raise ValueError(
                f"convert: layout {self.layout!r} has no meaning on target {self.target!r}; choose "
                f"one of {', '.join(TARGETS[self.target])}"
            )
        if self.layout == "trtllm" and self.target is None:
            known = [target for target, found in TARGETS.items() if "trtllm" in found]
            raise ValueError(
                "convert: layout 'trtllm' differs from one architecture to the other; choose a "
                f"target out of {', '.join(known)}"
            )
        if self.activation != "a16" and (self.chosen != "trtllm" or self.activation != "a8"):
            raise ValueError(
                f"convert: activation is {self.activation!r}, but must be 'a16', or 'a8' with "
                "layout 'trtllm'"
            )

    @property
    def chosen(self) -> str:
        """Return the layout."""
        return self.layout or (TARGETS[self.target][0] if self.target else LINEAR)

    @property
    def kernel(self) -> Kernel:
        """Return for which kernels of TensorRT-LLM INT4 weights are."""
        digits = re.sub(r"\D", "", self.target or "")
        return Kernel(int(digits or 80), self.activation)


@dataclass(frozen=True)
class Step:
    """Weights that are written together, and what becomes of them: "quantize", "repack" or "copy".

    Attributes:
        entries: one weight, or all experts of a layer.
        outputs: the tensors, by role.
        fmt: of the codes; of a copy: as it was.
        shared: the weights that have the same largest value (nvfp4).
        bundle: the experts, where they are written into one tensor.
        facts: what config.json says on them.
    """

    entries: tuple[Entry, ...]
    action: str
    outputs: dict[str, Output]
    fmt: str
    layout: str = LINEAR
    shared: tuple[Entry, ...] = ()
    bundle: Bundle | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    kernel: Kernel = _ANY

    @property
    def nbytes(self) -> int:
        """Return the bytes that are written."""
        return sum(out.nbytes for out in self.outputs.values())


@dataclass(frozen=True, repr=False)
class Plan:
    """The files of a conversion; ``digest`` is equal for equal plans of equal sources."""

    options: Options
    shards: tuple[tuple[Step, ...], ...]
    digest: str

    def __repr__(self) -> str:
        return f"<Plan {self.digest[:12]}: {len(self.steps)} weights, {len(self.shards)} files>"

    @property
    def names(self) -> list[str]:
        """Return the names of the files."""
        count = len(self.shards)
        if count == 1:
            return ["model.safetensors"]
        return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]

    @property
    def steps(self) -> list[Step]:
        """Return the steps of all files."""
        return [step for shard in self.shards for step in shard]


def make_plan(ckpt: Checkpoint, options: Options) -> Plan:
    """Return how ``ckpt`` is converted.

    Where any weight has 4 bits, whoever quantised it left the others out on purpose: they stay.

    Raises:
        CheckpointError: a weight that the layout cannot hold.
    """
    steps = _Planner(ckpt, options).steps()
    shards: list[list[Step]] = [[]]
    size = 0
    for step in steps:
        if size + step.nbytes > options.shard_bytes and size:
            shards.append([])
            size = 0
        shards[-1].append(step)
        size += step.nbytes
    source = [
        (role, *part[:3], part.path.name, part.start, part.path.stat().st_mtime_ns)
        for entry in ckpt.entries.values()
        for role, part in entry.parts.items()
    ]
    said = [options.fmt, options.chosen, options.kernel, [len(s) for s in shards]]
    outputs = [out for step in steps for out in step.outputs.values()]
    facts = [_FORMAT_VERSION, said, source, vars(ckpt.facts), outputs]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return Plan(options, tuple(tuple(shard) for shard in shards), digest)


class _Planner:
    """Decides what becomes of each weight."""

    def __init__(self, ckpt: Checkpoint, options: Options) -> None:
        self.ckpt, self.options = ckpt, options
        entries = list(ckpt.entries.values())
        laid = next((e for e in entries if isinstance(e, layout_of_one.Laid)), None)
        if laid is not None:
            raise CheckpointError(
                f"{ckpt.path}: {laid.name} is in layout {laid.layout!r} already; convert the "
                "checkpoint that this one was made of"
            )
        self._check_keep()
        self.bundles = bundles(entries, ckpt.facts)
        self.stacked = {e.name: e for b in self.bundles.values() for e in b.entries}
        self.done = any(entry.fmt in CODES for entry in entries)
        self.actions = {entry.name: self._action(entry) for entry in entries}
        for bundle in self.bundles.values():
            if all(self.actions[e.name] == "copy" for e in bundle.entries):
                for e in bundle.entries:  # nothing beside it says that it is turned
                    del self.stacked[e.name]
        self.shared: dict[str, list[Entry]] = {}
        for entry in entries:
            if self.actions[entry.name] == "quantize":
                found = self.stacked.get(entry.name, entry)
                self.shared.setdefault(_shared(entry.name), []).append(found)

    def _check_keep(self) -> None:
        """Refuse patterns that match no weight: what they were to keep would be quantised."""
        for rule in self.options.keep:
            if not any(fnmatchcase(name, rule) for name in self.ckpt.entries):
                names = {_NUMBER.sub(".*", name) for name in self.ckpt.entries}  # of all layers
                nearest = difflib.get_close_matches(_NUMBER.sub(".*", rule), names, _NEAREST, 0.0)
                raise CheckpointError(
                    f"{self.ckpt.path} has no weight that keep={rule!r} matches; write a pattern "
                    f"of whole names, of which the nearest are {', '.join(nearest)}"
                )

    def steps(self) -> list[Step]:
        """Return a step for each weight, in the order of the checkpoint."""
        layout = self.options.chosen
        whole: dict[str, Bundle] = {}
        if layout in OF_EXPERTS:
            for layer in self.bundles.values():
                kinds = {(self._fmt(e), self.actions[e.name]) for e in layer.entries}
                if not any(self._kept(e) for e in layer.entries) and self._codes(kinds):
                    whole.update({e.name: layer for e in layer.entries})
        made: list[Step] = []
        for entry in self.ckpt.entries.values():
            bundle = whole.get(entry.name)
            if bundle is None:
                made.append(self._step(self.stacked.get(entry.name, entry)))
            elif entry.name == bundle.entries[0].name:
                made.append(self._experts(bundle))
        asked = self.options.layout
        if asked not in (None, LINEAR) and all(s.layout == LINEAR for s in made):
            raise CheckpointError(
                f"{self.ckpt.path} has nothing that layout {asked!r} has a meaning for: "
                + ("no experts" if asked == "tiles64" else "no weight of such a format")
                + "; choose layout linear"
            )
        return made

    def _codes(self, kinds: set[tuple[str, str]]) -> bool:
        """Return whether all weights become codes of one format, which the layout has."""
        fmt, action = next(iter(kinds))
        return len(kinds) == 1 and action != "copy" and fmt in LAYOUTS[self.options.chosen]

    def _action(self, entry: Entry) -> str:
        if entry.fmt in CODES:
            return "repack"
        keep = ("*",) if self.done else (*KEPT, *self.options.keep)
        found = self.stacked.get(entry.name, entry)
        linear = entry.name.endswith(".weight") and len(entry.shape) == 2
        block = QUANTIZED[self.options.fmt].block
        some = bool(found.shape) and 0 not in found.shape
        fits = entry.fmt in PLAIN and some and found.shape[-1] % block == 0
        stacked = entry.name in self.stacked and len(entry.shape) == 3
        if fits and (linear or stacked) and not any(fnmatchcase(entry.name, r) for r in keep):
            return "quantize"
        return "copy"

    def _fmt(self, entry: Entry) -> str:
        return self.options.fmt if self.actions[entry.name] == "quantize" else entry.fmt

    def _kept(self, entry: Entry) -> bool:
        return any(fnmatchcase(entry.name, rule) for rule in self.options.keep)

    def _step(self, entry: Entry) -> Step:
        action, fmt = self.actions[entry.name], self._fmt(entry)
        if action == "copy":
            shape = entry.shape if entry.transposed else None
            parts = entry.parts.items()
            copied = {role: Output(p.name, p.dtype, shape or p.shape) for role, p in parts}
            return Step((entry,), action, copied, fmt)
        layout = self.options.chosen
        *lead, rows, inner = entry.shape
        unfit = self.options.layout is None and fmt not in LAYOUTS[layout]
        stacked = lead and layout in OF_EXPERTS
        if self._kept(entry) or layout == "tiles64" or stacked or unfit:
            layout = LINEAR
        if layout == "trtllm" and "group_index" in entry.parts:
            raise CheckpointError(
                f"{entry.name} is in act-order, for which layout 'trtllm' has no meaning; choose "
                "another layout, or leave the weight linear: --keep"
            )
        if layout != LINEAR:
            group = entry.group_in(fmt)
            sizes = rows, inner, inner // group
            layout_of_one.check(layout, entry.name, fmt, sizes, self.options.kernel)
        outputs = _outputs(entry, fmt, layout, self.options.kernel)
        shared = tuple(self.shared.get(_shared(entry.name), ()))
        return Step((entry,), action, outputs, fmt, layout, shared, kernel=self.options.kernel)

    def _experts(self, bundle: Bundle) -> Step:
        """Return the step of all experts of a layer in one layout."""
        layout, kernel = self.options.chosen, self.options.kernel
        entries = bundle.entries
        first, action, fmt = entries[0], self.actions[entries[0].name], self._fmt(entries[0])
        group = first.group_in(fmt)
        divides = "global_divisor" in first.parts
        bad = [
            e.name
            for e in entries
            if {"pre_quant_scale", "group_index"} & e.parts.keys()
            or (e.group_in(fmt), "global_divisor" in e.parts) != (group, divides)
        ]
        if bad:
            raise CheckpointError(
                f"{bad[0]} is in act-order, or has a pre_quant_scale or groups of its own, or "
                f"divides where others multiply, which layout {layout!r} cannot hold; choose "
                "layout linear, or leave the experts: --keep"
            )
        dtype = _scale_dtype(first, fmt)
        if layout == "tiles64" and fmt == "int4" and dtype not in tiles.HALVES:
            raise CheckpointError(
                f"{first.name} has scales of {dtype}, but layout 'tiles64' holds those of 16 bits "
                "only, and scales are not rounded; choose layout linear"
            )
        facts = _facts(bundle, fmt, group, dtype)
        facts |= {"interleaved": alternates(first, self.ckpt.facts), "divides": divides}
        inner, hidden = facts["intermediate"], facts["hidden"]
        rows = inner * (2 if bundle.gated else 1)
        for size in ((rows, hidden, hidden // group), (hidden, inner, inner // group)):
            layout_of_one.check(layout, bundle.head, fmt, size, kernel, moe=True)
        specs = tiles.specs(layout, facts, kernel)
        base = f"{bundle.head}.{layout}."
        outputs = {role: Output(base + role, *spec) for role, spec in specs.items()}
        for role, found in bundle.roles.items():
            given = {bool({"input_scale", "input_divisor"} & e.parts.keys()) for e in found}
            if given == {True}:
                name = f"{role}_input_scale"
                outputs[name] = Output(base + name, "F32", (bundle.experts,))
            elif len(given) > 1:
                raise CheckpointError(
                    f"{bundle.head}: some experts have an input_scale and others have none, which "
                    f"layout {layout!r} cannot hold; choose layout linear"
                )
        members = tuple(entries)
        return Step(members, action, outputs, fmt, layout, members, bundle, facts, kernel)


def _facts(bundle: Bundle, fmt: str, group: int, scale_dtype: str) -> dict[str, Any]:
    """Return what config.json says on the experts of a layer."""
    *_, hidden, intermediate = bundle.roles["down"][0].shape
    names = {role: _name(bundle, found) for role, found in bundle.roles.items()}
    return {
        "fmt": fmt,
        "group": group,
        "experts": bundle.experts,
        "hidden": hidden,
        "intermediate": intermediate,
        "gated": bundle.gated,
        "names": names,
        "zero": fmt == "int4",
        "scale_dtype": scale_dtype,
    }


def _name(bundle: Bundle, found: tuple[Entry, ...]) -> str:
    """Return the name of an entry of all experts, else one with {} for the expert's number."""
    first = found[0].name
    if len(found[0].shape) == 3:
        return first
    head, tail = bundle.head, first[len(bundle.head) :]
    name = head + tail.replace(".0", ".{}", 1)
    if any(name.replace("{}", str(e)) != entry.name for e, entry in enumerate(found)):
        raise CheckpointError(
            f"{first} and the other experts are not named alike, which this layout needs; choose "
            "layout linear"
        )
    return name


def _shared(name: str) -> str:
    """Return a name that weights with one global scale share: {q, k, v}, {gate, up}."""
    match = _SHARED.fullmatch(name)
    if match is None:
        return name
    kinds: Iterable[str] = ("qkv", "gate_up", "w13")
    return match["head"] + next(kind for kind in kinds if match[kind])


def _outputs(entry: Entry, fmt: str, layout: str, kernel: Kernel) -> dict[str, Output]:
    """Return the tensors of one weight, by role."""
    *lead, rows, inner = entry.shape
    group = entry.group_in(fmt)
    blocks = inner // group
    plain = entry.name.removesuffix("_blocks")  # as transformers saves gpt-oss dequantised
    base = plain if plain.endswith(".weight") else plain + "_weight"
    stem = base.removesuffix("weight")
    scale = _scale_dtype(entry, fmt)
    names = named(stem)
    outputs = {}
    if layout == "trtllm":
        spec = layout_of_one.trtllm_spec(rows, inner, blocks, scale, kernel, False)
        for role, (dtype, shape) in spec.items():
            name = f"{plain}_trtllm" + ("" if role == "codes" else f"_{role}")
            outputs[role] = Output(name, dtype, shape)
    else:
        tail = "_scale" if layout == LINEAR else f"_scale_{layout}"
        dtype, shape = layout_of_one.scale_spec(layout, scale, rows, blocks)
        outputs["packed"] = Output(plain, "U8", (*lead, rows, inner // 2))
        outputs["block_scale"] = Output(base + tail, dtype, (*lead, *shape))
    if fmt == "nvfp4":
        outputs["global_scale"] = Output(names["global_scale"], "F32", _experts(entry))
        if "global_divisor" in entry.parts:  # whose reciprocal, above, is rounded
            outputs["global_divisor"] = Output(names["global_divisor"], "F32", _experts(entry))
    if fmt == "int4" and layout != "trtllm":
        outputs["zero"] = Output(names["zero"], "U8", (*lead, rows, blocks))
        if "group_index" in entry.parts:
            outputs["group_index"] = Output(names["group_index"], "I32", (inner,))
    for role in ("input_scale", "input_divisor"):
        if role in entry.parts:
            shape = _stored(entry, role)
            outputs["input_scale"] = Output(names["input_scale"], "F32", shape)
    if "pre_quant_scale" in entry.parts:
        part = entry.parts["pre_quant_scale"]
        outputs["pre_quant_scale"] = Output(names["pre_quant_scale"], part.dtype, part.shape)
    return outputs


def _scale_dtype(entry: Entry, fmt: str) -> str:
    if fmt not in QUANTIZED:
        return entry.parts["block_scale"].dtype
    return file_dtype(QUANTIZED[fmt].scale.dtypes[0])


def _experts(entry: Entry) -> tuple[int, ...]:
    for role in ("global_scale", "global_divisor"):
        if role in entry.parts:
            return _stored(entry, role)
    return entry.shape[:1] if len(entry.shape) == 3 and entry.fmt in PLAIN else ()


def _stored(entry: Entry, role: str) -> tuple[int, ...]:
    count = entry.parts[role].nbytes // 4
    if len(entry.shape) == 3 and count == 2 * entry.shape[0]:
        return entry.shape[0], 2
    return (count,) if count > 1 else ()
