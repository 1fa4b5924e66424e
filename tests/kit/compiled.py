"""What compilers made, kept by content: shared by the workers of a run, and by later runs.

`install` and those after it put themselves before three doors: `subprocess.run`, for calls of
nvcc, ptxas and gcc, `tvm.tirx.build`, for CPU kernels, and the emulator's `linked`, for PTX.  The
key of an entry is all that decides what comes out: the command, the contents of every file it reads
(the headers of its folders too), the compiler; or the TensorIR as JSON, its target, TVM's version;
or PTX and the emulator's source.  So nothing stale is served, whatever was changed since, and
copies of a checkout may share one folder.  Only success is kept.

The folder is ``.cache/test-compiled`` of the checkout, or BLOCKSCALE_TEST_CACHE.  ``make clean``
empties the former; `trim` keeps both below `LIMIT_BYTES`.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
import pickle
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tests.kit.paths import ROOT

COMPILERS = ("nvcc", "ptxas", "gcc", "cc")
INSTALLED = (sys.prefix, "/usr")
HEADERS = (".h", ".cuh", ".hpp", ".inc")
ENVIRONMENT = (
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "C_INCLUDE_PATH"),
    *("CPLUS_INCLUDE_PATH", "LIBRARY_PATH"),
)
"""What compilers take from outside."""

LIMIT_BYTES = 4 << 30
PLACE = "@folder@"
"""Stands for the folder of the output, which is another one each time."""

_run = subprocess.run


def folder() -> Path:
    """Return where entries are kept."""
    return Path(os.environ.get("BLOCKSCALE_TEST_CACHE") or ROOT / ".cache" / "test-compiled")


def digest(*parts: str | bytes) -> str:
    """Return the digest of ``parts``, in order; none can pass as two."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()


@contextmanager
def lock(name: str) -> Iterator[None]:
    """Let one process at a time do what ``name`` stands for."""
    path = folder() / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def place(key: str, suffix: str) -> Path:
    """Return where the entry of ``key`` is, or will be."""
    return folder() / key[:2] / f"{key}{suffix}"


