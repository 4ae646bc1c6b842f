"""Named points at which a test can make a rank fail; without ``NBP_FAULT`` they cost one global look-up.

``NBP_FAULT="point:rank:nth:action"``: at the `nth` time (from 1) that `rank` passes `point`, do `action`.
"""

from __future__ import annotations

import os
import signal

POINTS = ("enter", "wrote_header", "half_payload", "wrote_flag", "waiting", "leave")
"""Points in an operation; tests iterate over all of them, so that none can be forgotten."""
ACTIONS = ("kill", "stop", "raise", "interrupt")


class FaultInjected(Exception):  # noqa: N818 - it is no error of the product
    """What the action ``raise`` raises."""


def _parse(text: str) -> tuple[str, int, int, str]:
    point, rank, nth, action = text.split(":")
    if point not in POINTS or action not in ACTIONS:
        raise ValueError(f"NBP_FAULT={text!r}: points are {POINTS}, actions {ACTIONS}")
    return point, int(rank), int(nth), action


_text = os.environ.get("NBP_FAULT", "")
_plan = _parse(_text) if _text and not _text.startswith("boot:") else None  # boot: is the engine's
_seen = 0
ARMED = _plan is not None
"""Whether any point does anything; callers test it before they call `hit`."""


def arm(text: str | None) -> None:
    """Set the plan of this process, as ``NBP_FAULT`` would have; for forked test ranks."""
    global _plan, _seen, ARMED
    _plan = _parse(text) if text else None
    _seen = 0
    ARMED = _plan is not None


def hit(point: str, rank: int) -> None:
    """Pass `point`: do the action if the plan names it."""
    global _seen
    if _plan is None or _plan[0] != point or _plan[1] != rank:
        return
    _seen += 1
    if _seen != _plan[2]:
        return
    action = _plan[3]
    if action == "raise":
        raise FaultInjected(f"injected at {point} on rank {rank}")
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}[action]
    os.kill(os.getpid(), number)
