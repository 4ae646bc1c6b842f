"""The live panel of a pool: how far its items are, and which workers have which."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program

HEAD = """
import re, threading
from functools import partial
from nbparallel.testing.waiting import wait_until
from nbparallel_magics.views.panel import now
from nbparallel_widgets.panel_view import PanelView

class Notebook:
    session = pool = None

def shown():
    return PanelView(now(Notebook))

def hold(gate, item):
    while item >= 4 and not os.path.exists(gate):
        time.sleep(0.005)
    return item
"""
WAYS = {
    "pool.map(function, range(8), chunksize=1)": "45",
    "pool.map(function, range(8), chunksize=2)": "46",
    "pool.imap_unordered(function, range(8))": "45",
    "[asked.get() for asked in [pool.apply_async(function, (i,)) for i in range(8)]]": "45",
    "executor.map(function, range(8))": "45",
    "executor.map(function, range(8), chunksize=2)": "46",
}
"""A call of the function for eight items, and which items two workers hold when four are done."""
JOBLIB = {
    "joblib.Parallel(2, 'nbparallel', batch_size=1)([joblib.delayed(function)(i) for i in range(8)])": "45"
}


def test_the_panel_shows_items_of_a_pool(tmp_path: Path) -> None:
    """How many of how many are done, which worker has which, and afterwards that all are."""
    ways = WAYS | (JOBLIB if find_spec("joblib") else {})
    joblib = "import joblib; mp.register_joblib()"
    run_program(
        f"""{HEAD}
{joblib if len(ways) > len(WAYS) else ""}
pool, executor = ctx.Pool(2), mp.Executor(2, ctx)
for number, (way, held) in enumerate({ways!r}.items()):
    function = partial(hold, f"gate{{number}}")
    results = []
    call = threading.Thread(target=lambda: results.extend(eval(way)))
    call.start()
    try:
        wait_until(lambda: repr(shown()).startswith("4 of 8 items done"), way)
        wait_until(lambda: re.findall(r"item (\\d)", repr(shown())) in ([*held], [*held[::-1]]), way)
        assert ">worker 1<" in shown().figures_bundle()["text/html"]
    finally:
        open(f"gate{{number}}", "w").close()
        call.join()
    assert sorted(results) == list(range(8)), way
    assert repr(shown()).startswith("8 of 8 items done\\nthe last call finished after "), repr(shown())
pool.terminate()
pool.join()
executor.shutdown()
del pool
assert repr(shown()).startswith("8 of 8 items done")
""",
        tmp_path,
        "forkserver",
    )


@pytest.mark.slow
def test_a_length_that_is_unknown_is_not_guessed(tmp_path: Path) -> None:
    """Of a generator the panel says how many items are done, and draws no share."""
    run_program(
        f"""{HEAD}
go_on = threading.Event()
def items():
    yield from range(4)
    go_on.wait()
with ctx.Pool(2) as pool:
    results = pool.imap(partial(hold, "gate"), items())
    assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
    seen = shown()
    go_on.set()
    assert list(results) == []
assert repr(seen).startswith("4 items done\\na call runs"), repr(seen)
assert "nbp-done" not in seen.figures_bundle()["text/html"]
""",
        tmp_path,
        "forkserver",
    )
