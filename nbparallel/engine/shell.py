"""A rank's shell: a full IPython `InteractiveShell`, without ipykernel."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Integer, Type, default

from nbparallel.distributed.runtime.call_site import show_warnings_at_callers
from nbparallel.engine.output import RankOutput
from nbparallel.transfer.cell_sources import label_of, source_label

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

CELL_MAGICS = ("parallel", "rank")
LINE_MAGICS = (
    *CELL_MAGICS, "%parallel", "%rank", "share", "sharing_strategy", "parallel_status", "parallel_segments",
    "parallel_who", "parallel_doctor", "parallel_restart", "parallel_stop", "parallel_result", "parallel_tb",
    "parallel_races", "parallel_profile", "parallel_scaling", "parallel_timeline", "parallel_panel",
    "parallel_draw", "parallel_push", "parallel_cluster", "parallel_output",
)  # fmt: skip
"""As `nbparallel_magics` defines them, which the engine cannot import; ``%%parallel`` below a comment is a
line magic, too."""


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
    return "run it in a separate cell"


_MADE = re.compile("tmp[a-z0-9_]{8}")
"""What `tempfile.mkdtemp` makes."""


class RankCompiler(CachingCompiler):
    """Compiler that gives each task's code a unique file name, known before it is compiled.

    The text of the last cells is kept for tracebacks; a session may run any number of cells.
    """

    KEPT = 1000
    """Cells whose text is kept."""

    filename = "<nbparallel>"
    """The name for the code that is compiled next."""
    _above = 0

    def __init__(self) -> None:
        super().__init__()
        self._kept: deque[str] = deque()

    def begin(self, filename: str, above: int = 0) -> str:
        """Name the next cell, and drop the text of an old one.

        The first lines, `above` of them, stand for what the notebook's cell has there: they are not shown.
        """
        self._above = above
        self._kept.append(filename)
        if len(self._kept) > self.KEPT:
            old = self._kept.popleft()
            linecache.cache.pop(old, None)
            self._filename_map.pop(old, None)
        self.filename = filename
        return filename

    def cache(self, *arguments: Any, **options: Any) -> str:
        """Compile a cell's text, and keep it for tracebacks without what stands for lines above it."""
        name: str = super().cache(*arguments, **options)
        size, when, lines, file = linecache.cache[name]  # type: ignore[misc]  # no lazy entry
        hidden = min(self._above, len(lines)) if name == self.filename else 0
        linecache.cache[name] = size, when, ["\n"] * hidden + lines[hidden:], file
        return name

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        return self.filename

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        """Return the label of a cell, also for the notebook's other cells."""
        label = label_of(name)
        return ("Cell", label) if label else super().format_code_name(name)


class DiscardedOutputs(defaultdict[int, list[Any]]):
    """A history of outputs that discards them: the notebook keeps them."""

    def __missing__(self, key: int) -> list[Any]:
        return []


