"""What may go wrong while processes meet: all who came learn why, nobody hangs, nothing stays behind."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from nbparallel.testing.waiting import wait_until
from nbparallel.wire.identity import SOCKET
from tests.distributed.bootstrap.started import Launcher, end_supervisor, only_supervisor
from tests.faults.security.test_other_users import as_another_user

pytestmark = [pytest.mark.time_limit(400), pytest.mark.fault("rendezvous")]

JOIN = """\
try:
    dist.init_process_group(timeout=float(os.environ.get("SECONDS", 300)))
except Exception as error:
    say(kind=type(error).__name__, text=str(error))
else:
    say(joined=True)
    say(sum=dist.all_reduce(1))
"""


def listening(launcher: Launcher) -> bool:
    """Return whether a supervisor has opened its door."""
    return any(place.endswith(f"/{SOCKET}") for place in launcher.places())


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named(launcher: Launcher) -> None:
    """After the time-out all who came learn who did not; a shorter time-out of one is told to all."""
    scripts = [launcher.start(JOIN, RANK=rank, WORLD_SIZE=5) for rank in (1, 3)]
    wait_until(lambda: listening(launcher) and _connections(launcher) == 2)
    scripts.append(launcher.start(JOIN, RANK=0, WORLD_SIZE=5, SECONDS=2))
    for script in scripts:
        said = script.wait()
        assert said["kind"] == "CollectiveTimeoutError"
        assert "rank 0 has waited 2 s for ranks 2, 4, which did not join" in said["text"]
        assert "nbparallel-" in said["text"]


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_one_that_ends_while_the_others_come(launcher: Launcher, number: int) -> None:
    """A process that dies or is interrupted while it waits ends the meeting; others are told."""
    waiting = [launcher.start(JOIN, RANK=rank, WORLD_SIZE=3) for rank in range(2)]
    wait_until(lambda: listening(launcher))
    wait_until(lambda: _connections(launcher) == 2)
    waiting[0].process.send_signal(number)
    said = waiting[1].wait()
    assert said["kind"] == "RendezvousError"
    assert f"rank 0 (process {waiting[0].process.pid}) left or ended before rank 2 had joined" in said["text"]
    waiting[0].wait(-number)


def _connections(launcher: Launcher) -> int:
    """Return how many processes a supervisor has pidfds of."""
    folder = Path(f"/proc/{only_supervisor(launcher).pid}/fd")
    return sum("pidfd" in os.readlink(entry) for entry in folder.iterdir())


@pytest.mark.slow
def test_a_supervisor_that_is_killed_while_they_meet(launcher: Launcher) -> None:
    """Those who wait start another one, and say that the place was stale."""
    first = launcher.start(JOIN, RANK=0, WORLD_SIZE=2)
    wait_until(lambda: listening(launcher) and _connections(launcher) == 1)
    end_supervisor(launcher)
    second = launcher.start(JOIN, RANK=1, WORLD_SIZE=2)
    assert [first.wait()["sum"], second.wait()["sum"]] == [2, 2]
    assert "was stale" in first.stderr + second.stderr


@pytest.mark.slow
def test_a_stale_place_is_used_again(launcher: Launcher) -> None:
    """What a killed world has left, its supervisor included, does not hang the next one, which says so."""
    first = launcher.start(JOIN, RANK=0, WORLD_SIZE=2)
    wait_until(lambda: listening(launcher) and _connections(launcher) == 1)
    os.kill(first.process.pid, signal.SIGSTOP)  # else it would start another supervisor
    end_supervisor(launcher)
    first.process.kill()
    first.wait(-signal.SIGKILL)
    assert listening(launcher)
    scripts = launcher.world(2, JOIN)
    assert [script.wait()["sum"] for script in scripts] == [2, 2]
    assert "".join(script.stderr for script in scripts).count("was stale") == 1


@pytest.mark.matrix(cover=())
@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("file", "no meeting place of nbparallel: a stale file, from torch"),
        ("link", "no meeting place of nbparallel"),
        ("full", "it holds other files"),
        ("open", "it may be entered by others"),
        ("foreign", "it belongs to another user"),
        ("nowhere", "No such file or directory"),
    ],
)
def test_places_that_cannot_be_used(launcher: Launcher, tmp_path: Path, made: str, said: str) -> None:
    """A stale file, a directory of somebody else, or none at all is an error at once, and is left alone."""
    place = tmp_path / "place"
    if made == "file":
        place.write_text("of torch")
    elif made == "link":
        (tmp_path / "target").mkdir(0o700)
        place.symlink_to(tmp_path / "target")
    elif made != "nowhere":
        place.mkdir(0o755 if made == "open" else 0o700)
    if made == "full":
        (place / "thesis.tex").touch()
    if made == "foreign":
        if os.geteuid() != 0:
            pytest.skip("only root can make a directory of another user")
        os.chown(place, 65534, -1)
    before = sorted(tmp_path.iterdir())
    if made == "nowhere":
        place = tmp_path / "there" / "is" / "none"
    code = JOIN.replace("init_process_group(", f"init_process_group(init_method='file://{place}', ")
    said_there = launcher.start(code, RANK=0, WORLD_SIZE=2).wait()
    assert said_there["kind"] == "RendezvousError"
    assert said in said_there["text"]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_nonsense_at_the_door_disturbs_nobody(launcher: Launcher) -> None:
    """A program of this user that talks nonsense, or nothing, is sent away; the world comes about."""
    first = launcher.start(JOIN, RANK=0, WORLD_SIZE=2)
    wait_until(lambda: listening(launcher))
    (place,) = (path for path in launcher.places() if path.endswith(f"/{SOCKET}"))
    strangers = []
    for words in ([], [b"hello"], [b"NBP1" + b"\xff" * 60], [b"x" * 60_000, b"y"]):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        strangers.append(stranger)
        stranger.connect(str(launcher.protocol / place))
        for word in words:
            try:
                stranger.send(word)
            except BrokenPipeError:
                break  # sent away already
    second = launcher.start(JOIN, RANK=1, WORLD_SIZE=2)
    assert [first.wait()["sum"], second.wait()["sum"]] == [2, 2]
    for stranger in strangers:
        stranger.close()


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("opened", [False, True])
def test_another_user_cannot_come(launcher: Launcher, opened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is not this user cannot enter the place, or is sent away unheard if he can."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    first = launcher.start(JOIN, RANK=0, WORLD_SIZE=2)
    wait_until(lambda: listening(launcher))
    (door,) = (launcher.protocol / place for place in launcher.places() if place.endswith(f"/{SOCKET}"))
    assert [path.stat().st_mode & 0o077 for path in (door, door.parent)] == [0, 0]
    if opened:
        door.chmod(0o777)
        door.parent.chmod(0o755)
    monkeypatch.chdir(door.parent)  # past all directories above it
    said = as_another_user(lambda: {"the door": knock})
    assert said == {"the door": "ConnectionResetError" if opened else "PermissionError"}
    door.parent.chmod(0o700)
    second = launcher.start(JOIN, RANK=1, WORLD_SIZE=2)
    assert [first.wait()["sum"], second.wait()["sum"]] == [2, 2]


def knock() -> None:
    """Connect, and be heard."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(30)
        sock.connect(SOCKET)
        if not sock.recv(100):
            raise ConnectionResetError
