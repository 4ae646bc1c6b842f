"""What others leave behind at the same kill points, and that ours leaves nothing after the sweep."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.sandboxes import missing_reason, on_private_places

SCRIPT = str(Path(__file__).with_name("peers_leftovers.py"))


def leftovers(peer: str) -> dict[str, dict[str, int]]:
    """Kill a peer at all points, in places of its own; return what it left."""
    reason = missing_reason()
    if reason is not None:
        pytest.skip(reason)
    words = [*on_private_places(), sys.executable, SCRIPT, peer]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    for point, files in found.items():
        print(f"{point}: {sum(files.values())} bytes left in {len(files)} files")
    return found


@pytest.mark.slow
@pytest.mark.time_limit(110)
def test_ours_leaves_nothing_after_the_sweep() -> None:
    """With the notebook alone killed, at once; with the supervisor too, when the next session starts."""
    found = leftovers("nbparallel")
    assert found["nbparallel, owner"] == {}
    assert len(found["nbparallel, owner and janitor"]) == 2, "the notebook's segment and the rank's"
    assert found["nbparallel, owner and janitor, after the next session"] == {}


@pytest.mark.slow
@pytest.mark.time_limit(110)
@pytest.mark.parametrize("peer", ["multiprocessing.shared_memory", "torch.multiprocessing"])
def test_peers_leave_their_segments_for_good(peer: str) -> None:
    """A janitor that is killed with its owner has no successor (the figure beside which ours stands)."""
    if importlib.util.find_spec(peer.partition(".")[0]) is None:
        pytest.skip(f"{peer.partition('.')[0]} is not installed: its leftovers cannot be compared")
    found = leftovers(peer)
    assert found[f"{peer}, owner"] == {}, "the janitor lives and cleans up"
    assert sum(found[f"{peer}, owner and janitor"].values()) >= 1 << 20
    assert os.environ.get("NBP_PEER") is None