def kept(key: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """Return the file of ``key``; ``make`` writes it to the path it gets if there is none yet."""
    path = place(key, suffix)
    if not path.exists():
        with lock(key):
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = path.with_name(f".{secrets.token_hex(8)}{suffix}")
                try:
                    make(temporary)
                    os.replace(temporary, path)
                finally:
                    temporary.unlink(missing_ok=True)
    os.utime(path)  # the least recently used go first
    return path


def text(make: Callable[[], str], *parts: str) -> str:
    """Return the text that ``make`` makes of ``parts``, which are all that it depends on."""

    def write(path: Path) -> None:
        path.write_text(make())

    return kept(digest("text", *parts), ".txt", write).read_text()


@cache
def version(program: str) -> str:
    """Return what a program of the CUDA toolkit says of itself, and what it takes from outside."""
    told = _run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return "\n".join([program, told, *(os.environ.get(name, "") for name in ENVIRONMENT)])


def trim(limit: int = LIMIT_BYTES) -> None:
    """Remove the entries that were not used for longest until ``limit`` bytes are left."""
    files = [(path, path.stat()) for path in folder().glob("??/*") if path.is_file()]
    left = sum(stat.st_size for _, stat in files)
    for path, stat in sorted(files, key=lambda entry: entry[1].st_mtime):
        if left <= limit:
            break
        path.unlink(missing_ok=True)
        left -= stat.st_size


# ---- Compilers that are programs -----------------------------------------------------------------


@cache
def _file_digest(path: str, size: int, mtime_ns: int) -> str:
    return digest(Path(path).read_bytes())


def _of_file(path: Path) -> str:
    stat = path.stat()
    return _file_digest(str(path), stat.st_size, stat.st_mtime_ns)


def _of_headers(path: Path) -> str:
    """Return the digest of all headers below ``path``; an installed package's by size and time."""
    installed = any(path.is_relative_to(folder) for folder in INSTALLED)
    return _headers_elsewhere(path) if installed else _headers_here(path)


def _headers_here(path: Path) -> str:
    found = (file for file in sorted(path.rglob("*")) if file.suffix in HEADERS)
    return digest(*(f"{file.relative_to(path)}={_of_file(file)}" for file in found))


@cache
def _headers_elsewhere(path: Path) -> str:
    found = ((file, file.stat()) for file in sorted(path.rglob("*.h*")) if file.is_file())
    return digest(str(path), *(f"{f}={s.st_size},{s.st_mtime_ns}" for f, s in found))


class Call:
    """A call of a compiler: what it reads, and what it writes, ``out``."""

    def __init__(self, command: Sequence[str], out: Path) -> None:
        self.command = command
        self.out = out
        self.place = str(out.parent)

    def key(self) -> str | None:
        """Return the key of what it makes; None if the compiler is not there."""
        compiler = shutil.which(self.command[0])
        if compiler is None:
            return None
        stat = Path(compiler).resolve().stat()
        parts = [compiler, str(stat.st_size), str(stat.st_mtime_ns)]
        parts += [os.environ.get(name, "") for name in ENVIRONMENT]
        for argument in self.command[1:]:
            parts += self._parts(argument)
        return digest(*parts)

    def _parts(self, argument: str) -> Iterator[str]:
        """Yield ``argument`` with contents in place of paths."""
        head, path = next(
            (
                (argument[: -len(tail)], Path(tail))
                for tail in re.findall(r"(?=(?:^|[=,]|^-[IL])(/.*))", argument)
            ),
            (argument, None),
        )
        if argument == str(self.out):
            yield PLACE
        elif path is None or not path.exists():
            yield argument.replace(self.place, PLACE)
        elif path.is_dir():
            yield head + _of_headers(path)
        else:
            yield head + path.suffix + self._contents(path)
            if path.suffix in (".c", ".cu"):
                yield _headers_here(path.parent)

    def _contents(self, path: Path) -> str:
        """Return the digest of an input, and of the files beside the output that its text names."""
        if path.suffix not in (".c", ".cu", ".map", ".s"):
            return _of_file(path)
        text = path.read_bytes()
        names = re.findall(re.escape(self.place.encode()) + rb"/([\w.]+)", text)
        beside = [_of_file(Path(self.place) / name.decode()) for name in names]
        return digest(text.replace(self.place.encode(), PLACE.encode()), *beside)

    def entry(self, key: str) -> Path | None:
        """Return the file with what the compiler said and wrote; None if it fails."""
        failed = False

        def make(path: Path) -> None:
            nonlocal failed
            done = _run(self.command, capture_output=True, check=False)
            failed = done.returncode != 0 or not self.out.is_file()
            if failed:
                raise ChildProcessError
            said = [text.decode(errors="replace") for text in (done.stdout, done.stderr)]
            said = [text.replace(self.place, PLACE) for text in said]
            mode = self.out.stat().st_mode & 0o777
            head = json.dumps([*said, mode]).encode()
            path.write_bytes(len(head).to_bytes(8, "little") + head + self.out.read_bytes())

        try:
            return kept(key, ".out", make)
        except ChildProcessError:
            return None


def _call(command: Any, options: dict[str, Any]) -> Call | None:
    """Return the call of a compiler that ``command`` is, if its result can be kept."""
    if isinstance(command, str) or set(options) - {"capture_output", "text", "check"}:
        return None
    command = [os.fspath(part) for part in command]
    if not all(isinstance(part, str) for part in command) or command.count("-o") != 1:
        return None
    if Path(command[0]).name not in COMPILERS or any("keep" in part for part in command):
        return None
    return Call(command, Path(command[command.index("-o") + 1]).absolute())


def run(command: Any, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Do what `subprocess.run` does; take what a compiler writes from what is kept."""
    call = _call(command, options)
    key = call.key() if call else None
    path = call.entry(key) if call and key else None
    if call is None or path is None:
        return _run(command, **options)  # it reports what is wrong, as ever
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    out, err, mode = json.loads(data[8:start])
    call.out.unlink(missing_ok=True)
    call.out.write_bytes(data[start:])
    call.out.chmod(mode)
    said: list[Any] = [text.replace(PLACE, call.place) for text in (out, err)]
    if not options.get("text"):
        said = [text.encode() for text in said]
    if not options.get("capture_output"):
        sys.stderr.write(err)
        said = [None, None]
    return subprocess.CompletedProcess(command, 0, *said)


# ---- TVM -----------------------------------------------------------------------------------------


class Kernels:
    """What TVM makes of CPU kernels: an object file, and the module that it becomes when asked."""

    def __init__(self, key: str, build: Callable[[], Any]) -> None:
        self._key, self._build, self._module = key, build, None
        self.object = kept(key, ".o", lambda path: build().write_to_file(str(path), "o"))

    def _loaded(self) -> Any:
        if self._module is None:
            self._module = loaded(self.object, self._key)
        return self._module

    def __getitem__(self, name: str) -> Any:
        return self._loaded()[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded(), name)

    def write_to_file(self, path: str, kind: str) -> None:
        """Write the object file, or what only TVM's own module can write."""
        if kind == "o":
            shutil.copyfile(self.object, path)
        else:
            self._build().write_to_file(path, kind)


def loaded(obj: Path, key: str) -> Any:
    """Return the module of an object file: linked once, loaded by every process."""
    import tvm

    def link(out: Path) -> None:
        _run(["gcc", "-shared", str(obj), "-lm", "-o", str(out)], check=True)

    return tvm.runtime.load_module(str(kept(key, ".so", link)))


@cache
def tvm_version() -> str:
    """Return what tells one TVM from another: its version, and its libraries' sizes and times."""
    import tvm

    stats = [p.stat() for p in sorted(Path(tvm.__file__).parent.rglob("*.so"))]
    return f"{tvm.__version__} {[(stat.st_size, stat.st_mtime_ns) for stat in stats]}"


def _keeping(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return `tvm.tirx.build` with a memory."""
    import tvm

    def kept_build(mod: Any, target: Any = None, pipeline: Any = "default") -> Any:
        def real() -> Any:
            return build(mod, target, pipeline)

        found = None if target is None else tvm.target.Target(target)
        whole = isinstance(mod, tvm.IRModule) and pipeline == "default"
        if not whole or found is None or str(found.kind) != "llvm" or found.host is not None:
            return real()
        context = tvm.transform.PassContext.current()
        passes = f"{context.opt_level} {dict(context.config)}"
        key = digest(tvm_version(), str(found), passes, tvm.ir.save_json(mod))
        return Kernels(key, real)

    return kept_build


def module(key: Iterable[str], make: Callable[[], Any]) -> Any:
    """Return the module that ``make`` returns, from the object file that is kept under ``key``."""
    whole = digest("module", tvm_version(), *key)
    obj = kept(whole, ".o", lambda path: make().write_to_file(str(path), "o"))
    return loaded(obj, whole)


# ---- The emulator --------------------------------------------------------------------------------

LONG_PTX = 1 << 14
"""Characters of PTX that are parsed once; shorter texts are what the parser's own tests give it."""


@cache
def emulators_source() -> str:
    """Return the digest of the emulator, and of what it imports."""
    package = Path(sys.modules["blockscale"].__file__ or "").parent
    files = (f for room in ("emulator", "base") for f in sorted((package / room).rglob("*.py")))
    return digest(sys.version, *(f"{f.relative_to(package)}={_of_file(f)}" for f in files))


def _keeping_programs(linked: Callable[..., Any]) -> Callable[..., Any]:
    """Return the emulator's `linked` with a memory: lexing and linking are a tenth of its time."""

    @lru_cache(maxsize=32)
    def kept_linked(ptx: str, entry: str | None) -> Any:
        if len(ptx) < LONG_PTX:
            return linked(ptx, entry)
        key = digest("units apart", emulators_source(), ptx, str(entry))
        made = kept(key, ".program", lambda path: _write_program(linked(ptx, entry), path))
        return _read_program(made)

    return kept_linked


def _write_program(program: Any, path: Path) -> None:
    """Write a program, its units apart; of its module a run needs the variables alone."""
    module = replace(program.module, functions={})
    with path.open("wb") as file:
        pickle.dump(replace(program, module=module, units=[]), file, pickle.HIGHEST_PROTOCOL)
        pickle.dump(program.units, file, pickle.HIGHEST_PROTOCOL)


def _read_program(path: Path) -> Any:
    """Return a program; its units, nearly all of it, are read when a launch is emulated."""
    with path.open("rb") as file:
        program = pickle.load(file)
        program.kept = file.read()
    del program.units
    program.__class__ = _with_late_units(type(program))
    return program


@cache
def _with_late_units(kind: type) -> type:
    def read(program: Any, name: str) -> Any:
        if name != "units":
            raise AttributeError(name)
        program.units = pickle.loads(program.__dict__.pop("kept"))
        return program.units

    return type(kind.__name__, (kind,), {"__getattr__": read})


def _keeping_kernels(launches: Any) -> Callable[[str], Any]:
    """Return the emulator's `kernels_of` with a memory: it parses a library's whole text."""
    kernels_of = launches.kernels_of

    def kept_kernels(ptx: str) -> dict[str, Any]:
        if len(ptx) < LONG_PTX:
            return kernels_of(ptx)

        def write(path: Path) -> None:
            found = [kernel.function for kernel in kernels_of(ptx).values()]
            heads = [replace(f, body=[], regs={}, variables={}, tables={}) for f in found]
            path.write_bytes(pickle.dumps(heads, pickle.HIGHEST_PROTOCOL))

        made = kept(digest("kernels", emulators_source(), ptx), ".kernels", write)
        return {f.name: launches.Kernel(f.name, ptx, f) for f in pickle.loads(made.read_bytes())}

    return kept_kernels


# ---- The doors -----------------------------------------------------------------------------------


def install() -> None:
    """Keep what compilers make from now on in this process."""
    subprocess.run = run  # type: ignore[assignment]


def install_emulator() -> None:
    """Keep the programs that the emulator makes of PTX, and libraries' kernels, if it is loaded."""
    if "blockscale.emulator.launching.front_door" not in sys.modules:
        return
    made: dict[Any, Any] = {}
    for name in ("launching.front_door", "launching.world", "host.launches"):
        module: Any = importlib.import_module(f"blockscale.emulator.{name}")
        if not hasattr(module.linked, "kept"):
            plain = module.linked
            made.setdefault(plain, _keeping_programs(plain)).kept = plain
            module.linked = made[plain]
    if not hasattr(module.kernels_of, "kept"):
        plain = module.kernels_of
        module.kernels_of = _keeping_kernels(module)
        module.kernels_of.kept = plain


def install_tvm() -> None:
    """Keep what TVM compiles, if it is loaded."""
    tirx = getattr(sys.modules.get("tvm"), "tirx", None)
    if tirx is not None and tirx.build.__module__ != __name__:
        tirx.build = _keeping(tirx.build)
