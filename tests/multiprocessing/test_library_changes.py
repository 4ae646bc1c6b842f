"""What of the library's is written again here, or called by names of its inside: each text was looked at."""

from __future__ import annotations

import hashlib
import inspect
import pkgutil

import pytest

KNOWN = {
    "multiprocessing.connection.Connection._close": {"b7075b5f7eb7"},
    "multiprocessing.pool.Pool._help_stuff_finish": {"3b5834eee960"},
    "multiprocessing.pool.Pool._setup_queues": {"93a5b1107bfd"},
    "multiprocessing.popen_forkserver.Popen._launch": {"68a951398cdc"},
    "multiprocessing.popen_spawn_posix.Popen._launch": {"3fcd3c877c17", "52a575fcf945"},
    "multiprocessing.queues.Queue._feed": {"a294238f3f78"},
    "multiprocessing.queues.Queue._start_thread": {"a96ed302fe89", "5306a29d6b84"},
    "multiprocessing.spawn.get_preparation_data": {"480422034ee4", "5c3d5066f936"},
    "concurrent.futures.process.ProcessPoolExecutor._spawn_process": {"f1873217c091", "91d10943eb20"},
    "concurrent.futures.process.ProcessPoolExecutor._start_executor_manager_thread": {"d58fd72ba73d"},
    "concurrent.futures.process._ExecutorManagerThread.run": {
        "d49c6c0831ae", "df7868215040", "b7db1ddfe3bc",
    },
}  # fmt: skip
"""Digests of the texts of CPython 3.11 to 3.14, without white space: a new one is read before it is added."""


@pytest.mark.parametrize("name", KNOWN)
def test_a_function_of_the_library_is_known(name: str) -> None:
    """A newer CPython's text was compared with ours: since 3.13 a copy of `_launch` had lost messages."""
    text = "".join(inspect.getsource(pkgutil.resolve_name(name)).split())
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    assert digest in KNOWN[name], f"look at what changed in {name}, then add {digest!r}"
