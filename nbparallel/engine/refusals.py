"""The notebook's magics on a rank: each says that it belongs into the notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from IPython.core.error import UsageError

if TYPE_CHECKING:
    from nbparallel.engine.shell import RankShell

CELL_MAGICS = ("parallel", "rank")
LINE_MAGICS = (
    *CELL_MAGICS, "%parallel", "%rank", "share", "sharing_strategy", "parallel_status", "parallel_segments",
    "parallel_who", "parallel_doctor", "parallel_restart", "parallel_stop", "parallel_result", "parallel_tb",
    "parallel_timeline", "parallel_panel",
)  # fmt: skip
"""As `nbparallel_magics` defines them, which the engine cannot import; ``%%parallel`` below a comment is a
line magic, too."""


def install(shell: RankShell) -> None:
    """Register a refusal for every magic of the notebook."""
    for name in LINE_MAGICS:
        shell.magics_manager.register_function(_refusal(f"%{name}"), "line", name)
    for name in CELL_MAGICS:
        shell.magics_manager.register_function(_refusal(f"%%{name}"), "cell", name)


def _refusal(magic: str) -> Callable[..., NoReturn]:
    def refuse(*_: str) -> NoReturn:
        raise UsageError(
            f"{magic} works in the notebook, and this code runs on a rank already: {_advice(magic)}"
        )

    refuse.__doc__ = f"Refuse {magic}: it works in the notebook only."
    return refuse


def _advice(magic: str) -> str:
    if magic.lstrip("%") in CELL_MAGICS:
        return "leave it out (for some ranks write `if rank == 0:`), or give the notebook's cell -n or -r"
    if "shar" in magic:
        return "nbp.share(x), nbp.set_sharing_strategy(name) do it here"
    return "run it in a cell of its own"
