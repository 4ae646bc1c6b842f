"""Streams, explored in every interleaving: nothing is read too early or written too soon, whatever happens.

The programs stand in `stream_model`.
"""

from __future__ import annotations

import re

import pytest

from tests.distributed.models.exploration import ORDERS, WrongError
from tests.distributed.models.stream_model import Stream

FAULTS = ({"raised": (0,)}, {"raised": (1,)}, {"killed": (0,)}, {"killed": (1,)})


def stream(messages: tuple[int, ...], order: str, wrong: str = "", **options: bool) -> Stream:
    """Return a stream whose code knows the order of memory that it runs in."""
    return Stream(messages, weak=order == "weak", wrong=wrong, **options)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("messages", [(3,), (1, 3), (3, 1, 3), (2, 1, 1, 3)])
def test_every_message_arrives_as_it_was_sent(order: str, messages: tuple[int, ...]) -> None:
    """Through two places: shorter and longer messages, followed, given up in the middle, and copied."""
    if order == "weak" and len(messages) > 2:
        messages = messages[:2]  # the longer ones in the long run below
    assert stream(messages, order).explore(order) > 50
    assert stream(messages, order, patient=True).explore(order) > 50


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_failure_at_any_point(order: str, fault: dict[str, tuple[int, ...]]) -> None:
    """Interrupted or killed between any two accesses: no false content, and nobody waits for ever."""
    for patient in (False, True):
        messages = (3,) if order == "weak" else (3, 1)
        assert stream(messages, order, patient=patient).explore(order, **fault) > 500


@pytest.mark.stress
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("messages", [(3, 1, 2), (1, 3, 3)])
def test_longer_ones_in_weak_order(messages: tuple[int, ...]) -> None:
    """Three messages, and failures in the second of two, where memory has the weakest order."""
    assert stream(messages, "weak").explore("weak") > 100_000
    for fault in FAULTS:
        assert stream(messages[:2], "weak").explore("weak", **fault) > 20_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "messages", "order", "seen"),
    [
        ("announce before writing", (3,), "sc", "process 1 reads 0 in chunk0, not 1"),
        ("do not wait", (3,), "sc", "process 1 reads 0 in chunk0, not 1"),
        ("one place too early", (3,), "sc", "process 1 reads 3 in chunk0, not 1"),
        ("free before reading", (4,), "sc", "process 1 reads"),
        ("say too late where", (3,), "sc", "process 1 reads"),
        ("let go at once", (3,), "sc", "process 1 reads -1 in chunk"),
        ("always stream", (3, 3), "sc", "process 1 reads"),
        ("any rest", (3, 3), "sc", "process 1 reads 200 in head, not 201"),
        ("no acknowledgement", (3, 1), "sc", "process 1 reads -1 in content0, not 200"),
        ("no fence before put", (3,), "weak", "process 1 reads"),
        ("no fence before tail", (3,), "weak", "process 1"),
        ("no fence after put", (3,), "weak", "process 1 reads"),
        ("no fence before taken", (3,), "weak", "is overwritten while process 1 reads it"),
        (
            "no fence before acknowledged",
            (1, 2, 1),
            "weak",
            "content1 is overwritten while process 1 reads it",
        ),
    ],
)
def test_the_model_sees_what_is_done_wrong(
    wrong: str, messages: tuple[int, ...], order: str, seen: str
) -> None:
    """Each step that is left out or done too early is found."""
    with pytest.raises(WrongError, match=re.escape(seen)):
        stream(messages, order, wrong).explore(order)


@pytest.mark.slow
def test_memory_is_held_before_it_is_announced() -> None:
    """A sender that is interrupted between the two would use memory again that is still to be read."""
    with pytest.raises(WrongError, match="reads -1 in content0, not 200"):
        stream((3,), "sc", "hold afterwards").explore("sc", raised=(0,))


def test_who_does_not_look_for_failures_waits_for_ever() -> None:
    """A dead sender's receiver, and the other way round."""
    for killed in (0, 1):
        with pytest.raises(WrongError, match="waits for ever"):
            stream((3,), "sc", "do not look for failures", patient=True).explore("sc", killed=(killed,))


def test_fences_of_x86_are_too_few_elsewhere() -> None:
    """On machines with weak order announcing takes more: `Waiter.strong_order` matters."""
    with pytest.raises(WrongError, match="process 1 reads"):
        Stream((3,), weak=False).explore("weak")
