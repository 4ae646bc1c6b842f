"""Fork inside a rank or in the owner: the child is inert, the parent is unharmed."""

from __future__ import annotations

import os

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.session import Session
from tests.harness.stores import names_of


@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("how", ["return", "_exit", "exception", "sys.exit"])
def test_f64_a_forked_child_of_a_rank_gets_an_error_and_harms_nothing(how: str) -> None:
    """ForkedRankError on every operation in the child; the parent goes on and its arrays stay."""
    end = {
        "return": "pass",
        "_exit": "os._exit(0)",
        "exception": "raise ValueError('in the child')",
        "sys.exit": "import sys; sys.exit(0)",
    }[how]
    with Session(2) as session:
        session.run("import os; x = nbp.zeros(1000); x[:] = rank")
        result = session.run(
            "read_end, write_end = os.pipe()\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    other = 1 - rank\n"
            "    for operation in (barrier, lambda: all_reduce(1), lambda: send(1, other)):\n"
            "        try:\n"
            "            operation()\n"
            "        except Exception as error:\n"
            "            os.write(write_end, type(error).__name__.encode() + b' ')\n"
            f"    {end}\n"
            "else:\n"
            "    os.close(write_end)\n"
            "    os.waitpid(child, 0)\n"
            "    said = b''.join(iter(lambda: os.read(read_end, 1000), b'')).decode()\n"
            "    os.close(read_end)\n"
        )
        assert result.values == [None, None]
        assert session.pull("said") == ["ForkedRankError " * 3] * 2
        assert session.run("all_reduce(float(x.sum()))").values == [1000.0, 1000.0]


@pytest.mark.slow
def test_f64_a_forked_child_of_the_owner_cannot_use_or_end_the_session() -> None:
    """The child's calls raise ForkedRankError, and its exit stops nothing."""
    from nbparallel.errors import ForkedRankError

    with Session(1) as session:
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                session.stop()
                session.run("1")
            except ForkedRankError:
                os.write(write_end, b"ForkedRankError")
            finally:
                os._exit(0)
        os.close(write_end)
        os.waitpid(child, 0)
        with os.fdopen(read_end, "rb") as pipe:
            assert pipe.read() == b"ForkedRankError"
        assert session.run("rank").values == [0]


AT_POINT = """
import os
from tests.harness import fault_injection
children = []

def hit(point):
    if point == {point!r} and not children:
        children.append(os.fork())
        if not children[0]:
            {end}

if rank == 0:
    fault_injection.call_at_points(hit)
x[rank] = rank + 1
try:
    total = all_reduce(big.copy() if rank else big + 1)
    barrier()
finally:
    if os.getpid() != {pid}[rank]: os._exit(0)
    for child in children: os.waitpid(child, 0)
(float(total[0]), float(total[-1]), len(children))
"""
ENDS = {
    "_exit": "os._exit(0)",
    "exception": "raise ValueError('in the child')",
    "sys.exit": "raise SystemExit(0)",
}


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=2)
@pytest.mark.parametrize("end", [*ENDS, "return"])
@pytest.mark.parametrize("point", ["enter", "wrote_header", "half_payload", "wrote_flag", "waiting", "leave"])
def test_f64_a_fork_in_the_middle_of_an_operation(point: str, end: str) -> None:
    """Another thread or a signal handler forked there: the child's end disturbs nobody."""
    names = {
        "x": nbp.share(np.zeros(1000), strategy="file_system"),
        "big": nbp.share(np.ones(300_000), strategy="mmap"),
    }
    with Session(2) as session:
        pids = session.run("import os; os.getpid()").values
        made = names_of(os.getpid())
        source = AT_POINT.format(point=point, end=ENDS.get(end, "pass"), pid=list(pids))
        result = session.run(source, namespace=names, share=["x"])
        assert result.values[0][:2] == result.values[1][:2] == (3.0, 3.0)
        assert set(made) <= set(names_of(os.getpid())), "a child removed a name"
        assert session.run("all_reduce(float(x.sum()))", namespace=names).values == [6.0, 6.0]
        assert session.run("os.getpid()").values == pids
    del names, result
    nbp.sharing.current_store().drain()


IN_SHARING = """
import os, numpy as np
from nbparallel.sharing.strategies.strategy import process_names
from nbparallel.wire import locked_names
children = []

def forking(function):
    def wrapper(*args, **options):
        if not children:
            children.append(os.fork())
            if not children[0]:
                {end}
            else:
                {wait}
        return function(*args, **options)
    return wrapper

original = {target}
{target} = forking(original)
try:
    made = [nbp.share(np.full(50_000, i), strategy="file_system") for i in range(3)]
    del made[0]
    nbp.sharing.current_store().drain()
    other = sum(all_reduce(rank) for _ in range(3))
finally:
    {target} = original
    if os.getpid() != {pid}[rank]: {last}
for child in children: os.waitpid(child, 0)
(len(children), int(made[0].sum() + made[1].sum()))
"""


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=2)
@pytest.mark.parametrize("end", [*ENDS, "return", "return first"])
@pytest.mark.parametrize("target", ["os.posix_fallocate", "os.fchmod", "process_names.claim", "os.unlink"])
def test_f64_a_fork_while_a_segment_is_made_or_freed(target: str, end: str) -> None:
    """What a child was born into the middle of, it leaves alone, however it ends."""
    before = {"kept": nbp.share(np.ones(50_000), strategy="file_system")}
    with Session(2) as session:
        pids = session.run("import os; kept.sum(); os.getpid()", namespace=before).values
        last = "pass" if end == "return" else "os._exit(0)"
        wait = (
            "os.waitid(os.P_PID, children[0], os.WNOWAIT | os.WEXITED)" if end == "return first" else "pass"
        )
        source = IN_SHARING.format(
            target=target,
            end=ENDS.get(end, "pass"),
            wait=wait,
            pid=list(pids),
            last=last,
        )
        assert session.run(source).values == [(1, 150_000)] * 2
        assert len(names_of(os.getpid())) == 5
        assert session.run("all_reduce(int(made[0][0]))").values == [2, 2]
        assert session.run("float(kept.sum())", namespace=before).values == [50_000.0] * 2
    del before
    nbp.sharing.current_store().drain()
