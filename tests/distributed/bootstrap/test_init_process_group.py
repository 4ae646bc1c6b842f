"""`init_process_group` in processes that somebody else started: they become one world, and leave it."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbparallel.distributed.bootstrap import process_group
from nbparallel.distributed.bootstrap.process_group import InitMethod
from nbparallel.testing.waiting import wait_until
from tests.distributed.bootstrap.started import Launcher

pytestmark = pytest.mark.time_limit(400)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """Return what starts processes, and ends those that a failed test has left."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


@pytest.mark.slow
def test_plain_processes_become_ranks(launcher: Launcher) -> None:
    """With torchrun's variables four processes join, and every family of operations works among them."""
    code = """\
assert not dist.is_initialized()
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x = nbp.zeros(200_000); x += rank
dist.all_reduce(x)
small = dist.all_reduce(rank)
dist.send(np.full(300_000, rank), (rank + 1) % size)
got = dist.recv(src=(rank - 1) % size)
pair = dist.split(rank % 2)
looked = dist.all_gather(x, view=True) if nbp.is_shared(x) else None
dist.barrier()
say(rank=rank, size=size, x=x.tolist()[:2], small=small, got=int(got[-1]))
say(pair=dist.all_reduce(rank, group=pair), shared=len(looked), gathered=dist.all_gather(rank))
dist.destroy_process_group()
assert not dist.is_initialized()
"""
    scripts = launcher.world(4, code)
    for rank, script in enumerate(scripts):
        assert script.wait() == {
            "rank": rank, "size": 4, "x": [6.0, 6.0], "small": 6, "got": (rank - 1) % 4,
            "pair": 2 if rank % 2 == 0 else 4, "shared": 4, "gathered": [0, 1, 2, 3],
        }  # fmt: skip
        assert script.stderr == ""
    assert launcher.places() == []


@pytest.mark.slow
def test_a_file_is_a_place_to_meet(launcher: Launcher) -> None:
    """Processes meet at a path, with ranks as arguments, while others meet at another one."""
    code = """\
at = "file://" + os.environ["TMPDIR"] + "/" + os.environ["NAME"]
dist.init_process_group(init_method=at, rank=int(os.environ["PLACE"]), world_size=2, timeout=300)
say(sum=dist.all_reduce(int(os.environ["VALUE"])))
"""
    scripts = [
        launcher.start(code, NAME=name, PLACE=place, VALUE=value)
        for name, place, value in (("a", 0, 1), ("b", 1, 10), ("a", 1, 2), ("b%20c", 0, 20))
    ]
    wait_until(lambda: "b c" in launcher.places())
    scripts.append(launcher.start(code, NAME="b%20c", PLACE=1, VALUE=30))
    scripts.append(launcher.start(code, NAME="b", PLACE=0, VALUE=40))
    assert [script.wait()["sum"] for script in scripts] == [3, 50, 3, 50, 50, 50]
    assert launcher.places() == []


@pytest.mark.slow
def test_two_worlds_at_once(launcher: Launcher) -> None:
    """Worlds with ports of their own know nothing of each other, while they meet and afterwards."""
    code = """\
dist.init_process_group()
say(sum=dist.all_reduce(int(os.environ["VALUE"])), other=dist.all_gather(os.getppid()))
dist.destroy_process_group()
"""
    one = launcher.world(2, code, MASTER_PORT=29601, VALUE=1)
    two = launcher.world(3, code, MASTER_PORT=29602, VALUE=100)
    assert [script.wait()["sum"] for script in (*one, *two)] == [2, 2, 300, 300, 300]
    assert launcher.places() == []


@pytest.mark.slow
def test_a_place_can_be_used_again_at_once(launcher: Launcher) -> None:
    """Ranks that leave and join again, at their own pace, never meet those of the last world."""
    code = """\
sums = []
for i in range(8):
    dist.init_process_group()
    sums.append(dist.all_reduce(i))
    dist.destroy_process_group()
    time.sleep(0.001 * ((i * 7 + dist.os.getpid()) % 5))
say(sums=sums)
"""
    for script in launcher.world(2, code):
        assert script.wait()["sums"] == [2 * i for i in range(8)]
    assert launcher.places() == []


@pytest.mark.slow
def test_a_world_of_one(launcher: Launcher) -> None:
    """One process is a world, too."""
    (script,) = launcher.world(1, "dist.init_process_group(); say(sum=dist.all_reduce(5))")
    assert script.wait() == {"sum": 5}


