"""A program: any tree of arrays goes to another process and back, by every carrier.

``python -m tests.multiprocessing.messages.round_trips METHOD EXAMPLES SEED`` prints how many went by each
carrier, or fails with hypothesis' smallest example.  The other processes serve all examples.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import nbparallel as nbp
import nbparallel.multiprocessing as mp
from nbparallel.multiprocessing import household

SECONDS = 60
"""Then an answer does not come any more."""
DTYPES = hnp.scalar_dtypes() | hnp.array_dtypes(
    st.sampled_from([np.dtype("<i2"), np.dtype(">f8"), np.dtype("M8[s]"), np.dtype("S3")]),
    allow_subarrays=True,
)
LARGE = st.sampled_from([(200, 200), (32768,), (2, 3, 6000)])
"""Shapes of which eight bytes an item are 256 KiB or more: shared memory also for private arrays."""


@st.composite
def bases(draw):
    """Memory of its own: shared or private, small or large, in C or Fortran order, or an array of objects."""
    order = draw(st.sampled_from("CF"))
    if draw(st.integers(0, 5)) == 0:
        shape = draw(LARGE)
        array = np.arange(np.prod(shape), dtype=np.float64).reshape(shape, order=order)
    elif draw(st.integers(0, 7)) == 0:
        items = draw(st.lists(st.none() | st.integers() | st.text(max_size=3), max_size=4))
        array = np.empty(len(items), object)
        array[:] = items
        return array
    else:
        dtype = draw(DTYPES)
        array = np.zeros(draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)), dtype, order)
        content = draw(st.binary(min_size=array.nbytes, max_size=array.nbytes))
        if array.nbytes:
            array.reshape(-1, order=order).view(np.uint8)[:] = np.frombuffer(content, np.uint8)
    return nbp.share(array) if draw(st.booleans()) else array


@st.composite
def views(draw, array):
    """Draw a view of it, or itself; perhaps read-only."""
    if draw(st.booleans()):
        return array
    if array.ndim:
        array = array.transpose(draw(st.permutations(range(array.ndim))))
        sliced = array[draw(hnp.basic_indices(array.shape, allow_newaxis=True))]
        array = sliced if isinstance(sliced, np.ndarray) else array
    array = array[...]
    if draw(st.integers(0, 3)) == 0:
        array.flags.writeable = False
    return array


@st.composite
def trees(draw):
    """Draw a tree of arrays, some of which are one array, or overlap."""
    memories = draw(st.lists(bases(), min_size=1, max_size=3))
    arrays = [draw(views(draw(st.sampled_from(memories)))) for _ in range(draw(st.integers(1, 4)))]
    shape = draw(
        st.recursive(
            st.integers(0, len(arrays) - 1),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.tuples(inner, inner)
                | st.dictionaries(st.text(max_size=2), inner, max_size=3)
            ),
            max_leaves=5,
        )
    )
    return fill(shape, arrays)


def fill(shape, arrays):
    """Put arrays at the leaves."""
    if isinstance(shape, dict):
        return {key: fill(value, arrays) for key, value in shape.items()}
    if isinstance(shape, list | tuple):
        return type(shape)(fill(value, arrays) for value in shape)
    return arrays[shape]


def leaves(tree):
    """Return the arrays of a tree in order."""
    if isinstance(tree, np.ndarray):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(part)]


def without_arrays(tree):
    """Return a tree with the type of each array in its place."""
    if isinstance(tree, dict):
        return {key: without_arrays(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(without_arrays(value) for value in tree)
    return type(tree)


def aliases(arrays):
    """Return which pairs of arrays have memory in common."""
    return [
        [
            left is right or bool(left.size and right.size and np.shares_memory(left, right))
            for right in arrays
        ]
        for left in arrays
    ]


def expected_aliases(arrays):
    """Return the same of what arrives: views of shared memory stay that, private ones are copied apart."""
    found = aliases(arrays)
    for i, left in enumerate(arrays):
        for j, right in enumerate(arrays):
            if not (nbp.is_shared(left) and nbp.is_shared(right)):
                found[i][j] = left is right
    return found


def within_rights(found, arrays):
    """Return the same, of pairs with equal rights: what may not be written is mapped by itself."""
    writable = [rights(x)[1] for x in arrays]
    return [
        [found[i][j] for j in range(len(arrays)) if writable[i] == writable[j]] for i in range(len(arrays))
    ]


def content(array):
    """Return every byte, padding included; of an array of objects the objects."""
    if array.dtype.hasobject:
        return array.tolist()
    if not array.size or not array.itemsize:
        return b""
    return np.ascontiguousarray(array).reshape(-1).view(np.dtype((np.void, array.itemsize))).tobytes()


def same_but_order(one, other):
    """Return whether two private arrays have one dtype but for the order of its bytes."""
    return not nbp.is_shared(one) and one.dtype.newbyteorder("=") == other.dtype.newbyteorder("=")


def check(sent, came, *, what):
    """Compare what was sent with what came back, and how its arrays lie in memory."""
    assert without_arrays(sent) == without_arrays(came), what
    what = what, [(x.shape, x.strides, x.dtype, nbp.is_shared(x)) for x in leaves(sent)]
    left, right = leaves(sent), leaves(came)
    for one, other in zip(left, right, strict=True):
        # numpy's pickle forgets some byte orders
        assert other.dtype == one.dtype or same_but_order(one, other), what
        assert one.shape == other.shape, what
        equal = one if one.dtype == other.dtype else one.astype(other.dtype)
        assert content(equal) == content(other), what
        if nbp.is_shared(one):
            assert nbp.is_shared(other) or not one.size, what  # of an empty one a forked child knows nothing
            assert one.strides == other.strides or not one.size, what
            if one.size and one.itemsize:
                assert np.shares_memory(one, other), what
        elif one.size and one.itemsize:
            assert not np.shares_memory(one, other), what
    assert aliases(right) == expected_aliases(left), what


def answer(tree):
    """Return what came, and how it lies in memory there."""
    arrays = leaves(tree)
    return tree, aliases(arrays), [(nbp.is_shared(x), x.flags.writeable) for x in arrays]


def rights(array):
    """Return whether it is shared where it arrives, and writable."""
    shared = nbp.is_shared(array)
    shared_there = shared or (array.nbytes >= 1 << 18 and not array.dtype.hasobject)
    return shared_there, array.flags.writeable or not shared


def serve(inbox, outbox):
    """Answer until None comes."""
    while (tree := inbox.get()) is not None:
        outbox.put(answer(tree[0]))
        if hasattr(inbox, "task_done"):
            inbox.task_done()


def serve_pipe(end):
    """Answer until None comes."""
    while (tree := end.recv()) is not None:
        end.send(answer(tree[0]))


def put_answer(tree, queue):
    """Answer once."""
    queue.put(answer(tree))


class Carriers:
    """The other processes, and how a tree goes to them and back."""

    def __init__(self, ctx):
        self.ctx = ctx
        self.used = Counter()
        self.queues = {}
        self.processes = []
        for kind in ("Queue", "SimpleQueue", "JoinableQueue"):
            self.queues[kind] = getattr(ctx, kind)(), getattr(ctx, kind)()
            self._start(serve, *self.queues[kind])
        self.end, theirs = ctx.Pipe()
        self._start(serve_pipe, theirs)
        theirs.close()
        self.pool = ctx.Pool(1)
        self.manager = ctx.Manager()
        self.dict, self.list = self.manager.dict(), self.manager.list([None])
        self.manager_queue = self.manager.Queue()
        self.results = ctx.Queue()

    def _start(self, target, *args):
        process = self.ctx.Process(target=target, args=args)
        process.start()
        self.processes.append(process)

    def send(self, carrier, tree):
        """Return what came back; of what went to another process and back also how it lay there."""
        self.used[carrier] += 1
        if carrier in self.queues:
            inbox, outbox = self.queues[carrier]
            inbox.put((tree,))
            if carrier == "JoinableQueue":
                inbox.join()
            return outbox.get()
        if carrier == "Pipe":
            self.end.send((tree,))
            assert self.end.poll(SECONDS)
            return self.end.recv()
        if carrier == "Pool":
            return self.pool.apply_async(answer, (tree,)).get(SECONDS)
        if carrier == "Process":
            process = self.ctx.Process(target=put_answer, args=(tree, self.results))
            process.start()
            came = self.results.get(timeout=SECONDS)
            process.join()
            # a forked child has its parent's arrays themselves
            return came if self.ctx.get_start_method() != "fork" else came[:1]
        if carrier == "dict":
            self.dict["x"] = tree
            return (self.dict.pop("x"),)
        if carrier == "list":
            self.list[0] = tree
            came = self.list[0]
            self.list[0] = None
            return (came,)
        self.manager_queue.put(tree)
        return (self.manager_queue.get(timeout=SECONDS),)

    def close(self):
        """End all processes."""
        for inbox, _ in self.queues.values():
            inbox.put(None)
        self.end.send(None)
        for process in self.processes:
            process.join(SECONDS)
            assert process.exitcode == 0, process
        self.end.close()
        for queues in [*self.queues.values(), [self.results]]:
            for queue in queues:
                queue.close()
        self.pool.close()
        self.pool.join()
        self.manager.shutdown()


CARRIERS = (
    "Queue",
    "SimpleQueue",
    "JoinableQueue",
    "Pipe",
    "Pool",
    "dict",
    "list",
    "manager's Queue",
    "Process",
)


def main(method, examples, number):
    """Send trees; no message holds anything at the end."""
    with contextlib.closing(
        Carriers(mp.get_context(method))
    ) as carriers:  # also if a tree does not come back
        for carrier in CARRIERS:
            # to start a process for each example takes most of the time
            send_trees(carriers, carrier, examples if carrier != "Process" else 1 + examples // 4, number)
        gc.collect()
    report = household.report()
    assert not any(row.messages for row in report.segments), report.segments
    print(*carriers.used.values())


def send_trees(carriers, carrier, examples, number):
    """Send so many trees by one carrier, and compare."""

    @seed(number)
    @settings(deadline=None, max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    @given(trees())
    def every_tree_comes_back(tree):
        came, *there = carriers.send(carrier, tree)
        check(tree, came, what=carrier)
        if there:
            arrays = leaves(tree)
            found, of_each = there
            assert of_each == [rights(x) for x in arrays], carrier
            assert within_rights(found, arrays) == within_rights(expected_aliases(arrays), arrays), carrier

    every_tree_comes_back()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
