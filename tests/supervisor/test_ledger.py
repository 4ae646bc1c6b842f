# ruff: noqa: D102
"""The ledger as a state machine: hundreds of histories, no processes."""

import random

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.ledger.ledger import Ledger
from nbparallel.supervisor.ledger.records import (
    Close,
    Grant,
    Notify,
    StoreDescriptor,
    Unlink,
)
from nbparallel.wire.segments import (
    AllowWrite,
    Drop,
    Ended,
    Fetch,
    Forget,
    Freed,
    Hold,
    Idle,
    Intend,
    Lost,
    LostReason,
    Register,
    Release,
    Removed,
    creator_of,
    segment_id,
)
from tests.harness.tiers import examples

CLIENTS = st.integers(0, 2)
SEGMENTS = st.builds(segment_id, CLIENTS, st.sampled_from([1, 1, 1, 2]))


def is_notice(action, kind):
    """Return whether an action sends a message of a kind."""
    return isinstance(action, Notify) and isinstance(action.message, kind)


STRANGERS = st.sampled_from([None] * 7 + [0, 1, 2])
"""Who says what only a segment's creator says; None: it does."""
SIZES = st.sampled_from([4096] * 4 + [8192])
PATHS = st.builds("/dev/shm/nbp_aaaaaaaaa{}_{}".format, st.sampled_from("abcd"), st.sampled_from("bc"))


