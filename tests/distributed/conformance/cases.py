"""Every collective as a case: what it is given, and what numpy says must come of it.

A case is a generator: it makes its buffers, yields what the call returned (with ``async_op=True`` a work),
is sent the result, and compares.  So the same cases run one by one, and mixed with others under way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbparallel.distributed import Communicator, Group
from tests.distributed.conformance.guarded import LAYOUTS, Guards
from tests.distributed.conformance.oracle import example, expected, located, same

NUMERIC = ("b1", "i1", "u2", "i4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", ">f4")
ORDERED = tuple(dtype for dtype in NUMERIC if np.dtype(dtype).kind != "c")
OTHERS = ("M8[s]", "S5", "U3", "i4,f8")
"""What can be moved, and not reduced."""
Array = np.ndarray[Any, Any]
Case = Generator[Any, Any, None]


def content(dtype: str, size: int, place: int, salt: int) -> Array:
    """Return what one member brings."""
    if dtype in NUMERIC:
        return example(dtype, size, place, salt)
    return ((np.arange(size) * 7 + place * 31 + salt) % 97).astype("u1").astype(dtype)


@dataclass(slots=True)
class Setting:
    """One call of a collective, as this rank sees it."""

    c: Communicator
    group: Group | None
    members: list[int]
    root: int
    """Its place in the group."""
    dtype: str
    size: int
    op: str = "sum"
    layout: str = "private"
    later: bool = False
    """Whether to call it with ``async_op=True``."""
    salt: int = 0
    guards: Guards = field(init=False)

    def __post_init__(self) -> None:
        self.guards = Guards(self.c)

    @property
    def k(self) -> int:
        """Return how many members there are."""
        return len(self.members)

    @property
    def me(self) -> int:
        """Return the place of this rank."""
        return self.members.index(self.c.rank)

    @property
    def mine(self) -> bool:
        """Whether this rank is the root."""
        return self.me == self.root

    def inputs(self, times: int = 1) -> list[Array]:
        """Return what all members bring."""
        return [content(self.dtype, self.size * times, place, self.salt) for place in range(self.k)]

    def read(self, x: Array) -> Array:
        """Return an input of the operation."""
        return self.guards.input(x, self.layout)

    def outputs(self, like: list[Array]) -> list[Array]:
        """Return buffers of these shapes to be filled, each in another layout."""
        at = LAYOUTS.index(self.layout)
        return [
            self.guards.buffer(x.shape, self.dtype, LAYOUTS[(at + i) % len(LAYOUTS)])
            for i, x in enumerate(like)
        ]

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call it."""
        self.guards.remember()
        if self.later:
            options["async_op"] = True
        return getattr(self.c, name)(*arguments, group=self.group, **options)

    def total(self, inputs: list[Array]) -> Array:
        """Return the combination in the order of the group."""
        with np.errstate(all="ignore"):
            return expected(self.op, inputs)

    def check(self, x: Array, want: Array, *, reduced: bool = False) -> None:
        """Assert that the bits are those of numpy."""
        assert same(x, want, self.dtype, self.op if reduced else ""), (self, x[:5], want[:5])


def all_reduce(s: Setting) -> Case:
    """Everybody's array becomes the combination."""
    inputs = s.inputs()
    x = s.guards.filled(inputs[s.me], s.layout)
    assert (yield s.call("all_reduce", x, s.op)) is x
    s.check(x, s.total(inputs), reduced=True)


def scan(s: Setting) -> Case:
    """Each array becomes the combination of those up to it."""
    inputs = s.inputs()
    x = s.guards.filled(inputs[s.me], s.layout)
    assert (yield s.call("scan", x, s.op)) is x
    s.check(x, s.total(inputs[: s.me + 1]), reduced=True)


def exscan(s: Setting) -> Case:
    """Each array becomes the combination of those before it, and the first one stays."""
    inputs = s.inputs()
    x = s.guards.filled(inputs[s.me], s.layout)
    found = yield s.call("exscan", x, s.op)
    assert found is (x if s.me else None)
    s.check(x, s.total(inputs[: s.me]) if s.me else inputs[0], reduced=True)


def maxloc(s: Setting, name: str = "maxloc") -> Case:
    """All get the largest of each element, and the lowest rank that has it; what they bring stays."""
    inputs = s.inputs()
    value, where = yield s.call(name, s.read(inputs[s.me]))
    best, ranks = located(name, inputs, s.members)
    s.check(value, best)
    assert str(where.dtype).endswith("int64")
    assert where.tolist() == ranks.tolist()


def minloc(s: Setting) -> Case:
    """All get the smallest likewise."""
    return maxloc(s, "minloc")


def reduce(s: Setting) -> Case:
    """Everybody brings an array, and the root's becomes the combination; the others' stay."""
    inputs = s.inputs()
    x = s.guards.filled(inputs[s.me], s.layout) if s.mine else s.read(inputs[s.me])
    found = yield s.call("reduce", x, s.members[s.root], s.op)
    assert found is (x if s.mine else None)
    if s.mine:
        s.check(x, s.total(inputs), reduced=True)


def reduce_scatter(s: Setting) -> Case:
    """Everybody's buffer becomes its part of the combination; parts may differ by one."""
    inputs = s.inputs()
    want = np.array_split(s.total(inputs), s.k)[s.me]
    (output,) = s.outputs([want])
    parts = [s.read(part) for part in np.array_split(inputs[s.me], s.k)]
    assert (yield s.call("reduce_scatter", output, parts, s.op)) is output
    s.check(output, want, reduced=True)


