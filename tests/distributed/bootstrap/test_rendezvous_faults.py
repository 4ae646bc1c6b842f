"""What may go wrong while processes meet, and when one of them dies: nobody hangs, nothing stays behind."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbparallel.supervisor.external.listener import SOCKET
from nbparallel.testing import processes
from nbparallel.testing.processes import ProcessRecord
from nbparallel.testing.waiting import wait_until
from tests.distributed.bootstrap.started import PREAMBLE, Launcher, Script

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


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """Return what starts processes; afterwards no place and no supervisor may be left."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()
    wait_until(lambda: not launcher.supervisors())
    assert launcher.places() == []


def listening(launcher: Launcher) -> bool:
    """Return whether a supervisor has opened its door."""
    return any(place.endswith(f"/{SOCKET}") for place in launcher.places())


def end_supervisor(launcher: Launcher) -> None:
    """Kill the only supervisor of a world."""
    os.kill(_supervisor(launcher).pid, signal.SIGKILL)


def _supervisor(launcher: Launcher) -> ProcessRecord:
    """Return the only supervisor of a world, once its first half, from which it forked away, has exited."""
    wait_until(lambda: len(launcher.supervisors()) == 1)
    return launcher.supervisors()[0]


# -- while they meet -----------------------------------------------------------------------------------


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
def test_a_rank_that_comes_twice(launcher: Launcher) -> None:
    """Both processes of one rank are named to everybody, at once."""
    first = launcher.start(JOIN, RANK=0, WORLD_SIZE=3)
    wait_until(lambda: listening(launcher))
    scripts = [first, *(launcher.start(JOIN, RANK=1, WORLD_SIZE=3) for _ in range(2))]
    pids = [str(script.process.pid) for script in scripts[1:]]
    for script in scripts:
        said = script.wait()
        assert said["kind"] == "RendezvousError"
        assert "rank 1 joined twice" in said["text"]
        assert all(pid in said["text"] for pid in pids)


@pytest.mark.slow
def test_world_sizes_that_differ(launcher: Launcher) -> None:
    """Everybody learns who says what."""
    scripts = [launcher.start(JOIN, RANK=rank, WORLD_SIZE=2 + rank) for rank in range(2)]
    for script in scripts:
        said = script.wait()
        assert said["kind"] == "RendezvousError"
        assert "the world sizes differ" in said["text"]
        assert "has 2" in said["text"]
        assert "has 3" in said["text"]


@pytest.mark.slow
def test_versions_that_differ(launcher: Launcher) -> None:
    """Another version of nbparallel is told before anything is exchanged."""
    other = "nbp.__version__ = 'other'\n" + JOIN
    scripts = [launcher.start(JOIN, RANK=0, WORLD_SIZE=2), launcher.start(other, RANK=1, WORLD_SIZE=2)]
    for script in scripts:
        assert "nbparallel other" in script.wait()["text"]


@pytest.mark.by_turns
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
    folder = Path(f"/proc/{_supervisor(launcher).pid}/fd")
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


@pytest.mark.by_turns
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("opened", [False, True])
def test_another_user_cannot_come(launcher: Launcher, opened: bool) -> None:
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
    child = os.fork()
    if not child:
        os._exit(_connect_as_another(door.parent))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (SENT_AWAY if opened else FORBIDDEN)
    door.parent.chmod(0o700)
    second = launcher.start(JOIN, RANK=1, WORLD_SIZE=2)
    assert [first.wait()["sum"], second.wait()["sum"]] == [2, 2]


FORBIDDEN, SENT_AWAY, HEARD = 3, 4, 5


