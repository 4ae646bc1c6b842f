"""Script: a file or a module for ranks, read and compiled once before any rank is started."""

from __future__ import annotations

import importlib.util
import os
import tokenize
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from nbparallel.session.output import LineSink
from nbparallel.wire.messages import ScriptTask

if TYPE_CHECKING:
    from nbparallel.session.session import Session


@dataclass(frozen=True, slots=True)
class Script:
    """The source of a script, with what Python sets up for it."""

    source: str
    path: str
    """Absolute."""
    package: str | None
    """``__package__``; None for a file."""
    directory: str
    """Its ``sys.path[0]``."""

    @classmethod
    def from_file(cls, path: str) -> Self:
        """Read a file.

        Raises
        ------
        OSError
            It cannot be read.
        SyntaxError
            It does not compile.
        """
        path = os.path.abspath(path)
        with tokenize.open(path) as file:  # heeds a coding cookie
            return cls._checked(file.read(), path, None, os.path.dirname(path))

    @classmethod
    def from_module(cls, name: str) -> Self:
        """Find a module, or the ``__main__`` of a package, as ``python -m`` does.

        Raises
        ------
        ModuleNotFoundError
            There is no such module, or it has no source.
        SyntaxError
            It does not compile.
        """
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        if spec is None or not spec.has_location or spec.origin is None:
            raise ModuleNotFoundError(f"there is no module {name!r} that could be run")
        with tokenize.open(spec.origin) as file:
            return cls._checked(file.read(), spec.origin, spec.parent, os.getcwd())

    def run(self, session: Session, arguments: Sequence[str] = ()) -> None:
        """Run it as ``__main__`` on every rank; their output is printed here, line by line.

        Raises as `Session.run` does.
        """
        parts = self.source, self.path, self.package, tuple(arguments)
        session.perform(
            lambda _, number, ranks: (ScriptTask(number, ranks, (), False, None, *parts), None), LineSink()
        )

    @classmethod
    def _checked(cls, source: str, path: str, package: str | None, directory: str) -> Self:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks warn
            compile(source, path, "exec", dont_inherit=True)
        return cls(source, path, package, directory)
