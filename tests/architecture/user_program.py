"""A user's program, for the type checker: what each public call returns.  Never run."""

from collections.abc import Callable, Mapping
from multiprocessing.queues import Queue
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import nbparallel as nbp
import nbparallel.distributed as dist
import nbparallel.multiprocessing as mp
from nbparallel import sharing
from nbparallel.errors import ParallelError
from nbparallel.session import Examination, PendingCell, RankResult, SessionNames, examine
from nbparallel.sharing import Access, SegmentSource, Strategy


def cells() -> None:
    """Run cells and functions in a session."""
    with nbp.Session(4, keep_messages=True) as session:
        assert_type(session, nbp.Session)
        result = session.run("all_reduce(rank)", ranks=[0, 1], share="x,y", timeout=5.0, seed=1)
        assert_type(result, nbp.CellResult)
        assert_type(result.values, nbp.RankValues)
        assert_type(result.values[0], Any)
        assert_type(list(result.values), list[Any])
        assert_type(result.values.ranks, tuple[int, ...])
        assert_type(result[1], RankResult)
        assert_type(result[1].stdout, str)
        assert_type(result[1].error, Exception | None)
        pending = session.submit("rank", namespace={"x": 1})
        assert_type(pending, PendingCell)
        assert_type(session.call(max, 1, 2), list[Any])
        assert_type(session.map(len, ["a", "bb"], progress=False), list[int])
        assert_type(nbp.map(str, (x for x in range(3))), list[str])
        assert_type(session.who(), SessionNames)
    assert_type(examine(), Examination)


def arrays(values: npt.NDArray[np.float32]) -> None:
    """Make and share arrays."""
    assert_type(nbp.share(values), npt.NDArray[np.float32])
    x = nbp.zeros((1000, 3), dtype=np.int64)
    x += 1
    assert_type(x.shape, tuple[Any, ...])
    nbp.from_file("data.npy")[0] = 1
    nbp.full(3, 7, strategy="mmap").sum()
    assert_type(nbp.is_shared(x), bool)
    assert_type([segment.nbytes for segment in nbp.segments()], list[int])
    assert_type(nbp.get_sharing_strategy(), str)


def operations(x: npt.NDArray[np.float64]) -> None:
    """Call operations as a module does that ranks import."""
    if dist.is_initialized():
        assert_type(dist.is_initialized(), bool)
    dist.init_process_group(init_method="env://", timeout=60)
    assert_type(dist.all_reduce(x, dist.ReduceOp.MAX), npt.NDArray[np.float64])
    assert_type(dist.all_reduce(3), int)
    assert_type(dist.all_reduce(True), int)
    assert_type(dist.all_reduce(3, "avg"), float)
    assert_type(dist.all_reduce(x, async_op=True), dist.Work)
    assert_type(dist.broadcast("text", src=0), str)
    assert_type(dist.broadcast(None), Any)
    assert_type(dist.all_gather("text"), list[str])
    assert_type(dist.barrier(), None)
    assert_type(dist.shard(["a", "b"]), list[str])
    assert_type(dist.exscan(3), int | None)
    root_has = dist.reduce(x, dst=0)
    if dist.get_rank() == 0:
        root_has.sum()
    total: float = dist.all_reduce(1.5)
    dist.send(total, dst=1, tag=3)
    received: npt.NDArray[np.float64] = dist.recv(src=0, tag=3)
    assert_type(dist.recv(src=dist.ANY_SOURCE, return_source=True), Any)
    assert_type(dist.sendrecv(received, dst=1, src=None), Any)
    dist.send(received, dist.PROC_NULL)
    dist.broadcast(received, src=0)
    work: dist.Work = dist.isend(x, 1)
    assert_type(work.wait(timeout=1.0), bool)
    assert_type(work.source_rank(), int)
    assert_type(work.result(), Any)
    pair: dist.Group = dist.new_group([0, 1])
    assert_type(list(pair), list[int])
    dist.barrier(group=pair)
    with dist.lock("counter", timeout=5) as lock:
        assert_type(lock, dist.NamedLock)
        assert_type(lock.abandoned, tuple[int, ...])
    grid = dist.grid((0, 0), periodic=True)
    assert_type(grid, dist.CartesianGrid)
    assert_type(grid.shift(0), tuple[int, int])
    assert_type(dist.scan(x), npt.NDArray[np.float64])


def double(x: int) -> int:
    """Be what processes call."""
    return 2 * x


def processes() -> None:
    """Use the drop-in as the library."""
    queue: Queue[int] = mp.Queue()
    assert_type(queue.get(timeout=1), int)
    process = mp.Process(target=double, args=(1,), daemon=True)
    process.start()
    assert_type(process.exitcode, int | None)
    with mp.Pool(2) as pool:
        assert_type(pool.map(double, [1, 2]), list[int])
    context = mp.get_context("spawn")
    context.Process(target=double, args=(1,)).join()
    assert_type(mp.cpu_count(), int)
    with mp.Executor(2) as executor:
        executor.submit(double, 1)
    mp.spawn(train, (3,), nprocs=2)


def failures(session: nbp.Session) -> str:
    """Look at the error of a cell."""
    try:
        session.run("1 / 0")
    except ParallelError as error:
        assert_type(error.errors, Mapping[int, Exception])
        return str(error)
    except nbp.RankDiedError as error:
        assert_type((error.rank, error.signal_name), tuple[int, str | None])
    return ""


def train(rank: int, steps: int) -> None:
    """Be the function of `spawn`."""


class Own(Strategy):
    """A strategy of a user's, as far as types go."""

    @property
    def name(self) -> str:
        """Name by which users choose it."""
        return "own"

    @property
    def unavailable_reason(self) -> str | None:
        """None: it works everywhere."""
        return None

    @property
    def needs_clean_up(self) -> bool:
        """Return whether segments have names."""
        return False

    def create(
        self, nbytes: int, content: memoryview | None = None, intend: Callable[[str], None] = print
    ) -> SegmentSource:
        """Allocate a segment."""
        assert_type(self.reuses_memory, bool)
        raise NotImplementedError

    def adopt(self, fd: int, nbytes: int) -> SegmentSource:
        """Open a segment of another process."""
        raise NotImplementedError

    def map(self, source: SegmentSource, access: Access) -> sharing.Mapping:
        """Map a segment."""
        raise NotImplementedError


nbp.register_sharing_strategy("own", Own())
nbp.spawn(train, (3,), nprocs=4)
