"""F40, F41, F52: a full /dev/shm, a full container, a full disk are exceptions, never SIGBUS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.sandboxes import memory_cgroup, missing_reason, on_small_tmpfs, run_script

MIB = 1 << 20
PRELUDE = """
import os, subprocess, sys, time
import numpy as np
import nbparallel as nbp
from nbparallel.errors import NbParallelError, SharedMemoryFullError
from nbparallel.testing.waiting import wait_until

def free():
    place = os.statvfs(FOLDER)
    return place.f_bavail * place.f_frsize

def room():
    nbp.sharing.current_store().drain()
    return free()

def names():
    return [name for name in os.listdir(FOLDER) if name.startswith("nbp_")]

def refused(call):
    try:
        call()
    except SharedMemoryFullError as error:
        assert isinstance(error, MemoryError)
        return str(error)
    raise AssertionError("it fitted")
"""
FILL = """
import os, sys
fd = os.open(sys.argv[1] + "/filler", os.O_RDWR | os.O_CREAT, 0o600)
place = os.statvfs(sys.argv[1])
os.posix_fallocate(fd, 0, max(1, place.f_bavail * place.f_frsize - int(sys.argv[2])))
"""
HUNGRY = """
import random
import numpy as np
import nbparallel as nbp
from nbparallel.errors import SharedMemoryFullError

def eat():
    mine, errors = [], []
    draw = random.Random(rank)
    barrier()
    for _ in range(3000):
        nbytes = draw.choice([1, 4096, 4097, 30_000, 200_000])
        try:
            if draw.random() < 0.5:
                mine.append(nbp.zeros(nbytes, "u1"))
            else:
                mine.append(nbp.share(np.ones(nbytes, "u1")))
        except SharedMemoryFullError as error:
            errors.append(str(error))
            if len(errors) == 20:
                break
            del mine[:draw.randrange(3)]
    for x in mine:
        x[:] = rank       # every page is there: no SIGBUS
    barrier()             # all have what they say at the same time
    return sum(x.nbytes for x in mine), errors
"""


@pytest.fixture(params=["file_system", "mmap"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., str]:
    """Run a script where the strategy's folder has 8 MiB; return what it printed."""
    reason = missing_reason()
    if reason is not None:
        pytest.skip(reason)
    folder = "/dev/shm" if request.param == "file_system" else str(tmp_path)
    options = "" if request.param == "file_system" else f", directory={folder!r}"
    chosen = f"FOLDER = {folder!r}\n{PRELUDE}\nnbp.set_sharing_strategy({request.param!r}{options})\n"

    def run(script: str, mount_options: str = "mode=1777") -> str:
        done = run_script(chosen + script, on_small_tmpfs(folder, "8m", mount_options))
        assert (done.returncode, done.stderr) == (0, ""), done.stderr + done.stdout
        return done.stdout

    return run


@pytest.fixture
def container() -> Callable[[int, str], None]:
    """Run a script in a memory cgroup with a limit in bytes."""

    def run(nbytes: int, script: str) -> None:
        with memory_cgroup(nbytes) as inside:
            if isinstance(inside, str):
                pytest.skip(f"{inside}; tests/sharing/memory/test_out_of_memory.py reads an imaginary cgroup")
            done = run_script(script, inside)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr

    return run


@pytest.mark.time_limit(60)
def test_f40_to_the_edge(small: Callable[..., str]) -> None:
    """The last page can be had, one more is refused with the numbers, a `del` makes room again."""
    text = small("""
x = nbp.ones(free(), "u1")
assert x.sum() == 8 << 20 and free() == 0
print(refused(lambda: nbp.zeros(1)))
del x
assert room() == 8 << 20, "freed"
x = nbp.zeros(free() - 4096, "u1")
x[:] = 1
print(refused(lambda: nbp.share(np.ones(4097, "u1"))))
y = nbp.share(np.ones(4096, "u1"))
del x, y
assert room() == 8 << 20
print(refused(lambda: nbp.zeros((8 << 20) + 1, "u1")))
assert names() == [], names()
""")
    nothing_left, one_page, too_much = text.splitlines()
    assert "needs 4.0 KiB, 0 B free on" in nothing_left
    assert "needs 8.0 KiB, 4.0 KiB free on" in one_page
    assert "needs 8196 KiB, 8192 KiB free on" in too_much, "numbers that differ look different"
    assert "tmpfs of 8.0 MiB" in nothing_left
    assert "--shm-size" in nothing_left or "directory=" in nothing_left
    assert "--memory" not in nothing_left, "the container's memory is not what is full"


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.time_limit(90)
def test_f40_four_ranks_eat_at_once(small: Callable[..., str]) -> None:
    """Concurrent ranks get exceptions, none a signal; the group goes on and room comes back."""
    small(f"""
with nbp.Session(4) as session:
    session.run({HUNGRY!r})
    for _ in range(2):
        sums, errors = zip(*session.run("eat()").values)
        assert sum(sums) <= 8 << 20, sums
        assert all(errors) and all("tmpfs of 8.0 MiB" in error for rank in errors for error in rank)
        assert session.run("all_reduce(rank)").values == [6] * 4
        wait_until(lambda: free() == 8 << 20, lambda: (free(), names()))
    assert session.run("x = nbp.ones(1 << 20, 'u1'); int(x.sum())").values == [1 << 20] * 4
assert names() == [], names()
""")


