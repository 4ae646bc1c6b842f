"""Conformance suite of sharing strategies: ours, and those that users write.

Derive a class whose name begins with ``Test``, say which strategy, and pytest does the rest::

    class TestMine(StrategyTests):
        strategy = "mine"  # registered with nbp.register_sharing_strategy

The cases are those of torch's ``test_multiprocessing.py`` (sharing, preserve_sharing, fs, inherit_tensor,
empty_tensor_sharing, is_shared, leak_checker), re-expressed for arrays and ranks, and what a strategy
promises beyond them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import nbparallel as nbp
from nbparallel.errors import InvalidHandleError, SharedMemoryFullError
from nbparallel.sharing import Access, SegmentSource, Strategy, current_store
from nbparallel.sharing.strategies import registry
from nbparallel.testing.arrays import checksum
from nbparallel.testing.waiting import wait_until

_DTYPES = ["?", "i1", ">u2", "f4", "<f8", "c16", "S3", "U2", "M8[ns]", [("a", "i2"), ("b", "f8", 2)]]
_REPETITIONS = 30


@contextmanager
def temporary_registry(*strategies: Strategy) -> Iterator[None]:
    """Use `strategies` beside the others or in their place; afterwards the registry is what it was before."""
    before, chosen = registry._strategies, registry._current
    options = [(strategy, vars(strategy).copy()) for strategy in before.values()]
    registry._strategies = {**before, **{strategy.name: strategy for strategy in strategies}}
    try:
        yield
    finally:
        registry._strategies, registry._current = before, chosen
        for strategy, values in options:
            vars(strategy).update(values)
        registry._generation += 1  # ranks follow


class StrategyTests:
    """What every sharing strategy that shares memory promises."""

    strategy = "file_descriptor"
    """Name of the strategy under test."""
    dtypes: Sequence[npt.DTypeLike] | None = None
    """Dtypes that `test_every_dtype_and_layout` draws from; None: all that exist."""
    examples = 12
    """How many lists of up to eight arrays it draws; each takes a cell or two."""

    @pytest.fixture(autouse=True)
    def _chosen(self) -> Iterator[None]:
        """Use the strategy under test, and the one before afterwards.

        What makes it available, such as an environment variable, is a fixture of the class or the module.
        """
        before = nbp.get_sharing_strategy()
        nbp.set_sharing_strategy(self.strategy)
        yield
        nbp.set_sharing_strategy(before)

    @pytest.fixture
    def made(self) -> Strategy:
        """Return the strategy itself."""
        return registry.find_strategy(self.strategy)

    @pytest.fixture
    def source(self, made: Strategy) -> Iterator[SegmentSource]:
        """Make a segment of a page and a bit."""
        source = made.create(5000)
        yield source
        source.close()

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls) -> Iterator[nbp.Session]:
        """Start two ranks for all tests of a strategy."""
        with nbp.Session(2) as session:
            session.run("pass")
            yield session

    @pytest.fixture
    def names(self, ranks: nbp.Session) -> Iterator[dict[str, Any]]:
        """Yield the notebook's variables; no process has them after the test."""
        names: dict[str, Any] = {"np": np, "nbp": nbp}
        ranks.run("pass", namespace=names)
        yield names
        names.clear()
        ranks.run("globals().pop('mine', None); None", namespace=names)

    # The contract

    def test_a_segment_is_reserved_and_zero(self, made: Strategy, source: SegmentSource) -> None:
        """Full memory is an exception at creation, so every page exists before a process touches it."""
        assert source.nbytes >= 5000
        assert os.fstat(source.fd).st_size == source.nbytes
        assert os.fstat(source.fd).st_blocks * 512 >= source.nbytes
        assert not os.get_inheritable(source.fd)
        mapping = made.map(source, Access.WRITE)
        assert not mapping.root(deque()).any()
        mapping.unmap()

    @pytest.mark.parametrize("nbytes", [1, 4095, 4097, 300_000])
    def test_content_is_written_whole(self, made: Strategy, nbytes: int) -> None:
        """What is given at creation is there, followed by zeros."""
        content = np.random.default_rng(0).integers(0, 255, nbytes, "u1")
        source = made.create(nbytes, content.data)
        mapping = made.map(source, Access.READ)
        root = mapping.root(deque())
        assert np.array_equal(root[:nbytes], content)
        assert not root[nbytes:].any()
        del root
        mapping.unmap()
        source.close()

    def test_too_much_is_an_error(self, made: Strategy) -> None:
        """More than there is raises, with the numbers; it kills no process."""
        with pytest.raises(SharedMemoryFullError, match="needs"):
            made.create(1 << 60)

    def test_what_is_no_segment_is_not_adopted(self, made: Strategy, source: SegmentSource) -> None:
        """A descriptor of another size or kind is refused, and closed."""
        read, write = os.pipe()
        os.close(write)
        for fd, nbytes in ((read, source.nbytes), (os.dup(source.fd), source.nbytes + 4096)):
            with pytest.raises(InvalidHandleError):
                made.adopt(fd, nbytes)
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(fd)
        made.adopt(os.dup(source.fd), source.nbytes).close()

    def test_reading_means_reading(self, made: Strategy, source: SegmentSource) -> None:
        """A descriptor for reading gives no process a mapping for writing."""
        fd = os.open(f"/proc/self/fd/{source.fd}", os.O_RDONLY | os.O_CLOEXEC)
        adopted = made.adopt(fd, source.nbytes)
        assert not made.map(adopted, Access.READ).root(deque()).flags.writeable
        with pytest.raises(OSError, match="ermission"):
            made.map(adopted, Access.WRITE)
        adopted.close()

    def test_names_are_announced_and_go(self, made: Strategy) -> None:
        """A name in the file system is announced before it exists, and goes with its segment."""
        announced: list[str] = []

        def intend(path: str) -> None:
            assert not os.path.lexists(path)
            announced.append(path)

        source = made.create(100, None, intend)
        assert bool(announced) == made.needs_clean_up
        assert all(os.path.exists(path) for path in announced)
        source.close()
        assert not any(os.path.lexists(path) for path in announced)

    # Arrays of one process

    @pytest.mark.parametrize("dtype", _DTYPES, ids=str)
    def test_dtype_shape_and_order_stay(self, dtype: Any) -> None:
        """A shared copy equals its original in everything, and is private no more."""
        x = np.zeros((3, 4, 2), dtype)
        for original in (x, np.asfortranarray(x), x[::2, ::-1], x[:0], x[0, 0, 0, ...], x.T):
            y = nbp.share(original)
            assert (y.dtype, y.shape) == (original.dtype, original.shape)
            assert y.tobytes() == original.tobytes()
            assert nbp.is_shared(y)
            assert nbp.share(y) is y
        assert not nbp.is_shared(y + 1 if y.dtype.kind in "iuf" else y.copy())

    def test_it_is_made_by_this_strategy(self) -> None:
        """`nbp.segments` names the strategy of an array's memory."""
        x = nbp.ones(10)
        location = current_store().location(x)
        assert location is not None
        assert [s.strategy for s in nbp.segments() if s.segment == location.segment] == [self.strategy]

    # Arrays on ranks

    def test_writes_are_seen_by_everybody(self, ranks: nbp.Session, names: dict[str, Any]) -> None:
        """A rank fills an array and a view of it; the notebook and the other rank see both (``sharing``)."""
        names["x"] = nbp.zeros((5, 5))
        names["column"] = names["x"][:, 1]
        ranks.run("x.fill(4)\ncolumn[:] = 7", ranks=[0], namespace=names)
        assert names["x"].sum() == 20 * 4 + 5 * 7
        assert ranks.run("float(x.sum())", ranks=[1], namespace=names).values[1] == 115
        names["x"][0, 0] = 100
        assert ranks.run("float(x[0, 0])", namespace=names).values == [100, 100]

    def test_views_stay_views_of_one_memory(self, ranks: nbp.Session, names: dict[str, Any]) -> None:
        """An array, its row, its column and its transpose alias on a rank as here (``preserve_sharing``)."""
        x = names["x"] = nbp.zeros((4, 4))
        names.update(row=x[2], column=x[:, 1], turned=x.T, back=x[::-1])
        cell = "x[2, 1] = 1 + rank\n[float(v) for v in (row[1], column[2], turned[1, 2], back[1, 1])]"
        assert ranks.run(cell, ranks=[1], namespace=names).values[1] == [2.0] * 4

    def test_one_array_is_one_mapping(self, ranks: nbp.Session, names: dict[str, Any]) -> None:
        """The same array under several names and in several cells is mapped once on a rank."""
        x = names["x"] = nbp.zeros(100_000)
        names.update(again=x, part=x[10:])
        count = "len([s for s in nbp.segments() if not s.own])"
        assert ranks.run(f"x, again, part\n{count}", namespace=names).values == [1, 1]
        assert ranks.run(f"again is x, {count}", namespace=names).values == [(True, 1)] * 2

    def test_the_notebooks_arrays_are_read_only(self, ranks: nbp.Session, names: dict[str, Any]) -> None:
        """What was not shared on purpose arrives without a copy, and cannot be written."""
        names["x"] = np.arange(50_000.0)
        assert ranks.run("float(x[-1]), x.flags.writeable", namespace=names).values == [(49_999, False)] * 2
        with pytest.raises(nbp.errors.ParallelError, match="read-only"):
            ranks.run("x[0] = 1", namespace=names)
        ranks.run("x[rank] = -1", namespace=names, share=["x"])
        assert names["x"][:3].tolist() == [-1, -1, 2]

    def test_empty_and_scalar_arrays(self, ranks: nbp.Session, names: dict[str, Any]) -> None:
        """Arrays without elements and without dimensions travel as what they are."""
        names.update(none=nbp.empty((0, 3)), point=nbp.full((), 7), void=nbp.share(np.ones((2, 0), "f4")))
        cell = "none.shape, int(point), void.shape, void.dtype.str, nbp.is_shared(point)"
        expected = ((0, 3), 7, (2, 0), "<f4", True)
        assert ranks.run(cell, namespace=names).values == [expected] * 2

    def test_what_a_rank_makes_can_be_sent(self, ranks: nbp.Session, names: dict[str, Any]) -> None:
        """A rank's own array is the receiver's too, without a copy, and survives its name on the sender."""
        ranks.run(
            "if rank == 0:\n    mine = nbp.ones(40_000)\n    send(mine, 1, view=True)\n    del mine\n"
            "else:\n    mine = recv(src=0)",
            namespace=names,
        )
        assert ranks.run("float(mine.sum()) if rank else None", namespace=names).values == [None, 40_000]

    def test_repetition_leaves_nothing(self, ranks: nbp.Session, names: dict[str, Any]) -> None:
        """Thirty times made, sent and dropped: no more segments, descriptors or names (``leak_checker``)."""

        def held() -> tuple[int, int]:
            current_store().drain()
            current_store().trim()
            return len(os.listdir("/proc/self/fd")), len(nbp.segments())

        def once() -> None:
            names["x"] = nbp.ones(10_000)
            assert ranks.run("float(x.sum())", namespace=names).values == [10_000] * 2
            del names["x"]
            ranks.run("pass", namespace=names)

        for _ in range(3):
            once()
        most = held()
        for _ in range(_REPETITIONS):
            once()
        # The notice that ranks released memory comes a moment after their cell has ended.
        wait_until(lambda: held() <= most, lambda: (held(), most), seconds=2.0)

    @pytest.mark.matrix(cover=(), across_classes=True)
    @pytest.mark.time_limit(60)
    def test_every_dtype_and_layout(self, ranks: nbp.Session, names: dict[str, Any]) -> None:
        """Whatever dtype, shape, order, strides, alignment: a rank sees what is here, and writes it."""
        hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
        from nbparallel.testing.arrays import arrays

        def check(drawn: list[np.ndarray[Any, Any]]) -> None:
            here = {f"a{at}": x for at, x in enumerate(drawn)}
            names.update(
                here, checksum=checksum, shared={f"a{at}": nbp.share(x) for at, x in enumerate(drawn)}
            )
            look = f"[(x.dtype, x.shape, x.strides, checksum(x)) for x in ({', '.join(here)},)]"
            seen = ranks.run(look, ranks=[1], namespace=names).values[1]
            for (name, x), (dtype, shape, strides, content) in zip(here.items(), seen, strict=True):
                assert (dtype, shape, strides) == (x.dtype, x.shape, names[name].strides)
                assert content == checksum(x) == checksum(names[name]) == checksum(names["shared"][name])
                assert x.size == 0 or strides == x.strides
                assert nbp.is_shared(names[name])
            cell = "for each in shared.values(): each[...] = np.zeros((), each.dtype)\ndel each"
            ranks.run(cell, ranks=[0], namespace=names)
            for x in names["shared"].values():
                assert np.array_equal(x, np.zeros(x.shape, x.dtype))

        st = hypothesis.strategies
        drawn = None if self.dtypes is None else st.sampled_from([np.dtype(dtype) for dtype in self.dtypes])
        lists = st.lists(arrays(drawn), min_size=6, max_size=8)
        # Not made smaller when one fails: with ranks that takes minutes.
        phases = [hypothesis.Phase.generate]
        run = hypothesis.settings(max_examples=self.examples, phases=phases, deadline=None, database=None)
        run(hypothesis.given(lists)(check))()

    @pytest.mark.matrix(across_classes=True)
    @pytest.mark.time_limit(60)
    @pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
    def test_world_sizes_and_start_methods(self, start_method: str) -> None:
        """One rank to four, forked or fresh: arrays go there, between ranks, and come back."""
        names: dict[str, Any] = {"np": np, "nbp": nbp}
        with nbp.Session(1, start_method=start_method) as session:
            for world_size in range(1, 5):
                session.resize(world_size)
                _check_sharing(session, names, world_size)


