"""The others: humming-kernels and triton_kernels, called as their users call them.

Routing metadata, padding and layouts are prepared before anything is timed, activations of their
own kernels are left out: what is timed is gemm1 and gemm2.  Both GEMMs are checked against dense
references of a few rows, so that a wrong call cannot pass for a fast one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bench.measure import describe
from bench.moe import cases, data
from bench.moe.cases import Case, Model
from bench.moe.data import Inputs, Pair, Weights, gemm_error

# ---- humming-kernels ---------------------------------------------------------------------------

HUMMING_KINDS = ("indexed", "grouped_contiguous")
PAD_ROWS, PAD_K = 256, 128  # as vLLM pads for it
HUMMING_TYPES = {
    "nvfp4": ("float4e2m1", "float8e4m3"),
    "mxfp4": ("float4e2m1", "float8e8m0"),
    "int4": ("uint4", "bfloat16"),
}
LOCKS = 1 << 14


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def humming_config(
    fmt: str, experts: int, rows: int, k: int, group: int = 0, by_bytes: bool = False
) -> Any:
    """Return humming's LayerConfig of one GEMM, W4A16 or W4A8 (E4M3); of no expert: dense."""
    dtypes = import_module("humming.dtypes")
    code, scale = HUMMING_TYPES[fmt]
    return import_module("humming.config").LayerConfig(
        a_dtype=dtypes.float8e4m3 if by_bytes else dtypes.bfloat16,
        b_dtype=dtypes.DataType.from_str(code),
        bs_dtype=dtypes.DataType.from_str(scale),
        c_dtype=dtypes.bfloat16,
        shape_n=_up(rows, PAD_ROWS),
        shape_k=_up(k, PAD_K),
        pad_shape_n=_up(rows, PAD_ROWS) - rows,
        pad_shape_k=_up(k, PAD_K) - k,
        num_experts=experts,
        weight_scale_group_size=group or cases.GROUP[fmt],
        weight_scale_type="group",
        weight_scale_2_type="tensor" if fmt == "nvfp4" else "none",
    )


def humming_configs(model: Model, fmt: str, by_bytes: bool = False) -> tuple[Any, Any]:
    """Return the LayerConfigs of gemm1 and gemm2."""
    first, second = (2 * model.intermediate, model.hidden), (model.hidden, model.intermediate)
    return (
        humming_config(fmt, model.experts, *first, by_bytes=by_bytes),
        humming_config(fmt, model.experts, *second, by_bytes=by_bytes),
    )


@dataclass(frozen=True)
class HummingKernel:
    """A compiled kernel: what its launcher takes, and its rows of tokens."""

    launch: Tensor
    block: int


def humming_kernel(config: Any, slots: int, kind: str) -> HummingKernel:
    """Return the kernel that humming's own heuristics choose, compiled now or before."""
    heuristics = import_module("humming.tune").get_heuristics_config
    tuning = dict(heuristics(config, shape_m=slots, gemm_type=kind))
    compute = {"use_f16_accum": False, "use_batch_invariant": False, "gemm_type": kind}
    sms = tuning.pop("num_sms", 0)
    compile_ = import_module("humming.kernel.humming").HummingKernel
    compiled = compile_(**(json.loads(config.to_str()) | compute | tuning))
    launch = torch.tensor([0, 1 << 30, compiled.kernel_id, sms], dtype=torch.int64)
    return HummingKernel(launch, tuning["block_shape"][0])


def compile_humming(chosen: Iterable[Case], by_bytes: bool = False) -> dict[str, str]:
    """Compile what the cases need on all cores; return what failed, by case."""
    jobs = [(case, kind, index) for case in chosen for kind in HUMMING_KINDS for index in (0, 1)]
    failed: dict[str, str] = {}

    def job(case: Case, kind: str, index: int) -> None:
        try:
            config = humming_configs(case.model, case.fmt, by_bytes)[index]
            humming_kernel(config, case.slots, kind)
        except Exception as error:  # of another's compiler
            failed[f"{case.name}, {kind}, gemm{index + 1}"] = describe(error)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for future in [pool.submit(job, *args) for args in jobs]:
            future.result()
    return failed


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor of a dtype that can be gathered."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _taken(tensor: Tensor, rows: Tensor) -> Tensor:
    return _bits(tensor)[rows.long()].view(tensor.dtype)


def _padded(tensor: Tensor, rows: int, columns: int, value: int = 0) -> Tensor:
    """Return bytes [E, rows, columns] with ``tensor`` in the corner."""
    source = tensor.view(torch.uint8)
    if source.shape[1:] == (rows, columns):
        return source.contiguous()
    result = torch.full(
        (source.shape[0], rows, columns), value, dtype=torch.uint8, device=source.device
    )
    result[:, : source.shape[1], : source.shape[2]] = source
    return result


