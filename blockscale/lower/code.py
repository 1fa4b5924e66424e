"""Compiled pieces of CUDA libraries, as the lowering hands them to the export."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelCode:
    """A kernel's name, the types of its parameters, and the launch arguments that follow them.

    ``waits``: whether it waits for the kernel before it (griddepcontrol.wait) before it touches
    what that one may write; only then may a launch let it begin early.
    """

    name: str
    params: tuple[str, ...]
    launch: tuple[str, ...]
    waits: bool = True


@dataclass(frozen=True)
class FunctionCode:
    """One exported function for one architecture."""

    name: str
    arch: str
    host_c: str
    kernels: tuple[KernelCode, ...]
    image: bytes
