"""F45, F46, F82: somebody else removes, cuts off or squats the names of segments."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.channel.channel import lost_error
from nbparallel.errors import SegmentLostError
from nbparallel.session import Session
from nbparallel.sharing.strategies.memfd import FileDescriptorStrategy, FileRegionStrategy
from nbparallel.sharing.strategies.named_files import FileSystemStrategy, MemoryMapStrategy
from nbparallel.sharing.strategies.strategy import Strategy, process_names
from nbparallel.supervisor.ledger.segment_server import SegmentServer
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.segments import Fetch, Lost, LostReason, Register, segment_id
from tests.harness.stores import names_of

SEGMENT = segment_id(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["file_system", "mmap"])
def test_f45_names_removed_by_somebody_else(strategy: str) -> None:
    """Who has mapped it goes on, who has not attaches through the supervisor, nobody complains."""
    names = {"x": nbp.share(np.arange(50_000.0), strategy=strategy), "np": np, "strategy": strategy}
    with Session(2) as session:
        session.run("x.sum(); y = nbp.share(np.full(50_000, rank), strategy=strategy)", namespace=names)
        found = names_of(os.getpid())
        assert len(found) == 3
        for path in found:
            os.unlink(path)
        names["late"] = names["x"][10:20]
        assert session.run("float(x[1] + late[0] + y[0])", namespace=names).values == [11.0, 12.0]
        session.restart(1)  # a new process has mapped nothing yet
        assert session.run("float(x.sum())", namespace=names).values == [float(names["x"].sum())] * 2
        assert session.run("rank").notes == ()
    assert names["x"].sum() == np.arange(50_000.0).sum()


@pytest.fixture
def server() -> Iterator[SegmentServer]:
    """Make a desk that keeps no descriptor at all, with two clients."""
    server = SegmentServer(0)
    server.ledger.clients.add(0)
    server.ledger.clients.add(1)
    yield server
    server.close()


def ask(server: SegmentServer, *, writable: bool = False) -> tuple[Kind, LostReason | None, list[int]]:
    """Ask for the segment as client 1; return the answer's kind, reason and descriptors."""
    (answer,) = server.receive(1, Frame(Kind.FETCH, 0, 5, Fetch(SEGMENT, writable).pack(), []))
    reason = answer.message.reason if isinstance(answer.message, Lost) else None
    return answer.message.kind, reason, answer.fds


@pytest.mark.parametrize("put", [None, "another file", "a link", "a FIFO"])
def test_f45_truly_gone(server: SegmentServer, tmp_path: Path, put: str | None) -> None:
    """Without a kept descriptor it is found by its name; if that is gone, the error says who does such."""
    source = FileSystemStrategy(str(tmp_path)).create(5000)
    payload = Register(SEGMENT, source.nbytes, True, path=source.path).pack()
    assert server.receive(0, Frame(Kind.REGISTER, 0, 0, payload, [os.dup(source.fd)])) == []
    for writable in (False, True):
        kind, _, fds = ask(server, writable=writable)
        assert kind is Kind.FETCHED
        assert os.fstat(fds[0]).st_ino == os.fstat(source.fd).st_ino
        rights = fcntl.fcntl(fds[0], fcntl.F_GETFL) & os.O_ACCMODE
        assert rights == (os.O_RDWR if writable else os.O_RDONLY)
        os.close(fds[0])
    os.unlink(source.path)
    if put == "another file":
        Path(source.path).write_bytes(bytes(8192))
    elif put == "a link":
        os.symlink("/etc/passwd", source.path)
    elif put == "a FIFO":
        os.mkfifo(source.path)
    kind, reason, _ = ask(server)
    assert (kind, reason) == (Kind.LOST, LostReason.REMOVED)
    error = lost_error(Lost(SEGMENT, LostReason.REMOVED), SEGMENT)
    assert isinstance(error, SegmentLostError)
    assert "RemoveIPC" in str(error)
    source.close()


