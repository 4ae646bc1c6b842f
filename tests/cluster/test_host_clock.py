"""The clock of a host beside the first one's: how well the shortest of some round trips tells it."""

from __future__ import annotations

import pickle
from random import Random

import pytest

from nbparallel.cluster import host_messages
from nbparallel.cluster.host_messages import STAMP, TIMES, HostClock

SECOND = 1_000_000_000


class TwoClocks:
    """A host's clock, and the first one's, which is ahead and slower."""

    def __init__(self, ahead: int, slower: float) -> None:
        self.now, self._ahead, self._slower = 10**7 * SECOND, ahead, slower

    def monotonic_ns(self) -> int:
        """Return the host's time."""
        return self.now

    def there(self) -> int:
        """Return the first host's time."""
        return self.now + self._ahead - round(self._slower * self.now)


@pytest.mark.parametrize("seed", range(20))
def test_the_offset_is_within_the_error(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever questions and answers take, which may differ, and how the clock drifts meanwhile."""
    random = Random(seed)
    clocks = TwoClocks(random.randrange(-(10**15), 10**15), random.choice([0.0, 3e-5, -3e-5]))
    monkeypatch.setattr(host_messages, "time", clocks)
    clock, began = HostClock(is_first=False), clocks.now
    asked = 0
    for _ in range(10_000):
        clocks.now += SECOND // 1000
        if question := clock.ask():
            asked += 1
            clocks.now += random.randrange(20_000, 400_000)
            came = clocks.there()
            clocks.now += random.randrange(5_000_000)
            answered = clocks.there()
            clocks.now += random.randrange(20_000, 400_000)
            clock.take(TIMES.pack(*STAMP.unpack(question), came, answered))
    assert asked < 60
    assert clock.known
    assert clock.error_ns < 400_000
    clock = pickle.loads(pickle.dumps(clock))
    ended = clocks.now
    for clocks.now in range(began, ended, SECOND // 7):
        drift = 50_000  # in the second and more since the last round trip
        assert abs(clock.on_first(clocks.now) - clocks.there()) <= clock.error_ns + drift


def test_the_first_host_has_the_clock() -> None:
    """Its times stay, without an error."""
    clock = HostClock(is_first=True)
    assert (clock.known, clock.error_ns, clock.on_first(5)) == (True, 0, 5)
    assert not HostClock(is_first=False).known