def _connect_as_another(place: Path) -> int:
    try:
        os.chdir(place)  # as root, past all directories above it
        os.setresuid(65534, 65534, 65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(30)
            sock.connect(SOCKET)
            return HEARD if sock.recv(100) else SENT_AWAY
    except PermissionError:
        return FORBIDDEN
    except OSError:
        return 1


# -- when they are a world -----------------------------------------------------------------------------

MEET = """\
dist.init_process_group(timeout=300)
rank = dist.get_rank()
def attempt(call, *args):
    began = time.monotonic()
    try:
        call(*args)
    except errors.NbParallelError as error:
        say(kind=type(error).__name__, text=str(error), seconds=time.monotonic() - began)
"""


def _victim(scripts: list[Script]) -> Script:
    for script in scripts:
        script.until_it_says("ready")
    return scripts[1]


@pytest.mark.slow
def test_a_rank_that_is_killed_idle(launcher: Launcher) -> None:
    """The next operation of the others says who died, of what; other ranks are not touched."""
    code = """\
dist.all_reduce(1)
say(ready=True)
while not os.path.exists(os.environ["TMPDIR"] + "/go"):
    time.sleep(0.01)
attempt(dist.all_reduce, np.ones(100_000))
attempt(dist.barrier)
"""
    scripts = launcher.world(3, MEET + code)
    _victim(scripts).process.kill()
    scripts[1].wait(-signal.SIGKILL)
    (launcher.protocol / "go").touch()
    for script in (scripts[0], scripts[2]):
        said = script.wait()
        assert said["kind"] == "PeerFailedError"
        assert "rank 1 died: its process was killed by SIGKILL" in said["text"]
    (launcher.protocol / "go").unlink()


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("size", [1, 50_000, 2_000_000])
def test_a_rank_that_is_killed_while_others_wait(launcher: Launcher, size: int) -> None:
    """Those who wait in `all_reduce` are freed by the death of the one they wait for."""
    code = f"""\
x = nbp.ones({size})
dist.all_reduce(x)
if rank == 1:
    say(ready=True)
    time.sleep(1000)
say(ready=True)
attempt(dist.all_reduce, x)
"""
    scripts = launcher.world(3, MEET + code)
    _victim(scripts).process.kill()
    for script in (scripts[0], scripts[2]):
        said = script.wait()
        assert "rank 1 died" in said["text"]
        assert said["kind"] == "PeerFailedError"
    scripts[1].wait(-signal.SIGKILL)


@pytest.mark.by_turns
def test_a_rank_that_is_killed_within(launcher: Launcher) -> None:
    """A death at any moment of a loop of collectives frees the others."""
    code = """\
x = nbp.ones(30_000)
def loop():
    while True:
        dist.all_reduce(x)
        dist.all_gather(rank)
        dist.barrier()
        x.fill(1)
say(ready=True)
attempt(loop)
"""
    scripts = launcher.world(3, MEET + code)
    _victim(scripts).process.kill()
    for script in (scripts[0], scripts[2]):
        said = script.wait()
        assert "rank 1 died" in said["text"], said
    scripts[1].wait(-signal.SIGKILL)


@pytest.mark.slow
def test_all_are_killed(launcher: Launcher) -> None:
    """Without members the supervisor goes, and with it everything; names in /dev/shm too."""
    code = """\
nbp.set_sharing_strategy("file_system")
x = nbp.zeros(100_000)
dist.all_gather(x, view=True)
dist.barrier()
say(names=sorted({line.split()[-1] for line in open("/proc/self/maps") if "/dev/shm/nbp_" in line}))
say(ready=True)
time.sleep(1000)
"""
    scripts = launcher.world(2, MEET + code)
    names = _victim(scripts).until_it_says("names")
    assert len(names) >= 2
    for script in scripts:
        script.process.kill()
    for script in scripts:
        script.wait(-signal.SIGKILL)
    wait_until(lambda: not launcher.supervisors())
    assert not [name for name in names if os.path.exists(name)]


@pytest.mark.by_turns
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("ending", ["raise", "exit"])
def test_a_rank_that_fails_or_forgets(launcher: Launcher, ending: str) -> None:
    """An exception that ends a script frees the others with its text and line; so does its early end."""
    code = "if rank == 1:\n    " + ("1 / 0" if ending == "raise" else "sys.exit(3)")
    code += "\nattempt(dist.all_reduce, 1)\n"
    scripts = launcher.world(2, MEET + code)
    said = scripts[0].wait()
    if ending == "raise":
        line = (PREAMBLE + MEET).count("\n") + 2
        assert f"rank 1 failed: ZeroDivisionError on line {line}: division by zero" in said["text"]
        assert said["kind"] == "PeerFailedError"
        assert "ZeroDivisionError" in scripts[1].stderr
    else:
        assert said["kind"] == "CollectiveMismatchError"
        assert "rank 1" in said["text"]
    assert scripts[1].process.wait(300) == (1 if ending == "raise" else 3)


@pytest.mark.slow
def test_an_exit_without_any_word(launcher: Launcher) -> None:
    """`os._exit(0)` is a death like any other, with its code."""
    code = "if rank == 1:\n    os._exit(0)\nattempt(dist.all_reduce, 1)\n"
    first, second = launcher.world(2, MEET + code)
    assert "rank 1 died: its process ended" in first.wait()["text"]
    second.wait()


@pytest.mark.slow
def test_a_deadlock_is_seen(launcher: Launcher) -> None:
    """Ranks that wait for each other are freed as in a session, with their lines."""
    first, second = launcher.world(2, MEET + "attempt(lambda: dist.recv(src=1 - rank))\n")
    for script in (first, second):
        assert script.wait()["kind"] == "DeadlockError"


@pytest.mark.by_turns
def test_a_supervisor_that_is_killed(launcher: Launcher) -> None:
    """Nobody would notice a dead rank any more, so a wait says that; work without waits goes on."""
    code = """\
x = nbp.ones(100_000)
dist.all_reduce(x)
say(ready=True)
if rank == 1:
    time.sleep(1000)
attempt(dist.all_reduce, x)
attempt(dist.all_reduce, x)
say(x=x[0])
dist.destroy_process_group()
"""
    scripts = launcher.world(2, MEET + code)
    _victim(scripts)
    end_supervisor(launcher)
    said = scripts[0].wait()
    assert said["kind"] == "SupervisorDiedError"
    assert "destroy_process_group()" in said["text"]
    assert said["x"] == 2.0
    assert scripts[0].stderr == ""
    scripts[1].process.kill()
    scripts[1].wait(-signal.SIGKILL)


@pytest.mark.slow
def test_what_a_rank_has_forked_does_not_hide_its_death(launcher: Launcher) -> None:
    """A child that holds the socket open lives on; the rank is dead all the same."""
    code = """\
if rank == 1:
    child = os.fork()
    if not child:
        time.sleep(1000)
    say(child=child)
say(ready=True)
attempt(dist.all_reduce, 1)
"""
    code = code.replace("attempt(", "time.sleep(1000) if rank == 1 else attempt(")
    scripts = launcher.world(2, MEET + code)
    child = _victim(scripts).until_it_says("child")
    try:
        scripts[1].process.kill()
        assert "rank 1 died: its process was killed by SIGKILL" in scripts[0].wait()["text"]
    finally:
        records = [r for r in processes.family(1, os.environ[processes.MARK]) if r.pid == child]
        assert records
        processes.kill(records)
    scripts[1].wait(-signal.SIGKILL)
