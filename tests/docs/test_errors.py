"""Every cause that the page of errors names is provoked once, and raises the error that it stands under."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel import errors
from nbparallel.channel import Channel
from nbparallel.cluster.host_dispatch import HostNames
from nbparallel.session import Session
from tests.harness.clusters import Loopback

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "reference" / "errors.md"

CELLS = {
    "RankExitError": "import sys; sys.exit(3)",
    "RemoteError": "class Own(Exception):\n    def __reduce__(self): raise TypeError\nraise Own('mine')",
    "InputRefusedError": "input()",
    "CollectiveMismatchError": "if rank == 0:\n    all_reduce(1)",
    "DeadlockError": "recv(src=1 - rank)\nsend(1, 1 - rank)",
    "CollectiveTimeoutError": "import time\ntime.sleep(rank)\nbarrier(timeout=0.1)",
    "PeerFailedError": "if rank:\n    1 / 0\nrecv(src=1)",
    "DifferentDataError": "dist.assert_same(rank)",
    "ReadOnlyArrayError": "x[rank] = 1",
    "SharedMemoryFullError": "nbp.zeros(1 << 50, 'u1')",
    "WorkerDiedError": (
        "import os, nbparallel.multiprocessing as mp\n"
        "with mp.get_context('fork').Pool(1) as pool:\n    pool.apply(os._exit, (3,))"
    ),
    "FileDescriptorLimitError": (
        "import resource\nold = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "try:\n    resource.setrlimit(resource.RLIMIT_NOFILE, (64, old[1]))\n"
        "    kept = [nbp.zeros(100_000) for _ in range(100)]\n"
        "finally:\n    resource.setrlimit(resource.RLIMIT_NOFILE, old); kept = None"
    ),
    "StrategyUnavailableError": "nbp.zeros(3, strategy='copy')",
    "RankDiedError": "import os\nif rank: os._exit(1)\nbarrier()",
    "ForkedRankError": (
        "import os\nend, start = os.pipe()\nchild = os.fork()\n"
        "if not child:\n    try:\n        barrier()\n    except Exception as error:\n"
        "        os.write(start, type(error).__name__.encode())\n    os._exit(0)\n"
        "os.waitpid(child, 0)\nraise getattr(nbp, os.read(end, 100).decode())('in the child')"
    ),
    "ProtocolError": (
        "import os, stat\nfor fd in range(3, 200):\n    try:\n"
        "        if rank and stat.S_ISSOCK(os.fstat(fd).st_mode): os.write(fd, b'noise')\n"
        "    except OSError:\n        pass\nbarrier()"
    ),
}
"""Of errors that a cell's ranks raise, or that the notebook raises about one: the cell."""


def _stale_work(ranks: Session) -> None:
    ranks.run("work = irecv(src=1 - rank)")
    ranks.run("work.wait()")


def _busy(ranks: Session) -> None:
    running = ranks.submit("import time; time.sleep(0.5)")
    try:
        ranks.run("1")
    finally:
        running.result()


def _closed(_ranks: Session) -> None:
    session = Session(1)
    session.stop()
    session.run("1")


def _not_started(_ranks: Session) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.path", ["/nowhere"])
        Session(1).start()


def _without_supervisor(_ranks: Session) -> None:
    with Session(1) as session:
        session.start()
        pid = session.statistics().supervisor_pid
        session.run(f"import os, time; os.kill({pid}, 9); time.sleep(60)")


def _joined_twice(_ranks: Session) -> None:
    place = f"file:///tmp/nbp-twice-{os.getpid()}"
    program = (
        "import nbparallel.distributed as dist\n"
        f"dist.init_process_group(init_method={place!r}, rank=0, world_size=3)"
    )
    both = [subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate(timeout=30)[1].decode() for process in both]
    name = said[0].rstrip().splitlines()[-1].partition(":")[0].rpartition(".")[2]
    raise getattr(errors, name)(said[0])


def _lost(ranks: Session) -> None:
    ranks.run("if rank: from nbparallel.sharing import current_store; x = nbp.zeros(100_000)")
    handle = ranks.run("current_store().handle(x) if rank else None").values[1]
    ranks.run("if rank: del x")
    ranks.run("1")
    nbp.sharing.current_store().attach(handle)


def _damaged(_ranks: Session) -> None:
    store = nbp.sharing.current_store()
    handle = store.handle(array := nbp.zeros(100_000))
    assert handle is not None
    store.attach(handle._replace(offset=array.nbytes + 1))


def _other_end_gone(_ranks: Session) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.close()
    with closing(Channel(one)) as channel:
        channel.receive(1.0)


def _host_lost(_ranks: Session) -> None:
    hosts = Loopback(["a"], cpus=1)
    with Session(cluster=hosts) as session:
        session.start()
        hosts.lose("a")
        session.run("1")


IN_THE_NOTEBOOK: dict[str, Callable[[Session], Any]] = {
    "ParallelError": lambda ranks: ranks.run("1 / 0"),
    "CellTimeoutError": lambda ranks: ranks.run("while True: pass", timeout=0.2),
    "BusyError": _busy,
    "ClosedError": _closed,
    "StaleWorkError": _stale_work,
    "RendezvousError": _joined_twice,
    "UnpicklableError": lambda ranks: ranks.run("lock", namespace={"lock": threading.Lock()}),
    "UnknownNameError": lambda ranks: ranks.run("1", share=["missing"], namespace={}),
    "NotAnArrayError": lambda ranks: ranks.run("1", share=["words"], namespace={"words": ["a"]}),
    "ObjectArrayError": lambda _: nbp.share(np.array([object()])),
    "SegmentLostError": _lost,
    "InvalidHandleError": _damaged,
    "StartError": _not_started,
    "HostLostError": _host_lost,
    "HostBoundaryError": lambda _: HostNames().share(["x"], {}),
    "SupervisorDiedError": _without_supervisor,
    "ChannelClosedError": _other_end_gone,
}
"""Of the other errors: what raises them."""
NOT_PROVOKED = {"InternalError", "NbParallelError"}
"""No state that never occurs can be provoked; the base is raised as one of its subclasses."""


def _provoke(name: str, ranks: Session) -> None:
    if name in CELLS:
        ranks.run(CELLS[name], namespace={"x": np.zeros(9)})
    else:
        IN_THE_NOTEBOOK[name](ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CELLS, *IN_THE_NOTEBOOK])
def test_the_cause_raises_the_error(two_ranks: Session, name: str) -> None:
    """The error itself is raised, or one rank's in a `ParallelError`; ranks go on with the next cell."""
    with pytest.raises(errors.NbParallelError) as caught:
        _provoke(name, two_ranks)
    raised = caught.value
    among = list(raised.errors.values()) if isinstance(raised, errors.ParallelError) else []
    assert name in {type(error).__name__ for error in (raised, *among)}, repr((raised, among))
    assert list(two_ranks.run("all_reduce(1)").values) == [2, 2]


def test_every_error_of_the_page_is_provoked() -> None:
    """No section of the page is left out."""
    described = re.findall(r"^### (\w+)$", PAGE.read_text(), re.MULTILINE)
    assert {*described} == {*CELLS, *IN_THE_NOTEBOOK, *NOT_PROVOKED}
