"""Private places: processes that see a /dev/shm and temporary directories of their own.

What other sessions of this machine leave, or sweep, is then not seen, and names can be counted.
See `small_places` for how it is done; the processes are those of this machine.
"""

from __future__ import annotations

from nbparallel.testing.sandboxes import on_small_tmpfs

PLACES = ("/dev/shm", "/var/tmp")


def on_private_places(size: str = "64m") -> list[str]:
    """Return the words before a command that give it places of its own, each of this size."""
    return [word for place in PLACES for word in on_small_tmpfs(place, size)] + ["env", "TMPDIR=/var/tmp"]