class LedgerMachine(RuleBasedStateMachine):
    """Any client says anything, in any order; the model knows who holds what, and what was said about it."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger()
        self.alive = set()
        self.holds = {}
        self.open = set()
        self.questions = {}
        self.sequence = 0
        self.files = {}
        self.named = {}
        self.writable = set()
        self.unwanted = set()
        self.sizes = {}

    @initialize()
    def all_join(self):
        for client in range(3):
            self.join(client)

    def step(self, client, message, sequence=0):
        try:
            return self.checked(self.ledger.step(client, message, sequence))
        except ProtocolError as error:
            return [error]

    def checked(self, actions):
        for action in actions:
            self.check(action)
        return list(actions)

    def check(self, action):
        match action:
            case StoreDescriptor(segment):
                # registered again: its descriptor may not have been kept
                assert segment not in self.open or creator_of(segment) in self.holds[segment]
                self.open.add(segment)
            case Unlink(path):
                user = next((s for s, p in self.named.items() if p == path and s in self.open), None)
                assert not self.holds.get(user), "a name went while its segment was held"
                self.files.pop(path)
                self.named.pop(user, None)
            case Close(segment):
                assert not self.holds.get(segment), "a segment with a living hold was closed"
                self.open.remove(segment)
                self.holds.pop(segment, None)
                self.named.pop(segment, None)
                self.writable.discard(segment)
                self.unwanted.discard(segment)
            case Grant(client, segment, nbytes, writable, sequence, fresh):
                assert segment in self.open
                assert client in self.alive
                assert nbytes == self.sizes[segment]
                assert fresh == (client not in self.holds.get(segment, ()))
                assert not writable or segment in self.writable or client == creator_of(segment)
                del self.questions[sequence]
                self.holds.setdefault(segment, set()).add(client)
            case Notify(_, Lost(segment, reason), sequence):
                del self.questions[sequence]
                if reason is LostReason.READ_ONLY:
                    assert segment not in self.writable
            case Notify(client, Idle(segment) | Drop(segment)):
                assert client == creator_of(segment)
                assert client in self.alive
                assert not self.holds.get(segment)

    @rule(client=CLIENTS)
    def join(self, client):
        self.alive.add(client)
        self.ledger.clients.add(client)

    @rule(client=CLIENTS, back=st.sampled_from([True, True, True, False]))
    def go_and_come(self, client, back):
        """End a client; as a rule another one comes under its number, or soon nobody would be there."""
        self.go(client)
        if back:
            self.join(client)

    def go(self, client):
        self.alive.discard(client)
        alone = {segment for segment, holders in self.holds.items() if holders == {client}}
        given = {s for s in alone if creator_of(s) in self.alive and s not in self.unwanted}
        for holders in self.holds.values():
            holders.discard(client)
        self.questions = {s: c for s, c in self.questions.items() if c != client}
        actions = self.checked(self.ledger.client_gone(client))
        assert {action.message.segment for action in actions if is_notice(action, Drop)} == given
        assert alone <= {action.segment for action in actions if isinstance(action, Close)}
        assert not any(is_notice(action, Idle) for action in actions), "a dead client's memory is not reused"

    @rule(stranger=STRANGERS, segment=SEGMENTS, writable=st.booleans(), nbytes=SIZES)
    def register(self, stranger, segment, writable, nbytes):
        client = creator_of(segment) if stranger is None else stranger
        good = client in self.alive and creator_of(segment) == client
        if segment in self.open and nbytes != self.sizes[segment]:
            good = False
        if good:
            self.take(client, segment, nbytes, writable=writable)
        actions = self.step(client, Register(segment, nbytes, writable))
        assert good != any(isinstance(action, ProtocolError) for action in actions)

    def take(self, client, segment, nbytes, *, writable):
        self.holds.setdefault(segment, set()).add(client)
        self.unwanted.discard(segment)
        self.sizes[segment] = nbytes
        if writable:
            self.writable.add(segment)

    @rule(client=CLIENTS, path=PATHS)
    def intend(self, client, path):
        good = client in self.alive and self.files.get(path, client) == client
        if good:
            self.files[path] = client
        assert good != any(isinstance(action, ProtocolError) for action in self.step(client, Intend(path)))

    @rule(client=CLIENTS, path=PATHS)
    def remove(self, client, path):
        if client in self.alive and self.files.get(path) == client:
            del self.files[path]
            self.named = {segment: p for segment, p in self.named.items() if p != path}
        self.step(client, Removed(path))

    @rule(segment=SEGMENTS, path=PATHS)
    def register_named(self, segment, path):
        client = creator_of(segment)
        fresh = segment not in self.open and path not in self.named.values()
        if client not in self.alive or not fresh or self.files.get(path) != client:
            return
        self.take(client, segment, 4096, writable=False)
        self.named[segment] = path
        self.step(client, Register(segment, 4096, False, path=path))

    @rule(client=CLIENTS, segment=SEGMENTS, writable=st.booleans())
    def ask(self, client, segment, writable):
        self.sequence += 1
        if client in self.alive:
            self.questions[self.sequence] = client
        creator, known, held = creator_of(segment), segment in self.open, bool(self.holds.get(segment))
        may = segment in self.writable or creator == client
        actions = self.step(client, Fetch(segment, writable), self.sequence)
        if client not in self.alive:
            assert isinstance(actions[0], ProtocolError)
        elif not known and creator in self.alive and creator != client:
            assert actions == [], "its registration may be under way"
        elif not known:
            assert [action.message.reason for action in actions] == [LostReason.UNKNOWN]
        elif not held and client != creator:
            assert actions[0].message.reason is LostReason.UNKNOWN, "its creator may have reused it"
        elif writable and not may:
            assert actions[0].message.reason is LostReason.READ_ONLY
        else:
            assert isinstance(actions[0], Grant)
            assert actions[0].writable == writable

    @rule(client=CLIENTS, segment=SEGMENTS)
    def release(self, client, segment):
        creator, known = creator_of(segment), segment in self.open
        held = client in self.alive and client in self.holds.get(segment, ())
        wanted = creator in self.alive and segment not in self.unwanted
        if held:
            self.holds[segment].discard(client)
        left = bool(self.holds.get(segment))
        actions = self.step(client, Release(segment))
        idle, closed = (any(is_notice(action, Idle) for action in actions), Close(segment) in actions)
        if client not in self.alive:
            assert isinstance(actions[0], ProtocolError)
        elif held and not left:
            assert (idle, closed) == (wanted, not wanted)
        else:
            assert (idle, closed) == (client == creator and (not known or not left), False)

    @rule(stranger=STRANGERS, segment=SEGMENTS)
    def allow_write(self, stranger, segment):
        client = creator_of(segment) if stranger is None else stranger
        good = client in self.alive and client == creator_of(segment)
        if good and segment in self.open:
            self.writable.add(segment)
        actions = self.step(client, AllowWrite(segment))
        assert good == (actions == [])
        assert good or isinstance(actions[0], ProtocolError)

    @rule(stranger=STRANGERS, segment=SEGMENTS)
    def forget(self, stranger, segment):
        client = creator_of(segment) if stranger is None else stranger
        good = client in self.alive and client == creator_of(segment)
        if good and segment in self.open:
            self.unwanted.add(segment)
            self.holds[segment].discard(client)
        actions = self.step(client, Forget(segment))
        assert not any(is_notice(action, Idle | Drop) for action in actions)
        if good and not self.holds.get(segment):
            assert segment not in self.open

    @rule(segment=SEGMENTS, client=CLIENTS, wanted=st.booleans())
    def hand_over(self, segment, client, wanted):
        """Do in one step what happens most: a segment is made, fetched, and let go of by its maker."""
        self.register(None, segment, False, self.sizes.get(segment, 4096))
        self.ask(client, segment, False)
        if wanted:
            self.release(creator_of(segment), segment)
        else:
            self.forget(None, segment)

    @rule()
    def drain(self):
        actions = self.checked(self.ledger.settle(self.ledger.mark()))
        assert all(is_notice(action, Lost) for action in actions)
        assert self.questions == {}, "every question has been answered"

    @precondition(lambda self: self.alive)
    @rule()
    def all_go(self):
        for client in sorted(self.alive):
            self.go(client)
        assert self.open == set()
        assert self.files == {}, "every name that may exist has been removed"
        assert self.ledger == Ledger()
        self.all_join()

    @invariant()
    def holds_agree(self):
        recorded = {segment: set(entry.holders) for segment, entry in self.ledger.entries.items()}
        assert {s: h for s, h in recorded.items() if h} == {s: h for s, h in self.holds.items() if h}
        assert set(recorded) == self.open
        assert self.ledger.names == self.files
        for path, maker in self.files.items():
            held = [segment for segment, p in self.named.items() if p == path and recorded.get(segment)]
            assert maker in self.alive or held, "nobody needs it, and its name was kept"
        for segment, entry in self.ledger.entries.items():
            assert entry.writable == (segment in self.writable)
        for segment, holders in recorded.items():
            assert holders <= self.alive, "a dead client holds nothing"
            assert holders or creator_of(segment) in self.alive, "nobody needs it, and it was kept"


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
TestLedger.pytestmark = [pytest.mark.time_limit(90)]
TestLedger.__doc__ = (
    "Whatever clients say: held memory stays, unheld memory goes, every question is answered."
)


def test_random_histories():
    """The same machine, driven evenly: Hypothesis likes short histories, and seldom draws an idle segment."""
    random_ = random.Random(1)
    for _ in range(300):
        machine = LedgerMachine()
        machine.all_join()
        for _ in range(40):
            client, yes = random_.randrange(3), random_.random() < 0.5
            segment = segment_id(random_.randrange(3), random_.choice([1, 1, 1, 2]))
            path = f"/dev/shm/nbp_aaaaaaaaaa_{random_.choice('bc')}"
            step, *values = random_.choice(
                [
                    (machine.hand_over, segment, client, yes),
                    (machine.ask, client, segment, yes),
                    (machine.release, client, segment),
                    (machine.register, None, segment, yes, machine.sizes.get(segment, 4096)),
                    (machine.forget, None, segment),
                    (machine.allow_write, None, segment),
                    (machine.go_and_come, client, True),
                    (machine.intend, client, path),
                    (machine.register_named, segment, path),
                    (machine.drain,),
                ]
            )
            step(*values)
            machine.holds_agree()


FIRST, SECOND, THIRD = (segment_id(0, serial) for serial in (1, 2, 3))


def kept():
    """Return a ledger: client 1 keeps memory of client 0 mapped, which uses it again."""
    book = Ledger()
    for client in range(3):
        book.clients.add(client)
    book.step(0, Register(FIRST, 4096, False, memory=FIRST))
    book.step(1, Fetch(FIRST, False), 1)
    book.step(1, Release(FIRST, FIRST))
    book.step(0, Register(SECOND, 4096, False, memory=FIRST))
    return book


@pytest.mark.parametrize(
    ("client", "message"),
    [
        (2, Hold(SECOND, FIRST, False)),
        (1, Hold(SECOND, FIRST, True)),
        (0, Release(SECOND, FIRST)),
        (1, Freed(FIRST)),
        (0, Register(THIRD, 8192, False, memory=FIRST)),
        (0, Register(THIRD, 4096, False, memory=segment_id(1, 1))),
    ],
)
def test_who_says_what_it_may_not(client, message):
    """A hold of what was never mapped, or with a right that nobody has; others' memory; sizes that differ."""
    book = kept()
    with pytest.raises(ProtocolError):
        book.step(client, message)
    assert book.entries[SECOND].holders == {0}


