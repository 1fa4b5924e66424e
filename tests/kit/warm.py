"""Workers of the tuner that are there at once: nurseries stay for as long as the tests' process.

The processes that they fork are new, as in the product.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from blockscale.tuning.components import nursery, pool

FAKES = tuple(f"tests.kit.{name}" for name in ("fake_gpu", "fake_moe_gpu", "untimed"))


class Kept(nursery.Nursery):
    """A nursery that no session closes."""

    def close(self) -> None:
        """Stay."""


_nurseries: dict[str, Kept] = {}


def kept(needs: str) -> Kept:
    """Return the nursery of all sessions."""
    if needs not in _nurseries:
        _nurseries[needs] = Kept(needs)
        atexit.register(_nurseries[needs].end)
    return _nurseries[needs]


@contextmanager
def workers() -> Iterator[None]:
    """Let workers be forked by nurseries that stay."""
    loaded = nursery.PRELOADED | {"tvm": (*nursery.PRELOADED["tvm"], *FAKES)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "Nursery", kept)
        patch.setattr(nursery, "PRELOADED", loaded)
        yield
