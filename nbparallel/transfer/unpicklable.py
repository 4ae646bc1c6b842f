"""Error messages for objects that cannot be pickled: which part, and what to do."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Iterator
from typing import Any

from nbparallel.errors import with_article

_BUDGET = 0.5
"""Seconds that the search may take: a user waits for an error message."""
_OWN_METHODS = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
"""By which a class says how it is pickled, or that it is not."""
_DEPTH = 8
"""Levels that the search descends; deeper ones are reported as their ancestor."""
_OF_TASK = " of a task"
"""Ends what `name_part` calls an argument."""


def explain(
    obj: Any, error: BaseException, *, name: str | None, attempt: Callable[[Any], BaseException | None]
) -> str:
    """Return the message for an object that could not be pickled.

    Parameters
    ----------
    error : BaseException
        What pickling it raised.
    name : str, optional
        The user's name for the object: of a variable, or words that end with `_OF_TASK`.
    attempt : callable
        Pickles one part; returns what that raised, or None.
    """
    of_task = name is not None and name.endswith(_OF_TASK)
    path, culprit, reason = (name or "it").removesuffix(_OF_TASK), obj, error
    if not _is_recursion(error) and repr(type(obj)) not in str(error):  # else it is the culprit
        path, culprit, reason = _search(obj, error, path, attempt)
    subject = f"an object of type {_type_name(obj)}"
    if name is not None:
        subject = name if of_task else f"variable {name!r}"
    where = "it" if culprit is obj else f"{path}, which"
    text = f"{type(reason).__name__}: {reason}" if str(reason) else type(reason).__name__
    what = with_article(_type_name(culprit))
    return (
        f"{subject} cannot be sent to another process: {where} is {what} ({text}); "
        f"{_advice(culprit, reason, name, inside=culprit is not obj)}"
    )


def _advice(culprit: Any, reason: BaseException, name: str | None, *, inside: bool) -> str:
    if _is_recursion(reason):
        return "it is nested too deeply: flatten it"
    what, where = (repr(name), "inside the cell") if name else ("'it'", "where it is used")
    if name and name.endswith(_OF_TASK):
        what, where = name.removesuffix(_OF_TASK), "in the task"
    if isinstance(culprit, types.GeneratorType):
        return f"turn the generator into a list, or create it {where}"
    return f"create it {where}" + f", or leave it out of {what} (a __getstate__ can)" * inside


def _is_recursion(error: BaseException) -> bool:
    return isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError)


def _type_name(obj: Any) -> str:
    cls = type(obj)
    module = getattr(cls, "__module__", "builtins")
    return cls.__qualname__ if module in ("builtins", "__main__") else f"{module}.{cls.__qualname__}"


def _search(
    obj: Any, error: BaseException, path: str, attempt: Callable[[Any], BaseException | None]
) -> tuple[str, Any, BaseException]:
    deadline = time.monotonic() + _BUDGET
    seen = {id(obj)}
    for _ in range(_DEPTH):
        if _refuses(obj, error):
            break
        for label, part in _parts(obj):
            if time.monotonic() > deadline:
                return path, obj, error
            if id(part) in seen or isinstance(part, int | float | str | bytes | None):
                continue
            failed = attempt(part)
            if failed is not None:
                seen.add(id(part))
                path, obj, error = path + label, part, failed
                break
        else:
            break
    return path, obj, error


def _refuses(obj: Any, error: BaseException) -> bool:
    """Whether the object's own method raised the error: then its text is the reason, and no part of it."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        own = code.co_name in _OWN_METHODS and code.co_argcount
        if own and trace.tb_frame.f_locals.get(code.co_varnames[0]) is obj:
            return True
        trace = trace.tb_next
    return False


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield what `obj` holds, with how a user would write it."""
    if isinstance(obj, dict):
        for key, value in list(obj.items()):
            yield f"[{_short(key)}]", value
        for key in list(obj):
            yield f" key {_short(key)}", key
    elif isinstance(obj, list | tuple):
        for index, value in enumerate(obj):
            yield f"[{index}]", value
    elif isinstance(obj, set | frozenset):
        for value in list(obj):
            yield f" element {_short(value)}", value
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
    elif isinstance(obj, types.FunctionType):
        for variable, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=False):
            try:
                yield f" with {variable}", cell.cell_contents
            except ValueError:
                continue
        for index, value in enumerate(obj.__defaults__ or ()):
            yield f".__defaults__[{index}]", value
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict | types.MappingProxyType) and not isinstance(obj, types.ModuleType):
        for attribute, value in list(attributes.items()):
            yield f".{attribute}", value


def _short(value: Any) -> str:
    if not isinstance(value, str | int | float | bytes | bool | None):
        return f"<{type(value).__name__}>"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
