"""Fork inside a rank or in the owner: the child is inert, the parent is unharmed."""

from __future__ import annotations

import os

import pytest

from nbparallel.session import Session


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