class Humming:
    """humming-kernels on one layer; variants are its two kinds of grouped GEMM."""

    name = "humming-kernels"

    @staticmethod
    def takes(weights: Weights) -> bool:
        """Return whether it has the format."""
        return weights.fmt in HUMMING_TYPES

    variants = HUMMING_KINDS

    def __init__(self, weights: Weights, by_bytes: bool = False) -> None:
        self.weights, self.by_bytes = weights, by_bytes
        self.configs = humming_configs(weights.model, weights.fmt, by_bytes)
        self.tensors = tuple(
            self._transformed(config, which)
            for config, which in zip(self.configs, ("w13", "w2"), strict=True)
        )
        device = weights.w13.device
        self.locks = torch.zeros(LOCKS, dtype=torch.int32, device=device)

    def _transformed(self, config: Any, which: str) -> dict[str, Tensor]:
        transform = import_module("humming.transform").transform_humming_tensors
        weights = self.weights
        group = cases.GROUP[weights.fmt]
        scale_bytes = cases.SCALE_BYTES[weights.fmt]
        rows, k = config.shape_n, config.shape_k
        kinds = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu}
        scale = _padded(getattr(weights, f"{which}_scale"), rows, k // group * scale_bytes)
        given = {
            "weight": _padded(getattr(weights, which), rows, k // 2).view(torch.int32),
            "weight_scale": scale.view(kinds.get(weights.fmt, torch.bfloat16)),
        }
        if weights.fmt == "nvfp4":
            given["weight_scale_2"] = getattr(weights, f"{which}_global")
        return dict(transform(config, given, already_padded=True))

    def pair(self, case: Case, inputs: Inputs, variant: str) -> Pair:
        """Return the call's GEMMs; gemm2 reads random rows, not those of gemm1."""
        kernels = [humming_kernel(config, case.slots, variant) for config in self.configs]
        model, x = case.model, inputs.x
        h = torch.randn(case.slots, model.intermediate, dtype=torch.bfloat16, device=x.device)
        y1 = torch.zeros(case.slots, 2 * model.intermediate, dtype=torch.bfloat16, device=x.device)
        y2 = torch.zeros(case.slots, model.hidden, dtype=torch.bfloat16, device=x.device)
        order, counts = cases.sorted_slots(inputs.ids, model.experts)
        indexed = variant == "indexed"
        if indexed:
            routes = [self._blocks(case, inputs, kernel.block) for kernel in kernels]
            routes[0]["top_k"], routes[1]["top_k"] = model.top_k, 1
            places = list(range(case.slots))
        else:
            offsets = torch.zeros(model.experts + 1, dtype=torch.int64, device=x.device)
            offsets[1:] = counts.cumsum(0)
            routes = [{"expert_layout": offsets, "valid_shape_m": case.slots}] * 2
            places = torch.argsort(order).tolist()
        rows = order // model.top_k
        given, x, given_h, h = *self._given(x), *self._given(h)
        sorted_x = x if indexed else x[rows.long()]
        moved = given if indexed else {name: _taken(t, rows) for name, t in given.items()}

        def run() -> None:
            if not indexed:
                # This kind does not gather: x by expert is data, not metadata, so it counts.
                for name, tensor in given.items():
                    torch.index_select(_bits(tensor), 0, rows, out=_bits(moved[name]))
            self._launch(0, kernels[0], outputs=y1, **moved, **routes[0])
            self._launch(1, kernels[1], outputs=y2, **given_h, **routes[1])

        def error() -> float:
            def gathered(slot: int) -> Tensor:
                return x[slot // model.top_k] if indexed else sorted_x[places[slot]]

            def placed(y: Tensor) -> Callable[[int], Tensor]:
                return lambda slot: y[places[slot]]

            ids, weights = inputs.ids, self.weights
            first = gemm_error(weights, "w13", ids, gathered, placed(y1))
            return max(first, gemm_error(weights, "w2", ids, placed(h), placed(y2)))

        return Pair(run, error)

    def _given(self, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return rows as its kernels take them, quantised if they are, and their values."""
        if not self.by_bytes:
            return {"inputs": x}, x
        scale = data.row_scales(x)
        codes = (x.float() / scale).to(torch.float8_e4m3fn)
        return {"inputs": codes, "input_scale": scale}, codes.float() * scale

    @staticmethod
    def _blocks(case: Case, inputs: Inputs, block: int) -> dict[str, Any]:
        """Return the routing metadata of the indexed kind for blocks of so many rows."""
        device = inputs.x.device
        slots, owners = cases.aligned_blocks(inputs.ids, case.model.experts, block)
        return {
            "sorted_ids": slots.to(device),
            "expert_ids": owners.to(device),
            "num_tokens_padded": torch.tensor([slots.numel()], dtype=torch.int32, device=device),
            "valid_shape_m": case.slots,
        }

    def _launch(self, index: int, kernel: HummingKernel, **given: Any) -> None:
        import_module("humming.ops").launch_kernel(
            configs=kernel.launch, locks=self.locks, **given, **self.tensors[index]
        )


# ---- triton_kernels ----------------------------------------------------------------------------


def _triton(name: str) -> Any:
    return import_module(f"triton_kernels.{name}")


class _Divided:
    """Indices whose quotient by top_k is known: saves triton_kernels a kernel within the time."""

    def __init__(self, quotient: Tensor) -> None:
        self.quotient, self.shape = quotient, quotient.shape

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].quotient


class TritonKernels:
    """triton_kernels on one layer of mxfp4; variants are the warps its layout is made for.

    gemm1 has its own SwiGLU (gpt-oss) fused, which halves what it writes, for every model.
    """

    name = "triton_kernels"
    variants = ("8 warps", "4 warps")

    @staticmethod
    def takes(weights: Weights) -> bool:
        """Return whether it has the format."""
        return weights.fmt == "mxfp4"

    def __init__(self, weights: Weights) -> None:
        # As vLLM sets it for Hopper.
        _triton("matmul_ogs_details.opt_flags").update_opt_flags_constraints({"split_k": 1})
        self.weights = weights
        self._layouts: dict[str, Any] = {}

    @cached_property
    def _interleaved(self) -> tuple[tuple[Tensor, Tensor], ...]:
        def pairs(tensor: Tensor) -> Tensor:
            gate, up = tensor.chunk(2, dim=1)
            return torch.stack((gate, up), dim=2).flatten(1, 2)

        w = self.weights
        return (pairs(w.w13), pairs(w.w13_scale)), (w.w2, w.w2_scale)

    def _swizzled(self, variant: str) -> Any:
        """Return (weight, PrecisionConfig) of both GEMMs, as vLLM makes them for Hopper."""
        ogs, tensor = _triton("matmul_ogs"), _triton("tensor")
        layout = _triton("tensor_details.layout")
        warps = int(variant.split()[0])
        made = []
        for codes, scale in self._interleaved:
            padded = torch.nn.functional.pad(scale, (0, -scale.shape[-1] % 4))
            value, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
            scales, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(
                mx_axis=1, num_warps=warps
            )
            columns = tensor.wrap_torch_tensor(codes.transpose(-2, -1), dtype=tensor.FP4)
            weight = tensor.convert_layout(columns, value, **value_options)
            columns = tensor.wrap_torch_tensor(padded.transpose(-2, -1))
            factors = tensor.convert_layout(columns, scales, **scale_options)
            made.append((weight, ogs.PrecisionConfig(weight_scale=factors)))
        return made

    def _routing(self, case: Case, inputs: Inputs) -> tuple[Any, Any, list[int]]:
        ogs, model = _triton("matmul_ogs"), case.model
        order, counts = cases.sorted_slots(inputs.ids, model.experts)
        place = torch.argsort(order).to(torch.int32)
        ragged = _triton("tensor").make_ragged_tensor_metadata_torch(counts, case.slots)
        routing = ogs.RoutingData(None, counts, model.experts, model.top_k, ragged)
        quotient = torch.div(order, model.top_k, rounding_mode="trunc")
        gather = ogs.GatherIndx(src_indx=_Divided(quotient), dst_indx=place)
        return routing, gather, place.tolist()

    def pair(self, case: Case, inputs: Inputs, variant: str) -> Pair:
        """Return the call's GEMMs; gemm2 reads the rows of gemm1 and leaves them sorted."""
        ogs = _triton("matmul_ogs")
        if variant not in self._layouts:
            self._layouts[variant] = self._swizzled(variant)
        (w13, precision1), (w2, precision2) = self._layouts[variant]
        routing, gather, place = self._routing(case, inputs)
        model, x = case.model, inputs.x
        y1 = torch.zeros(case.slots, model.intermediate, dtype=torch.bfloat16, device=x.device)
        y2 = torch.zeros(case.slots, model.hidden, dtype=torch.bfloat16, device=x.device)
        function = _triton("swiglu").swiglu_fn
        specs = ogs.FnSpecs("swiglu", function, ("alpha", "limit"), reduction_n=2)
        activation = ogs.FusedActivation(specs, data.SWIGLU_OAI)

        def run() -> None:
            ogs.matmul_ogs(
                *(x, w13, None, routing),
                gather_indx=gather,
                precision_config=precision1,
                fused_activation=activation,
                y=y1,
            )
            ogs.matmul_ogs(y1, w2, None, routing, precision_config=precision2, y=y2)

        def error() -> float:
            first = gemm_error(
                self.weights,
                "w13",
                inputs.ids,
                lambda s: x[s // model.top_k],
                lambda s: y1[place[s]],
                data.swiglu_oai,
            )
            second = gemm_error(
                self.weights, "w2", inputs.ids, lambda s: y1[place[s]], lambda s: y2[place[s]]
            )
            return max(first, second)

        return Pair(run, error)


PEERS: tuple[type[Humming] | type[TritonKernels], ...] = (Humming, TritonKernels)
