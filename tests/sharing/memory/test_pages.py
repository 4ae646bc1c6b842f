"""What the system is told about pages, and what it makes of it."""

from pathlib import Path

import numpy as np
import pytest

from nbparallel.sharing import Store
from nbparallel.sharing.memory import mapping
from tests.harness.sandboxes import missing_reason, on_small_tmpfs, run_script

STRATEGIES = ["file_descriptor", "file_system", "file_region", "mmap"]


def flags_at(address):
    """Return what the system was told about the mapping that holds an address."""
    return field_at(address, "VmFlags:")


def field_at(address, name):
    """Return a field of the mapping that holds an address (proc_pid_smaps(5))."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(word, 16) for word in first.split("-"))
            inside = begin <= address < end
        elif inside and first == name:
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("nbytes", [100, 400_000])
def test_no_segment_gets_into_core_files(exchange, strategy, nbytes):
    """A crash must not write everybody's arrays to the disk: own and fetched mappings are left out."""
    store, other = exchange.store(0), exchange.store(1)
    own = store.zeros(nbytes, "u1", strategy=strategy)
    fetched = other.attach(store.handle(own))
    assert "dd" in flags_at(own.ctypes.data)
    assert "dd" in flags_at(fetched.ctypes.data)


@pytest.mark.parametrize("mode", ["advise", "never"])
def test_huge_pages_are_asked_for_where_they_are_offered(monkeypatch, mode):
    """Only for large segments, and only where somebody offers them."""
    monkeypatch.setattr(mapping, "huge_mode", lambda device: mode)
    store = Store()
    large = store.share(np.ones(mapping.HUGE_NBYTES, "u1"), strategy="file_descriptor")
    small = store.zeros(mapping.HUGE_NBYTES // 2, "u1", strategy="file_descriptor")
    assert ("hg" in flags_at(large.ctypes.data)) == (mode == "advise")
    assert "hg" not in flags_at(small.ctypes.data)
    assert large.all()
    assert not small.any()
    del large, small
    store.close()


@pytest.mark.slow
def test_huge_pages_where_they_really_are():
    """On a tmpfs that offers them a large segment consists of huge pages, for its maker and for others."""
    reason = missing_reason()
    if reason is not None:
        pytest.skip(reason)
    script = """
        import numpy as np
        from nbparallel.sharing import Store
        from nbparallel.sharing.memory.mapping import huge_mode
        import os
        print(huge_mode(os.stat("/dev/shm").st_dev))
        x = Store().share(np.ones(32 << 20, "u1"), strategy="file_system")
        assert x.all()
        sizes = [line.split()[1] for line in open("/proc/self/smaps") if line.startswith("ShmemPmdMapped")]
        print(max(map(int, sizes)))
    """
    done = run_script(script, on_small_tmpfs("/dev/shm", "64m", "mode=1777,huge=advise"))
    if "huge" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no tmpfs with huge pages here: {done.stderr.strip()}")
    assert (done.returncode, done.stderr) == (0, "")
    mode, mapped = done.stdout.split()
    assert mode == "advise"
    if mapped == "0":
        pytest.skip("the system had no huge page free")
    assert int(mapped) >= 16 << 10