@pytest.mark.slow
def test_forgetting_to_leave_is_fine(launcher: Launcher) -> None:
    """A script that ends without `destroy_process_group` leaves in good order; nothing is lost or printed."""
    code = """\
dist.init_process_group()
if dist.get_rank() == 0:
    dist.send(np.arange(2_000_000), 1)
    say(gone=True)
else:
    time.sleep(1.0)
    say(last=int(dist.recv(src=0)[-1]))
"""
    first, second = launcher.world(2, code)
    assert first.wait() == {"gone": True}
    assert second.wait() == {"last": 1_999_999}
    assert first.stderr == second.stderr == ""


@pytest.mark.slow
@pytest.mark.fault("F39")
def test_locks_among_plain_processes(launcher: Launcher) -> None:
    """They take turns; one that leaves with a lock held names it and releases it; a death ends the waits."""
    code = """\
dist.init_process_group("gloo")
rank, order = dist.get_rank(), []
for _ in range(50):
    with dist.lock("turns"):
        order.append(rank)
assert len(order) == 50
dist.barrier()
if rank == 0:
    dist.lock("left").acquire()
    dist.barrier()
    dist.destroy_process_group()
elif rank == 1:
    dist.barrier()
    with dist.lock("left"):
        os.kill(os.getpid(), signal.SIGKILL)
else:
    dist.barrier()
    try:
        while True:
            with dist.lock("left"):
                pass
    except errors.PeerFailedError as error:
        say(failed=error.rank)
    os._exit(0)
"""
    scripts = launcher.world(3, code)
    scripts[0].wait()
    assert "the lock 'left' since line" in scripts[0].stderr
    scripts[1].wait(-9)
    assert scripts[2].wait() == {"failed": 1}


@pytest.mark.slow
def test_arrays_outlive_the_world(launcher: Launcher) -> None:
    """What was shared, sent or received stays readable and writable after everybody has left."""
    code = """\
before, small = nbp.ones(100_000), [nbp.ones(10) for _ in range(20)]
dist.init_process_group()
x = nbp.zeros(100_000)
x += dist.get_rank()
theirs = dist.all_gather(x, view=True)[1 - dist.get_rank()]
got = dist.broadcast(np.arange(100_000) if dist.get_rank() == 0 else None)
dist.all_reduce(before)
dist.all_reduce(small[3])
views = dist.all_gather(small[4], view=True)
say(shared=all(nbp.is_shared(y) for y in (before, *small)), views=[float(view.sum()) for view in views])
del views
small.append(nbp.ones(5))
dist.destroy_process_group()
time.sleep(0.2)
x += 1; got += 1
say(x=x[0], theirs=float(theirs[5]), got=int(got[-1]), before=before[0], small=small[3][0])
say(still=all(nbp.is_shared(y) for y in (x, before, *small)))
del x, theirs, got, before, small[:]
import gc; gc.collect()
nbp.zeros(1)
say(left=len([s for s in nbp.segments() if s.nbytes >= 800_000 and s.phase == "live"]))
dist.init_process_group()
say(again=dist.all_reduce(1))
"""
    scripts = launcher.world(2, code)
    for rank, script in enumerate(scripts):
        said = script.wait()
        assert said.pop("theirs") in (1 - rank, 2 - rank)  # it may have been added to meanwhile
        assert said == {
            "shared": True, "views": [10.0, 10.0], "x": rank + 1.0, "got": 100_000, "before": 2.0,
            "small": 2.0, "still": True, "left": 0, "again": 2,
        }  # fmt: skip


