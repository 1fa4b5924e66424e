"""What an engine has, recorded from the engine itself, so that CI can hold our half against it.

``python -m tests.kit.engine_facts vllm`` (or ``sglang``), in an environment that has the engine,
writes ``tests/integrations/facts/``: of each name that our interfaces look up its kind, parameters
and abstract methods (``vllm.json``); and, of each way to store a weight, the parameters of a layer
of the engine as they lie when our step after loading is called (``vllm.npz``).
"""

from __future__ import annotations

import abc
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from blockscale.integrations.interfaces import Engine
from tests.kit.paths import ROOT

FACTS = ROOT / "tests" / "integrations" / "facts"
SEEN: dict[str, dict[str, np.ndarray]] = {}
"""What `see` was given in this process."""
_UNREAD = ("input", "shape", "g_idx", "swizzled")
"""In names of parameters that are not read here, and may never have been written."""
_DIMS = ("input_dim", "output_dim", "packed_dim")


def _parameters(what: Any) -> list[str] | None:
    try:
        return list(inspect.signature(what).parameters)
    except (TypeError, ValueError):
        return None


def _described(what: Any) -> dict[str, Any]:
    if inspect.isclass(what):
        methods = {
            name: _parameters(value)
            for name, value in inspect.getmembers(what, inspect.isroutine)
            if not name.startswith("__")
        }
        return {
            "kind": "class",
            "parameters": _parameters(what),
            "abstract": sorted(getattr(what, "__abstractmethods__", ())),
            "methods": {name: found for name, found in methods.items() if found is not None},
        }
    if inspect.isroutine(what):
        return {"kind": "function", "parameters": _parameters(what)}
    return {"kind": "module" if isinstance(what, ModuleType) else "object"}


def _interfaces(engine: str) -> str:
    return f"blockscale.integrations.{engine}.interfaces"


def record(engine: str) -> dict[str, Any]:
    """Return what the installed engine has of what our interfaces look up."""
    found: dict[str, Any] = {}
    real = Engine.module, Engine.of

    def module(self: Engine, name: str) -> Any:
        made = real[0](self, name)
        found.setdefault(name, _described(made))
        return made

    def of(self: Engine, where: str, name: str) -> Any:
        made = real[1](self, where, name)
        found[f"{where}:{name}"] = _described(made)
        return made

    Engine.module, Engine.of = module, of  # type: ignore[method-assign]
    held = sys.modules.pop(_interfaces(engine), None)
    try:
        interfaces = importlib.import_module(_interfaces(engine))
    finally:
        Engine.module, Engine.of = real  # type: ignore[method-assign]
        if held is not None:
            sys.modules[_interfaces(engine)] = held
    return {"version": interfaces._ENGINE.version, "names": dict(sorted(found.items()))}


def recorded(engine: str) -> dict[str, Any]:
    """Return the record of an engine."""
    made: dict[str, Any] = json.loads((FACTS / f"{engine}.json").read_text())
    return made


# ---- Stand-ins ----------------------------------------------------------------------------------


class _Thing:
    """Something of an engine of which only the name is known."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Thing(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


def _stand_in(name: str, fact: dict[str, Any]) -> Any:
    if fact["kind"] != "class":
        return _Thing(name)

    def absent() -> Any:
        def method(*_: Any, **__: Any) -> None:
            raise NotImplementedError

        return method

    body = {method: absent() for method in fact["methods"]}
    body |= {method: abc.abstractmethod(absent()) for method in fact["abstract"]}
    return abc.ABCMeta(name.rpartition(".")[2], (), body)


@contextmanager
def standing_in(engine: str) -> Iterator[SimpleNamespace]:
    """Let our modules be imported with classes that have what the record says, and no code.

    Gives a function that imports a module of ours; a name that is not recorded is an error.
    """
    names = recorded(engine)["names"]
    real = Engine.module, Engine.of
    made: dict[str, Any] = {}

    def module(self: Engine, name: str) -> Any:
        return made.setdefault(name, _stand_in(name, names[name]))

    def of(self: Engine, where: str, name: str) -> Any:
        key = f"{where}:{name}"
        return made.setdefault(key, _stand_in(name, names[key]))

    ours = f"blockscale.integrations.{engine}"
    held = {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith(f"{ours}.")}
    Engine.module, Engine.of = module, of  # type: ignore[method-assign]
    try:
        yield SimpleNamespace(module=lambda name: importlib.import_module(f"{ours}.{name}"))
    finally:
        Engine.module, Engine.of = real  # type: ignore[method-assign]
        for name in [name for name in sys.modules if name.startswith(f"{ours}.")]:
            del sys.modules[name]
        sys.modules.update(held)


# ---- Parameters of layers -----------------------------------------------------------------------


def parameters(layer: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return the parameters of a layer that are read here, and which axis of each is which."""
    found: dict[str, np.ndarray] = {}
    for name, value in layer.named_parameters():
        if any(word in name for word in _UNREAD):
            continue
        plain = value.data.contiguous()
        kind = str(plain.dtype).removeprefix("torch.")
        if kind not in ("uint8", "int32", "int64", "float32", "float16"):
            plain = plain.view({1: torch.uint8, 2: torch.int16}[plain.element_size()])
        dims = [str(getattr(value, dim, "")) for dim in _DIMS]
        found["|".join([name, kind, *dims])] = plain.numpy()
    return found


def layer_of(found: dict[str, np.ndarray]) -> torch.nn.Module:
    """Return a module with these parameters; the way back from `parameters`."""
    layer = torch.nn.Module()
    for key, value in found.items():
        name, kind, *dims = key.split("|")
        tensor = torch.from_numpy(value.copy())
        if str(tensor.dtype) != f"torch.{kind}":
            tensor = tensor.view(getattr(torch, kind))
        param = torch.nn.Parameter(tensor, requires_grad=False)
        for dim, axis in zip(_DIMS, dims, strict=True):
            if axis.lstrip("-").isdigit():
                setattr(param, dim, int(axis))
        layer.register_parameter(name, param)
    return layer


def layers(engine: str) -> dict[str, dict[str, np.ndarray]]:
    """Return the recorded parameters by the names of tests that have seen them."""
    found: dict[str, dict[str, np.ndarray]] = {}
    with np.load(FACTS / f"{engine}.npz") as file:
        for key in file.files:
            test, _, name = key.rpartition("/")
            found.setdefault(test, {})[name] = file[key]
    return found


def see(name: str, layer: torch.nn.Module) -> None:
    """Keep the parameters of a layer of an engine, as they are now."""
    SEEN[name] = parameters(layer)


def same(engine: str) -> bool:
    """Return whether the record is what the installed engine has, and what `see` was given."""
    known = layers(engine)
    assert recorded(engine) == record(engine)
    for name, found in SEEN.items():
        assert found.keys() == known[name].keys(), name
        for key, value in found.items():
            assert np.array_equal(value, known[name][key]), (name, key)
    return bool(SEEN)


def main(engine: str) -> None:
    """Write both records, after tests of the engine have shown its layers to `see`."""
    import pytest

    from tests.kit import engine_facts  # not __main__, but what the tests import

    test = f"tests/integrations/test_{engine}.py"
    assert pytest.main([test, "-q", "-k", "loaded or taken_apart"]) == 0
    FACTS.mkdir(exist_ok=True)
    (FACTS / f"{engine}.json").write_text(json.dumps(record(engine), indent=1) + "\n")
    arrays: dict[str, Any] = {}
    for name, found in engine_facts.SEEN.items():
        arrays |= {f"{name}/{key}": value for key, value in found.items()}
    np.savez_compressed(FACTS / f"{engine}.npz", **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
