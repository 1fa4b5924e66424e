"""Tensor maps and bulk and tensor copies: pure index maths, no machine state (PTX ISA 9.7.9.25)."""

from blockscale.emulator.tma.encoding import decode, replace
from blockscale.emulator.tma.opcode import AsyncOp, parse
from blockscale.emulator.tma.reduction import combine, tensor_element
from blockscale.emulator.tma.tensormap import TensorMap
from blockscale.emulator.tma.tiling import Tiling
from blockscale.emulator.tma.transfer import Transfer, plan

__all__ = [
    "AsyncOp",
    "TensorMap",
    "Tiling",
    "Transfer",
    "combine",
    "decode",
    "parse",
    "plan",
    "replace",
    "tensor_element",
]
