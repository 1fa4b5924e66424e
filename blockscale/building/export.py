"""Object files and a manifest -> one kernel library that needs no compiler to run.

The library exports nothing but its kernels, and needs nothing but libc, libm and the libtvm_ffi
that ``import tvm_ffi`` has loaded; threads come from the OpenMP library of the process (torch's).
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tvm_ffi import libinfo

from blockscale.base import files
from blockscale.base.errors import LibraryError, LinkError
from blockscale.base.files import HOST_C
from blockscale.base.manifest import append_manifest, validate

RUNTIME_SOURCE = HOST_C / "runtime.c"

CFLAGS = ("-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread")
LDFLAGS = (
    "-shared",
    "-pthread",  # as with LDLIBS, glibc before 2.34 has these functions beside libc
    "-Wl,-z,noexecstack,-z,relro,-z,now",  # now: a missing symbol shows at load, not in a call
    "-Wl,-z,defs",  # and one that no library has shows here
    "-Wl,-z,nodelete",  # threads hold destructors of ours until they end
    "-Wl,--build-id=none,--strip-all,--as-needed",
)
LDLIBS = ("-lm", "-ldl")  # after the objects: --as-needed drops what none before it wants

# Pointers that TVM's object code calls through, which libtvm_runtime would fill.  native/runtime.c
# has these; a kernel that wants another would call a null pointer.
CONTEXT_SYMBOLS = frozenset(
    {
        b"__TVMBackendParallelLaunch",
        b"__TVMBackendParallelBarrier",
        b"__TVMBackendAllocWorkspace",
        b"__TVMBackendFreeWorkspace",
    }
)


def write_library(
    objects: Sequence[Path | str | bytes],
    manifest: Mapping[str, Any],
    out: Path | str,
    *,
    cc: str = "gcc",
) -> Path:
    """Link ``objects`` into the library ``out``, append ``manifest``, and return the path.

    The file appears complete or not at all: one that was there before stays until then.

    Args:
        objects: relocatable ELF files, or their contents, that define ``__tvm_ffi_<name>`` for
            every function of the manifest.
        manifest: see `blockscale.base.manifest`.
        out: where to write; the folder must exist.
        cc: the C compiler; it must understand GCC's options.

    Raises:
        ValueError: the manifest is wrong, or an object needs a runtime function that we lack.
        LinkError: the compiler is missing or reports an error.
        OSError: ``out`` cannot be written.
    """
    out = Path(out)
    validate(manifest, f"write_library({out.name})")
    check_folder(out)
    with files.temporary_folder() as folder:
        runtime = folder / "runtime.o"
        run([cc, *CFLAGS, "-c", str(RUNTIME_SOURCE), "-o", str(runtime)])
        inputs = [*_stage_objects(objects, folder), runtime]
        elf = link(inputs, list(manifest["functions"]), folder, cc)
    files.write(out, append_manifest(elf, manifest), 0o755)
    return out


def check_folder(out: Path) -> None:
    """Check that ``out`` can be written into its folder.

    Raises:
        FileNotFoundError: there is no such folder.
        IsADirectoryError: ``out`` is a folder itself.
        PermissionError: nothing may be written there.
    """
    if not out.parent.is_dir():
        raise FileNotFoundError(
            f"write_library: {out.parent} is not a folder, so {out.name} cannot be written there; "
            "create it first"
        )
    if out.is_dir():
        raise IsADirectoryError(f"write_library: {out} is a folder; name a file in it")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise PermissionError(
            f"write_library: {out.parent} is not writable, so {out.name} cannot be written there; "
            "choose another folder"
        )


def _stage_objects(objects: Sequence[Path | str | bytes], folder: Path) -> list[Path]:
    """Write the objects under names that do not depend on the caller, after looking into them."""
    if not objects:
        raise ValueError("write_library: objects is empty; pass at least one object file")
    staged = []
    for i, item in enumerate(objects):
        data = item if isinstance(item, bytes) else Path(item).read_bytes()
        name = f"objects[{i}]" if isinstance(item, bytes) else str(item)
        if data[:4] != b"\x7fELF":
            raise ValueError(
                f"write_library: {name} begins with {data[:4]!r}, not with the ELF magic; pass an "
                "object file, as Module.write_to_file(path, 'o') writes it"
            )
        wanted = set(re.findall(rb"__TVM\w+(?=\0)", data)) - CONTEXT_SYMBOLS
        if wanted:
            names = ", ".join(sorted(symbol.decode() for symbol in wanted))
            raise ValueError(
                f"write_library: {name} calls TVM's runtime through {names}, which a blockscale "
                "library does not have; keep calls of packed functions out of kernels"
            )
        staged.append(folder / f"kernel{i}.o")
        staged[-1].write_bytes(data)
    return staged


def link(objects: Sequence[Path], functions: Sequence[str], folder: Path, cc: str) -> bytes:
    """Return the ELF image that ``objects`` make, which exports ``functions`` and nothing else.

    Raises:
        LinkError: the compiler is missing or reports an error.
    """
    symbols = [f"__tvm_ffi_{name}" for name in functions]
    script = folder / "exports.map"
    script.write_text("{ global: " + "".join(f"{s}; " for s in symbols) + "local: *; };\n")
    image = folder / "image.so"
    run(
        [
            cc,
            *LDFLAGS,
            f"-Wl,--version-script={script}",
            *(f"-Wl,--require-defined={symbol}" for symbol in symbols),
            *map(str, objects),
            # By file, so that only its soname is recorded: the loader then takes the copy that the
            # process has loaded already, wherever it lies and whatever its visibility.
            libinfo.find_libtvm_ffi(),
            *LDLIBS,
            "-o",
            str(image),
        ]
    )
    return image.read_bytes()


def run(command: list[str]) -> None:
    """Run the C compiler.

    Raises:
        LinkError: it is missing or reports an error.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise LinkError(
            f"write_library: the C compiler {command[0]!r} does not run ({error.strerror}); "
            "install it (gcc, as most systems call the package) and see that it is on PATH"
        ) from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        reason = "\n".join(lines[-12:]) or "no message"
        raise LinkError(
            f"write_library: {command[0]!r} ended with status {done.returncode}; the command was\n"
            f"  {' '.join(command)}\nand it said\n{reason}"
        )


__all__ = ["LibraryError", "LinkError", "write_library"]
