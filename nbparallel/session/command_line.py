"""The command line: ``python -m nbparallel run`` starts a script as ranks."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import tokenize
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import nbparallel
from nbparallel.errors import NbParallelError, ParallelError, RankExitError
from nbparallel.session.output import LineSink
from nbparallel.session.session import START_METHODS, Session
from nbparallel.session.tasks.dispatch import plain_task
from nbparallel.wire.messages import ScriptTask


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
        session.perform(plain_task(ScriptTask, *parts), LineSink())

    @classmethod
    def _checked(cls, source: str, path: str, package: str | None, directory: str) -> Self:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks warn
            compile(source, path, "exec", dont_inherit=True)
        return cls(source, path, package, directory)


INTERRUPTED = 128 + signal.SIGINT
"""What a shell expects of a program that Ctrl-C ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        script = Script.from_module(options.script) if options.module else Script.from_file(options.script)
    except (OSError, SyntaxError, ImportError) as error:
        sys.stderr.write(f"nbparallel run: {_what(error)}\n")
        return 2
    sys.path[0] = script.directory  # where this module was run from is no business of the script
    try:
        with Session(options.nproc, start_method=options.start_method) as session:
            script.run(session, options.arguments)
    except ParallelError as error:
        sys.stderr.write("\n".join(error.rendering) + "\n")
        return _status(error)
    except KeyboardInterrupt:
        sys.stderr.write("nbparallel run: interrupted; all ranks have ended\n")
        return INTERRUPTED
    except (NbParallelError, ValueError) as error:
        sys.stderr.write(f"nbparallel run: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m nbparallel", description="SPMD programs on one machine, with shared numpy arrays."
    )
    parser.add_argument("--version", action="version", version=nbparallel.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a script as ranks that communicate through nbparallel.distributed",
        description="Run a script on several ranks, as torchrun does.  Every rank finds its number in "
        "nbparallel.distributed.get_rank() and in the environment variable RANK.  The exit status is 0 if "
        "all ranks succeeded, else that of the first one which failed by sys.exit(status), else 1.",
        epilog="example: python -m nbparallel run --nproc 4 train.py --epochs 10",
    )
    run.add_argument(
        "-n", "--nproc", "--nproc-per-node", type=int, metavar="N", help="ranks (default: one per usable CPU)"
    )
    run.add_argument("--start-method", choices=START_METHODS, default=START_METHODS[0])
    run.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is a module's name, as for python -m"
    )
    run.add_argument("script", metavar="SCRIPT", help="a file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what the script gets")
    return parser


def _what(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    return f"cannot open {error.filename!r}: {error.strerror}" if isinstance(error, OSError) else str(error)


def _status(error: ParallelError) -> int:
    """Return the exit status that the first failed rank passed to ``sys.exit``, else 1."""
    first = next(iter(error.errors.values()), None)
    code = first.code if isinstance(first, RankExitError) else 1
    return code if isinstance(code, int) and 0 < code < 256 else 1
