"""What was copied for a cell is said once if it was much: what has moved in one line, copies in another."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbparallel.session import Session


def test_much_copying_is_said_with_the_names() -> None:
    """The first time an array moves, and whenever an object's change travels; not when nothing is copied."""
    namespace: dict[str, Any] = {
        "x": np.ones(1 << 18),
        "y": np.ones(10),
        "words": list(range(1 << 20)),
        "few": [1],
    }
    with Session(2) as session:
        first = session.run("float(x.sum() + y.sum() + len(words)), len(few)", namespace=namespace)
        assert first.values == [((1 << 18) + 10 + (1 << 20), 1)] * 2
        moved, copied = first.notes
        head, _, names = moved.partition(": ")
        assert head == "moved into shared memory, where every rank reads it"
        assert names == "x (2.0 MiB), y (80 B)"
        assert copied.startswith("copied for the ranks: words (")
        assert "x (" not in copied
        assert "few" not in copied
        assert sum(first.copied_nbytes.values()) > (3 << 20)
        assert session.run("x.sum(), len(words)", namespace=namespace).notes == ()
        namespace["words"].append(0)
        (note,) = session.run("x.sum(), len(words)", namespace=namespace).notes
        assert note.startswith("copied for the ranks: words (")
        assert "shared memory" not in note
        namespace["y"] = np.zeros(1000)
        assert session.run("y.sum()", namespace=namespace).notes == ()
