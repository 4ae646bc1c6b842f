"""F11: notebook, supervisor and ranks killed at once; the next session removes exactly what they left."""

from __future__ import annotations

import pytest

from tests.harness.sandboxes import missing_reason, on_private_places, run_script

VICTIM = """
import json, os, sys, numpy as np, nbparallel as nbp
x = nbp.share(np.ones(100_000), strategy="file_system")
nbp.set_sharing_strategy("mmap", directory="/var/tmp")
y, z = nbp.share(np.ones(100_000)), nbp.share(np.ones(100_000))
names = {"x": x, "y": y, "z": z, "np": np}
names["r"], names["d"] = nbp.ones(1000, strategy="file_region"), nbp.ones(10**6, strategy="file_descriptor")
session = nbp.Session(2)
session.run("mine = [nbp.share(x + rank, strategy='file_system'), r, d, y, z]\\n"
            "mine.append(nbp.share(np.ones(5), strategy='mmap'))", namespace=names)
seen = session.statistics()
pids = [seen.supervisor_pid, seen.template_pid, *(rank.pid for rank in seen.ranks), os.getpid()]
print(json.dumps(pids), flush=True)
sys.stdin.read()
"""
DRIVER = (
    f"VICTIM = {VICTIM!r}"
    + """
import json, os, signal, subprocess, sys
from nbparallel.testing.waiting import wait_until
PLACES = ("/dev/shm", "/var/tmp")

def names():
    found = [f"{place}/{name}" for place in PLACES for name in os.listdir(place) if name.startswith("nbp")]
    return sorted(found)

def used():
    return [(os.statvfs(p).f_blocks - os.statvfs(p).f_bfree) * os.statvfs(p).f_frsize for p in PLACES]

def start(code):
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             text=True, start_new_session=True)
    return child, json.loads(child.stdout.readline())

def kill_at_once(pids):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids), "they are still there")

def end(child):
    child.kill()
    child.communicate()

nothing = used()
neighbour, _ = start(VICTIM)                  # a session that lives
for junk in ("/dev/shm/nbp_mine", "/dev/shm/nbp_aaaaaaaaaa_b", "/var/tmp/nbp-other", "/var/tmp/notes.txt"):
    open(junk, "w").write("not ours")
others = names()
victim, pids = start(VICTIM)
kill_at_once(pids)
left = [name for name in set(names()) - set(others) if "." not in os.path.basename(name)]
assert len(left) == COUNT, left
"""
)
LOAD = """
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
shell = InteractiveShell.instance()
with capture_output() as said:
    shell.run_cell("%load_ext nbparallel")
    shell.run_cell("%%parallel -n 1\\npass")
text = said.stdout
shell.run_cell("%unload_ext nbparallel")
"""
SESSION = """
import nbparallel as nbp
with nbp.Session(1) as session:
    result = session.run("rank")
    text = "".join(result.notes)
"""
CHECK = """
assert f"removed {COUNT} stale segments" in text, text
assert "of a session that ended without cleaning up" in text, text
assert text.count("removed") == 1, text
assert names() == others, set(names()) ^ set(others)
end(neighbour)
junk = ["/dev/shm/nbp_aaaaaaaaaa_b", "/dev/shm/nbp_mine", "/var/tmp/nbp-other"]
# memory without a name goes with the last process that has it mapped
wait_until(lambda: sorted(set(names()) & set(others)) == junk
           and all(now <= before + 65536 for now, before in zip(used(), nothing)),
           lambda: (names(), used(), nothing), seconds=5)
end(victim)
"""


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    reason = missing_reason()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.matrix(cover=())
@pytest.mark.time_limit(90)
@pytest.mark.parametrize("way", ["load", "session"])
def test_f11_everything_killed_at_once(way: str) -> None:
    """File_system, mmap, regions and memfds: one line, and exactly the dead one's gone."""
    # three of the notebook, two of each rank
    script = "COUNT = 7\n" + DRIVER + {"load": LOAD, "session": SESSION}[way] + CHECK
    done = run_script(script, on_private_places())
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_f11_a_script_without_a_session() -> None:
    """`nbp.share` in a plain script that is killed: the next one's session removes it."""
    # it lives until its standard input ends
    plain = (
        VICTIM.partition("session = ")[0] + "print(json.dumps([os.getpid()]), flush=True); sys.stdin.read()"
    )
    driver = DRIVER.replace("start(VICTIM)", f"start({plain!r})")
    check = CHECK.replace("end(neighbour)", "neighbour.communicate('\\n')")
    done = run_script("COUNT = 3\n" + driver + SESSION + check, on_private_places())
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
