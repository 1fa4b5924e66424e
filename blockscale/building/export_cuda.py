"""Compiled CUDA functions and a manifest -> one library that needs no compiler to run.

The library holds, per function and architecture, TVM's host code and the kernels' machine code, and
once the runtime of `native/cuda_library.h`, which finds the driver when a function is first called.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import os
import re
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tvm_ffi
from tvm_ffi import libinfo

from blockscale.base import files, shapes, words
from blockscale.base.errors import LinkError
from blockscale.base.files import HOST_C
from blockscale.base.manifest import REPLAY, append_manifest, validate
from blockscale.building.export import CFLAGS, check_folder, link, run
from blockscale.lower.code import FunctionCode, KernelCode
from blockscale.specs.spec import Param

RUNTIME_SOURCES = (
    *("cuda_runtime.c", "cuda_arguments.c", "cuda_choice.c"),
    *("cuda_gemm.c", "cuda_linear.c", "cuda_moe.c", "cuda_int4.c"),
)
HOST_CFLAGS = ("-O1", "-fPIC", "-fvisibility=hidden", "-w", "-Dhalf=uint16_t")  # as TVM writes C

MAX_PARAMS = 32
MAX_RANK = 8
MAX_KERNEL_PARAMS = 256
"""Limits of native/cuda_library.h and .c."""

VECTOR_BYTES = 16
"""The widest access of a thread, to which kernels may expect the rows of a tensor to be aligned."""

_ARCH = re.compile(r"(?:sm|compute)_(\d+)(\d)([af]?)")
_LOOKUP = re.compile(r'TVMFFIEnvModLookupFromImports\(__tvm_ffi__library_ctx, "([^"]+)"')
_DIRECT = {"handle", "bool", "float64"} | {f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)}
_KINDS = {"float32": "BS_FLOAT32", "tensormap": "BS_BY_ADDRESS"}
_PLACES = {
    f"{tag}.{axis}": f"{place} + {i}"
    for tag, place in {
        "blockIdx": "BS_GRID",
        "threadIdx": "BS_BLOCK",
        "clusterCtaIdx": "BS_CLUSTER",
        "preferredClusterCtaIdx": "BS_PREFERRED_CLUSTER",
    }.items()
    for i, axis in enumerate("xyz")
} | {"tirx.use_dyn_shared_memory": "BS_SHARED"}
_OPTIONS = {
    "clusterCtaIdx.": "BS_HAS_CLUSTER",
    "preferredClusterCtaIdx.": "BS_HAS_PREFERRED_CLUSTER",
    "tirx.use_programtic_dependent_launch": "BS_PROGRAMMATIC",
    "tirx.use_cooperative_launch": "BS_COOPERATIVE",
}
_FLAGS = ("tirx.use_programtic_dependent_launch", "tirx.use_cooperative_launch")  # no argument


def write_cuda_library(
    functions: Sequence[FunctionCode],
    manifest: Mapping[str, Any],
    out: Path | str,
    *,
    cc: str = "gcc",
    runtime: Path | None = None,
) -> Path:
    """Link ``functions`` into the library ``out``, append ``manifest``, and return the path.

    A tensor parameter of the manifest may say ``align``, the bytes of which its address must be a
    multiple; where it does not, `VECTOR_BYTES` is written into the file, or the size of an element
    for what is shorter or has one symbolic dimension.

    Args:
        functions: every function of the manifest, each for one architecture or more.
        manifest: see `blockscale.base.manifest`; of target kind "cuda".
        out: where to write; the folder must exist.  The file appears complete or not at all.
        cc: the C compiler; it must understand GCC's options.
        runtime: a folder that keeps objects for the libraries of one session: the runtime's, which
            take half the time of a small library, and those of host code that many candidates have.

    Raises:
        ValueError: the manifest is wrong, or does not fit the functions, or a kernel wants what the
            runtime does not have.
        LinkError: the compiler is missing or reports an error.
        OSError: ``out`` cannot be written.
    """
    out = Path(out)
    contents = _with_alignment(manifest, out)
    check_folder(out)
    _check(functions, contents)
    with files.temporary_folder() as folder:
        commands, objects = _commands(functions, contents, folder, cc, runtime)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, commands))
        for made in objects:
            if not made.exists():
                made.parent.mkdir(parents=True, exist_ok=True)
                files.write(made, (folder / made.name).read_bytes())
        elf = link(objects, [*contents["functions"], *REPLAY], folder, cc)
    files.write(out, append_manifest(elf, contents), 0o755)
    return out


def _with_alignment(manifest: Mapping[str, Any], out: Path) -> dict[str, Any]:
    validate(manifest, f"write_cuda_library({out.name})")
    contents = copy.deepcopy(dict(manifest))
    for function in contents["functions"].values():
        for entry in function["params"]:
            if entry["shape"] is not None and entry.get("align") is None:
                entry["align"] = _default_alignment(Param.from_manifest(entry))
    return contents


def _default_alignment(param: Param) -> int:
    bytes_ = param.itemsize
    for dim in param.dims:
        if dim.symbols:
            return VECTOR_BYTES if len(param.dims) > 1 else param.itemsize
        bytes_ *= dim.evaluate({})
    return VECTOR_BYTES if bytes_ >= VECTOR_BYTES else param.itemsize


def _check(functions: Sequence[FunctionCode], manifest: Mapping[str, Any]) -> None:
    """Check that the functions are those of the manifest, and can be launched."""
    target = manifest["target"]
    if target["kind"] != "cuda":
        raise ValueError(
            f"write_cuda_library: the manifest is for target {target['kind']!r}; pass one for "
            "'cuda', or call write_library"
        )
    seen: set[tuple[str, str]] = set()
    for code in functions:
        where = f"write_cuda_library: {code.name} for {code.arch}"
        if (code.name, code.arch) in seen:
            raise ValueError(f"{where} is there twice; pass each function once per architecture")
        seen.add((code.name, code.arch))
        if _ARCH.fullmatch(code.arch) is None:
            raise ValueError(f"{where}: no architecture is spelled so; write for example 'sm_100a'")
        if f"{_entry(code)}(" not in code.host_c:
            raise ValueError(
                f"{where}: the host code does not define {_entry(code)}; give the function this "
                "symbol before lowering it"
            )
        wanted = set(_LOOKUP.findall(code.host_c)) - {kernel.name for kernel in code.kernels}
        if wanted - {"__tvm_set_device"}:
            raise ValueError(
                f"{where}: the host code calls {sorted(wanted - {'__tvm_set_device'})}, which the "
                "runtime does not have; keep calls of packed functions out of it"
            )
        for kernel in code.kernels:
            _check_kernel(kernel, where)
    names, archs = {name for name, _ in seen}, {arch for _, arch in seen}
    for what, have, said in (
        ("functions", names, set(manifest["functions"])),
        ("target.archs", archs, set(target["archs"])),
    ):
        if have != said:
            raise ValueError(
                f"write_cuda_library: the manifest's {what} differ from the code's in "
                f"{sorted(have ^ said)}; list what is passed"
            )


def _check_kernel(kernel: KernelCode, where: str) -> None:
    for kind in kernel.params:
        if kind not in _DIRECT and kind not in _KINDS:
            raise ValueError(
                f"{where}: kernel {kernel.name} takes a {kind} by value, which the runtime cannot "
                "pass; pass float32"
            )
    if len(kernel.params) > MAX_KERNEL_PARAMS:
        raise ValueError(
            f"{where}: kernel {kernel.name} has {len(kernel.params)} parameters; "
            f"{MAX_KERNEL_PARAMS} is the limit"
        )
    for tag in kernel.launch:
        if tag not in _PLACES and tag not in _FLAGS:
            raise ValueError(
                f"{where}: kernel {kernel.name} has launch parameter {tag!r}, which is none of "
                f"{[*_PLACES, *_FLAGS]}; do without it"
            )


def _host_code(code: FunctionCode) -> str:
    """Return TVM's host code, whose launches pass on the function's own first argument."""
    launch = "blockscale_launch((const BsCall *)self_handle, "
    text = code.host_c.replace("TVMFFIFunctionCall(", launch)
    return f'#include "cuda_library.h"\n{text}'


def _entry(code: FunctionCode) -> str:
    """Return the symbol of TVM's host function."""
    return f"__tvm_ffi_{code.name}__{code.arch}"


