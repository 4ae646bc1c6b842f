"""F20: an interrupt during a rank's first ``await``, or another import, breaks nothing for later cells."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbparallel.session import Session
from nbparallel.session.tasks import task_run
from nbparallel.testing.waiting import wait_until
from tests.harness.turns import Promised


@pytest.fixture
def session() -> Iterator[Session]:
    """One rank."""
    with Session(1) as session:
        yield session


def interrupt_after(session: Session, seconds: float, source: str) -> None:
    """Run a cell that is interrupted some time after it was sent."""
    pending = session.submit(source)
    time.sleep(seconds)
    pending.cancel()
    assert isinstance(pending.exception(15), KeyboardInterrupt)


@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("milliseconds", [0, 1, 2, 4, 6, 9, 13, 18, 25])
def test_f20_an_interrupt_in_the_first_await(session: Session, milliseconds: int) -> None:
    """Whenever it comes, the next cell awaits."""
    interrupt_after(session, milliseconds / 1000, "await __import__('asyncio').sleep(30)")
    cell = "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 7\nawait f()"
    assert list(session.run(cell).values) == [7]


@pytest.mark.slow
def test_f20_an_awaiting_cell_does_not_go_on_in_the_next(session: Session) -> None:
    """It is cancelled, its cleaning up runs, and the error names its line."""
    session.run("import asyncio\nseen = []")
    cell = (
        "try:\n    await asyncio.sleep(0.3)\n    seen.append('late')\n"
        "finally:\n    await asyncio.sleep(0)\n    seen.append('cleaned')"
    )
    timer = threading.Timer(0.1, session.interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt, match="rank 0 on line 2"):
        session.run(cell)
    timer.join()
    assert list(session.run("await asyncio.sleep(0.5)\nseen").values) == [["cleaned"]]


@pytest.mark.slow
def test_f20_a_cell_that_does_not_end_when_it_is_cancelled(session: Session) -> None:
    """Its loop is left behind: the next cell has one of its own."""
    session.run("import asyncio")
    cell = (
        "while True:\n    try:\n        await asyncio.sleep(30)\n"
        "    except asyncio.CancelledError:\n        await asyncio.sleep(30)"
    )
    interrupt_after(session, 0.1, cell)
    assert list(session.run("await asyncio.sleep(0.05)\n1").values) == [1]


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """Return a module that takes a while to import, and notes how far it came."""
    path = tmp_path / "slow_module.py"
    path.write_text(
        f"import time\nfrom pathlib import Path\nPath({str(tmp_path / 'begun')!r}).touch()\n"
        "for _ in range(LONG := 40):\n    time.sleep(0.01)\ndone = True\n"
    )
    return path


@pytest.mark.slow
def test_f20_an_import_is_finished_first(session: Session, module: Path) -> None:
    """An interrupt that meets an import raises behind it; what it has imported is whole."""
    cell = f"import sys, time\nsys.path.append({str(module.parent)!r})\nimport slow_module\ntime.sleep(30)"
    wait = threading.Thread(
        target=lambda: (wait_until((module.parent / "begun").exists), session.interrupt())
    )
    wait.start()
    with pytest.raises(KeyboardInterrupt, match="rank 0 on line 4"):
        session.run(cell)
    wait.join()
    assert list(session.run("slow_module.done").values) == [True]


@pytest.mark.slow
def test_f20_an_import_without_end_is_interrupted(session: Session, module: Path, promised: Promised) -> None:
    """It has three seconds, which is before the rank would be killed for not answering."""
    module.write_text(module.read_text().replace("LONG := 40", "100_000"))
    session.run("kept = 1")
    cell = f"import sys\nsys.path.append({str(module.parent)!r})\nimport slow_module"
    wait = threading.Thread(
        target=lambda: (wait_until((module.parent / "begun").exists), session.interrupt())
    )
    wait.start()
    with promised(4.5), pytest.raises(KeyboardInterrupt):
        session.run(cell)
    wait.join()
    assert list(session.run("kept").values) == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_f22_the_limit_of_the_kill_counts_no_import(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose interrupt waits for an import lives, and its traceback ends at the cell's line."""
    monkeypatch.setattr(task_run, "KILL_SECONDS", 1.0)
    (tmp_path / "takes_long.py").write_text("import time\nfor _ in range(4): time.sleep(0.5)\n")
    session.run(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nkept = 1")
    pending = session.submit("import takes_long\nwhile True: pass")
    time.sleep(0.3)
    pending.cancel()
    assert isinstance(pending.exception(15), KeyboardInterrupt)
    assert list(session.run("kept").values) == [1]


@pytest.mark.slow
def test_f22_no_frames_of_an_import_that_was_interrupted(session: Session, tmp_path: Path) -> None:
    """Their sources, of a large library, would take seconds; the cell's line says all."""
    (tmp_path / "takes_longer.py").write_text(
        "import time\ndef wait(): time.sleep(0.5)\nwhile True: wait()\n"
    )
    session.run(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})")
    pending = session.submit("x = 1\nimport takes_longer")
    time.sleep(0.3)
    pending.cancel()
    stopped = pending.exception(15)
    assert isinstance(stopped, KeyboardInterrupt)
    (failure,) = stopped.failures.values()  # type: ignore[attr-defined]
    assert [frame.line for frame in failure.frames] == [2]
    assert "takes_longer.py" not in "".join(failure.traceback)


@pytest.mark.slow
def test_f22_a_report_that_is_under_way_is_an_answer(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that takes long to say what it is does not cost the rank."""
    monkeypatch.setattr(task_run, "KILL_SECONDS", 1.0)
    session.run(
        "import time\nkept = 1\nclass Slow(Exception):\n    def __str__(self):\n"
        "        time.sleep(0.6)\n        return 'slow'"
    )
    pending = session.submit("try:\n    time.sleep(30)\nexcept KeyboardInterrupt:\n    raise Slow")
    time.sleep(0.3)
    pending.cancel()
    assert isinstance(pending.exception(15), KeyboardInterrupt)
    assert list(session.run("kept").values) == [1]
