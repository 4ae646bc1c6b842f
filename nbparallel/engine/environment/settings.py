"""Settings of the notebook that a rank follows, such as options of pandas: a function for each.

`nbparallel.session.names.notebook_settings` reads them.  A rank keeps what its own cells have set until the
notebook changes the same setting, as with names.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any

from nbparallel.wire.system import ImportHook

_OWN_VARIABLES = frozenset((
    "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NBP_CLIENT", "NBP_OWNER",
    "NBP_SESSION", "PYTHONHASHSEED", "RANK", "WORLD_SIZE",
))  # fmt: skip
"""What a rank's environment has of its own."""
_MISSING: Any = object()


def _changed(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that have changed at the notebook."""
    former = before or {}
    return {key: value for key, value in now.items() if former.get(key, _MISSING) != value}


def _environment(_: Any, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    for name in (before.keys() - now.keys()) - _OWN_VARIABLES:
        os.environ.pop(name, None)
    for name in _changed(before, now).keys() - _OWN_VARIABLES:
        os.environ[name] = now[name]


def _logging(logging: Any, before: Any, now: Any) -> None:
    level, disabled, handlers, levels = now
    root = logging.getLogger()
    if before is None or before[0] != level:
        root.setLevel(level)
    if before is None or before[1] != disabled:
        logging.disable(disabled)
    for name, each in _changed(before and before[3], levels).items():
        logging.getLogger(name).setLevel(each)
    for name in (before[3] if before else {}).keys() - levels.keys():
        logging.getLogger(name).setLevel(logging.NOTSET)
    if before is not None and before[2] == handlers:
        return
    _remove_own(root)
    if not hasattr(logging.basicConfig, "__wrapped__"):
        logging.basicConfig = _configures(logging.basicConfig, root)
    if root.handlers:
        return  # a cell of this rank has configured it
    for stream, own_level, form in handlers:
        handler = logging.StreamHandler(_Current(stream))
        handler.setLevel(own_level)
        if form is not None:
            handler.setFormatter(logging.Formatter(*form))
        root.addHandler(handler)


def _remove_own(root: Any) -> None:
    for handler in [each for each in root.handlers if isinstance(getattr(each, "stream", None), _Current)]:
        root.removeHandler(handler)


def _configures(configure: Callable[..., None], root: Any) -> Callable[..., None]:
    """Return `basicConfig` that takes the notebook's handlers away: if there are any, it does nothing."""

    @wraps(configure)
    def basicConfig(**options: Any) -> None:  # noqa: N802  as logging names it
        _remove_own(root)
        configure(**options)

    return basicConfig


class _Current:
    """Writes to the stream that ``sys`` has at the moment: a cell may redirect it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, text: str) -> None:
        getattr(sys, self._name).write(text)

    def flush(self) -> None:
        getattr(sys, self._name).flush()


def _numpy(numpy: Any, before: Any, now: Any) -> None:
    errors, options = (before[0], before[1]) if before else (numpy.geterr(), numpy.get_printoptions())
    numpy.seterr(**_changed(errors, now[0]))
    if changed := _changed(options, now[1]):
        numpy.set_printoptions(**changed)


def _decimal(decimal: Any, before: Any, now: Any) -> None:
    context, default = decimal.getcontext(), decimal.DefaultContext
    names = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
    if before is None:
        traps = [signal for signal, is_on in default.traps.items() if is_on]
        before = (*(getattr(default, name) for name in names), traps)
    for number, name in enumerate(names):
        if before[number] != now[number]:
            setattr(context, name, now[number])
    if before[6] != now[6]:
        for signal in context.traps:
            context.traps[signal] = signal in now[6]


def _pandas(pandas: Any, before: Any, now: Any) -> None:
    if before is None:
        options = pandas._config.config._registered_options
        before = {key: option.defval for key, option in options.items()}
    for key, value in _changed(before, now).items():
        if pandas.get_option(key) != value:
            pandas.set_option(key, value)


def _matplotlib(matplotlib: Any, before: Any, now: Any) -> None:
    changed = _changed(before[0] if before else dict(dict.items(matplotlib.rcParamsDefault)), now[0])
    options = matplotlib.rcParams
    options.update({k: v for k, v in changed.items() if dict.get(options, k, _MISSING) != v})
    figures = _changed(before and before[1], now[1])
    if not figures:
        return
    from IPython.core.getipython import get_ipython
    from matplotlib_inline.config import InlineBackend

    shell: Any = get_ipython()
    for name, value in figures.items():
        setattr(shell.config.InlineBackend, name, value)  # for when it begins to show figures
        if InlineBackend.initialized():
            setattr(InlineBackend.instance(), name, value)


def _plotly(plotly: Any, before: Any, now: Any) -> None:
    if before is None or before[0] != now[0]:
        plotly.renderers.default = now[0]
    if before is None or before[1] != now[1]:
        plotly.templates.default = now[1]


def _torch(torch: Any, before: Any, now: Any) -> None:
    if now != (before or torch.float32):
        torch.set_default_dtype(now)


_FOLLOWERS: Mapping[str, Callable[[Any, Any, Any], None]] = {
    "os": _environment,
    "logging": _logging,
    "numpy": _numpy,
    "decimal": _decimal,
    "pandas": _pandas,
    "matplotlib": _matplotlib,
    "plotly.io": _plotly,
    "torch": _torch,
}
"""Called with the module, and with what the notebook had before (None: the defaults) and has now."""


class FollowedSettings:
    """The notebook's settings, and what of them waits until the rank has loaded the module that has them."""

    def __init__(self) -> None:
        self._sent: dict[str, bytes] = {}
        self._values: dict[str, Any] = {}
        self._waiting: dict[str, frozenset[str]] = {}
        """Names of settings, and the modules of which one has to be loaded first."""
        self._filters: list[Any] = list(warnings.filters)
        """Those of warnings that are no cell's."""

    def begin(self, settings: Iterable[tuple[str, bytes]]) -> None:
        """Follow what the notebook has when the rank starts; the environment it has already."""
        for name, data in settings:
            if name == "os":
                self._sent[name], self._values[name] = data, pickle.loads(data)
        self.follow(settings)

    def follow(self, settings: Iterable[tuple[str, bytes]]) -> None:
        """Follow what the notebook has changed: of modules that a cell loads, behind their import.

        A filter for a class of such a module holds from the next cell on.
        """
        for name, data in settings:
            if self._sent.get(name) != data:
                self._sent[name] = data
                self._waiting[name] = frozenset({name})
                if name not in sys.modules:  # behind the import immediately: a cell's own settings come later
                    ImportHook(name, partial(self._settle, name)).install()
        for name, modules in list(self._waiting.items()):
            if any(map(_is_loaded, modules)):
                self._settle(name)

    def _settle(self, name: str) -> None:
        if name not in self._waiting:
            return
        missing = frozenset[str]()
        try:
            now = pickle.loads(self._sent[name])
            if name == "warnings":
                missing = self._follow_filters(now)
            else:
                with warnings.catch_warnings(action="ignore"):  # about options that are deprecated
                    _FOLLOWERS[name](sys.modules[name], self._values.get(name), now)
                self._values[name] = now
        except Exception as error:  # noqa: BLE001  another version of a library, or what an option holds
            sys.stderr.write(f"nbparallel: the notebook's settings of {name} are not the rank's: {error}\n")
        if missing:
            self._waiting[name] = missing
        else:
            self._waiting.pop(name, None)  # last: after an interrupt it still waits

    def _follow_filters(self, now: list[Any]) -> frozenset[str]:
        """Put the notebook's filters behind those that cells have added; return modules to wait for."""
        filters: list[Any] = []
        missing: set[str] = set()
        for action, text, (module, name), place, line in now:
            category: Any = sys.modules.get(module)
            for part in name.split("."):
                category = getattr(category, part, None)
            if isinstance(category, type):
                filters.append((action, _pattern(text), category, _pattern(place), line))
            elif module != "__main__":
                missing.add(module)
        current: Any = warnings.filters
        own = [each for each in current if each not in self._filters and each not in filters]
        self._filters = filters
        current[:] = [*own, *filters]
        with warnings.catch_warnings():
            pass  # the interpreter forgets what the former ones let through
        return frozenset(missing)


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _pattern(pattern: Any) -> Any:
    return re.compile(*pattern) if isinstance(pattern, tuple) else pattern
