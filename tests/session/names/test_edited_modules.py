"""Modules whose files were edited after ranks had imported them: ranks say so, once, with ways that work."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from nbparallel.engine.environment.edited_modules import EditedModules
from nbparallel.session import Session

OLD = "edited is still the old code on ranks 0-1, which imported it before the last edit"
RELOAD = "import importlib, edited; importlib.reload(edited)"


class Source:
    """A file of the user's, of which each version has a time of its own, whatever the clock says."""

    def __init__(self, folder: Path, name: str = "edited") -> None:
        self.file, self._edits = folder / f"{name}.py", 0

    def write(self, text: str) -> None:
        """Edit it."""
        self.file.write_text(text)
        self._edits += 1
        os.utime(self.file, ns=(1, 10**18 - self._edits * 10**9))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """Return a module that ranks can import, which defines ``f``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    found = Source(tmp_path)
    found.write("def f(x): return x + 1\n")
    return found


@pytest.mark.slow
def test_ranks_say_once_that_they_have_the_old_code(source: Source) -> None:
    """Each way that the line names works, and says nothing more."""
    with Session(2) as session:

        def say(cell: str) -> list[str]:
            return list(session.run(cell).notes)

        assert say("import edited; from edited import f; assert f(1) == 2") == []
        source.write("def f(x): return x + 10\n")
        (line,) = say("assert edited.f(1) == 2")
        assert line.startswith(OLD)
        assert f"`{RELOAD}` in a cell for ranks" in line
        assert "`restart()` of the session does for what was imported from it, too" in line
        assert say("assert edited.f(1) == 2") == []
        assert say(RELOAD) == say("assert edited.f(1) == 11 and f(1) == 2") == []
        source.write("def f(x): return x + 100\n")
        assert [line.partition(":")[0] for line in say("pass")] == [OLD]
        session.restart()
        assert say("from edited import f; assert f(1) == 101") == []


def test_what_is_no_edit(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is gone, one that is there again as it was, another spec, and what is not the user's."""
    monkeypatch.delitem(sys.modules, "edited", raising=False)
    modules = EditedModules(share=float("inf"))
    assert modules.describe(magics=True) == ()
    import edited  # type: ignore[import-not-found]

    assert modules.describe(magics=True) == ()
    text, times = source.file.read_text(), source.file.stat()
    source.file.unlink()
    assert modules.describe(magics=True) == ()
    source.file.write_text(text)
    os.utime(source.file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert modules.describe(magics=True) == ()
    source.write("def f(x): return x + 100\n")
    edited.__spec__ = object()
    assert modules.describe(magics=True) == (), "it was reloaded since"
    source.write("def f(x): return x + 1000\n")
    (line,) = modules.describe(magics=True)
    assert "`%parallel_restart` does for what was imported from it, too" in line
    monkeypatch.setattr(edited, "__file__", os.__file__)
    assert EditedModules(share=float("inf")).describe(magics=True) == ()
    del sys.modules["edited"]


def test_looks_take_a_share_of_the_time(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many files the next look comes later."""
    monkeypatch.delitem(sys.modules, "edited", raising=False)
    modules = EditedModules(share=1e-9)
    import edited

    assert modules.describe(magics=True) == ()
    source.write("def f(x): return x + 100\n")
    assert modules.describe(magics=True) == ()
    assert edited.f(1) == 2
    del sys.modules["edited"]