@pytest.mark.parametrize("strategy", [FileDescriptorStrategy(), FileRegionStrategy()])
@pytest.mark.parametrize("size", [0, 4096, 1 << 20])
def test_f46_memory_without_a_name_cannot_be_cut_off(strategy: Strategy, size: int) -> None:
    """A peer that was given the right to write can change the content, never the size."""
    source = strategy.create(1 << 16)
    with pytest.raises(PermissionError):
        os.ftruncate(source.fd, size)
    source.close()


def test_f46_a_reader_of_a_named_one_cannot_cut_it_off(tmp_path: Path) -> None:
    """A writer of the same user can: the risk that the documents name; a reader's descriptor cannot."""
    source = FileSystemStrategy(str(tmp_path)).create(8192)
    reader = os.open(f"/proc/self/fd/{source.fd}", os.O_RDONLY)
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        os.ftruncate(reader, 0)
    os.close(reader)
    source.close()


OCCUPANTS: dict[str, Callable[[Path, Path], object]] = {
    "a file": lambda path, victim: path.write_text("mine"),
    "a link to a file": lambda path, victim: path.symlink_to(victim),
    "a link to nothing": lambda path, victim: path.symlink_to("nothing"),
    "a folder": lambda path, victim: path.mkdir(),
    "a FIFO": lambda path, victim: os.mkfifo(path),
}


@pytest.fixture(params=["file_system", "mmap"])
def named(request: pytest.FixtureRequest, tmp_path: Path) -> Strategy:
    """Make a strategy whose names lie in a folder of the test's own."""
    kind = {"file_system": FileSystemStrategy, "mmap": MemoryMapStrategy}[request.param]
    return kind(str(tmp_path / "names"))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> None:
    (tmp_path / "names").mkdir()


@pytest.mark.parametrize("what", OCCUPANTS)
def test_f82_a_name_that_is_taken(
    what: str, named: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another random name is drawn, with another beginning; nothing is followed, opened or removed."""
    folder, victim = tmp_path / "names", tmp_path / "thesis.tex"
    victim.write_text("ten years of work")
    taken = process_names.draw()
    OCCUPANTS[what](folder / taken, victim)
    fresh, draws = process_names.draw, iter([taken])
    monkeypatch.setattr(process_names, "draw", lambda: next(draws, None) or fresh())
    source = named.create(5000, memoryview(b"x" * 5000))
    assert os.path.basename(source.path).rpartition("_")[0] != taken.rpartition("_")[0]
    assert os.fstat(source.fd).st_ino == os.lstat(source.path).st_ino
    source.close()
    assert [path.name for path in folder.iterdir()] == [taken]
    assert victim.read_text() == "ten years of work"


def test_f82_three_names_in_a_row(named: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no accident: the error says so, and what to do; nothing of ours is left."""
    folder, taken = tmp_path / "names", [process_names.draw() for _ in range(3)]
    for name in taken:
        (folder / name).write_text("mine")
    draws, announced = iter(taken), []
    monkeypatch.setattr(process_names, "draw", lambda: next(draws))
    with pytest.raises(OSError, match=r"3 random names in a row were taken.*file_descriptor"):
        named.create(5000, None, announced.append)
    assert [os.path.basename(path) for path in announced] == taken
    assert sorted(path.name for path in folder.iterdir()) == sorted(taken)


@pytest.mark.slow
def test_f45_at_random_moments() -> None:
    """A program that removes whatever it sees of ours, all the time: results stay right, nothing is left."""
    draw, done = random.Random(45), threading.Event()

    def remove() -> None:
        while not done.is_set():
            paths = names_of(os.getpid(), ["/dev/shm"])
            for path in draw.sample(paths, draw.randint(0, len(paths))):
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    pass
            time.sleep(draw.random() * 0.003)

    thread = threading.Thread(target=remove)
    with Session(2) as session:
        session.run("import numpy as np")
        thread.start()
        try:
            for turn in range(15):
                names = {"x": nbp.share(np.full(30_000, turn), strategy="file_system")}
                source = "y = nbp.share(x + rank, strategy='file_system'); int(y[-1])"
                assert session.run(source, namespace=names).values == [turn, turn + 1]
        finally:
            done.set()
            thread.join()
    del names
    nbp.sharing.current_store().drain()