@pytest.mark.parametrize("message", [Intend, lambda path: Register(segment_id(1, 1), 4096, False, path=path)])
def test_another_clients_name_is_said_so_that_it_can_be_logged(message):
    """A name need not be text: the refusal is, which the supervisor writes to its log as UTF-8."""
    book = kept()
    book.step(0, Intend("/dev/shm/nbp_\udcff"))
    with pytest.raises(ProtocolError) as refused:
        book.step(1, message("/dev/shm/nbp_\udcff"))
    assert "nbp_\\udcff'" in str(refused.value)


def test_a_damaged_handle_holds_nothing():
    """Who names the wrong memory gets nothing that it could mix up with another array."""
    book = kept()
    book.step(0, Register(THIRD, 4096, False, memory=THIRD))
    assert book.step(1, Hold(THIRD, FIRST, False)) == []
    assert book.entries[THIRD].holders == {0}
    (refusal,) = book.step(2, Fetch(THIRD, False, FIRST), 1)
    assert isinstance(refusal.message, Lost)


def test_what_a_dead_client_held_is_not_used_again():
    """It may have given it to a keeper whose hold comes too late: other holders' release changes nothing."""
    book = kept()
    book.step(1, Hold(SECOND, FIRST, False))
    book.client_gone(1)
    assert book.step(0, Release(SECOND)) == []
    assert list(book.settle(book.mark())) == [Notify(0, Drop(SECOND)), Close(SECOND)]


def test_a_keeper_that_says_nothing_is_told_once():
    """What a rank that computes for hours is told does not pile up."""
    book, told = kept(), []
    for serial in range(2, 20):
        book.step(0, Register(segment_id(0, serial), 4096, False, memory=FIRST))
        book.step(0, Release(segment_id(0, serial)))
        told += [action for action in book.settle(book.mark()) if action.client == 1]
    assert told == [Notify(1, Ended(SECOND, FIRST))]


def test_a_hold_of_what_has_ended_is_ignored():
    """Nobody holds it afterwards: its owner may use the memory again."""
    book = kept()
    book.step(0, Release(SECOND))
    book.settle(book.mark())
    assert book.step(1, Hold(SECOND, FIRST, False)) == []
    assert book.entries[SECOND].holders == set()


def test_a_hold_that_overtook_the_registration():
    """It counts when the registration comes; a release that overtook it as well takes it back."""
    for released in (False, True):
        book = kept()
        assert book.step(1, Hold(THIRD, FIRST, False)) == []
        if released:
            book.step(1, Release(THIRD, FIRST))
        book.step(0, Register(THIRD, 4096, False, memory=FIRST))
        assert book.entries[THIRD].holders == ({0} if released else {0, 1})
