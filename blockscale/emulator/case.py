"""A kernel's test case: arguments, launch sizes and expected outputs, read from a case.json.

Paths are relative to the folder of the case.json. One file is one allocation, however often it is
named. bfloat16 is stored as uint16, FP4 and FP8 as uint8.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from blockscale.emulator.case_outputs import POISON, Outcome, judge, map_dtype, storage
from blockscale.emulator.launching.arguments import Struct
from blockscale.emulator.launching.front_door import launch
from blockscale.emulator.report import Report
from blockscale.emulator.tma import TensorMap

SCALARS: dict[str, Callable[[Any], Any]] = {
    "i32": np.int32,
    "u32": np.uint32,
    "i64": np.int64,
    "u64": np.uint64,
    "f32": np.float32,
    "f64": np.float64,
}
KINDS = ("buffer", "null", *SCALARS, "tensormap", "struct")

TENSOR_MAP_NAMES = {  # ours -> spellings of cuTensorMapEncodeTiled's parameters, lower case, no "_"
    "dtype": ("tensordatatype", "tensordtype", "datatype", "mapdtype", "dtype"),
    "global_dim": ("globaldim",),
    "global_strides_bytes": ("globalstridesbytes", "globalstrides"),
    "box_dim": ("boxdim",),
    "element_strides": ("elementstrides",),
    "interleave": ("interleave",),
    "swizzle": ("swizzle",),
    "oob_fill": ("oobfill",),
}
NESTED = ("map", "encode", "tensormap", "tensor_map")  # where the encoding may lie


class CaseError(ValueError):
    """A case.json that cannot be used."""


def read_ptx(path: Path) -> str:
    """Return the PTX text in a file; CaseError says why there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CaseError(
            f"{path}: {error.strerror}; the PTX of a case is kernel.ptx beside it, or the file "
            "that you name"
        ) from None
    except UnicodeDecodeError:
        raise CaseError(
            f"{path}: holds no text, but PTX is text; name the kernel's .ptx file, as nvcc --ptx "
            "writes it"
        ) from None


