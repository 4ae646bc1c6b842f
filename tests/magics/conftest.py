"""A shell with the magics, and behind them a session without processes that plays back a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import nbparallel_magics
from nbparallel.session.processes.launch import check_world_size
from nbparallel.wire.identity import WorldPlace

Script = Callable[[Any, Any], Any]
"""``script(sink, call)``: what happens during one cell; may raise; returns the values by rank."""


class FakeSession:
    """Stands in for `nbparallel.Session`; notes what it was asked to do."""

    made: list[FakeSession]
    script: Script

    def __init__(
        self, world_size: int | None = None, *, start_method: str = "forkserver", launch: object = None
    ) -> None:
        if world_size is not None:
            check_world_size(world_size)
        self.world_size = world_size or 2
        self.started = False
        self.place = WorldPlace(self.world_size)
        self.start_method = start_method
        self.closed = False
        self.calls: list[SimpleNamespace] = []
        self.restarted: list[int | None] = []
        self.made.append(self)

    def run(self, source: str, **options: Any) -> Any:
        """Play the script."""
        self.started = True
        call = SimpleNamespace(source=source, **options)
        self.calls.append(call)
        values = type(self).script(options["sink"], call) or {}
        if options["sink"] is not None:
            options["sink"].finish()
        return SimpleNamespace(values=values, drawn=None)

    def resize(self, world_size: int) -> None:
        """Grow; shrinking is refused as if the last rank held a variable."""
        if world_size < self.world_size:
            raise ValueError("rank 1 holds x: use -r 0, or %parallel_stop first")
        self.world_size = world_size

    def restart(self, rank: int | None = None) -> None:
        """Note it."""
        self.restarted.append(rank)

    def stop(self) -> None:
        """End."""
        self.closed = True


class Notebook:
    """A shell with the extension loaded."""

    def __init__(self, shell: InteractiveShell, sessions: type[FakeSession]) -> None:
        self.shell, self.sessions = shell, sessions

    @property
    def session(self) -> FakeSession:
        """The session that was made last."""
        return self.sessions.made[-1]

    def play(self, script: Script) -> None:
        """Say what the next cells do."""
        self.sessions.script = staticmethod(script)

    def run(self, cell: str) -> SimpleNamespace:
        """Run a cell; return what it printed, and its error."""
        with capture_output() as captured:
            result = self.shell.run_cell(cell, store_history=True)
        return SimpleNamespace(
            stdout=captured.stdout,
            stderr=captured.stderr,
            outputs=captured.outputs,
            error=result.error_before_exec or result.error_in_exec,
        )


@pytest.fixture(scope="session")
def shell() -> InteractiveShell:
    """One shell for all tests: IPython keeps one a process."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    made: InteractiveShell = InteractiveShell.instance(config=config)
    return made


class NoIgnition:
    """Stands in for what is started in the background: nothing, since the ranks are played."""

    def __init__(self, start_method: str) -> None:
        self.waited = False

    def is_current(self, start_method: str) -> bool:
        """Be of no use later."""
        return False

    def terminate(self) -> None:
        """End nothing."""


@pytest.fixture
def notebook(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    """Return a fresh notebook whose ranks are played by a `FakeSession`."""
    sessions = type(
        "FakeSession", (FakeSession,), {"made": [], "script": staticmethod(lambda sink, call: {})}
    )
    monkeypatch.setattr("nbparallel.session.Session", sessions, raising=False)
    monkeypatch.setattr("nbparallel.session.processes.launch.SupervisorLaunch", NoIgnition)
    shell.reset(new_session=True)
    nbparallel_magics.load(shell)
    shell.magics_manager.registry["ParallelMagics"].state.configuration.welcome = False
    yield Notebook(shell, sessions)
    nbparallel_magics.unload(shell)
    shell.config.pop("NbParallel", None)  # the shell is the module's
