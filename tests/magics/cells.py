"""What tests of cells in a real kernel begin and end with: ranks, and the text that a cell has left."""

from __future__ import annotations

from tests.harness.kernel import CellOutcome, Kernel


def with_ranks(kernel: Kernel, count: int = 2, cell: str = "kept = rank + 7") -> Kernel:
    """Load the extension without its welcome, and start ranks by running `cell` on them."""
    outcome = kernel.run(
        f"%load_ext nbparallel\n%config NbParallel.welcome = False\n%parallel -n {count} {cell}"
    )
    assert outcome.status == "ok", outcome.traceback
    return kernel


def printed(outcome: CellOutcome) -> str:
    """Return what the cell printed on both streams, also what was cleared later."""
    return "".join(message.printed for message in outcome.messages)


def text(outcome: CellOutcome) -> str:
    """Return the text of both streams that is left on the page."""
    shown = ""
    for message in outcome.messages:
        if message.kind == "clear_output":
            shown = ""
        else:
            shown += message.printed
    return shown