@dataclass
class Case:
    """One launch and what must come out of it."""

    path: Path
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem: int
    args: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    files: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    """The initial contents of every buffer, by the name of its file."""

    @classmethod
    def load(cls, path: str | Path) -> Case:
        """Read a case.json, or the one in a folder; CaseError says what is wrong."""
        path = Path(path)
        if path.is_dir():
            path = path / "case.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CaseError(
                f"{path}: {error.strerror}; name a case.json or a folder that has one"
            ) from None
        except ValueError as error:
            raise CaseError(f"{path}: no JSON: {error}; write it again") from None
        if not isinstance(data, dict):
            raise CaseError(f"{path}: holds a {type(data).__name__}; a case is one JSON object")
        reader = _Reader(path, data)
        case = cls(
            path=path,
            entry=str(reader.need(data, "entry", "the name of the kernel")),
            grid=reader.sizes("grid"),
            block=reader.sizes("block"),
            cluster=reader.sizes("cluster", (1, 1, 1)),
            dynamic_smem=reader.number(data, "dynamic_smem", 0),
            args=reader.list_of_objects("args"),
            outputs=reader.list_of_objects("outputs"),
        )
        for index, arg in enumerate(case.args):
            reader.check_arg(f"args[{index}]", arg)
        case.files = reader.files
        for index, output in enumerate(case.outputs):
            where = f"{path}: outputs[{index}]"
            name = case.output_file(where, output)
            if name not in case.files:
                raise CaseError(f"{where}: {name!r} is no buffer of args; name one of them")
            for key in ("expected", "expected_bits"):
                if isinstance(output.get(key), str):
                    reader.array(f"outputs[{index}]", output[key])
        return case

    @property
    def ptx(self) -> Path:
        """The kernel.ptx beside the case.json."""
        return self.path.parent / "kernel.ptx"

    def run(
        self,
        seed: int = 0,
        *,
        ptx: str | Path | None = None,
        max_instructions: int | None = None,
    ) -> tuple[Report, list[Outcome]]:
        """Run the kernel on fresh buffers; return its report and one outcome for each output.

        `ptx` is PTX text or the path of a file; by default kernel.ptx beside the case.json.
        """
        arrays = {name: array.copy() for name, array in self.files.items()}
        options: dict[str, Any] = {}
        if max_instructions is not None:
            options["max_instructions"] = max_instructions
        report = launch(
            self._text(ptx),
            entry=self.entry,
            grid=self.grid,
            block=self.block,
            cluster=self.cluster,
            dynamic_smem=self.dynamic_smem,
            args=[self._value(arg, arrays) for arg in self.args],
            seed=seed,
            **options,
        )
        return report, [self._outcome(i, o, arrays) for i, o in enumerate(self.outputs)]

    def _text(self, ptx: str | Path | None) -> str:
        if isinstance(ptx, str) and "\n" in ptx:
            return ptx
        return read_ptx(self.ptx if ptx is None else Path(ptx))

    def output_file(self, where: str, output: Mapping[str, Any]) -> str:
        """Return the name of the buffer that an output looks at."""
        if "file" in output:
            return str(output["file"])
        index = output.get("arg")
        if not isinstance(index, int) or not 0 <= index < len(self.args):
            raise CaseError(
                f"{where}: arg is {index!r}; it is the index of one of the {len(self.args)} args"
            )
        arg = self.args[index]
        if arg["kind"] == "struct":
            names = [p["file"] for p in arg["pointers"]]
            outs = [p["file"] for p in arg["pointers"] if p.get("role", "out") != "in"]
            if len(names) != 1 and len(outs) != 1:
                raise CaseError(
                    f"{where}: args[{index}] is a struct with {len(names)} pointers; name the "
                    'output\'s buffer: "file"'
                )
            return str((names if len(names) == 1 else outs)[0])
        if arg["kind"] not in ("buffer", "tensormap"):
            raise CaseError(
                f"{where}: args[{index}] is a {arg['kind']}; an output is a buffer, a tensormap or "
                "a struct with pointers"
            )
        return str(_buffer_of(arg, self.args)["file"])

    def _outcome(
        self, index: int, output: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> Outcome:
        where = f"{self.path}: outputs[{index}]"
        name = self.output_file(where, output)

        def read(file: str) -> np.ndarray:
            return np.load(self.path.parent / file)

        try:
            return judge(output, name, arrays[name], self.files[name], read)
        except ValueError as error:
            raise CaseError(f"{where}: {error}") from None

    def _value(self, arg: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
        """Return the argument of `launch` for one argument of the case."""
        kind = arg["kind"]
        if kind == "null":
            return None
        if kind in SCALARS:
            return _scalar(kind, arg["value"])
        if kind == "buffer":
            return arrays[arg["file"]]
        if kind == "struct":
            pointers = {int(p["offset"]): arrays[p["file"]] for p in arg["pointers"]}
            return Struct(bytes.fromhex(arg["hex"]), pointers)
        file = _buffer_of(arg, self.args)["file"]
        return TensorMap(arrays[file], **_tensor_map(arg))


class _Reader:
    """Checks the parts of a case.json; every sentence begins with the file and the place in it."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self.path, self.data = path, data
        self.files: dict[str, np.ndarray] = {}

    def fail(self, where: str, sentence: str) -> CaseError:
        return CaseError(f"{self.path}: {where}: {sentence}")

    def need(self, data: Mapping[str, Any], key: str, what: str, where: str = "") -> Any:
        if key not in data:
            raise self.fail(where or key, f"{key!r} is missing; give {what}")
        return data[key]

    def number(self, data: Mapping[str, Any], key: str, default: int) -> int:
        value = data.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.fail(key, f"is {value!r}; it is a number of bytes, 0 or more")
        return value

    def sizes(self, key: str, default: tuple[int, int, int] | None = None) -> tuple[int, int, int]:
        value = self.data.get(key, default)
        good = isinstance(value, list | tuple) and 1 <= len(value) <= 3
        if not good or not all(type(size) is int and size > 0 for size in value or ()):
            raise self.fail(key, f"is {value!r}; it is one to three positive integers, x first")
        x, y, z = (*(value or ()), 1, 1)[:3]
        return x, y, z

    def list_of_objects(self, key: str) -> list[dict[str, Any]]:
        value = self.need(self.data, key, "a list")
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.fail(key, "is no list of objects; see the format's description")
        return [dict(item) for item in value]

    def check_arg(self, where: str, arg: dict[str, Any]) -> None:
        kind = self.need(arg, "kind", f"one of {', '.join(KINDS)}", where)
        if kind not in KINDS:
            raise self.fail(where, f"kind {kind!r} is unknown; use one of {', '.join(KINDS)}")
        if kind in SCALARS:
            value = self.need(arg, "value", "a number", where)
            try:
                _scalar(kind, value)
            except (TypeError, ValueError, OverflowError) as error:
                raise self.fail(
                    where, f"value {value!r} is no {kind} ({error}); give a number that fits"
                ) from None
        elif kind == "buffer":
            self.buffer(where, arg)
        elif kind == "tensormap":
            self.buffer(where, _buffer_of(arg, self.data["args"]))
            missing = [name for name in ("global_dim", "box_dim") if name not in _tensor_map(arg)]
            if missing:
                raise self.fail(
                    where,
                    f"{missing[0]} is missing; give every argument of cuTensorMapEncodeTiled, "
                    "innermost dimension first",
                )
        elif kind == "struct":
            self.struct(where, arg)

    def struct(self, where: str, arg: dict[str, Any]) -> None:
        text = self.need(arg, "hex", "the bytes of the struct", where)
        try:
            content = bytes.fromhex(text)
        except (TypeError, ValueError):
            raise self.fail(where, f"hex {str(text)[:20]!r} is no row of hex digits") from None
        size = arg.get("size", len(content))
        if size != len(content):
            raise self.fail(
                where, f"hex holds {len(content)} bytes, size says {size}; make them agree"
            )
        arg.setdefault("pointers", [])
        for index, pointer in enumerate(arg["pointers"]):
            place = f"{where}.pointers[{index}]"
            offset = self.need(pointer, "offset", "the place of the address in the struct", place)
            if type(offset) is not int or not 0 <= offset <= len(content) - 8:
                raise self.fail(
                    place,
                    f"offset {offset!r} leaves no room for 8 bytes in a struct of {len(content)}; "
                    f"the last possible one is {len(content) - 8}",
                )
            self.buffer(place, pointer)

    def buffer(self, where: str, arg: Mapping[str, Any]) -> None:
        """Load a buffer's file once; check its dtype and shape."""
        name = str(self.need(arg, "file", "the .npy file of the buffer", where))
        dtype = arg.get("dtype")
        try:
            wanted = None if dtype is None else storage(dtype)
        except ValueError as error:
            raise self.fail(where, str(error)) from None
        shape = None if arg.get("shape") is None else tuple(arg["shape"])
        if name not in self.files:
            absent = not (self.path.parent / name).exists()
            if absent and arg.get("role") == "out" and wanted is not None and shape is not None:
                poison = np.full(prod(shape) * wanted.itemsize, POISON, np.uint8)
                self.files[name] = poison.view(wanted).reshape(shape)
            else:
                self.files[name] = self.array(where, name)
        array = self.files[name]
        if wanted is not None and array.dtype.itemsize != wanted.itemsize:
            raise self.fail(
                where, f"{name} holds {array.dtype}; dtype {dtype} is stored as {wanted}; mend one"
            )
        if shape is not None and array.shape != shape:
            raise self.fail(
                where, f"{name} has shape {array.shape}; the case says {shape}; make them agree"
            )

    def array(self, where: str, name: str) -> np.ndarray:
        try:
            return np.ascontiguousarray(np.load(self.path.parent / name, allow_pickle=False))
        except OSError as error:
            reason = error.strerror or "cannot be read"
            raise self.fail(where, f"{name}: {reason}; files lie beside the case.json") from None
        except ValueError as error:
            raise self.fail(where, f"{name} is no .npy file ({error}); save it again") from None


def _scalar(kind: str, value: Any) -> Any:
    """Return a NumPy scalar of exactly the width of the parameter."""
    if kind.startswith("f"):
        return SCALARS[kind](float(value))
    if isinstance(value, str):
        value = int(value, 0)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("not an integer")
    return SCALARS[kind](value)


def _buffer_of(arg: Mapping[str, Any], args: list[dict[str, Any]]) -> Mapping[str, Any]:
    """Return {file, dtype, shape, role} of a buffer or tensormap argument."""
    inner = arg.get("buffer")
    if isinstance(inner, dict):
        return inner
    if isinstance(inner, str):
        return {"file": inner}
    if isinstance(inner, int) and 0 <= inner < len(args):
        return args[inner]
    if arg["kind"] == "tensormap" and not _has_own_dtype(arg):
        return {key: value for key, value in arg.items() if key != "dtype"}
    return arg


def _has_own_dtype(arg: Mapping[str, Any]) -> bool:
    """Return whether a flat tensormap spells the map's dtype apart from the buffer's."""
    return any(_plain(key) in TENSOR_MAP_NAMES["dtype"][:-1] for key in arg) or any(
        isinstance(arg.get(key), dict) for key in NESTED
    )


def _plain(key: str) -> str:
    return key.lower().replace("_", "")


def _tensor_map(arg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `TensorMap` that a tensormap argument gives."""
    inner = next((arg[key] for key in NESTED if isinstance(arg.get(key), dict)), arg)
    given = {_plain(key): value for key, value in inner.items()}
    found = {}
    for name, spellings in TENSOR_MAP_NAMES.items():
        spelling = next((s for s in spellings if s in given), None)
        if spelling is not None:
            found[name] = given[spelling]
    if "dtype" not in found:
        found["dtype"] = _buffer_of(arg, []).get("dtype", "UINT8")
    found["dtype"] = map_dtype(found["dtype"])
    return found