@pytest.mark.slow
@pytest.mark.parametrize("call", ["nbp.zeros(1 << 20, 'u1')", "nbp.share(np.ones(1 << 20, 'u1'))"])
@pytest.mark.time_limit(60)
def test_f40_filled_between_the_look_and_the_use(small: Callable[..., str], call: str) -> None:
    """Another process takes the room after it was seen: still an exception, and nothing is left."""
    small(f"""
from nbparallel.sharing.strategies.page_allocation import SegmentDirectory

look = SegmentDirectory.require

def look_and_lose(place, nbytes):
    look(place, nbytes)
    subprocess.run([sys.executable, "-I", "-c", {FILL!r}, FOLDER, "8192"], check=True)

SegmentDirectory.require = look_and_lose
text = refused(lambda: {call})
assert "needs 1.0 MiB, 8.0 KiB free on" in text, text
assert names() == [] and free() == 8192, (names(), free())
os.unlink(FOLDER + "/filler")
SegmentDirectory.require = look
x = {call}
assert x.nbytes == 1 << 20
""")


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.time_limit(90)
def test_f40_beside_a_process_that_fills_and_empties(small: Callable[..., str]) -> None:
    """However often room comes and goes, ranks get arrays that they can fill, or the one exception."""
    small(f"""
loop = "import itertools\\nfor _ in itertools.count():\\n" + "".join(
    "    " + line + "\\n" for line in {FILL!r}.strip().splitlines()
).replace("sys.argv[2]", "0") + "    os.unlink(sys.argv[1] + '/filler'); os.close(fd)\\n"
loop = loop.replace("    os.posix_fallocate", "    try: os.posix_fallocate").replace(
    "    os.unlink", "    except OSError: pass\\n    os.unlink")
other = subprocess.Popen([sys.executable, "-I", "-c", loop, FOLDER])
try:
    with nbp.Session(2) as session:
        session.run({HUNGRY!r})
        sums, errors = zip(*session.run("eat()").values)
        assert session.run("all_reduce(rank)").values == [1, 1]
    assert other.poll() is None
finally:
    other.kill()
    other.wait()
""")


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_f40_no_names_left(small: Callable[..., str]) -> None:
    """A folder that is out of file names says so, rather than that it has room."""
    text = small(
        """
arrays = []
print(refused(lambda: arrays.extend(nbp.zeros(300_000, "u1") for _ in range(100))))
assert 5 < len(arrays) < 20
assert len(names()) == len(arrays)
""",
        "nr_inodes=20",
    )
    assert "no file can be added" in text


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_f40_anonymous_memory_does_not_care(tmp_path: Path) -> None:
    """`file_descriptor` and `file_region` share 64 MiB beside a /dev/shm of 8 MiB."""
    reason = missing_reason()
    if reason is not None:
        pytest.skip(reason)
    script = """
        import nbparallel as nbp
        for name in ("file_descriptor", "file_region"):
            x = nbp.ones(64 << 20, "u1", strategy=name)
            with nbp.Session(2) as session:
                assert session.run("int(x[-1])", namespace={"x": x}).values == [1, 1]
    """
    done = run_script(script, on_small_tmpfs("/dev/shm", "8m"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_what_the_notebook_has_dropped_is_free_for_ranks() -> None:
    """On a nearly full tmpfs a rank gets the room of an array that the notebook has deleted."""
    if (reason := missing_reason()) is not None:
        pytest.skip(reason)
    script = """
        import nbparallel as nbp
        nbp.set_sharing_strategy("file_system")
        with nbp.Session(1) as session:
            session.run("1")
            x = nbp.zeros(11 << 20, dtype="u1")
            del x
            assert session.run("nbp.zeros(8 << 20, dtype='u1').nbytes", namespace={}).values == [8 << 20]
    """
    done = run_script(script, on_small_tmpfs("/dev/shm", "16m"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_what_the_notebook_drops_while_ranks_run_is_free_for_them(tmp_path: Path) -> None:
    """A rank that finds the tmpfs full has the idle notebook return what it has just deleted."""
    if (reason := missing_reason()) is not None:
        pytest.skip(reason)
    script = f"""
        import nbparallel as nbp
        path = {str(tmp_path / "go")!r}
        nbp.set_sharing_strategy("file_system")
        with nbp.Session(1) as session:
            session.run("from nbparallel.testing.waiting import wait_until")
            cell = (
                f"import os; wait_until(lambda: os.path.exists({{path!r}}))\\n"
                "nbp.zeros(8 << 20, dtype='u1').nbytes"
            )
            pending = session.submit(cell)
            x = nbp.zeros(11 << 20, dtype="u1")
            del x
            open(path, "w").close()
            assert pending.result(30).values == [8 << 20]
    """
    done = run_script(script, on_small_tmpfs("/dev/shm", "16m"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.time_limit(90)
def test_what_other_ranks_keep_for_reuse_is_free_for_a_rank() -> None:
    """In a nearly full container a rank gets the room that idle ranks have kept for their next arrays."""
    script = """
        import nbparallel as nbp
        from nbparallel.testing.waiting import wait_until
        with nbp.Session(3) as session:
            session.run("if rank: y = nbp.ones(40 << 20, dtype='u1')")
            session.run("y = None")
            session.run(
                "from nbparallel.sharing.memory.memory_limits import MARGIN, limits\\n"
                "free = min(limit.free for limit in limits()) - MARGIN\\n"
                "assert nbp.zeros(free + (30 << 20), dtype='u1').nbytes > free", ranks=[0]
            )
    """
    with memory_cgroup(700 * MIB) as words:
        if isinstance(words, str):
            pytest.skip(words)
        done = run_script(script, words)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_f52_a_users_file_on_a_full_disk(tmp_path: Path) -> None:
    """`from_file(mode="w+")` on a full disk raises, and leaves neither a draft nor a half-made file."""
    reason = missing_reason()
    if reason is not None:
        pytest.skip(reason)
    script = f"""
FOLDER = {str(tmp_path)!r}
{PRELUDE}
path = FOLDER + "/big.npy"
print(refused(lambda: nbp.from_file(path, "u1", 9 << 20, mode="w+")))
assert os.listdir(FOLDER) == [], os.listdir(FOLDER)
x = nbp.from_file(path, "u1", 7 << 20, mode="w+")
x[:] = 1
assert np.load(path, mmap_mode="r").sum() == 7 << 20
"""
    done = run_script(script, on_small_tmpfs(tmp_path, "8m"))
    assert (done.returncode, done.stderr) == (0, "")
    assert str(tmp_path) in done.stdout
    assert "--memory" not in done.stdout


@pytest.mark.slow
@pytest.mark.time_limit(90)
def test_f41_a_containers_limit(container: Callable[[int, str], None]) -> None:
    """Beyond a memory cgroup's limit there is an exception before the kernel kills anybody."""
    container(
        400 * MIB,
        PRELUDE.replace("FOLDER", "'/dev/shm'")
        + """
for name in ("file_descriptor", "file_region", "file_system"):
    text = refused(lambda: nbp.zeros(500 << 20, "u1", strategy=name))
    assert "on this container (memory cgroup limit 400.0 MiB)" in text, text
    assert "--memory" in text, text
x = nbp.ones(64 << 20, "u1")
with nbp.Session(2) as session:
    values = session.run('''
import nbparallel as nbp
from nbparallel.errors import SharedMemoryFullError
mine = []
if rank == 0:
    try:
        while True:
            mine.append(nbp.ones(16 << 20, "u1"))
    except SharedMemoryFullError as error:
        text = str(error)
''' + "len(mine), text if rank == 0 else ''", namespace={"x": x}).values
    count, text = values[0]
    assert 2 < count < 25 and "container" in text, values
    assert session.run("mine.clear(); all_reduce(rank)").values == [1, 1]
    assert int(x.sum()) == 64 << 20
""",
    )


@pytest.mark.slow
@pytest.mark.fault("F6")
@pytest.mark.time_limit(90)
def test_f41_a_race_for_the_last_memory_costs_a_rank_not_the_notebook(
    container: Callable[[int, str], None],
) -> None:
    """Four ranks that together take too much: one is killed and named, K and the others live."""
    container(
        500 * MIB,
        r"""
import nbparallel as nbp
from nbparallel.errors import ParallelError, RankDiedError, SharedMemoryFullError

def killed_or_refused(session, cell):
    try:
        session.run(cell)
    except ParallelError as error:
        kinds = {type(e) for e in error.errors.values() if not isinstance(e, nbp.errors.PeerFailedError)}
        assert kinds <= {RankDiedError, SharedMemoryFullError}, error
        for e in error.errors.values():
            if isinstance(e, RankDiedError):
                assert "was killed by the system because memory ran out (this" in str(e), e
        return kinds
    raise AssertionError("480 MiB and four processes fitted into 500")

with nbp.Session(4) as session:
    session.run("import numpy as np, nbparallel as nbp")
    assert killed_or_refused(session, "x = np.ones(120 << 20, 'u1')\nbarrier()") == {RankDiedError}
    session.restart()
    assert session.run("all_reduce(rank)").values == [6] * 4
    killed_or_refused(session, "barrier()\nx = nbp.ones(120 << 20, 'u1')\nbarrier()")
    session.restart()
    assert session.run("all_reduce(rank)").values == [6] * 4
""",
    )
