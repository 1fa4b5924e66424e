"""What an engine must have, and what is said where it is missing: one way for all engines."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Engine:
    """An installed engine, whose names are looked up one by one.

    Attributes:
        where: module of ours, with which errors begin.
        name: of the engine's package.
        tested: the releases that were tested, as a sentence has them.
        advice: what to do about a missing or another release.
    """

    def __init__(self, name: str, tested: str, advice: str) -> None:
        """See the class."""
        self.where = f"blockscale.integrations.{name}"
        self.name, self.tested, self.advice = name, tested, advice

    def module(self, name: str) -> Any:
        """Return the module ``name`` of the engine.

        Raises:
            ModuleNotFoundError: the engine is not installed, or something that it needs.
            ImportError: it is, but has no such module.
        """
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name == self.name:
                raise ModuleNotFoundError(
                    f"{self.where} needs {self.name}, which is not installed; {self.advice}",
                    name=self.name,
                ) from None
            if error.name and name.startswith(error.name):
                raise self.lacks(name) from error
            raise

    def of(self, module: str, name: str) -> Any:
        """Return what ``module`` of the engine calls ``name``, dots and all; errors: `module`."""
        found = self.module(module)
        try:
            for part in name.split("."):
                found = getattr(found, part)
        except AttributeError as error:
            raise self.lacks(f"{module}.{name}") from error
        return found

    def lacks(self, missing: str) -> ImportError:
        """Return the error that the installed release has no ``missing``."""
        return ImportError(
            f"{self.where}: {self.name} {self.version} has no {missing}, but must have what "
            f"{self.tested} have; install one of these, e.g. {self.advice}"
        )

    @property
    def version(self) -> str:
        """The installed release, as its module says."""
        return str(getattr(import_module(self.name), "__version__", "of unknown version"))