def _check_sharing(session: nbp.Session, names: dict[str, Any], world_size: int) -> None:
    """Check with all ranks what torch's tests of sharing check with one child."""
    all_ranks = range(world_size)
    for length in (100, 100_000):
        x = names["x"] = nbp.zeros((4, length))
        names.update(row=x[2], column=x[:, 1], turned=x.T, y=np.arange(float(length)), none=nbp.empty((0, 3)))
        names.update(again=x, point=nbp.full((), 7))
        cell = """
x[rank, rank + 5] = y[-1] + rank
column[rank] = -rank - 1
mine = nbp.ones(len(y))
count = len([s for s in nbp.segments() if not s.own])
again is x, int(point), none.shape, count <= 4
"""
        assert session.run(cell, namespace=names).values == [(True, 7, (0, 3), True)] * world_size
        assert [x[r, r + 5] for r in all_ranks] == [length - 1.0 + r for r in all_ranks]
        assert [names["row"][1], names["turned"][1, 0]] == [-3.0 if world_size > 2 else 0.0, -1.0]
        cell = """
send(mine, (rank + 1) % world_size, view=True)
theirs = recv(src=(rank - 1) % world_size)
mine[0] = rank
barrier()
float(theirs[0]), nbp.is_shared(theirs), float(x[:4, 1].sum()), float(y.sum())
"""
        total, left = -sum(r + 1.0 for r in all_ranks), [(r - 1) % world_size for r in all_ranks]
        expected = [(float(r), True, total, length * (length - 1) / 2) for r in left]
        assert session.run(cell, namespace=names).values == expected
        names.update(dict.fromkeys(("x", "row", "column", "turned", "y", "none", "again", "point")))
        session.run("del mine, theirs", namespace=names)
