"""Sessions of these tests share their workers."""

from collections.abc import Iterator

import pytest

from tests.kit import warm


@pytest.fixture(scope="package", autouse=True)
def _warm() -> Iterator[None]:
    with warm.workers():
        yield
