"""F74: too few processes, by the user's limit or a container's: told before the start, or within seconds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from nbparallel.session.processes import launch
from nbparallel.wire import system
from nbparallel.wire.system import TaskLimit, task_limits
from tests.harness.sandboxes import process_cgroup, run_script

USER = 54_321
UNPRIVILEGED = [
    "setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups",
    "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search",
    "--bounding-set=-all,+dac_read_search", "env", "OPENBLAS_NUM_THREADS=1",
]  # fmt: skip
"""Words before a command that is then another user's, who may read this checkout."""
START = """
import time
import nbparallel as nbp
from nbparallel.session import session as sessions
if not CHECK:
    sessions.check_world_size = lambda *counts: None  # as if the others had come after it
began = time.monotonic()
try:
    with nbp.Session(6, start_method=METHOD) as session:
        print("started", *session.run("rank").values)
except (nbp.errors.StartError, ValueError) as error:
    print(type(error).__name__, error)
print(time.monotonic() - began)
"""


def start(before: list[str], *, check: bool, method: str = "forkserver") -> tuple[str, float]:
    """Start six ranks in a process behind these words; return what came of it, and after how long."""
    done = run_script(f"CHECK = {check}\nMETHOD = {method!r}\n{START}", before)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    *text, seconds = done.stdout.splitlines()
    return "\n".join(text), float(seconds)


@pytest.fixture(params=["ulimit -u", "pids.max"])
def few_processes(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[str]]]:
    """Return a limit's name, and the words before a command that may have eight processes and threads."""
    if request.param == "ulimit -u":
        words = ["prlimit", "--nproc=8", *UNPRIVILEGED]
        if os.geteuid() or not all(map(shutil.which, ("prlimit", "setpriv"))):
            pytest.skip("only root can become another user, with prlimit and setpriv")
        yield request.param, words
        return
    with process_cgroup(8) as words_or_reason:
        if isinstance(words_or_reason, str):
            pytest.skip(words_or_reason)
        yield request.param, words_or_reason


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_f74_the_check_counts_all_that_is_started(few_processes: tuple[str, list[str]]) -> None:
    """Supervisor, template and threads count: nothing is started that cannot be finished."""
    limit, before = few_processes
    text, _ = start(before, check=True)
    assert text.startswith("ValueError 6 ranks do not fit this machine: ")
    assert f"of the 8 that {'this user' if limit == 'ulimit -u' else 'this container'} may have" in text
    assert limit in text


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_f74_a_rank_that_is_refused_is_told(few_processes: tuple[str, list[str]], method: str) -> None:
    """Where the check could not know, the start ends soon with the limit that was in the way."""
    limit, before = few_processes
    text, seconds = start(before, check=False, method=method)
    assert text.startswith("StartError the system refused a process for rank "), text
    assert limit in text
    assert seconds < 5.0


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_f74_fewer_still(few_processes: tuple[str, list[str]], count: int) -> None:
    """Whatever is refused first, the supervisor, a thread or the template, the error names the limit."""
    limit, before = few_processes
    if limit != "ulimit -u":
        pytest.skip("the limit of a cgroup is the same for all tests")
    text, seconds = start([f"--nproc={count}" if "--nproc" in word else word for word in before], check=False)
    assert text.startswith("StartError the system refused "), text
    assert limit in text
    assert seconds < 5.0


FILES = {
    "/proc/self/cgroup": "8:pids:/docker/a\n0::/",
    "/proc/self/mountinfo": "1 2 0:1 /docker/a /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids",
    "/sys/fs/cgroup/pids/pids.max": "20\n",
    "/sys/fs/cgroup/pids/pids.current": "7\n",
    "/proc/self/uid_map": "0 1000 1",
    "/proc/loadavg": "0.0 0.0 0.0 1/900 77",
}


def read(path: str) -> str:
    """Read one of the files above."""
    try:
        return FILES[path]
    except KeyError:
        raise FileNotFoundError(path) from None


def test_f74_limits_of_containers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 or 2, own or of an ancestor; the user's limit holds for all but the machine's own root."""
    monkeypatch.setattr(system, "process_limit", lambda number: (None, None))
    assert list(task_limits(read)) == [TaskLimit(20, 7, "this container may have (pids.max of its cgroup)")]
    monkeypatch.setitem(FILES, "/proc/self/cgroup", "0::/a/b")
    monkeypatch.setitem(FILES, "/proc/self/mountinfo", "1 2 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
    for directory, most in (("a/b", "max"), ("a", "30")):
        monkeypatch.setitem(FILES, f"/sys/fs/cgroup/{directory}/pids.max", most)
        monkeypatch.setitem(FILES, f"/sys/fs/cgroup/{directory}/pids.current", "9")
    assert [(limit.most, limit.used) for limit in task_limits(read)] == [(30, 9)]
    monkeypatch.setattr(system, "process_limit", lambda number: (5000, None))
    assert [(limit.most, limit.used) for limit in task_limits(read)] == [(5000, 900), (30, 9)]
    monkeypatch.setattr(system, "process_limit", lambda number: (1000, None))
    (own, _) = task_limits(read)
    assert own.used > 0, "counted, since all users together may be near the limit"
    monkeypatch.setitem(FILES, "/proc/self/uid_map", "         0          0 4294967295")
    assert [limit.most for limit in task_limits(read)] == ([30] if os.getuid() == 0 else [1000, 30])


def test_f74_threads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """On eight CPUs a rank of two has four threads of BLAS, one of eight has one."""
    monkeypatch.setattr(launch, "usable_cpus", lambda: 8)
    monkeypatch.setattr(system, "task_limits", lambda: iter([TaskLimit(30, 14, "this user may have")]))
    launch.check_world_size(2)
    launch.check_world_size(8)
    with pytest.raises(ValueError, match=r"14 processes and threads .* of the 30 .*; at most 12 do"):
        launch.check_world_size(13)
    monkeypatch.setattr(system, "task_limits", lambda: iter([TaskLimit(16, 14, "this user may have")]))
    with pytest.raises(ValueError, match="not even one does"):
        launch.check_world_size(1)
    launch.check_world_size(5, running=4)
