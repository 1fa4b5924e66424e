"""Torch tensors, NumPy arrays and other DLPack tensors, seen alike by the kernel runtime.

Neither torch nor ml_dtypes is imported here: a torch tensor can only arrive when the caller has
imported torch.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
import tvm_ffi

Kind = Literal["torch", "numpy", "dlpack"]

_CPU = 1  # DLPack's kDLCPU
_BFLOAT16 = (4, 16)  # DLPack's kDLBfloat, bits
NEGATIVE = "is a view with the negative bit, which kernels do not see", "{}.resolve_neg(), a copy"
"""What is wrong with ``torch._neg_view(x)``, and what to pass."""

_threads = threading.local()
_torch: ModuleType | None = None


def _nothing_watches() -> bool:
    return False


_watched: Callable[[], Any] = _nothing_watches


@dataclass(frozen=True)
class Described:
    """What the checks need to know of a tensor."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    device: str
    contiguous: bool
    writable: bool
    grad: bool


def torch_module() -> ModuleType | None:
    """Return torch if the process has imported it (to the end)."""
    global _torch, _watched
    if _torch is None and hasattr(sys.modules.get("torch"), "Tensor"):
        _torch = sys.modules["torch"]
        _watched = watcher(_torch)
    return _torch


def watcher(torch: ModuleType) -> Callable[[], Any]:
    """Return the test whether in this thread torch records, transforms or differentiates calls.

    That is: dispatch modes (make_fx, fake tensors), functorch's levels (vmap, grad, jvp,
    functionalize), jit.trace, forward-mode AD.  None of them sees a kernel that is called from
    Python.
    """
    modes, tracing = torch._C._len_torch_dispatch_stack, torch._C._is_tracing
    transforms, forward = torch._C._are_functorch_transforms_active, torch.autograd.forward_ad
    return lambda: modes() or transforms() or tracing() or forward._current_level >= 0


def check_unwatched(where: str) -> None:
    """RuntimeError where `watcher` says that torch would not see a call of a kernel."""
    torch = torch_module()
    if torch is None or not _watched():
        return
    if torch._C._len_torch_dispatch_stack():
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        what = f"a dispatch mode ({type(mode).__name__})"
    elif torch._C._are_functorch_transforms_active():
        what = "a transform of torch.func (vmap, grad, jvp, functionalize)"
    else:
        what = "jit.trace" if torch._C._is_tracing() else "forward-mode AD"
    raise RuntimeError(
        f"{where}: {what} is at work in this thread, and would not see the call of a library's "
        "function; call the function of blockscale that runs this kernel, or call it outside"
    )


def stranger(value: Any) -> tuple[str, str] | None:
    """Return why the memory of a tensor is not its values, and what to pass; None: it is.

    Torch keeps some views lazily, and classes with ``__torch_dispatch__`` do as they please.
    """
    torch = torch_module()
    if torch is not None and isinstance(value, torch.Tensor):
        if redirects(type(value)):
            what = f"is a {type(value).__name__}, whose class answers torch's operations itself"
            return what, "a plain tensor, or call the function of blockscale, which torch sees"
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            return "belongs to a transform of torch.func", "a plain tensor"
        if torch._is_functional_tensor(value):
            return "is a functional tensor, not held in memory", "a plain tensor"
        if value.is_neg():
            return NEGATIVE
    elif isinstance(value, np.ma.MaskedArray):
        return "is a masked array, and kernels see no masks", "{}.filled(value), or {}.data"
    elif isinstance(value, np.ndarray) and not value.dtype.isnative:
        order = "big" if sys.byteorder == "little" else "little"
        return f"is {order}-endian", "{}.astype({}.dtype.newbyteorder('='))"
    return None


