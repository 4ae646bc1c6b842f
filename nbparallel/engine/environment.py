"""What a rank finds predefined: names, environment, random streams, numbers of threads, and settings.

Settings are the notebook's, such as options of pandas: a function for each follows what
`nbparallel.session.names.notebook_settings` reads.  A rank keeps what its own cells have set until the
notebook changes the same setting, as with names.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import cache, partial, wraps
from types import ModuleType, NoneType
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from nbparallel.wire.identity import WorldPlace
from nbparallel.wire.messages import Configure, WorkingContext
from nbparallel.wire.system import THREAD_VARIABLES, ImportHook, threads_from_environment


def follow_context(before: WorkingContext, now: WorkingContext) -> tuple[str, ...]:
    """Follow the notebook's directory and path; return a line if a cell had changed the directory."""
    notes: tuple[str, ...] = ()
    if now.cwd != before.cwd:
        if before.cwd and now.cwd and _directory() not in (before.cwd, now.cwd):
            notes = (f"the working directory is the notebook's again: {now.cwd}",)
        _change_directory(now.cwd)
    if now.sys_path != before.sys_path:
        sys.path[:] = merged(sys.path, before.sys_path, now.sys_path)
    return notes


def merged(mine: Sequence[str], before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return the notebook's path `now`, with the rank's own entries (not in `before`) around it.

    >>> merged(["own", "a", "b", "late"], before=["a", "b"], now=["c", "a"])
    ['own', 'c', 'a', 'late']
    """
    first = next((index for index, entry in enumerate(mine) if entry in before), len(mine))
    own = [entry for entry in mine[:first] if entry not in now]
    late = [entry for entry in mine[first:] if entry not in before and entry not in now]
    return [*own, *now, *late]


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _change_directory(path: str) -> None:
    """Enter a directory; if that cannot be done, write a line to stderr."""
    try:
        os.chdir(path or ".")  # empty: it was removed, and a process that is in it stays in it
    except OSError as error:
        sys.stderr.write(f"nbparallel: the notebook's directory cannot be entered: {error}\n")


_MISSING: Any = object()
_SIMPLE = (bool, int, float, str, NoneType, np.int64, np.float64)
"""Kinds of values that a line shows."""
_MEANT = {
    "rank": "the rank's number, which is {dist}.get_rank()",
    "world_size": "the number of ranks, which is {dist}.get_world_size()",
    "rng": "the rank's own random generator",
    "dist": "nbparallel.distributed",
    "nbp": "the module nbparallel",
}
"""What predefined names are; the others are operations."""


def _shown(value: Any) -> str:
    """Return a simple value in brackets, if it is short."""
    if type(value) not in _SIMPLE:
        return ""
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return f" ({text})" if len(text) <= 30 else ""


class Defaults:
    """Predefined names; a name that the user has assigned is never overwritten."""

    def __init__(self, namespace: MutableMapping[str, Any], hidden: MutableMapping[str, Any]) -> None:
        self._namespace = namespace
        self._hidden = hidden
        self.values: dict[str, Any] = {}
        """The defaults as they are now."""
        self._noted: dict[str, int] = {}
        """Name -> identity of the value that a line was shown about."""

    def set(self, /, **values: Any) -> None:
        """Define or renew defaults where the user has not taken the name."""
        for name, value in values.items():
            current = self._namespace.get(name, _MISSING)
            if current is _MISSING or current is self.values.get(name, _MISSING):
                self._namespace[name] = value
            self.values[name] = value
            self._hidden[name] = value  # `%who` lists the user's names only

    def restore(self) -> None:
        """Define again the defaults that the user deleted."""
        for name, value in self.values.items():
            self._namespace.setdefault(name, value)

    def hidden(self, names: Iterable[str]) -> dict[str, Any]:
        """Return those of `names` whose default something else hides, with that; modules do not count.

        A module was imported under the name on purpose, and lacks what the default has.
        """
        now, values = self._namespace, self.values
        return {
            name: value
            for name in names
            if (value := now.get(name, _MISSING)) is not (mine := values.get(name, value))
            and value is not _MISSING
            and not isinstance(value, ModuleType)
            and not (type(mine) is int and isinstance(value, int | np.integer) and value == mine)
        }

    def describe_hidden(
        self, names: Iterable[str], is_own: Callable[[str], bool], before: Mapping[str, Any] | None = None
    ) -> tuple[str, ...]:
        """Return a line for each of `names` whose default something else hides.

        About numbers in each cell that uses them: `rank` is easily taken for the rank's; about others once
        for each value.

        Parameters
        ----------
        is_own : callable
            Whether the rank assigned a name itself.
        before : mapping, optional
            What hid defaults when the cell began: only names are returned that hide one since.
        """
        dist = "nbp.distributed" if self.hidden(("dist",)) else "dist"
        notes = []
        for name, value in self.hidden(names).items():
            if before is not None and before.get(name, _MISSING) is value:
                continue
            is_known, self._noted[name] = self._noted.get(name) == id(value), id(value)
            if is_known and type(self.values[name]) is not int:
                continue
            what, where = f"the notebook's{_shown(value)}", "in the notebook"
            if is_own(name):
                what = "what an earlier cell assigned"
                if before is not None:
                    what = "what this cell assigned, for later cells too"
                where = "in a cell for ranks"
            meant = _MEANT.get(name, "the operation, which is {dist}." + name).format(dist=dist)
            notes.append(f"{name} is {what}, not {meant}: `del {name}` {where} brings that back")
        return tuple(notes)

    def user_names(self) -> list[str]:
        """Return the names that the user has assigned, sorted."""
        return sorted(
            name
            for name, value in list(self._namespace.items())  # a thread may assign at the same time
            if not name.startswith("_")
            and value is not self.values.get(name, _MISSING)
            and value is not self._hidden.get(name, _MISSING)
        )


def set_environment(configure: Configure) -> None:
    """Take over the notebook's environment, directory and path, and add torchrun's variables."""
    rank, place = configure.rank, configure.place
    owner = os.environ.get("NBP_OWNER", "")
    seed = os.environ.get("PYTHONHASHSEED")
    os.environ.clear()
    os.environ.update(dict(configure.environment))
    os.environ.update(
        NBP_SESSION=configure.session,
        NBP_CLIENT=str(configure.client),  # by these the supervisor knows what a rank has started
        NBP_OWNER=owner,
        RANK=str(rank),
        LOCAL_RANK=str(rank - place.ranks.start),
        WORLD_SIZE=str(place.world_size),
        LOCAL_WORLD_SIZE=str(len(place.ranks)),
        GROUP_RANK=str(place.part),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",  # until an epoch begins; ranks talk through shared memory
    )
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed  # that of this process: what ranks start hashes as they do
    _change_directory(configure.context.cwd)
    sys.path[:] = configure.context.sys_path
    sys.argv[:] = [""]


def resize_environment(place: WorldPlace, former_port: int, port: int) -> int:
    """Renew what depends on the epoch; a MASTER_PORT that the user has set stays.  Returns `port`."""
    os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"] = str(place.world_size), str(len(place.ranks))
    if os.environ.get("MASTER_PORT") == str(former_port):
        os.environ["MASTER_PORT"] = str(port)
    return port


def random_streams(seed: int, rank: int) -> np.random.Generator:
    """Reseed `random`, `numpy.random` and torch, if it is loaded, for this rank; return its own generator.

    The streams of ranks are independent (`numpy.random.SeedSequence.spawn`) and repeat with the seed.
    """
    child = np.random.SeedSequence(seed, spawn_key=(rank,))
    legacy, standard, generator, tensors = child.spawn(4)
    np.random.seed(legacy.generate_state(4))
    random.seed(int.from_bytes(standard.generate_state(8).tobytes(), "little"))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(int(tensors.generate_state(1, np.uint64)[0]))
    return np.random.default_rng(generator)


@cache
def find_blas() -> ThreadpoolController:
    """Return the BLAS libraries that a rank begins with; found in the template, its ranks need not do it."""
    return ThreadpoolController()


class ThreadLimits:
    """A rank's share of the CPUs, as the number of threads of its libraries; what the user has set stays.

    Libraries that are loaded later follow the environment.  Those that are there already are called.

    Parameters
    ----------
    usable_cpus : int
        CPUs that the session may use.
    world_size : int
        How many ranks share them.
    """

    def __init__(self, usable_cpus: int, world_size: int) -> None:
        self._usable_cpus = usable_cpus
        self._share = max(1, usable_cpus // world_size)
        self._ours = [name for name in THREAD_VARIABLES if name not in os.environ]
        os.environ.update(dict.fromkeys(self._ours, str(self._share)))
        for library in find_blas().lib_controllers:
            library.set_num_threads(threads_from_environment(library.internal_api) or self._share)

    def resize(self, world_size: int) -> None:
        """Follow another number of ranks, but for what a cell has changed."""
        before, self._share = self._share, max(1, self._usable_cpus // world_size)
        if self._share == before:
            return
        torch: Any = sys.modules.get("torch")  # it keeps a number of its own beside that of OpenMP
        get_threads = getattr(torch, "get_num_threads", None)  # a thread may be half-way through the import
        if get_threads is not None and get_threads() == before and "OMP_NUM_THREADS" in self._ours:
            torch.set_num_threads(self._share)
        for name in self._ours:
            if os.environ.get(name) != str(before):
                continue
            if name != "NUMBA_NUM_THREADS" or "numba" not in sys.modules:  # numba refuses a second number
                os.environ[name] = str(self._share)
        for library in ThreadpoolController().lib_controllers:
            if library.num_threads == before:
                library.set_num_threads(threads_from_environment(library.internal_api) or self._share)


# Settings of the notebook that a rank follows.

_OWN_VARIABLES = frozenset((
    "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NBP_CLIENT", "NBP_OWNER",
    "NBP_SESSION", "PYTHONHASHSEED", "RANK", "WORLD_SIZE",
))  # fmt: skip
"""What a rank's environment has of its own."""


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
        if data := dict(settings).get("os"):
            self._sent["os"], self._values["os"] = data, pickle.loads(data)
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
