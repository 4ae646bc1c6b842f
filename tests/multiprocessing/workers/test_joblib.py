"""joblib with our processes: its own tests, memory, deaths and interrupts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from nbparallel import Session
from tests.multiprocessing.programs import run_program

pytestmark = [
    pytest.mark.skipif(find_spec("joblib") is None, reason="joblib is not installed"),
    pytest.mark.slow,
    pytest.mark.time_limit(60),
]

REGISTER = "import nbparallel.multiprocessing as ours; ours.register_joblib()"
EXCEPTIONS = {
    "test_error_capture": "it wants other workers after an error; ours stay",
    "test_auto_memmap_on_arrays_from_generator": "it wants np.memmap",
    "test_memmapping_leaks": "it wants np.memmap",
}
"""Of joblib's tests of its process backends."""


@pytest.mark.time_limit(300)
def test_joblibs_own_tests(tmp_path: Path) -> None:
    """With our backend in place of both of joblib's own for processes, all pass but three with reasons."""
    found = find_spec("joblib.test.test_parallel")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).read_text()
    ours = 'PROCESS_BACKENDS = ["nbparallel"]'
    source, count = re.subn(r'PROCESS_BACKENDS = \["multiprocessing", "loky"\]', ours, source)
    assert count == 1
    # in the module itself, and in the scripts that its tests run
    imports = re.compile(r"^(import mmap|from joblib import Parallel, delayed)$", flags=re.M)
    source, count = imports.subn(rf"{REGISTER}\n\1", source)
    assert count > 2
    (tmp_path / "test_joblib_parallel.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "nbparallel"]
    done = subprocess.run(
        [*command, "test_joblib_parallel.py"], cwd=tmp_path, capture_output=True, text=True, check=False,
        timeout=280, env=os.environ,
    )  # fmt: skip
    failed = re.findall(r"^(?:FAILED|ERROR) test_joblib_parallel.py::(\w+)", done.stdout, flags=re.M)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert set(failed) <= EXCEPTIONS.keys(), done.stdout[-5000:]
    assert passed is not None
    assert int(passed[1]) >= 100, done.stdout[-5000:]


def test_arrays(tmp_path: Path) -> None:
    """A shared one is the same memory; a private one is copied once, and what a task writes stays there."""
    run_program(
        """
        import joblib
        from nbparallel.multiprocessing import household

        mp.register_joblib()
        shared, private = nbp.zeros(8), np.ones(1_000_000)

        def fill(x, k):
            x[k] = k
            return x is not None

        def total(x, k):
            x[0] += k
            time.sleep(0.2)
            return float(x[0])

        def shared_nbytes():
            return sum(row.nbytes for row in household.report().segments)

        with joblib.parallel_config(backend="nbparallel", n_jobs=2):
            joblib.Parallel()(joblib.delayed(fill)(shared, k) for k in range(8))
            assert shared.tolist() == list(range(8))
            before, most = shared_nbytes(), 0
            calls = (joblib.delayed(total)(private, k) for k in range(6))
            results = joblib.Parallel(return_as="generator")(calls)
            for k, value in enumerate(results):
                most = max(most, shared_nbytes() - before)
                assert value == 1.0 + k, value
            assert private[0] == 1 and not nbp.is_shared(private)
            assert private.nbytes <= most < 1.5 * private.nbytes, most
        """,
        tmp_path,
        "forkserver",
    )


def test_workers_that_die_or_are_interrupted(tmp_path: Path) -> None:
    """A death is a `WorkerDiedError`; the stop button raises `KeyboardInterrupt`, and the workers stay."""
    run_program(
        """
        import joblib, threading

        mp.register_joblib()
        run = joblib.Parallel(backend="nbparallel", n_jobs=2)

        def pid_of(_):
            time.sleep(0.1)
            return os.getpid()

        def pids():
            return set(run(joblib.delayed(pid_of)(k) for k in range(6)))

        def slow(k):
            open(f"begun{k}", "w").close()
            time.sleep(60)

        def interrupt():
            while not os.path.exists("begun0"):
                time.sleep(0.01)
            time.sleep(0.2)
            os.killpg(0, signal.SIGINT)

        os.setsid()
        before = pids()
        while len(before) < 2:  # the other worker was late
            before |= pids()
        thread = threading.Thread(target=interrupt)
        thread.start()
        began = time.monotonic()
        try:
            run(joblib.delayed(slow)(k) for k in range(6))
        except KeyboardInterrupt:
            thread.join()
        else:
            raise AssertionError
        assert time.monotonic() - began < 20
        assert pids() <= before
        try:
            run(joblib.delayed(lambda: os.kill(os.getpid(), signal.SIGKILL))() for k in range(2))
        except WorkerDiedError as error:
            assert error.signal_name == "SIGKILL", error
        else:
            raise AssertionError
        assert pids()
        """,
        tmp_path,
        "forkserver",
    )


def test_the_backend_in_its_own_tasks_and_threads(tmp_path: Path) -> None:
    """Tasks use it by name; each has its share of the CPUs, or `inner_max_num_threads`; a line names it."""
    printed = run_program(
        """
        import joblib, threadpoolctl
        sys.stderr = sys.stdout  # joblib's line
        os.environ.pop("OMP_NUM_THREADS", None)
        mp.register_joblib()

        def inner(k):
            return joblib.Parallel(2, backend="nbparallel")(joblib.delayed(pow)(k, n) for n in range(3))

        def threads():
            return {one["num_threads"] for one in threadpoolctl.threadpool_info()}

        tasks = [joblib.delayed(inner)(k) for k in (2, 3)]
        assert joblib.Parallel(2, backend="nbparallel", verbose=1)(tasks) == [[1, 2, 4], [1, 3, 9]]
        share = max(1, len(os.sched_getaffinity(0)) // 2)
        for given, expected in ({}, share), ({"inner_max_num_threads": 3}, 3):
            with joblib.parallel_config("nbparallel", n_jobs=2, **given):
                assert joblib.Parallel()([joblib.delayed(threads)()] * 4) == [{expected}] * 4
        """,
        tmp_path,
        "forkserver",
    )
    assert "Using backend NbparallelBackend" in printed


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_backend_in_other_tasks(method: str, tmp_path: Path) -> None:
    """A worker of a pool knows it by name, although nothing has registered it."""
    run_program(
        """
        def inner(k):
            import joblib
            return joblib.Parallel(2, backend="nbparallel")(joblib.delayed(pow)(k, n) for n in range(3))

        pool = ctx.Pool(1)
        assert pool.map(inner, [2, 3]) == [[1, 2, 4], [1, 3, 9]]
        pool.close()
        pool.join()
        assert "joblib" not in sys.modules
        """,
        tmp_path,
        method,
    )


def test_the_backend_on_ranks() -> None:
    """A rank knows it by name, although nothing has registered it there."""
    with Session(2) as session:
        values = session.run(
            "import joblib\n"
            "with joblib.parallel_config('nbparallel', n_jobs=2):\n"
            "    found = joblib.Parallel()(joblib.delayed(pow)(rank + 2, n) for n in range(3))\n"
            "found"
        )
        assert [*values.values] == [[1, 2, 4], [1, 3, 9]]


def test_a_module_that_was_reloaded(tmp_path: Path) -> None:
    """The workers that are kept have its old code: others take over."""
    run_program(
        """
        import importlib, joblib
        sys.dont_write_bytecode = True
        mp.register_joblib()
        run = joblib.Parallel(2, backend="nbparallel")
        for factor in (1, 10):
            with open("edited.py", "w") as file:
                file.write(f"def f(x): return {factor} * x")
            if factor == 1:
                import edited
            else:
                assert run([joblib.delayed(edited.f)(1)] * 2) == [1, 1], "old code here as well as there"
                importlib.reload(edited)
            assert run([joblib.delayed(edited.f)(1)] * 2) == [factor] * 2
        """,
        tmp_path,
        "forkserver",
    )


def test_a_fork_server_that_is_killed(tmp_path: Path) -> None:
    """While it starts workers: an error of ours that names it, and the next call starts another."""
    run_program(
        """
        import joblib, threading
        from nbparallel.multiprocessing.starting.start_methods import present_server

        mp.register_joblib()
        present_server.ensure_running()
        server = present_server._forkserver_pid
        os.kill(server, signal.SIGSTOP)
        killer = threading.Timer(0.5, os.kill, [server, signal.SIGKILL])
        killer.start()
        run = joblib.Parallel(2, backend="nbparallel")
        try:
            run(joblib.delayed(pow)(k, 2) for k in range(3))
        except StartError as error:
            assert f"the fork server, process {server}, ended while it started" in str(error), error
        else:
            raise AssertionError
        killer.join()
        assert run(joblib.delayed(pow)(k, 2) for k in range(3)) == [0, 1, 4]
        """,
        tmp_path,
        "forkserver",
    )


FORKED = """
import multiprocessing, joblib, warnings
from nbparallel.testing.waiting import wait_until

mp.register_joblib()
shared = nbp.ones(8)  # a supervisor is there before the fork
queue = ctx.Queue()

def squares():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with joblib.parallel_config(backend="nbparallel", n_jobs=2):
            found = joblib.Parallel()(joblib.delayed(pow)(k, 2) for k in range(20))
            pids = set(joblib.Parallel()(joblib.delayed(os.getpid)() for k in range(20)))
    return found == [k * k for k in range(20)], pids == {os.getpid()}, [str(one.message) for one in said]
"""


def test_a_process_of_another_library_runs_tasks_itself(tmp_path: Path) -> None:
    """In a worker of `multiprocessing`'s pool, which would leave ours behind: one by one, with a warning."""
    run_program(
        FORKED
        + """
with multiprocessing.get_context("fork").Pool(1) as pool:
    right, alone, said = pool.apply(squares)
assert right and alone
assert said and all("forked by another library's pool" in text for text in said), said
assert not mp.active_children()
""",
        tmp_path,
        "forkserver",
    )


def test_a_forked_process_has_its_own_workers(tmp_path: Path) -> None:
    """After `os.fork` tasks run in workers of the child, which end with it; its parent has its own."""
    run_program(
        FORKED
        + """
child = os.fork()
if child == 0:
    right, alone, said = squares()
    assert right and not alone and not said, (right, alone, said)
    with open("workers", "w") as file:
        print(*(process.pid for process in mp.active_children()), file=file)
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
with open("workers") as file:
    workers = [int(word) for word in file.read().split()]
wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers))
assert squares()[0]
""",
        tmp_path,
        "forkserver",
    )
