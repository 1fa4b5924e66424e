"""The others' linear layers: humming-kernels, and Marlin of vLLM, called as their users call them.

Weights are prepared before anything is timed, outputs are given where the call takes them.  Results
are checked by the caller.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.peers.moe import LOCKS, humming_config, humming_kernel

Call = Callable[[], Tensor]


class Weight(NamedTuple):
    """A weight as checkpoints have it, codes [N, K / 2], scales [N, K / group]; values [N, K]."""

    fmt: str
    group: int
    packed: Tensor
    block_scale: Tensor
    dense: Tensor


class Humming:
    """humming-kernels, W4A16, with the kernel that its heuristics choose."""

    name = package = "humming-kernels"
    of = ""

    @staticmethod
    def missing() -> str:
        """Return what is not installed, or nothing."""
        return "" if importlib.util.find_spec("humming") else "humming-kernels is not installed"

    @staticmethod
    def compile_all(wanted: Iterable[tuple[str, int, int, int, int]]) -> None:
        """Compile kernels for format, N, K, group and rows, on all cores; failures show later."""

        def job(fmt: str, n: int, k: int, group: int, rows: int) -> None:
            with suppress(Exception):  # of another's compiler
                humming_kernel(humming_config(fmt, 0, n, k, group), rows, "dense")

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for future in [pool.submit(job, *each) for each in wanted]:
                future.result()

    def __init__(self, given: Weight) -> None:
        n, k = given.packed.shape[0], 2 * given.packed.shape[1]
        self.config = humming_config(given.fmt, 0, n, k, given.group)
        rows, columns = self.config.shape_n, self.config.shape_k
        codes = _padded(given.packed.view(torch.uint8), rows, columns // 2)
        scale = _padded(_typed(given), rows, columns // given.group)
        tensors = {"weight": codes.view(torch.int32), "weight_scale": scale}
        if given.fmt == "nvfp4":
            tensors["weight_scale_2"] = torch.ones(1, device=codes.device)
        transform = import_module("humming.transform").transform_humming_tensors
        self.tensors = dict(transform(self.config, tensors, already_padded=True))
        self.locks = torch.zeros(LOCKS, dtype=torch.int32, device=codes.device)
        self.n = n

    def calls(self, x: Tensor, copies: int) -> list[Call]:
        """Return calls, each on another copy of the weight."""
        launch_kernel = import_module("humming.ops").launch_kernel
        kernel = humming_kernel(self.config, x.shape[0], "dense")
        y = torch.empty(x.shape[0], self.n, dtype=x.dtype, device=x.device)

        def call(tensors: dict[str, Tensor]) -> Tensor:
            launch_kernel(configs=kernel.launch, locks=self.locks, inputs=x, outputs=y, **tensors)
            return y

        return [_bound(call, self.tensors)] + [
            _bound(call, {name: t.clone() for name, t in self.tensors.items()})
            for _ in range(copies - 1)
        ]


class Marlin:
    """Marlin of vLLM, W4A16.  The operators are registered by ``import vllm._custom_ops``."""

    name, package = "Marlin", "vllm"
    of = "of vLLM "
    FLOAT4, UINT4 = 562949953487106, 1125899907892224
    """vLLM's numbers of the types: E2M1, and integers less 8."""

    @staticmethod
    def missing() -> str:
        """Return what is not installed, or nothing."""
        if not hasattr(torch.ops._C, "marlin_gemm") and importlib.util.find_spec("vllm"):
            import_module("vllm._custom_ops")
        return "" if hasattr(torch.ops._C, "marlin_gemm") else "vLLM is not installed"

    def __init__(self, given: Weight) -> None:
        device = given.packed.device
        self.n, self.k = given.packed.shape[0], 2 * given.packed.shape[1]
        least = sorted((self.n & -self.n, self.k & -self.k))  # the powers of two that divide them
        fits = least[0] >= 64 and least[1] >= 128
        self.rows = self.n if fits else -(-self.n // 128) * 128
        self.columns = self.k if fits else -(-self.k // 128) * 128
        codes = _padded(given.packed.view(torch.uint8), self.rows, self.columns // 2)
        words = codes.view(torch.int32).T.contiguous()
        self.weight = torch.ops._C.gptq_marlin_repack(words, self.columns, self.rows, 4, False)
        scale = _padded(_typed(given).to(torch.bfloat16), self.rows, self.columns // given.group)
        # Of 64 columns next to each other, those 8 apart lie together.
        scale = scale.T.reshape(-1, 8, 8).transpose(1, 2).reshape(-1, self.rows)
        self.factor: Tensor | None = None
        if given.fmt == "nvfp4":
            scale, factor = _unsigned_e5m3(_fours(scale))
            self.factor = torch.full((1,), 2.0**119 / factor, device=device)
        elif given.fmt == "mxfp4":
            scale = _fours(scale).to(torch.float8_e8m0fnu)
        self.scale = scale.contiguous()
        self.type = self.UINT4 if given.fmt == "int4" else self.FLOAT4
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.workspace = torch.zeros(sms, dtype=torch.int32, device=device)

    def calls(self, x: Tensor, copies: int) -> list[Call]:
        """Return calls, each on another copy of the weight."""
        if self.columns != self.k:
            x = torch.nn.functional.pad(x, (0, self.columns - self.k))
        m = x.shape[0]
        y = torch.empty(m, self.rows, dtype=x.dtype, device=x.device)

        def call(weight: Tensor, scale: Tensor) -> Tensor:
            torch.ops._C.marlin_gemm(
                *(x, y, weight, None, scale, None, self.factor, None, self.workspace, self.type),
                *(m, self.rows, self.columns, False, True, False),
            )
            return y[:, : self.n]

        return [_bound(call, self.weight, self.scale)] + [
            _bound(call, self.weight.clone(), self.scale.clone()) for _ in range(copies - 1)
        ]


def _typed(given: Weight) -> Tensor:
    """Return scales with the dtype of what they are."""
    kinds = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu}
    return given.block_scale.view(kinds.get(given.fmt, torch.bfloat16))


def _bound(function: Callable[..., Tensor], *values: Any) -> Call:
    return lambda: function(*values)


def _padded(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """Return ``tensor`` in the corner of zeros [rows, columns]."""
    if tensor.shape == (rows, columns):
        return tensor.contiguous()
    bits = tensor if tensor.element_size() > 1 else tensor.view(torch.uint8)
    made = torch.zeros(rows, columns, dtype=bits.dtype, device=bits.device)
    made[: tensor.shape[0], : tensor.shape[1]] = bits
    return made.view(tensor.dtype)


def _fours(scale: Tensor) -> Tensor:
    """Return scales in the order in which Marlin widens four bytes: 0, 2, 1, 3."""
    return scale.reshape(-1, 2, 2).transpose(1, 2).reshape(scale.shape)


def _unsigned_e5m3(scale: Tensor) -> tuple[Tensor, float]:
    """Return scales times a power of two as Marlin's bytes without a sign, and that power.

    A byte is bits 14 to 7 of the half of 128 times the scale; the power keeps the first of them 1.
    """
    largest = scale.float().max()
    factor = float((448 / largest).log2().floor().exp2()) if 0 < largest < 448 else 1.0
    halves = (scale.float() * factor * 128).half()
    halves[halves < 2] = 0
    found = (halves.view(torch.int16) >> 7).to(torch.uint8)
    return found.view(torch.float8_e4m3fn), factor


PEERS: tuple[type[Humming] | type[Marlin], ...] = (Humming, Marlin)
