"""Cells at random, with the pairs of lines that race in them by a model that looks at all pairs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from nbparallel.distributed.races.operations import Order

CALLS = {
    Order.ALL: (
        "barrier({group})", "all_reduce(1.0, {group})", "all_gather(rank, {group})",
        "dist.maxloc(1.0, {group})", "all_reduce(np.ones(3), {group})", "dist.assert_same(1, {group})",
        "dist.average_gradients([np.ones(4)], {group})",
    ),
    Order.FROM_ROOT: (
        "broadcast(np.ones(2), src={root}, {group})",
        "dist.scatter([1] * {size} if rank == {root} else None, src={root}, {group})",
    ),
    Order.TO_ROOT: ("gather(rank, dst={root}, {group})", "reduce(1.0, {root}, {group})"),
    Order.PREFIX: ("dist.scan(1.0, {group})", "dist.exscan(1.0, {group})"),
}  # fmt: skip
BEGINNINGS = (
    "all_reduce(np.ones(2), async_op=True, {group})",
    "barrier(async_op=True, {group})",
    "dist.all_gather(np.ones(1), async_op=True, {group})",
)
MESSAGES = (
    "send(1, {dst}) if rank == {src} else recv(src={src}) if rank == {dst} else None",
    "send(1, {dst}, tag={tag}) if rank == {src} else recv(tag={tag}) if rank == {dst} else None",
    "x = dist.isend(np.ones(1), {dst}) if rank == {src} else "
    "dist.irecv(np.zeros(1), {src}) if rank == {dst} else None\nx and x.wait()",
)
CELLS = 9
"""Elements of the array `cells`."""
PLACES = ("0", "2", "5", "8", "1:4", "3:7", "::2", "1::3", "::-4", "[0, 5]", "[2, 3, 7]")
"""What cells touch of it."""
Clock = list[int]


@dataclass(frozen=True)
class _Access:
    line: int
    rank: int
    cells: frozenset[int]
    writes: bool
    clock: tuple[int, ...]

    def is_before(self, other: _Access) -> bool:
        return other.clock[self.rank] >= self.clock[self.rank]


@dataclass
class RandomCell:
    """A cell for some ranks.

    Parameters
    ----------
    seed : int
        Of what it does.
    ranks : int
        How many there are.
    """

    seed: int
    ranks: int
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._accesses: list[_Access] = []
        self._clocks: list[Clock] = [[0] * self.ranks for _ in range(self.ranks)]
        self._begun: dict[str, tuple[Sequence[int], list[Clock]]] = {}
        self._groups: list[tuple[str, Sequence[int]]] = [("group=None", range(self.ranks))]
        for number in range(2 if self.ranks > 2 else 0):
            members = sorted(self._random.sample(range(self.ranks), self._random.randint(2, self.ranks - 1)))
            self._groups.append((f"group=g{number}", members))
            self.lines.append(f"g{number} = dist.new_group({members})")
        for step in range(self._random.randint(4, 14)):
            for _ in range(self._random.randint(0, 4)):
                self._touch()
            self._random.choice([self._collect, self._collect, self._send, self._begin, self._wait])(step)
        for step in range(len(self._begun)):
            self._wait(step)

    @property
    def source(self) -> str:
        """What the ranks run."""
        return "\n".join(self.lines)

    @property
    def races(self) -> set[frozenset[int]]:
        """Pairs of lines that touch an element, one to write it, and that nothing orders."""
        return {
            frozenset((one.line, other.line))
            for one, other in itertools.combinations(self._accesses, 2)
            if one.rank != other.rank and one.cells & other.cells and (one.writes or other.writes)
            if not one.is_before(other) and not other.is_before(one)
        }

    def _touch(self) -> None:
        rank, writes = self._random.randrange(self.ranks), self._random.random() < 0.5
        places = f"np.s_[{', '.join(self._random.choices(PLACES, k=self._random.choice([1, 1, 2, 4])))},]"
        cells = frozenset(
            i for place in eval(places) for i in np.atleast_1d(np.arange(CELLS)[place]).tolist()
        )
        touch = f"cells[s] = {rank}.5" if writes else "cells[s].sum()"
        self.lines.append(f"for s in {places} if rank == {rank} else (): {touch}")
        self._clocks[rank][rank] += 1
        self._accesses.append(_Access(len(self.lines), rank, cells, writes, tuple(self._clocks[rank])))

    def _collect(self, step: int) -> None:
        group, members = self._random.choice(self._groups)
        order, root = self._random.choice(list(CALLS)), self._random.choice(members)
        call = self._random.choice(CALLS[order]).format(group=group, root=root, size=len(members))
        self.lines.append(f"if rank in {tuple(members)}: {call}")
        before = [list(clock) for clock in self._clocks]
        for rank in members:
            self._follow(rank, _seen_by(rank, members, order, root), before)

    def _send(self, step: int) -> None:
        src, dst = self._random.sample(range(self.ranks), 2)
        self.lines += self._random.choice(MESSAGES).format(src=src, dst=dst, tag=100 + step).split("\n")
        self._follow(dst, [src], self._clocks)

    def _begin(self, step: int) -> None:
        group, members = self._random.choice(self._groups)
        call = self._random.choice(BEGINNINGS).format(group=group)
        self.lines.append(f"work{step} = {call} if rank in {tuple(members)} else None")
        self._begun[f"work{step}"] = members, [list(clock) for clock in self._clocks]

    def _wait(self, step: int) -> None:
        if self._begun:
            name = self._random.choice(sorted(self._begun))
            members, before = self._begun.pop(name)
            self.lines.append(f"{name} and {name}.wait()")
            for rank in members:
                self._follow(rank, members, before)

    def _follow(self, rank: int, others: Iterable[int], clocks: Sequence[Clock]) -> None:
        for other in others:
            self._clocks[rank] = [max(pair) for pair in zip(self._clocks[rank], clocks[other], strict=True)]


def _seen_by(rank: int, members: Sequence[int], order: Order, root: int) -> Sequence[int]:
    """Return whose past comes before what a rank does after a collective."""
    if order is Order.FROM_ROOT:
        return [root]
    if order is Order.PREFIX:
        return [member for member in members if member < rank]
    return members if order is Order.ALL or rank == root else []