def _commands(
    functions: Sequence[FunctionCode],
    manifest: Mapping[str, Any],
    folder: Path,
    cc: str,
    runtime: Path | None,
) -> tuple[list[list[str]], list[Path]]:
    """Write the sources into ``folder``; return the commands that compile them, and the objects.

    All are compiled into ``folder``.  Those of which libraries of one session have the same, the
    runtime and TVM's host code, are expected in ``runtime``, and are compiled only if they are not
    there.
    """
    shared = runtime or folder
    (folder / "tables.c").write_text(_tables(functions, manifest, folder))
    made: list[tuple[Path, Path, tuple[str, ...]]] = [
        (HOST_C / name, shared / f"{Path(name).stem}.o", CFLAGS) for name in RUNTIME_SOURCES
    ]
    made.append((folder / "tables.c", folder / "tables.o", CFLAGS))
    for i, code in enumerate(functions):
        (folder / f"image{i}").write_bytes(code.image)
        source, text = folder / f"host{i}.c", _host_code(code)
        source.write_text(text)
        renamed = {
            "TVMFFIEnvModLookupFromImports": f"blockscale_lookup_{i}",
            "__tvm_ffi_main": f"blockscale_main_{i}",
            "__tvm_ffi__library_ctx": f"blockscale_context_{i}",
        }
        defines = tuple(f"-D{old}={new}" for old, new in renamed.items())
        digest = hashlib.sha256(text.encode()).hexdigest()
        made.append((source, shared / f"host{i}-{digest[:24]}.o", (*HOST_CFLAGS, *defines)))
    include = [f"-I{path}" for path in (*_include_folders(), HOST_C)]
    commands = [
        [cc, *flags, *include, "-c", str(source), "-o", str(folder / out.name)]
        for source, out, flags in made
        if not out.exists()
    ]
    return commands, [out for _, out, _ in made]


