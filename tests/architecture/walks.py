"""How many files a value visits: the walks of a first array to a rank, and of a large ``all_reduce``.

``python -m tests.architecture.source_tree`` prints them.  A step is a call from one file of the library into
another; steps inside of a file, and those of numpy, Python and the notebook, are not counted.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

ROOTS = tuple(f"/{root}/" for root in ("nbparallel", "nbparallel_magics", "nbparallel_widgets"))


class Walk:
    """A profile function that counts the files which the thread visits, and its steps between them."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.steps = 0

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Count a call between two files of the library; `sys.setprofile` calls this."""
        if event != "call" or not (file := _file(frame)):
            return
        self.files.add(file)
        caller = frame.f_back
        while caller is not None and not _file(caller):  # numpy may lie between two files of ours
            caller = caller.f_back
        self.steps += caller is not None and _file(caller) != file

    def of(self, function: Callable[[], Any]) -> "Walk":
        """Call a function under this walk."""
        sys.setprofile(self)
        try:
            function()
        finally:
            sys.setprofile(None)
        return self


def _file(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    return name if any(root in name for root in ROOTS) else ""


_BEGIN = "import sys; from tests.architecture.walks import Walk; sys.setprofile(walk := Walk())"
_END = "sys.setprofile(None); (len(walk.files), walk.steps)"

# the second call: the first makes what later ones use
_REDUCE = """
import numpy as np
from tests.architecture.walks import Walk
large = np.ones(8_000_000)
for _ in range(3): all_reduce(large)
walk = Walk().of(lambda: all_reduce(large))
walk.steps
"""


def print_walks() -> None:
    """Start a session, walk, print."""
    import numpy as np

    import nbparallel as nbp

    with nbp.Session(2) as session:
        session.run("1 + 1")
        session.run(_BEGIN)
        array = np.ones(1000)
        kernel = Walk().of(lambda: session.run("float(a.sum())", namespace={"a": array}))
        rank = session.run(_END).values[0]
        print(
            f"first array to a rank: {len(kernel.files)} files and {kernel.steps} steps in the kernel",
            end=", ",
        )
        print(f"{rank[0]} and {rank[1]} on the rank")
        steps = session.run(_REDUCE).values[0]
        print(f"private all_reduce of 64 MB, a later call: {steps} steps between files")
