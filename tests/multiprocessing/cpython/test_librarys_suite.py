"""CPython's own tests of processes and executors pass over ours wherever they pass over the library."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.multiprocessing.cpython.suite import run_suite

pytestmark = pytest.mark.skipif(
    find_spec("test") is None or find_spec("test._test_multiprocessing") is None,
    reason="this Python comes without its own tests",
)

EXCEPTIONS = {
    "PoolWorkerErrors.test_unpickleable_result": "a lambda travels here",
    "_TestImportStar.test_import": "it lists the files of the library's folder",
    "TestPoolNotLeakOnFailure.test_release_unused_processes": "its stand-in has no join in time",
    "DeadlockTest.test_exit_during_result_pickle_on_worker": "not its SystemExit",
    "ExecutorTest.test_traceback": "the cause is a pool's RemoteTraceback",
    **dict.fromkeys(
        (
            "DeadlockTest.test_crash_at_task_unpickle",
            "DeadlockTest.test_crash_big_data",
            "DeadlockTest.test_crash_during_func_exec_on_worker",
            "DeadlockTest.test_crash_during_result_pickle_on_worker",
            "DeadlockTest.test_error_at_task_unpickle",
            "DeadlockTest.test_error_during_result_unpickle_in_result_handler",
            "DeadlockTest.test_exit_at_task_unpickle",
            "DeadlockTest.test_exit_during_func_exec_on_worker",
            "DeadlockTest.test_exit_during_result_unpickle_in_result_handler",
            "ExecutorTest.test_killed_child",
            "ExecutorTest.test_python_finalization_error",
            "FailingInitializerTest.test_initializer",
            "DeadlockTest.test_shutdown_deadlock",
            "ExecutorTest.test_force_shutdown_workers_dead_workers",
        ),
        "what fails or dies costs its call, where theirs ends as a BrokenProcessPool",
    ),
    **dict.fromkeys(
        (
            "ExecutorTest.test_gc_during_max_tasks_worker_exit_gh152967",
            "ExecutorTest.test_shutdown_no_wait_max_tasks_gh119592",
            "ExecutorTest.test_idle_process_reuse_multiple",
            "ExecutorTest.test_idle_process_reuse_one",
            "ShutdownTest.test_context_manager_shutdown",
            "ShutdownTest.test_del_shutdown",
            "ShutdownTest.test_processes_terminate",
            "DeadlockTest.test_shutdown_deadlock_pickle",
            "ExecutorTest.test_max_tasks_per_child",
            "ExecutorTest.test_saturation",
            "ShutdownTest.test_shutdown_no_wait",
            "ExecutorTest.test_force_shutdown_workers",
            "ExecutorTest.test_force_shutdown_workers_invalid_op",
            "ExecutorTest.test_force_shutdown_workers_stops_pool",
            "ExecutorTest.test_kill_workers",
            "ExecutorTest.test_terminate_workers",
            "ExecutorTest.test_broken_process_pool_traceback",
            "ExecutorTest.test_failed_worker_replacement_breaks_pool",
            "ExecutorTest.test_force_shutdown_during_max_tasks_worker_exit",
            "ShutdownTest.test_shutdown_gh_132969_case_1",
            "ShutdownTest.test_shutdown_gh_132969_case_2",
        ),
        "they look at the library's private attributes",
    ),
}
"""Ends of the names of cases that pass over the library and not over ours, with any start method."""
CASES = {"processes": 130, "misc": 55, "manager": 70, "executor": 50}
"""How many cases of each kind there are, at least (3.11 has 144, 62 and 74, 3.13 has 59 of `Executor`)."""


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=1)  # each runs the library's own suite twice, for minutes
@pytest.mark.time_limit(1300)
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_librarys_own_suite(method: str, kind: str, tmp_path: Path) -> None:
    """Every case that passes over the library passes over ours, but for some with reasons."""
    package = find_spec("test.test_concurrent_futures")
    if kind == "executor" and (package is None or not package.submodule_search_locations):
        pytest.skip("this Python comes without its tests of concurrent.futures, or is older than 3.12")
    library = run_suite("library", method, kind, tmp_path)
    ours = run_suite("ours", method, kind, tmp_path)
    assert len(ours.outcomes) >= CASES[kind], ours.text[-3000:]
    assert ours.outcomes.keys() == library.outcomes.keys()
    wrong = library.named("ok") - ours.named("ok")
    assert not {case for case in wrong if not case.endswith(tuple(EXCEPTIONS))}, ours.text[
        ours.text.find("=====") :
    ]


@pytest.mark.slow
@pytest.mark.time_limit(600)
def test_the_library_itself_is_unchanged(tmp_path: Path) -> None:
    """With our package imported, the library's own tests pass over the library as before."""
    result = run_suite("library", "fork", "processes", tmp_path, first="nbparallel.multiprocessing.pool")
    assert len(result.outcomes) >= CASES["processes"], result.text[-3000:]
    assert not result.named("FAIL") | result.named("ERROR") | result.named("died"), result.text