def _include_folders() -> list[str]:
    found = importlib.util.find_spec("tvm")
    if found is None or not found.submodule_search_locations:
        raise LinkError(f"write_cuda_library: TVM's headers are missing; {words.install()}")
    tvm = Path(found.submodule_search_locations[0]) / "include"
    return [str(tvm), libinfo.find_include_path(), libinfo.find_dlpack_include_path()]


def _tables(functions: Sequence[FunctionCode], manifest: Mapping[str, Any], folder: Path) -> str:
    """Return C source: code, kernels, entries and parameters, and the exported stubs."""
    parts = ['#include "cuda_library.h"\n']
    parts += [_code_tables(i, code, folder) for i, code in enumerate(functions)]
    records, stubs = [], []
    for number, (name, function) in enumerate(manifest["functions"].items()):
        params = [Param.from_manifest(entry) for entry in function["params"]]
        parts.append(_param_tables(number, name, params))
        entries = [_entry_row(code) for code in functions if code.name == name]
        parts.append(f"static const BsEntry entries_{number}[] = {{{', '.join(entries)}}};")
        records.append(
            f"{{{_string(name)}, params_{number}, entries_{number}, {len(params)}, {len(entries)}}}"
        )
        stubs.append(
            f'__attribute__((visibility("default"))) int __tvm_ffi_{name}(void *self, '
            "const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {\n"
            f"  (void)self;\n  return blockscale_call(&functions[{number}], args, count, result);\n"
            "}"
        )
    stubs += [
        f'__attribute__((visibility("default"))) int __tvm_ffi_{name}(void *self, '
        "const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {\n"
        f"  (void)self, (void)result;\n  return {name}(args, count);\n}}"
        for name in REPLAY
    ]
    parts.append("static const BsFunction functions[] = {" + ",\n".join(records) + "};")
    return "\n".join([*parts, *stubs, ""])


def _code_tables(number: int, code: FunctionCode, folder: Path) -> str:
    """Return one function's code for one architecture, its kernels, and their look-up."""
    lines = [
        f'__asm__(".section .rodata\\n.balign 64\\nblockscale_code_{number}: '
        f'.incbin \\"{folder / f"image{number}"}\\"\\n.byte 0\\n.previous\\n");',
        f"extern BS_HIDDEN const char blockscale_code_{number}[];",
        f"static BsImage image_{number} = {{.data = blockscale_code_{number}}};",
        f"extern int32_t {_entry(code)}(void *, void *, int32_t, void *);",
    ]
    rows = []
    for i, kernel in enumerate(code.kernels):
        kinds = [_KINDS.get(kind, "BS_DIRECT") for kind in kernel.params]
        places = [_PLACES[tag] for tag in kernel.launch if tag in _PLACES]
        found = {o for tag in kernel.launch for t, o in _OPTIONS.items() if tag.startswith(t)}
        if kernel.waits and int(_ARCH.fullmatch(code.arch)[1]) >= 9:  # type: ignore[index]
            found.add("BS_WAITS")
        options = sorted(found)
        own = f"{number}_{i}"
        lines.append(f"static const uint8_t kinds_{own}[] = {{{', '.join(kinds) or 0}}};")
        lines.append(f"static const uint8_t places_{own}[] = {{{', '.join(places) or 0}}};")
        rows.append(
            f"{{.name = {_string(kernel.name)}, .image = &image_{number}, .kinds = kinds_{own}, "
            f".places = places_{own}, .params = {len(kinds)}, .count = {len(places)}, "
            f".options = {' | '.join(options) or 0}}}"
        )
    lines += [
        f"static BsKernel kernels_{number}[] = {{{', '.join(rows) or '{0}'}}};",
        f"BS_HIDDEN int blockscale_lookup_{number}(void *context, const char *name, void **out) {{",
        f"  static const BsKernels known = {{kernels_{number}, {len(rows)}}};",
        "  (void)context;",
        "  return blockscale_lookup(&known, name, out);",
        "}",
    ]
    return "\n".join(lines)


