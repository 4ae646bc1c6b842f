"""What ends ranks that another program started, once they have met: the others are freed and told why."""

from __future__ import annotations

import os
import signal

import pytest

from nbparallel.testing import processes
from nbparallel.testing.waiting import wait_until
from tests.distributed.bootstrap.started import PREAMBLE, Launcher, Script, end_supervisor

pytestmark = [pytest.mark.time_limit(400), pytest.mark.fault("rendezvous")]


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


@pytest.mark.slow
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