class RankDisplayPublisher(DisplayPublisher):
    """Sends rich outputs to the kernel."""

    shell: Any  # a RankShell; traitlets would say "or None"

    def publish(  # type: ignore[override]
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        self.shell.output.display("update" if update else "display", data, metadata, transient)

    def clear_output(self, wait: bool = False) -> None:
        self.shell.output.display("clear", {}, {"wait": wait})


class RankDisplayHook(DisplayHook):
    """Sends the last expression's value to the kernel, as ``Out[rank]``."""

    shell: Any

    def quiet(self) -> bool:
        """Whether the value is not needed: then an array is not turned into text, which takes long."""
        if not self.shell.needs_text:
            return True
        return bool(self.semicolon_at_end_of_expression(self.shell.source))

    def __call__(self, result: Any = None) -> None:
        """Keep the value also where a semicolon hides it: ``-o`` wants it."""
        super().__call__(result)
        if result is not None:
            self.fill_exec_result(result)

    def write_output_prompt(self) -> None:
        """Leave the label to the kernel."""

    def write_format_data(self, format_dict: dict[str, Any], md_dict: Any = None) -> None:
        self.shell.value_text = str(format_dict.get("text/plain", ""))
        if self.shell.show_values:
            self.shell.output.display("result", format_dict, md_dict or {})

    def log_output(self, format_dict: Any) -> None:
        """Keep no log."""


class CellLoop:
    """The event loop of a rank's cells: one for all of them, so that what a cell has begun can go on.

    IPython's own runner leaves a cell that was interrupted in the loop, and it goes on in the next cell that
    awaits something.
    """

    def __init__(self) -> None:
        self._loop: AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a cell to its end and return its result; an interrupt cancels it, and raises when it has ended.

        A cell that does not end then is left behind with its loop.
        """
        import asyncio  # here: most cells await nothing, and it takes as long as ten of them

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        loop = self._loop
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        except BaseException as error:
            if task.done():
                raise
            self._loop = None
            task.cancel()
            place = getattr(loop.run_until_complete(task), "error_in_exec", None)
            self._loop = loop
            raise error.with_traceback(None if place is None else place.__traceback__) from None


class RankShell(InteractiveShell):
    """The shell in which a rank runs cells.

    It is made in the template, before the fork; `attach` gives it its rank's output.
    """

    display_pub_class = Type(RankDisplayPublisher)
    displayhook_class = Type(RankDisplayHook)
    compiler_class = Type(RankCompiler)
    cache_size = Integer(0)  # `Out` and `_` would keep every array that a cell has shown

    output: RankOutput
    source: str = ""
    """The cell that runs."""
    show_values: bool = True
    """Whether the last expression's value is shown; ``-o`` only keeps it."""
    needs_text: bool = True
    """Whether it is needed as text."""
    at_line: Callable[[int, int], None] = staticmethod(lambda line, last_line: None)
    """Called with the first and last line of every statement of the cell before it runs."""
    value_text: str = ""
    """The last expression's value as text."""
    text_of_error: Callable[[BaseException], str] = staticmethod(repr)
    """What is shown of an error that does not end the cell."""
    _result: Any = None
    """What IPython knows of the cell that runs, which may run others."""

    def __init__(self, **options: Any) -> None:
        self._loop = CellLoop()
        self.loop_runner_map = {**InteractiveShell.loop_runner_map, "asyncio": (self._loop.run, True)}
        super().__init__(**options)

    def attach(self, output: RankOutput, colors: str) -> None:
        """Connect to a rank's output."""
        self.output = output
        # IPython's advice for a terminal; a rank raises `RankExitError`
        warnings.filterwarnings("ignore", message="To exit: use 'exit', 'quit', or Ctrl-D.")
        show_warnings_at_callers()
        output.put_back()
        try:
            self.colors = colors
        except Exception:  # noqa: BLE001  a theme that only the notebook knows is no reason to fail
            self.colors = "nocolor"

    def init_history(self) -> None:
        # no thread and no database: both would be copied by the fork, half alive
        from IPython.core.history import HistoryManager

        manager: Any = HistoryManager
        manager.enabled = False
        super().init_history()
        history: Any = self.history_manager
        history.outputs = DiscardedOutputs()  # newer IPythons keep what every cell printed, forever

    compile: Any  # a RankCompiler

    def enable_gui(self, gui: str | None = None) -> None:
        # the base class raises, which would break %matplotlib inline
        if gui not in (None, "inline", "agg"):
            raise UsageError(f"a rank has no window: %gui {gui} does not work here; use %matplotlib inline")

    @default("loop_runner")
    def _default_loop_runner(self) -> Callable[[Coroutine[Any, Any, Any]], Any]:
        return self._loop.run

    system = InteractiveShell.system_raw  # no pexpect: a child writes to the rank's own pipes

    def showtraceback(self, exc_tuple: Any = None, *_: Any, **__: Any) -> None:
        """Show an error that does not end the cell: of a value's ``__repr__``, of ``%run``, in ``%%capture``.

        `failures.describe` formats the one that does; the kernel shows it, folded with the other ranks'.
        """
        error = (exc_tuple or sys.exc_info())[1]
        if error is not None and self._result is not None and error is not self._result.error_in_exec:
            self.output.stderr.write(self.text_of_error(error) + "\n")  # `%%capture` has Python's own

    def showsyntaxerror(self, *_: Any, **__: Any) -> None:
        """Show a syntax error that does not end the cell, of a file or a captured cell."""
        self.showtraceback()

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> Any:
        """Run one statement of a cell (IPython compiles each by itself), after reporting its lines."""
        lines = [line for *_, line in code_obj.co_lines() if line] or [0]
        self.at_line(lines[0], max(lines))
        outer, self._result = self._result, self._result or result
        try:
            return await super().run_code(code_obj, result, async_=async_)
        finally:
            self._result = outer

    def lines_of(self, error: BaseException) -> list[str]:
        """Return the parts of an error's traceback, in the notebook's colours; the error's own code runs."""
        # IPython asks for the module of each frame, and for one of a cell `inspect` looks at all modules
        cells = list(filter(source_label, list(linecache.cache)))
        with suppress(FileNotFoundError):  # the working directory has been removed
            cells += map(os.path.abspath, cells[:])
        inspect.modulesbyfile.update(dict.fromkeys(cells, "__main__"))
        try:
            if isinstance(error, SyntaxError):
                return list(self.SyntaxTB.structured_traceback(type(error), error, None))
            return list(
                self.InteractiveTB.structured_traceback(type(error), error, error.__traceback__, tb_offset=0)
            )
        finally:
            for name in cells:
                inspect.modulesbyfile.pop(name, None)
            self.InteractiveTB.tb = None  # it would keep the frames, and all arrays that they hold
            _forget_parsed()

    def ask_exit(self) -> None:
        raise SystemExit


def make() -> RankShell:
    """Create the one shell of this process and import what a first cell would."""
    shell = RankShell.instance()
    for name in LINE_MAGICS:
        shell.magics_manager.register_function(_refusal(f"%{name}"), "line", name)
    for name in CELL_MAGICS:
        shell.magics_manager.register_function(_refusal(f"%%{name}"), "cell", name)
    shell.user_ns.pop("In", None)
    if _is_temporary(shell.ipython_dir):
        shutil.rmtree(shell.ipython_dir, ignore_errors=True)  # no other process would remove it
    return shell


def _is_temporary(directory: str) -> bool:
    """Return whether IPython has just made a directory because it found no home that it can write to."""
    parent, name = os.path.split(directory)
    chosen = os.environ.get("IPYTHONDIR", "")
    made = parent == tempfile.gettempdir() and _MADE.fullmatch(name) is not None
    return made and os.path.normpath(os.path.expanduser(chosen)) != directory


def _forget_parsed() -> None:
    """Clear the caches of `executing`, which would keep every cell of a traceback parsed forever."""
    try:
        from executing import executing
        from stack_data.core import Source

        for name in ("__source_cache_with_lines", "__executing_cache"):
            Source._class_local(name, {}).clear()
        for names in (executing, *Source.__mro__):
            for function in vars(names).values():
                if hasattr(function, "cache_clear"):
                    function.cache_clear()
    except (ImportError, AttributeError):
        pass  # an IPython that does without, or one that keeps it elsewhere