@pytest.mark.slow
def test_joining_twice_and_before_joining(launcher: Launcher) -> None:
    """The second call is refused; without the first one operations say what is missing."""
    code = """\
try:
    dist.get_rank()
except RuntimeError as error:
    say(before=str(error))
dist.destroy_process_group()
dist.init_process_group()
try:
    dist.init_process_group()
except ValueError as error:
    say(twice=str(error))
try:
    nbp.Session(2)
except RuntimeError as error:
    say(session=str(error))
child = os.fork()
if not child:
    try:
        dist.all_reduce(1)
    except errors.ForkedRankError:
        dist.destroy_process_group()
        os._exit(7)
    os._exit(1)
say(child=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sum=dist.all_reduce(1))
dist.destroy_process_group()
nbp.Session(2).stop()  # allowed again
try:
    dist.all_reduce(1)
except RuntimeError as error:
    say(after=str(error))
"""
    (script,) = launcher.world(1, code)
    said = script.wait()
    assert "init_process_group()" in said["before"]
    assert "already" in said["twice"]
    assert "cannot start ranks" in said["session"]
    assert said["child"] == 7
    assert said["sum"] == 1
    assert "init_process_group()" in said["after"]


ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": ""}, r"RANK is not set.*RANK=0"),
        ({"WORLD_SIZE": ""}, r"WORLD_SIZE is not set.*WORLD_SIZE=4"),
        ({"MASTER_PORT": ""}, r"MASTER_PORT is not set.*file:///"),
        ({"RANK": "", "OMPI_COMM_WORLD_RANK": "1"}, r"rank=int\(os.environ\['OMPI_COMM_WORLD_RANK'\]\)"),
        ({"WORLD_SIZE": "", "PMI_SIZE": "2"}, r"world_size=int\(os.environ\['PMI_SIZE'\]\)"),
        ({"RANK": "one"}, "RANK must be an integer, not 'one'"),
        ({"RANK": "2"}, "rank .RANK. is 2, and a world of world_size=2 has the ranks 0-1"),
        ({"RANK": "-3"}, "rank .RANK. is -3"),
        ({"WORLD_SIZE": "0"}, "must be between 1 and 1024, not 0"),
        ({"WORLD_SIZE": "5000"}, "must be between 1 and 1024, not 5000"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT must be between 1 and 65535, not '0'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be between 1 and 65535, not 'http'"),
        ({"MASTER_ADDR": "192.0.2.1"}, "'192.0.2.1', which is another machine.*localhost"),
        ({"MASTER_ADDR": "no such host"}, "'no such host', which is not known here"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_what_the_environment_lacks_is_named(changes: dict[str, str], said: str) -> None:
    """A variable that is missing or makes no sense is named, with what to do."""
    with pytest.raises(ValueError, match=said):
        process_group.resolve_init_method(None, -1, -1, ENVIRONMENT | changes)


@pytest.mark.parametrize("address", ["", "localhost", "127.0.0.1", "127.0.0.2", socket.gethostname().upper()])
def test_every_name_of_this_machine_is_the_same_place(address: str) -> None:
    """MASTER_ADDR may be spelled in several ways, and all meet."""
    found = process_group.resolve_init_method("env://", -1, -1, ENVIRONMENT | {"MASTER_ADDR": address})
    assert found.place.endswith(f"nbparallel-{os.geteuid()}-29500")
    assert (found.rank, found.world_size) == (1, 2)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("tcp://localhost:1", "'tcp://localhost:1' is not known: use 'env://'.*or 'file:///"),
        ("file://", "lacks a path"),
        ("file:///", "lacks a path"),
        ("file://tmp/x", "begins with a third slash"),
        ("here", "'here' is not known"),
    ],
)
def test_methods_that_there_are_not(method: str, said: str) -> None:
    """An unknown method is an error that says which there are."""
    with pytest.raises(ValueError, match=said):
        process_group.resolve_init_method(method, 0, 1, {})


def test_arguments_win_and_types_are_checked(tmp_path: Path) -> None:
    """What is passed wins over the environment; what is no number of ranks or seconds is refused."""
    (tmp_path / "link").symlink_to(tmp_path)
    found = process_group.resolve_init_method(f"file://{tmp_path}/link/a%20b", 2, 3, ENVIRONMENT)
    assert found == InitMethod(f"{tmp_path}/a b", 2, 3)
    with pytest.raises(TypeError, match="rank must be an int, not str 'x'"):
        process_group.resolve_init_method("file:///x", "x", 2, {})
    with pytest.raises(TypeError, match="init_method must be a string, not int"):
        process_group.resolve_init_method(3, 0, 2, {})  # type: ignore[arg-type]
    assert process_group.seconds_of(datetime.timedelta(minutes=1)) == 60.0
    assert process_group.seconds_of(None) == process_group.DEFAULT_SECONDS
    with pytest.raises(ValueError, match="must be more than 0 s"):
        process_group.seconds_of(0)
    with pytest.raises(TypeError, match="seconds or a timedelta, not str"):
        process_group.seconds_of("5")  # type: ignore[arg-type]
    process_group.check_backend("GLOO")
    with pytest.raises(ValueError, match="unknown backend 'foo'"):
        process_group.check_backend("foo")
