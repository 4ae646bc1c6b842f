"""Full memory and full tables of descriptors are exceptions, never signals."""

import errno
import os
import subprocess
import sys
import textwrap

import pytest

from nbparallel.errors import SharedMemoryFullError, StrategyUnavailableError
from nbparallel.sharing import Store
from nbparallel.sharing.memory.memory_limits import MARGIN, MemoryGuard, limits
from nbparallel.sharing.strategies.memfd import FileDescriptorStrategy
from nbparallel.testing.strategies import temporary_registry

MIB = 1 << 20
MEMINFO = f"MemTotal: {1000 * 1024} kB\nMemAvailable: {800 * 1024} kB\nSwapFree: 0 kB\n"
V2 = {
    "/proc/meminfo": MEMINFO,
    "/proc/self/cgroup": "0::/user/app\n",
    "/proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n",
    "/sys/fs/cgroup/user/app/memory.max": "max\n",
    "/sys/fs/cgroup/user/app/memory.current": "0\n",
    "/sys/fs/cgroup/user/memory.max": f"{300 * MIB}\n",
    "/sys/fs/cgroup/user/memory.current": f"{200 * MIB}\n",
    "/sys/fs/cgroup/user/memory.stat": f"anon 5\ninactive_file {40 * MIB}\nactive_file {20 * MIB}\n",
}
V1 = {
    "/proc/meminfo": MEMINFO,
    "/proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n",
    "/proc/self/mountinfo": (
        "31 24 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,cpu,memory\n"
        "32 24 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    ),
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{256 * MIB}\n",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes": f"{100 * MIB}\n",
    "/sys/fs/cgroup/memory/memory.stat": f"cache {90 * MIB}\ntotal_inactive_file {10 * MIB}\n",
}


def reader(files):
    """Return a reader of imaginary files."""

    def read(path):
        try:
            return files[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    return read


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (V2, [800, 300 - 200 + 40 + 10]),
        (V1, [800, 256 - 100 + 10]),
        ({"/proc/meminfo": MEMINFO}, [800]),
        ({}, []),
    ],
    ids=["cgroup v2", "cgroup v1 in Docker", "no cgroups", "no /proc"],
)
def test_limits_are_read_where_the_system_keeps_them(files, free):
    """The machine's and every ancestor cgroup's limit counts; reclaimable page cache is free memory."""
    assert [limit.free // MIB for limit in limits(reader(files))] == free


@pytest.mark.parametrize(("files", "where"), [(V2, "container"), (V1, "container")])
def test_what_does_not_fit_is_refused_before_it_is_tried(files, where):
    """The error says what was needed, what is free, and where."""
    guard = MemoryGuard(reader(files))
    tightest = min(limit.free for limit in limits(reader(files)))
    guard.require(tightest - MARGIN)
    with pytest.raises(SharedMemoryFullError, match=r"118\.0 MiB free|134\.0 MiB free") as caught:
        guard.require(tightest - MARGIN + MIB)
    assert where in str(caught.value)
    assert isinstance(caught.value, MemoryError)


def test_nothing_is_left_after_a_refusal():
    """A refused array leaves no descriptor, no mapping and no segment."""
    files = dict(V2)
    strategy = FileDescriptorStrategy(MemoryGuard(reader(files)))
    store = Store()
    fds = len(os.listdir("/proc/self/fd"))
    with temporary_registry(strategy), pytest.raises(SharedMemoryFullError):
        store.zeros(200 * MIB, "u1")
    assert len(os.listdir("/proc/self/fd")) == fds
    assert store.segments() == ()


def test_the_pool_makes_room(monkeypatch):
    """Memory that is merely kept for reuse is given back before an array is refused."""
    files = dict(V2)
    strategy = FileDescriptorStrategy(MemoryGuard(reader(files)))
    with temporary_registry(strategy):
        store = Store(pool_nbytes=1 << 30)
        array = store.empty(MIB, "u1")
        del array
        store.drain()
        monkeypatch.setattr(store.pool, "trim", lambda keep=0: files.update({"/proc/self/cgroup": ""}) or MIB)
        assert store.empty(200 * MIB, "u1").nbytes == 200 * MIB
        monkeypatch.undo()
    store.drain()
    store.close()


def run(script, prepare):
    """Run a script in another process, under a limit."""
    code = textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-c", f"import resource, os\n{prepare}\n{code}"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


@pytest.mark.slow
def test_a_limit_of_address_space():
    """Where `ulimit -v` stands in the way, that is an exception, and smaller arrays still work."""
    done = run(
        """
        import nbparallel.sharing as nbp
        from nbparallel.errors import SharedMemoryFullError
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        before = len(os.listdir("/proc/self/fd"))
        try:
            nbp.zeros(1 << 30, "u1")
        except SharedMemoryFullError as error:
            assert "ulimit -v" in str(error), error
            assert len(os.listdir("/proc/self/fd")) == before
            print(nbp.ones(10).sum())
        """,
        "",
    )
    assert (done.stdout, done.stderr) == ("10.0\n", "")


def test_a_mapping_that_fails_keeps_no_descriptor(exchange, monkeypatch):
    """What was fetched and could not be mapped is closed, also while a traceback holds on to everything."""
    made, other = exchange.store(0), exchange.store(1)
    array = made.zeros(1000)
    handle = made.handle(array)
    before = len(os.listdir("/proc/self/fd"))

    def refused(*args, **options):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr("mmap.mmap", refused)
        with pytest.raises(StrategyUnavailableError, match="not permitted") as caught:
            other.attach(handle)
    assert caught.value.__traceback__ is not None
    assert len(os.listdir("/proc/self/fd")) == before
    assert other.attach(handle).sum() == 0