def _entry_row(code: FunctionCode) -> str:
    found = _ARCH.fullmatch(code.arch)
    assert found is not None, "_check has looked"
    major, minor, suffix = found.groups()
    is_ptx = int(code.image[:4] != b"\x7fELF")
    made_for = f"{{{major}, {minor}, {ord(suffix) if suffix else 0}, {is_ptx}}}"
    return f"{{{_string(code.arch)}, {made_for}, {_entry(code)}}}"


def _param_tables(number: int, name: str, params: Sequence[Param]) -> str:
    if len(params) > MAX_PARAMS:
        raise ValueError(
            f"write_cuda_library: {name} has {len(params)} parameters; {MAX_PARAMS} is the limit"
        )
    symbols: dict[str, int] = {}
    exact = shapes.divisors(dim for param in params for dim in param.dims)
    places = {param.name: i for i, param in enumerate(params)}
    lines, rows = [], []
    for i, param in enumerate(params):
        if len(param.dims) > MAX_RANK:
            raise ValueError(
                f"write_cuda_library: {name}: {param.name} has {len(param.dims)} dimensions; "
                f"{MAX_RANK} is the limit"
            )
        dims = [_dim(dim, symbols) for dim in param.dims]
        lines.append(f"static const int64_t dims_{number}_{i}[] = {{{', '.join(dims) or 0}}};")
        of = ", ".join(str(dim.multiple(exact)) for dim in param.dims)
        lines.append(f"static const int32_t multiples_{number}_{i}[] = {{{of or 0}}};")
        other = [_dtype_number(dtype) for dtype in param.dtypes[1:]]
        alias = places[param.alias] if param.alias is not None else -1
        rows.append(
            f"{{{_string(param.name)}, {_string(param.type)}, dims_{number}_{i}, "
            f"multiples_{number}_{i}, {float(param.default or 0)!r}, {_dtype_number(param.dtype)}, "
            f"{{{', '.join(map(str, other)) or 0}}}, {_fill(name, param)}u, {param.alignment}, "
            f"{len(dims)}, {_flags(param)}, {alias}}}"
        )
    lines.append(f"static const BsParam params_{number}[] = {{{', '.join(rows)}}};")
    return "\n".join(lines)


def _dim(dim: Any, symbols: dict[str, int]) -> str:
    if not dim.symbols:
        return str(dim.evaluate({}))
    if dim.symbol is None:
        return "BS_EXPRESSION"
    return str(-1 - symbols.setdefault(dim.symbol, len(symbols)))


def _flags(param: Param) -> str:
    flags = ["BS_OUTPUT"] if param.output else []
    flags += ["BS_OPTIONAL"] if param.default is not None else []
    flags += ["BS_SCALAR"] if param.scalar else []
    flags += ["BS_NOT_NEGATIVE"] if param.least == 0 else []
    flags += ["BS_FLATTENS"] if param.flattens else []
    tiled = (param.storage or "").endswith("x4")
    flags += ["BS_FLAT"] if tiled and len(param.dims) == 2 and not param.dims[1].symbols else []
    return " | ".join(flags) or "0"


def _dtype_number(name: str) -> int:
    dtype = tvm_ffi.dtype(name)
    return int(dtype.type_code | dtype.bits << 8 | dtype.lanes << 16)


def _fill(function: str, param: Param) -> int:
    """Return the four bytes of which a tensor of defaults consists."""
    if param.scalar or not param.default:
        return 0
    if param.dtype == "float32":
        return int(struct.unpack("<I", struct.pack("<f", param.default))[0])
    if param.dtype in ("int32", "uint32"):
        return int(param.default) & 0xFFFFFFFF
    raise ValueError(
        f"write_cuda_library: {function}: {param.name} is {param.dtype} with default "
        f"{param.default}; the runtime has defaults of float32 and int32, and zero"
    )


def _string(text: str) -> str:
    """Return a C string literal."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
