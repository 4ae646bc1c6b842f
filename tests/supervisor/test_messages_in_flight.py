"""Messages in flight: what can be received stays, what cannot goes, whatever socket is read first."""

import random

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.harness.tiers import examples
from tests.supervisor.messages_in_flight import MessagesInFlight


@pytest.mark.slow
@pytest.mark.time_limit(90)
def test_what_can_be_received_is_there_and_the_rest_is_not():
    """Parcels, mailboxes in mailboxes, guests and forks: no memory is taken from a message or a child."""
    received = dropped = forks = 0
    for seed in range(100):
        world = MessagesInFlight(random.Random(seed))
        world.run(300)
        received, dropped, forks = received + world.received, dropped + world.dropped, forks + world.forks
    assert received > 300
    assert dropped > 50
    assert forks > 100


@pytest.mark.time_limit(90)
@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(random_=st.randoms(use_true_random=False), steps=st.integers(1, 60))
def test_histories_that_hypothesis_finds(random_, steps):
    """The same, with histories that Hypothesis makes shorter when one of them fails."""
    MessagesInFlight(random_).run(steps)


def test_the_model_sees_what_was_decided_too_early():
    """Without reading the other sockets first, memory would be taken that a client has received."""

    def run_early():
        for seed in range(60):
            MessagesInFlight(random.Random(seed), settle_early=True).run(150)

    with pytest.raises(AssertionError, match=r"looks at|nobody did|is kept that was taken"):
        run_early()
