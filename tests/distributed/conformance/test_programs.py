"""Random programs: right ones equal numpy, and with one call gone, swapped or altered an error names it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from nbparallel.distributed import Communicator
from nbparallel.errors import CollectiveMismatchError, DeadlockError, NbParallelError, PeerFailedError
from tests.distributed.conformance.cases import ALL, REDUCTIONS, ROOTED, Setting, complete
from tests.distributed.conformance.guarded import LAYOUTS
from tests.distributed.conformance.oracle import OPERATORS, allowed
from tests.harness.ranks import run_ranks
from tests.harness.tiers import examples

SHOWN = {
    "reduce_scatter_tensor": "reduce_scatter", "all_gather_into_tensor": "all_gather",
    "all_to_all_single": "all_to_all", "ring": "recv",
}  # fmt: skip
"""What messages call a collective, where it is another's other form."""
CHANGES = ("left out", "swapped", "another one", "op", "dtype", "size", "root")


class Step(NamedTuple):
    """One call, the same on all ranks."""

    name: str
    op: str
    dtype: str
    size: int
    root: int
    layout: int

    @property
    def shown(self) -> str:
        """What messages call it."""
        return SHOWN.get(self.name, self.name)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What tells calls apart."""
        op = self.op if self.name in REDUCTIONS else ""
        root = self.root if self.name in ROOTED or self.name == "ring" else 0
        return self.shown, op, self.dtype, self.size, root

    def setting(self, c: Communicator) -> Setting:
        """Return the call as one rank sees it; layouts differ from rank to rank."""
        return Setting(
            c, None, list(range(c.world_size)), self.root, self.dtype, self.size, self.op,
            LAYOUTS[(self.layout + c.rank) % len(LAYOUTS)], salt=self.size,
        )  # fmt: skip


def steps(n: int) -> st.SearchStrategy[Step]:
    """Generate calls for `n` ranks: every part of an array has other sizes in each."""
    ops = [op for op in OPERATORS if op != "avg"]
    return st.builds(
        Step,
        st.sampled_from(sorted(ALL)),
        st.sampled_from(ops),
        st.sampled_from(["i4", "i8", "u2"]),
        st.sampled_from([12, 300, 2000, 20_000]),
        st.integers(0, n - 1),
        st.integers(0, 5),
    )


def program_of(drawn: list[Step]) -> list[Step]:
    """Return a program in which neighbours differ: a call that equals the next may be taken for it."""
    return [step for i, step in enumerate(drawn) if i == 0 or step.kind != drawn[i - 1].kind]


def run(c: Communicator, program: list[Step]) -> tuple[int, str, bool]:
    """Run a program; return where it stopped, by which error, and whether its buffers are as before."""
    for i, step in enumerate(program):
        setting = step.setting(c)
        case = ALL[step.name](setting)
        try:
            complete(case, next(case), setting)
        except NbParallelError as error:
            return i, f"{type(error).__name__}: {error}", setting.guards.untouched()
    return len(program), "", True


def changed(program: list[Step], at: int, change: str, n: int) -> list[Step]:
    """Return the program with one call changed; the same one if it cannot be changed so."""
    step = program[at]
    before, after = program[:at], program[at + 1 :]
    if change == "left out":
        return before + after
    if change == "swapped":
        return [*before, after[0], step, *after[1:]] if after else program
    other = {
        "another one": step._replace(name="all_reduce" if step.shown != "all_reduce" else "broadcast"),
        "op": step._replace(op="max" if step.op != "max" else "sum"),
        "dtype": step._replace(dtype="f4" if allowed(step.op, "f4") else "u4"),
        "size": step._replace(size=2 * step.size),
        "root": step._replace(root=(step.root + 1) % n),
    }[change]
    return [*before, other, *after]


@pytest.mark.slow
@given(st.data(), st.integers(2, 3))
@settings(max_examples=examples(25), deadline=None)
@pytest.mark.fault("F31")
@pytest.mark.fault("F32")
@pytest.mark.time_limit(600)
def test_programs_with_one_fault(data: st.DataObject, n: int) -> None:
    """One call of one rank gone, swapped or altered: an error names it, and no buffer was touched."""
    program = program_of(data.draw(st.lists(steps(n), min_size=2, max_size=6)))
    at, victim = data.draw(st.integers(0, len(program) - 1)), data.draw(st.integers(0, n - 1))
    change = data.draw(st.sampled_from(CHANGES))
    other = changed(program, at, change, n)
    if [step.kind for step in other] == [step.kind for step in program]:
        return
    found = run_ranks(n, lambda c: run(c, other if c.rank == victim else program), seconds=300)
    assert all(outcome.error is None for outcome in found), found
    texts = [outcome.value[1] for outcome in found]
    kinds = {text.split(":")[0] for text in texts if text}
    told = {CollectiveMismatchError.__name__, DeadlockError.__name__}
    assert kinds & told, texts
    assert kinds <= told | {PeerFailedError.__name__}, texts
    names = {step.shown for step in (program[at], *other[at : at + 1])}
    assert any(name in text for name in names for text in texts if text.split(":")[0] in told), (names, texts)
    assert all(outcome.value[2] for outcome in found), ("a buffer was touched", texts)
    if "recv" not in names:  # a message concerns two ranks: the others may go on to the next collective
        stopped = [outcome.value[0] for outcome in found if outcome.rank != victim]
        assert stopped == [at] * (n - 1), (at, texts)
