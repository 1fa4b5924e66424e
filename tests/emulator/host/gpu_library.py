"""A GPU library in miniature for tests: host_library.c with the kernels of host_kernels.ptx."""

import subprocess
from pathlib import Path

import numpy as np
import torch
from tvm_ffi import libinfo

from tests.emulator.host import fatbins

HERE = Path(__file__).parent
OFFSET = 3.5  # what scaled_add adds


def build(folder: Path) -> Path:
    """Return the library with sm_100a PTX in a fat binary."""
    return link(folder, fatbins.ptx_container(kernels("sm_100a"), "sm_100a"))


def kernels(target: str) -> str:
    return (HERE / "host_kernels.ptx").read_text().replace("@TARGET@", target)


def link(folder: Path, code: bytes, *flags: str) -> Path:
    """Return the library of host_library.c with this code inside."""
    folder.mkdir(exist_ok=True)
    (folder / "code.bin").write_bytes(code)
    include = [f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"]
    warnings = ["-std=gnu11", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        ["gcc", *warnings, "-O1", "-fPIC", "-shared", "-fvisibility=hidden", *include, *flags]
        + [str(HERE / "host_library.c"), libinfo.find_libtvm_ffi(), "-ldl", "-o", "library.so"],
        cwd=folder,
        check=True,
    )
    return folder / "library.so"


def vectors(size=300):
    """Return x, y and a result of NaN."""
    return whole(size), whole(size), torch.full((size,), torch.nan)


def whole(*shape):
    return torch.randint(-50, 50, shape).float()


def expect_scaled_add(x, y, scale):
    return torch.as_tensor(np.asarray(x) + np.float32(scale) * np.asarray(y) + np.float32(OFFSET))


def link_again(library: Path, name: str) -> Path:
    """Return a copy that counts as another library, so that attributes set elsewhere are not."""
    copy = library.parent / f"{name}.so"
    copy.write_bytes(library.read_bytes() + name.encode())
    return copy