def reduce_scatter_tensor(s: Setting) -> Case:
    """As above, from one array with equal parts."""
    inputs = s.inputs(s.k)
    want = np.split(s.total(inputs), s.k)[s.me]
    (output,) = s.outputs([want])
    assert (yield s.call("reduce_scatter_tensor", output, s.read(inputs[s.me]), s.op)) is output
    s.check(output, want, reduced=True)


def broadcast(s: Setting) -> Case:
    """Everybody's array becomes the root's."""
    inputs = s.inputs()
    x = s.read(inputs[s.me]) if s.mine else s.outputs([inputs[s.root]])[0]
    assert (yield s.call("broadcast", x, src=s.members[s.root])) is x
    s.check(x, inputs[s.root])


def all_gather(s: Setting) -> Case:
    """Everybody's list of buffers is filled with what all bring."""
    inputs = s.inputs()
    outputs = s.outputs(inputs)
    assert (yield s.call("all_gather", outputs, s.read(inputs[s.me]))) is outputs
    for x, want in zip(outputs, inputs, strict=True):
        s.check(x, want)


def all_gather_into_tensor(s: Setting) -> Case:
    """As above, into one array."""
    inputs = s.inputs()
    want = np.concatenate(inputs)
    (output,) = s.outputs([want])
    assert (yield s.call("all_gather_into_tensor", output, s.read(inputs[s.me]))) is output
    s.check(output, want)


def gather(s: Setting) -> Case:
    """Everybody brings an array, and the root's list of buffers is filled."""
    inputs = s.inputs()
    outputs = s.outputs(inputs) if s.mine else None
    found = yield s.call("gather", s.read(inputs[s.me]), outputs, dst=s.members[s.root])
    assert found is outputs
    for x, want in zip(outputs or [], inputs if s.mine else [], strict=True):
        s.check(x, want)


def scatter(s: Setting) -> Case:
    """Everybody's buffer becomes its part of what the root has."""
    inputs = s.inputs()
    parts = np.array_split(inputs[s.root], s.k)
    (output,) = s.outputs([parts[s.me]])
    values = [s.read(part) for part in parts] if s.mine else None
    assert (yield s.call("scatter", output, values, src=s.members[s.root])) is output
    s.check(output, parts[s.me])


def all_to_all(s: Setting) -> Case:
    """Everybody's buffers are filled with its parts of what all have; parts may differ by one."""
    wanted = [np.array_split(x, s.k)[s.me] for x in s.inputs()]
    outputs = s.outputs(wanted)
    parts = [s.read(part) for part in np.array_split(s.inputs()[s.me], s.k)]
    assert (yield s.call("all_to_all", outputs, parts)) is outputs
    for x, want in zip(outputs, wanted, strict=True):
        s.check(x, want)


def all_to_all_single(s: Setting) -> Case:
    """As above from one array into another; member i gets i parts more than nothing."""
    sizes = [s.size * place for place in range(s.k)]
    inputs = [content(s.dtype, sum(sizes), place, s.salt) for place in range(s.k)]
    at = sum(sizes[: s.me])
    want = np.concatenate([x[at : at + sizes[s.me]] for x in inputs])
    (output,) = s.outputs([want])
    found = yield s.call("all_to_all_single", output, s.read(inputs[s.me]), [sizes[s.me]] * s.k, sizes)
    assert found is output
    s.check(output, want)


def ring(s: Setting) -> Case:
    """Everybody sends to the next one and receives from the one before; the root is the tag."""
    inputs = s.inputs()
    before = (s.me - 1) % s.k
    (output,) = s.outputs([inputs[before]])
    x = s.read(inputs[s.me])
    s.guards.remember()
    s.c.send(x, s.members[(s.me + 1) % s.k], s.group, s.root)
    if s.later:
        yield s.c.irecv(output, s.members[before], s.group, s.root)
    else:
        assert (yield s.c.recv(output, s.members[before], s.group, s.root)) == s.members[before]
    s.check(output, inputs[before])


REDUCTIONS: dict[str, Callable[[Setting], Case]] = {
    f.__name__: f for f in (all_reduce, scan, exscan, reduce, reduce_scatter, reduce_scatter_tensor)
}
LOCATING: dict[str, Callable[[Setting], Case]] = {f.__name__: f for f in (maxloc, minloc)}
MOVES: dict[str, Callable[[Setting], Case]] = {
    f.__name__: f
    for f in (
        broadcast, all_gather, all_gather_into_tensor, gather, scatter, all_to_all, all_to_all_single,
    )
}  # fmt: skip
ALL = {**REDUCTIONS, **LOCATING, **MOVES, "ring": ring}


def dtypes_of(name: str) -> tuple[str, ...]:
    """Return the dtypes that a collective takes."""
    return NUMERIC if name in REDUCTIONS else ORDERED if name in LOCATING else NUMERIC + OTHERS


ROOTED = {"reduce", "broadcast", "gather", "scatter"}


def groups(c: Communicator) -> Iterator[tuple[Group | None, list[int]]]:
    """Yield one group of every kind: the world, all as a group, some, one alone, all backwards."""
    n = c.world_size
    everybody = list(range(n))
    yield None, everybody
    yield c.new_group(everybody, tag="all"), everybody
    if n > 2:
        yield c.new_group([n - 1, 0]), [0, n - 1]
    if n > 1:
        yield c.new_group([n - 1], tag="alone"), [n - 1]
        yield c.split(0, key=-c.rank), everybody[::-1]


def complete(case: Case, begun: Any, s: Setting) -> None:
    """Wait for what a case has begun, and let it compare."""
    try:
        case.send(begun.result() if s.later else begun)
    except StopIteration:
        s.guards.check()
        return
    raise AssertionError("a case yields once")
