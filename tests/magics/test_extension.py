"""The extension in a shell: loaded, configured, interrupted while it starts ranks, unloaded."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import nbparallel_magics


def test_configuration(notebook: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`%config NbParallel` shows and sets the defaults; a flag wins, and what cannot be is one line."""
    assert "NbParallel" in notebook.run("%config").stdout
    shown = notebook.run("%config NbParallel").stdout
    names = (
        "keep_frames", "keep_messages", "n", "output", "queue", "quiet", "ranks_per_cpu", "read_in_place",
        "start_method", "timeout", "warm", "welcome",
    )  # fmt: skip
    for name in names:
        assert f"NbParallel.{name}=<" in shown
    assert shown.count("Current: ") == len(names)
    wrong = notebook.run("%config NbParallel.output = 'tabs'")
    assert wrong.stderr.count("\n") <= 1
    assert notebook.shell.run_line_magic("config", "NbParallel.output") == "rank"
    # IPython keeps what it was told, and would tell it to the extension when it is loaded again.
    for told in (True, False):
        nbparallel_magics.unload(notebook.shell)
        capsys.readouterr()
        nbparallel_magics.load(notebook.shell)
        said = capsys.readouterr().err
        assert said.startswith("nbparallel: The 'output' trait") == told
        assert said.endswith("The default is used.\n") == told
    notebook.run("%config NbParallel.n = 3\n%config NbParallel.timeout = 9.0")
    notebook.run("%%parallel\nx")
    assert (notebook.session.world_size, notebook.session.calls[-1].timeout) == (3, 9.0)
    notebook.run("%%parallel --timeout 2\nx")
    assert notebook.session.calls[-1].timeout == 2


def test_an_interrupt_while_ranks_are_brought_up(notebook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A press in the moment in which the supervisor starts: it is stopped, the next cell works (F23)."""
    with monkeypatch.context() as patched:
        patched.setattr(
            "nbparallel.session.processes.launch.SupervisorLaunch",
            lambda method: os.kill(os.getpid(), signal.SIGINT),
        )
        assert isinstance(notebook.run("%%parallel -n 2\n1").error, KeyboardInterrupt)
    assert notebook.session.closed
    assert not notebook.session.calls
    assert notebook.run("%%parallel -n 2\n1").error is None
    assert notebook.session.calls


def test_a_custom_exception_handler_keeps_working(notebook: Any) -> None:
    """A handler that the user set before is still called, and is back after unloading."""
    import nbparallel_magics

    shell = notebook.shell
    nbparallel_magics.unload(shell)
    seen: list[type] = []
    shell.set_custom_exc((LookupError,), lambda self, kind, value, trace, tb_offset=None: seen.append(kind))
    try:
        nbparallel_magics.load(shell)
        notebook.run("{}['a']")
        assert seen == [KeyError]
        nbparallel_magics.unload(shell)
        notebook.run("{}['a']")
        assert seen == [KeyError, KeyError]
    finally:
        shell.set_custom_exc((), None)
