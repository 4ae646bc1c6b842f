"""Settings of this process that ranks follow, such as options of pandas: a reader for each.

`nbparallel.engine.environment` has for each the function that follows it.  The reference,
"Magics", says what does not go.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Settings = tuple[tuple[str, bytes], ...]
"""Names of readers, and what they returned, pickled."""
_STREAMS = ("stdout", "stderr")


def _environment(_: Any) -> dict[str, str]:
    data: Any = getattr(os.environ, "_data", os.environ)  # decoding it takes as long as all others together
    return dict(data)


def _pattern(pattern: Any) -> Any:
    return pattern if pattern is None or isinstance(pattern, str) else (pattern.pattern, pattern.flags)


def _logging(logging: Any) -> Any:
    """Return what `logging.basicConfig` sets, and the levels of loggers."""
    root = logging.getLogger()
    handlers = []
    for handler in root.handlers:
        stream = next((name for name in _STREAMS if getattr(handler, "stream", 0) is getattr(sys, name)), "")
        if type(handler) is logging.StreamHandler and stream:
            form = handler.formatter
            styles = (key for key, (kind, _) in logging._STYLES.items() if form and type(form._style) is kind)
            style = None if form is None else (form._fmt, form.datefmt, next(styles, "%"))
            handlers.append((stream, handler.level, style))
    levels = {
        name: logger.level
        for name, logger in root.manager.loggerDict.copy().items()
        if getattr(logger, "level", 0)
    }
    return root.level, root.manager.disable, handlers, levels


def _decimal(decimal: Any) -> Any:
    now = decimal.getcontext()
    traps = [name for name, is_on in now.traps.items() if is_on]
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, traps


class _OptionTree:
    """Options in nested dictionaries, read again only when something in them is another object.

    Lists are copied, else a change in place would change what was seen, too.
    """

    def __init__(self) -> None:
        self._containers: list[Any] = []
        self._contents: list[list[Any]] = []
        self._found: dict[str, Any] = {}

    def read(self, root: dict[str, Any]) -> dict[str, Any]:
        """Return the options by their names; the same object as before if nothing has changed."""
        if self._containers[:1] != [root] or [*map(_content, self._containers)] != self._contents:
            self._containers, self._found = [], {}
            self._add(root, "")
            self._contents = [*map(_content, self._containers)]
        return self._found

    def _add(self, options: dict[str, Any], above: str) -> None:
        self._containers.append(options)
        for key, value in dict.items(options):  # that of matplotlib's takes forty times as long
            if type(value) is dict:
                self._add(value, above + key + ".")
                continue
            self._found[above + key] = value
            if type(value) is list:
                self._containers.append(value)
                self._found[above + key] = value[:]


def _content(container: Any) -> list[Any]:
    return [*dict.values(container)] if isinstance(container, dict) else container[:]


_pandas_tree, _matplotlib_tree = _OptionTree(), _OptionTree()


_OF_A_WINDOW = frozenset((
    "backend", "backend_fallback", "interactive", "toolbar", "timezone", "tk.window_focus", "date.epoch",
    "docstring.hardcopy", "savefig.directory", "figure.max_open_warning", "figure.raise_window",
))  # fmt: skip
"""What matplotlib's styles leave alone, too."""


def _figures() -> dict[str, Any]:
    """Return how ``%matplotlib inline`` shows figures, also what is set before the first."""
    config: Any = sys.modules.get("matplotlib_inline.config")
    if config is None or not config.InlineBackend.initialized():
        shells: Any = sys.modules.get("IPython")
        shell = None if shells is None else shells.get_ipython()
        return {} if shell is None else {**shell.config.get("InlineBackend", {})}
    inline = config.InlineBackend.instance()
    return {
        "figure_formats": set(inline.figure_formats),
        "print_figure_kwargs": dict(inline.print_figure_kwargs),
        "close_figures": inline.close_figures,
    }


READERS: dict[str, Callable[[Any], Any]] = {
    "os": _environment,
    "warnings": lambda warnings: list(warnings.filters),
    "logging": _logging,
    "numpy": lambda numpy: (numpy.geterr(), numpy.get_printoptions()),
    "decimal": _decimal,
    "pandas": lambda pandas: _pandas_tree.read(pandas.options.d),
    "matplotlib": lambda matplotlib: (_matplotlib_tree.read(matplotlib.rcParams), _figures()),
    "plotly.io": lambda plotly: (plotly.renderers.default, plotly.templates.default),
    "torch": lambda torch: torch.get_default_dtype(),
}
"""By the module that has them: a process that has not loaded it has none to follow."""


_UNREADABLE = (AttributeError, RuntimeError, TypeError, ValueError)
"""What reading raises in a library that another thread loads or changes, or in another version of one."""


class NotebookSettings:
    """Settings of this process, pickled again only when they have changed."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}
        self._pickled: Settings = ()
        self._lock = threading.RLock()

    def current(self) -> Settings:
        """Return the settings as they are; the same object as before if nothing has changed."""
        changed = {}
        with self._lock:  # another thread would return former ones that count as seen
            for name, read in READERS.items():
                if (module := sys.modules.get(name)) is None:
                    continue
                with suppress(*_UNREADABLE):
                    value = read(module)
                    if name not in self._seen or self._seen[name] != value:
                        self._seen[name] = changed[name] = value
            if changed:
                now = {name: _pickled(name, value) for name, value in changed.items()}
                self._pickled = tuple({**dict(self._pickled), **now}.items())
            return self._pickled


def _pickled(name: str, value: Any) -> bytes:
    import cloudpickle  # here: scripts that start no ranks need none of it

    if name == "warnings":  # with names for classes: a rank does not import a library for its filter
        value = [
            (action, _pattern(text), (category.__module__, category.__qualname__), _pattern(module), line)
            for action, text, category, module, line in value
            if isinstance(category, type)
        ]
    elif name == "os":
        value = {os.fsdecode(key): os.fsdecode(text) for key, text in value.items()}
    elif name == "matplotlib":
        options, figures = value
        value = {key: each for key, each in options.items() if key not in _OF_A_WINDOW}, figures
    try:
        return bytes(cloudpickle.dumps(value, 5))
    except Exception:  # noqa: BLE001  a formatter that holds an open file, for one
        kept = {}
        for key, each in value.items() if isinstance(value, dict) else ():
            with suppress(Exception):  # whatever its own method of pickling raises
                cloudpickle.dumps(each, 5)
                kept[key] = each
        return bytes(cloudpickle.dumps(kept, 5))


current_settings = NotebookSettings().current