def redirects(kind: type) -> bool:
    """Return whether tensors of this class get torch's operations themselves (fake, wrapped)."""
    torch = torch_module()
    assert torch is not None, "there is a class of tensors"
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def describe(value: Any) -> Described | None:
    """Return the description of a tensor, or None for what is no tensor."""
    torch = torch_module()
    if torch is not None and isinstance(value, torch.Tensor):
        strided = value.layout == torch.strided
        return Described(
            "torch",
            tuple(value.shape),
            str(value.dtype).removeprefix("torch."),
            str(value.device),
            strided and value.is_contiguous(),
            True,
            value.requires_grad and torch.is_grad_enabled(),
        )
    if isinstance(value, np.ndarray):
        contiguous, writable = value.flags.c_contiguous, value.flags.writeable
        return Described("numpy", value.shape, value.dtype.name, "cpu", contiguous, writable, False)
    if isinstance(value, tvm_ffi.Tensor):
        device = "cpu" if value.device.dlpack_device_type() == _CPU else str(value.device)
        return Described(
            "dlpack",
            tuple(value.shape),
            str(value.dtype),
            device,
            value.is_contiguous(),
            True,
            False,
        )
    return None


def adopt(value: Any) -> Any:
    """Return ``value``, or a view of it as tvm_ffi.Tensor if it is some other library's tensor."""
    if isinstance(value, (np.ndarray, tvm_ffi.Tensor)) or not hasattr(value, "__dlpack__"):
        return value
    torch = torch_module()
    if torch is not None and isinstance(value, torch.Tensor):
        return value
    return tvm_ffi.from_dlpack(value)


def as_bytes(value: Any) -> Any:
    """Return a uint8 view of a contiguous tensor of one-byte elements."""
    if isinstance(value, np.ndarray):
        return value.view(np.uint8)
    torch = torch_module()
    assert torch is not None, "only torch and NumPy have 8-bit float dtypes that reach this"
    return value.view(torch.uint8)


def _numpy_address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def address_of(got: Described) -> Callable[[Any], int]:
    """Return the function that tells the address of such a tensor's first element."""
    if got.kind == "numpy":
        return _numpy_address
    torch = torch_module()
    if got.kind == "torch" and torch is not None:
        data_ptr: Callable[[Any], int] = torch.Tensor.data_ptr
        return data_ptr
    return tvm_ffi.Tensor.data_ptr


def numel(shape: tuple[int, ...]) -> int:
    """Return the number of elements."""
    return math.prod(shape)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype called ``name``.

    Raises:
        TypeError: it is bfloat16 and ml_dtypes is not installed.
    """
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(
            "NumPy has no bfloat16 without the ml_dtypes package; install ml_dtypes, or pass "
            "torch tensors"
        ) from None
    return np.dtype(ml_dtypes.bfloat16)


def constant(shape: tuple[int, ...], dtype: str, value: float) -> tvm_ffi.Tensor:
    """Return a tensor filled with ``value``."""
    return pass_numpy(np.full(shape, value, numpy_dtype(dtype)))


class _Capsule(ctypes.Structure):
    """The head of DLPack's DLManagedTensor, which begins with a DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
    )


class _Writable:
    """The same memory without the read-only flag, which DLPack could not express before 1.0."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.keep_alive = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def pass_numpy(array: np.ndarray[Any, Any]) -> tvm_ffi.Tensor:
    """Return a view of a NumPy array for a kernel to take, bfloat16 and read-only arrays included.

    A read-only array must be an input, which kernels do not write.
    """
    is_bfloat16 = array.dtype.name == "bfloat16"
    bits = array.view(np.uint16) if is_bfloat16 else array
    if not bits.flags.writeable:
        bits = np.asarray(_Writable(bits))
    if not is_bfloat16:
        return tvm_ffi.from_dlpack(bits)
    # NumPy's DLPack knows no bfloat16: export the bits as uint16, then correct the dtype.
    capsule = bits.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    head = _Capsule.from_address(get(capsule, b"dltensor"))
    head.code, head.bits = _BFLOAT16
    return tvm_ffi.from_dlpack(capsule)


def pack(value: Any) -> Any:
    """Return a view of a tensor that holds its memory, and costs less to pass; or the value."""
    torch = torch_module()
    if torch is not None and isinstance(value, torch.Tensor):
        return tvm_ffi.from_dlpack(value.detach())
    return tvm_ffi.from_dlpack(value) if isinstance(value, np.ndarray) else value


def honour_torch_threads(torch: ModuleType) -> None:
    """Give this thread the OpenMP thread count of torch.set_num_threads(), once per thread.

    OpenMP keeps that number per thread, and torch hands it on when a thread first asks for it.
    """
    if not getattr(_threads, "ready", False):
        torch.get_num_threads()
        _threads.ready = True
