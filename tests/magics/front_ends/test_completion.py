"""Tab completion: flags, their values, strategies, and names that exist on ranks only."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.harness.kernel import Kernel

pytestmark = pytest.mark.time_limit(90)

HELPER = """
import time
from IPython.core.completer import provisionalcompleter

def offered(text):
    with provisionalcompleter():
        return [c.text for c in get_ipython().Completer.completions(text, len(text))]
"""


def offered(kernel: Kernel, text: str) -> list[str]:
    """Return what the kernel's shell offers behind `text`; a rank that answers late is asked again."""
    found: Any = []
    for _ in range(5):
        outcome = kernel.run(f"print(offered({text!r}))")
        assert outcome.status == "ok", outcome.traceback
        found = ast.literal_eval("".join(m.content["text"] for m in outcome.messages if m.kind == "stream"))
        if found:
            break
    return list(found)


@pytest.mark.slow
def test_flags_values_and_strategies_without_ranks(kernel: Kernel) -> None:
    """On a magic's own line; elsewhere nothing of ours."""
    assert kernel.run("%load_ext nbparallel" + HELPER).status == "ok"
    assert offered(kernel, "%%parallel --sh") == ["--share"]
    assert offered(kernel, "%%parallel -n 2 --output s") == ["stream"]
    assert offered(kernel, "%%parallel --on-error ") == ["continue", "stop"]
    assert offered(kernel, "%sharing_strategy file_") == ["file_descriptor", "file_region", "file_system"]
    assert offered(kernel, "%parallel_restart --r") == ["--ranks"]
    assert offered(kernel, "%parallel_restart ") == ["--ranks", "-r"]
    assert {"-n", "--out", "--timeout"} < set(offered(kernel, "%%parallel "))
    assert "-n" not in offered(kernel, "%parallel ")
    assert kernel.run("import numpy as np\nsomething, some_array = 1, np.ones(3)").status == "ok"
    for line in ("%share some", "%share x some", "%%parallel -n 2 --share some", "%%parallel --share x,some"):
        assert offered(kernel, line) == ["some_array"], line
    half_imported = "import sys, types\nsys.modules['torch'] = types.ModuleType('torch')"
    assert kernel.run(half_imported).status == "ok"
    assert offered(kernel, "%share some") == ["some_array"]
    assert "--share" not in offered(kernel, "x = 1\ny --sh")
    assert offered(kernel, "%%parallel\nno_such_name_anywhere") == []


@pytest.mark.slow
def test_names_of_ranks_in_cells_for_ranks(shared_kernel: Kernel) -> None:
    """Names, attributes and keys of rank 0; not in the notebook's own cells, whose names stay as they are."""
    assert shared_kernel.run("%load_ext nbparallel" + HELPER).status == "ok"
    made = shared_kernel.run(
        "%%parallel -n 2\nonly_here = {'key one': 1}\nclass A:\n    attribute_x = 3\na_thing = A()"
    )
    assert made.status == "ok"
    assert offered(shared_kernel, "%%parallel\nonly_h") == ["only_here"]
    assert offered(shared_kernel, "%%rank 1\nx = 1\nif a_thing.attr")[0].endswith("attribute_x")
    assert "only_here" in offered(shared_kernel, "%parallel only_")
    assert offered(shared_kernel, "%%parallel -r ") == ["0", "1"]
    assert offered(shared_kernel, "%%parallel --quiet --ranks 1") == ["1"]
    assert offered(shared_kernel, "%%rank ") == offered(shared_kernel, "%parallel_tb -r ") == ["0", "1"]
    assert "only_here" in offered(shared_kernel, "%rank 0 only_")
    assert "only_here" in offered(shared_kernel, "%parallel -r 0 only_")
    assert shared_kernel.run("only_there = 1").status == "ok"
    for line in ("%%parallel --draw only_", "%parallel --draw x,only_", "%parallel_draw x only_"):
        assert offered(shared_kernel, line) == ["only_here", "only_there"], line
    assert "-r" in offered(shared_kernel, "%parallel_draw -")
    assert "all_reduce" in offered(shared_kernel, "%%parallel\nall_r")
    of_dist = offered(shared_kernel, "%%parallel\ndist.")
    assert any(name.endswith("new_group") for name in of_dist)
    assert not [name for name in of_dist if name.endswith((".Any", ".annotations", ".functools"))]
    assert "only_here" not in offered(shared_kernel, "only_h")
    assert shared_kernel.run("assert 'only_here' not in globals()").status == "ok"


@pytest.mark.slow
def test_busy_and_hostile_ranks_do_not_hold_up_a_key_press(kernel: Kernel, tmp_path: Path) -> None:
    """A rank that computes is not asked; an object that raises or sleeps does no harm."""
    assert kernel.run("%load_ext nbparallel" + HELPER).status == "ok"
    hostile = (
        "%%parallel -n 1\nimport time\nclass Bad:\n    def __dir__(self):\n        raise RuntimeError('no')\n"
        "class Slow:\n    def __dir__(self):\n        time.sleep(1)\n        return []\n"
        "bad, slow, only_here = Bad(), Slow(), 1"
    )
    assert kernel.run(hostile).status == "ok"
    assert offered(kernel, "%%parallel\nbad.x") == []
    assert offered(kernel, "%%parallel\nslow.x") == []
    assert kernel.run("%parallel 1;").status == "ok"  # waits until the rank is through
    assert offered(kernel, "%%parallel\nonly_h") == ["only_here"]
    asked = tmp_path / "asked"
    busy = f"%%parallel --async\nimport os\nwhile not os.path.exists({str(asked)!r}):\n    time.sleep(0.01)"
    assert kernel.run(busy).status == "ok"
    assert offered(kernel, "%%parallel\nonly_h") == []
    asked.touch()
    assert kernel.run("%parallel_result").status == "ok"
    assert offered(kernel, "%%parallel\nonly_h") == ["only_here"]
    assert kernel.run("%unload_ext nbparallel").status == "ok"
    assert offered(kernel, "%%parallel\nonly_h") == []
