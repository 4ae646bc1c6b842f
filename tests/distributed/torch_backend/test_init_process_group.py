"""torch's init_process_group in cells: without arguments, again, over gloo, on some ranks; a free port."""

from __future__ import annotations

import socket

import pytest

import nbparallel as nbp

REDUCE = "x = torch.ones(2); td.all_reduce(x); (td.get_backend(), td.get_world_size(), x.tolist())"


@pytest.mark.slow
def test_cells_run_again(session: nbp.Session) -> None:
    """A second call begins anew, with any backend; nobody has to destroy what was there."""
    for backend in ("", "'nbparallel'", "'gloo'", "", "'gloo'", "'cpu:nbparallel'"):
        found = session.run(f"td.init_process_group({backend})\n{REDUCE}", namespace={}).values
        assert found[0] == found[1]
        assert found[0][1:] == (2, [2.0, 2.0])
        assert found[0][0] == (backend.strip("'") or "nbparallel")
    session.run("td.destroy_process_group()", namespace={})
    assert session.run("td.is_initialized()", namespace={}).values[0] is False


@pytest.mark.slow
def test_a_tutorial_sets_address_and_port(session: nbp.Session) -> None:
    """Rank, world size and a port of its own change nothing, also if another program listens there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cell = f"""
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "{port}"
td.init_process_group("gloo", rank=rank, world_size=world_size)
{REDUCE}
"""
        assert session.run(cell, namespace={}).values[0][2] == [2.0, 2.0]
    session.run("del os.environ['MASTER_PORT']", namespace={})


def test_master_port_is_free(entry_point: str) -> None:
    """Each session has a MASTER_PORT at which its programs may listen, the same on all ranks."""
    with nbp.Session(2) as session:
        ports = session.run("import os; int(os.environ['MASTER_PORT'])", namespace={}).values
        assert ports[0] == ports[1] > 0
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", ports[0]))


@pytest.mark.slow
def test_some_ranks(four: nbp.Session) -> None:
    """In a cell of some ranks torch's world are these, if the call says so; else the error says what is."""
    cell = f"td.init_process_group(rank=rank // 2, world_size=2)\n{REDUCE}"
    result = four.run(cell, ranks=[0, 2], namespace={}).values
    assert result[0] == result[2] == ("nbparallel", 2, [2.0, 2.0])
    with pytest.raises(nbp.ParallelError, match="not in this cell"):
        four.run("td.init_process_group()", ranks=[0, 2], namespace={})
    assert four.run(f"td.init_process_group()\n{REDUCE}", namespace={}).values[3][2] == [4.0, 4.0]


@pytest.mark.slow
def test_a_rank_that_was_restarted(entry_point: str) -> None:
    """A rank that has lost its process group and others that have not begin anew together."""
    from tests.distributed.torch_backend.conftest import BEGIN

    with nbp.Session(2) as session:
        cell = f"{BEGIN}\ntd.init_process_group()\ngroup = td.new_group([0, 1])\n{REDUCE}"
        session.run(cell, namespace={})
        session.restart(1)
        assert session.run(cell, namespace={}).values[1][2] == [2.0, 2.0]
        done = session.run("td.all_reduce(x, group=group); x.tolist()", namespace={}).values
        assert list(done) == [[4.0, 4.0]] * 2


def test_one_rank_alone_is_named(session: nbp.Session) -> None:
    """If a rank does not call it, the others do not wait for a time-out."""
    with pytest.raises(
        nbp.ParallelError, match=r"init_process_group\(\) begins with .* rank 1 finished the cell"
    ):
        session.run("if rank == 0:\n    td.init_process_group('gloo')", namespace={})
    assert session.run(f"td.init_process_group()\n{REDUCE}", namespace={}).values[0][2] == [2.0, 2.0]


@pytest.mark.parametrize("backend", ["nccl", "mpi", "fastnet", "cpu:gloo,cuda:nccl"])
def test_a_backend_that_torch_lacks(session: nbp.Session, backend: str) -> None:
    """Tutorials for GPUs name one: torch's message goes on with what runs in a cell."""
    if session.run("td.is_nccl_available() or td.is_mpi_available()", namespace={}).values[0]:
        pytest.skip("this torch has it")
    with pytest.raises(nbp.ParallelError, match=r"(built in|fastnet).*In a cell, init_process_group\(\)"):
        session.run(f"td.init_process_group({backend!r})", namespace={})
    assert session.run(f"td.init_process_group()\n{REDUCE}", namespace={}).values[0][2] == [2.0, 2.0]


@pytest.mark.slow
def test_time_outs(session: nbp.Session) -> None:
    """A time-out of the group or of a call ends an operation, and names the rank that has not come."""
    cell = """
import datetime, time
td.init_process_group(timeout=datetime.timedelta(seconds=0.3))
if rank == 0:
    td.barrier()
else:
    time.sleep(30)
"""
    with pytest.raises(nbp.ParallelError, match="rank 1 did not arrive"):
        session.run(cell, namespace={})
