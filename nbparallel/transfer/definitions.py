"""Functions and classes of the notebook, by value, so that they live in the receiver's own namespace.

cloudpickle gives every function it rebuilds a private copy of the globals it used.  A notebook's function
must see the *rank's* globals instead (``rank``, the operations, what the rank assigned), and two closures
over one variable must go on sharing it.  So functions whose globals are the notebook's (`main_globals`: on a
rank the user's namespace) are reduced here; classes go through cloudpickle, but a class that the receiver
knows already is left as it is.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import functools
import hashlib
import sys
import threading
import types
import typing
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from cloudpickle import cloudpickle

from nbparallel.errors import InternalError, NbParallelError, UnpicklableError
from nbparallel.transfer.code_names import CodeNames
from nbparallel.transfer.pickle_format import is_plain

KNOWN: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that are complete in this process: defined here, or rebuilt to the end."""


class CellReference:
    """Stands for a closure's cell while pickling; one for each cell, so that sharing is kept."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __reduce__(self) -> Any:
        return types.CellType, ()


def is_main_globals(namespace: Mapping[str, Any], main_globals: Mapping[str, Any] | None) -> bool:
    """Whether `namespace`, a function's globals, is the notebook's."""
    if main_globals is None:
        return False
    main = sys.modules.get("__main__")
    return namespace is main_globals or (main is not None and namespace is main.__dict__)


def module_of(namespace: Mapping[str, Any]) -> str | None:
    """Name of the importable module whose globals `namespace` is, else None."""
    name = namespace.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) and name != "__main__" else None
    if module is None or getattr(module, "__spec__", None) is None or module.__dict__ is not namespace:
        return None
    return name


def find_modules(module: types.ModuleType, mentioned: Collection[str]) -> tuple[str, ...]:
    """Return the module's name and those of its loaded submodules that code may use.

    ``import scipy`` in another process does not bring ``scipy.sparse``, which this one has imported: a
    submodule counts if every part of its name is mentioned.
    """
    found = [module.__name__]
    for parent in found:  # grows while it is walked
        prefix = parent + "."
        found += [prefix + name for name in mentioned if prefix + name in sys.modules]
    return (found[0], *sorted(found[1:]))


def _bound_cells(function: types.FunctionType) -> Iterator[tuple[types.CellType, Any]]:
    """Yield the cells of a function's closure that are bound by now, with what they hold."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell, cell.cell_contents


def _submodules(function: types.FunctionType, names: CodeNames) -> tuple[str, ...]:
    """Return submodules that a function reaches through modules which it names."""
    values = [function.__globals__.get(name) for name in names.reads | names.doubtful]
    values += [value for _, value in _bound_cells(function)]
    modules = {id(value): value for value in values if isinstance(value, types.ModuleType)}
    return tuple(name for module in modules.values() for name in find_modules(module, names.mentioned)[1:])


def _module_values(function: types.FunctionType, names: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Return what a function finds in its module under `names`: numbers and texts, names of other objects.

    The module may have set them since its import: a receiver that imports it has what they were then.
    """
    found = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
    plain = {name: value for name, value in found.items() if is_plain(value)}
    return plain, [name for name in found if name not in plain]


def reduce_function(
    function: types.FunctionType, module: str | None, cells: dict[int, CellReference], names: CodeNames
) -> tuple[Any, ...]:
    """Reduce to code and cells, then state: so recursion through a cell or a default ends.

    Parameters
    ----------
    module : str or None
        The module that provides its globals; None: the receiver's main globals.
    cells : dict
        The references of this pickle so far, by the id of their cell.
    names : CodeNames
        Of its code.
    """
    found = [cells.setdefault(id(cell), CellReference(cell)) for cell in function.__closure__ or ()]
    references = None if function.__closure__ is None else tuple(found)
    contents = [(cells[id(cell)], value) for cell, value in _bound_cells(function)]
    attributes = {
        "__name__": function.__name__,
        "__qualname__": function.__qualname__,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
        "__defaults__": function.__defaults__,
        "__kwdefaults__": function.__kwdefaults__,
        "__annotations__": _annotations(function),
    }
    if getattr(function, "__type_params__", ()):
        attributes["__type_params__"] = function.__type_params__  # type: ignore[attr-defined]  # 3.12 on
    state = (attributes, function.__dict__, contents, _submodules(function, names))
    values = None if module is None else _module_values(function, names.reads - names.stores)
    arguments = function.__code__, module, references, values
    return rebuild_function, arguments, state, None, None, set_function_state


def rebuild_code(filename: str, arguments: tuple[Any, ...]) -> types.CodeType:
    """Rebuild code as it was compiled."""
    return types.CodeType(*arguments).replace(co_filename=filename)


def _annotations(thing: Any) -> dict[str, Any]:
    """Return annotations; as texts if they are evaluated on demand (3.14): names may be missing by design."""
    annotate = getattr(thing, "__annotate__", None)
    if annotate is None:
        own = vars(thing) if isinstance(thing, type) else {}
        found = own.get("__annotations__", own.get("__annotations_cache__", {}))
        return found if isinstance(thing, type) else thing.__annotations__  # type: ignore[no-any-return]
    from annotationlib import Format, call_annotate_function  # type: ignore[import-not-found]  # 3.14

    return call_annotate_function(annotate, Format.STRING)  # type: ignore[no-any-return]


def without_annotations(function: types.FunctionType) -> types.FunctionType:
    """Return a function for cloudpickle to take apart, which looks at its annotations: one with texts."""
    if getattr(function, "__annotate__", None) is None:
        return function
    parts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    clone = types.FunctionType(function.__code__, *parts)
    clone.__kwdefaults__, clone.__dict__ = function.__kwdefaults__, function.__dict__
    for name in ("__qualname__", "__module__", "__doc__", "__type_params__"):
        setattr(clone, name, getattr(function, name))
    clone.__annotations__ = _annotations(function)
    return clone


def set_function_state(function: types.FunctionType, state: tuple[Any, Any, Any, Any]) -> None:
    """Give a rebuilt function its defaults, its attributes, what its cells hold and the modules it uses."""
    attributes, extra, contents, modules = state
    for name in modules:
        with contextlib.suppress(ImportError):  # an attribute of that name may be meant: the code will say so
            __import__(name)
    for name, value in attributes.items():
        setattr(function, name, value)
    function.__dict__.update(extra)
    for cell, value in contents:
        cell.cell_contents = value


def make_function(
    main_globals: dict[str, Any],
    code: types.CodeType,
    module: str | None,
    cells: tuple[types.CellType, ...] | None,
    values: tuple[dict[str, Any], list[str]] | None,
) -> types.FunctionType:
    """Rebuild a function with `main_globals` as its globals, or those of `module`.

    `values` are what the sender's module has.  What is not set here, the function has as the sender's, in
    globals of its own; where both are set and differ, those of this process count, which an initializer may
    have made, and a warning says so.
    """
    if module is not None and values is not None:
        __import__(module)
        main_globals = sys.modules[module].__dict__
        set_there = {name: value for name, value in values[0].items() if value is not None}
        lacking = [name for name in values[1] if main_globals.get(name) is None]
        differing = [name for name, value in set_there.items() if _differs(main_globals.get(name), value)]
        for names, here in ((lacking, "which it is not here"), (differing, "and is something else here")):
            if names:
                warnings.warn(
                    f"{code.co_qualname} of module {module!r} reads {', '.join(names)}: set by the process "
                    f"that sent it, {here}; pass it as an argument",
                    RuntimeWarning,
                    stacklevel=2,
                )
        absent = {name: value for name, value in set_there.items() if main_globals.get(name) is None}
        main_globals = {**main_globals, **absent} if absent else main_globals
    return types.FunctionType(code, main_globals, None, None, cells)


def _differs(here: Any, value: Any) -> bool:
    return here is not None and not (here == value or (here != here and value != value))


def by_value(cls: type) -> bool:
    """Whether a class is defined in the notebook (or otherwise cannot be imported)."""
    return cls not in _BUILT_IN and not cloudpickle._should_pickle_by_reference(cls)


_BUILT_IN = set(cloudpickle._BUILTIN_TYPE_NAMES) | {type(None), type(Ellipsis), type(NotImplemented)}


def tracker(cls: type) -> str:
    """Id of a class, the same in every process that has it; the caller must have it complete."""
    KNOWN.add(cls)
    return str(cloudpickle._get_or_create_tracker_id(cls))


def known_class(identifier: str) -> type | None:
    """Return the class with that id if this process has it complete."""
    cls = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(identifier)
    return cls if cls is not None and cls in KNOWN else None


def reduce_class(cls: type, *, redefine: bool) -> tuple[Any, ...]:
    """Reduce by value; `redefine`: the receiver is to take this state even if it knows the class."""
    maker, arguments, state, _, _, setter = cloudpickle._dynamic_class_reduce(cls)
    if "__slots__" in vars(cls) and typing.NamedTuple not in vars(cls).get("__orig_bases__", ()):
        # cloudpickle sets the attribute when the class is made, which is too late; NamedTuple makes its own
        made = {
            name: value
            for name, value in vars(cls).items()
            if isinstance(value, types.MemberDescriptorType) and value.__objclass__ is cls
        }
        extra = tuple(name for name in ("__dict__", "__weakref__") if name in vars(cls))
        kind, name, bases, begun, *rest = arguments
        arguments = kind, name, bases, {**begun, "__slots__": (*made, *extra)}, *rest
        for slot in made:
            state[0].pop(slot, None)
    for name in _ON_DEMAND:  # else pickling an instance would look like a change of its class
        state[0].pop(name, None)
    if annotations := _annotations(cls):
        state[0]["__annotations__"] = annotations
    return (
        rebuild_class,
        (tracker(cls), cls.__qualname__, fingerprint(cls), maker, arguments),
        (redefine, setter, state),
        None,
        None,
        set_class_state,
    )


_ON_DEMAND = (
    "__slotnames__",
    "__annotations__",
    "__annotations_cache__",
    "__annotate_func__",
    "__annotate__",
)
"""Attributes that Python adds to a class on demand (`copyreg`, `inspect`)."""


def fingerprint(cls: type) -> bytes:
    """Return what two classes made by running the same source in two processes have in common."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr([base.__qualname__ for base in cls.__bases__]).encode())
    for name, value in sorted(vars(cls).items()):
        if name in _ON_DEMAND:
            continue
        function = getattr(value, "__func__", getattr(value, "fget", value))
        code = getattr(function, "__code__", None)
        digest.update(f"{name}:{type(value).__qualname__}:".encode())
        if isinstance(code, types.CodeType):
            digest.update(
                code.co_code + repr((code.co_names, code.co_varnames, code.co_firstlineno)).encode()
            )
    return digest.digest()


def matching_class(
    identifier: str, qualname: str, print_: bytes, main_globals: Mapping[str, Any]
) -> type | None:
    """Return the class of `main_globals` if it came from the same source, and remember it under `identifier`.

    A cell that every rank ran has defined the class on each: an instance that rank 0 sends is an
    instance of rank 1's own.
    """
    first, *rest = qualname.split(".")
    found = main_globals.get(first)
    for attribute in rest:
        found = getattr(found, attribute, None)
    if not isinstance(found, type) or found.__module__ != "__main__" or fingerprint(found) != print_:
        return None
    KNOWN.add(found)
    cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[identifier] = found
    return found


def make_class(
    main_globals: Mapping[str, Any], identifier: str, qualname: str, print_: bytes, maker: Any, arguments: Any
) -> type:
    """Return the class with that id, its equal in `main_globals`, or a new one for `complete_class`."""
    with LOCK:
        known = known_class(identifier) or matching_class(identifier, qualname, print_, main_globals)
        made: type = known if known is not None else maker(*arguments)
    return made


def complete_class(cls: type, state: tuple[bool, Any, Any]) -> None:
    """Give a class its attributes, unless this process has it complete and need not redefine it."""
    redefine, setter, attributes = state
    with LOCK:
        if redefine or cls not in KNOWN:
            setter(cls, attributes)
            KNOWN.add(cls)


def find_class(identifier: str, name: str) -> type:
    """Return a class that was delivered before."""
    cls = known_class(identifier)
    if cls is None:
        raise UnpicklableError(f"the definition of class {name!r} has not arrived here; define it again")
    return cls


def reduce_typing(thing: Any) -> Any:
    """Reduce what typing makes and Python pickles by its name, which the receiver's ``__main__`` lacks.

    `NotImplemented`: it is none of these, or a module's.
    """
    kind = type(thing)
    if kind is typing.ForwardRef:  # else it differs once it was evaluated, and holds on to namespaces
        return kind, (thing.__forward_arg__,)
    if kind not in _NAMED_TYPES or thing.__module__ != "__main__":
        return NotImplemented
    options, tracked = {}, True
    arguments: tuple[Any, ...] = (thing.__name__,)
    if kind is typing.NewType:
        arguments += (thing.__supertype__,)
    elif kind.__name__ == "TypeAliasType":
        arguments += (thing.__value__,)
        options, tracked = {"type_params": thing.__type_params__}, False  # it takes no weak reference
    elif kind is typing.ParamSpec:
        options = {name: getattr(thing, f"__{name}__") for name in ("bound", "covariant", "contravariant")}
    identifier = cloudpickle._get_or_create_tracker_id(thing) if tracked else ""
    return rebuild_typing, (kind, arguments, options, identifier)


_NAMED_TYPES = {
    getattr(typing, name)
    for name in ("NewType", "ParamSpec", "TypeVarTuple", "TypeAliasType")
    if hasattr(typing, name)
}


def rebuild_typing(kind: Any, arguments: tuple[Any, ...], options: dict[str, Any], identifier: str) -> Any:
    """Make it, or return the one that came before under this identifier."""
    made = kind(*arguments, **options)
    if kind is typing.NewType:
        made.__module__ = "__main__"
    return cloudpickle._lookup_class_or_track(identifier, made) if identifier else made


def reduce_cached(function: Any) -> tuple[Any, ...]:
    """Reduce a ``functools.lru_cache``: the function and the parameters, an empty cache."""
    return _rebuild_cached, (function.__wrapped__, function.cache_parameters()), function.__dict__


def _rebuild_cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


DISPATCHER: types.CodeType = vars(functools)["singledispatch"](len).__code__
"""That of every function of ``functools.singledispatch``, whose cache of weak references cannot travel."""


def reduce_dispatcher(function: Any) -> tuple[Any, ...]:
    """Reduce a ``functools.singledispatch``: the functions by the type they are for."""
    return _rebuild_dispatcher, (tuple(function.registry.items()),)


def _rebuild_dispatcher(registry: tuple[tuple[type, Callable[..., Any]], ...]) -> Any:
    functions = dict(registry)
    dispatcher = functools.singledispatch(functions.pop(object))
    for cls, function in functions.items():
        dispatcher.register(cls, function)
    return dispatcher


def reduce_cached_property(descriptor: functools.cached_property[Any]) -> tuple[Any, ...]:
    """Reduce without its lock, which Python 3.11 still has."""
    return (
        functools.cached_property,
        (descriptor.func,),
        {name: value for name, value in vars(descriptor).items() if name != "lock"},
    )


def reduce_exception(error: BaseException) -> Any:
    """Reduce an exception whose class has a constructor of its own; `NotImplemented`: Python's way will do.

    Python's way calls the class with ``args``: what the constructor has passed on, not what it was called
    with.  So the constructor that it has passed them to is called, and attributes are put back.
    """
    cls = type(error)
    # that of our errors takes what it is given
    own = {name for base in _defined_in_python(cls) if base is not NbParallelError for name in vars(base)}
    if own.isdisjoint({"__init__", "__new__"}) or not own.isdisjoint(_OWN_REDUCTION):
        return NotImplemented
    form = error.__reduce__()
    if not isinstance(form, tuple) or cls in copyreg.dispatch_table or form[0] is not cls:
        return NotImplemented
    slots = [
        name
        for base in cls.__mro__
        if base is not BaseExceptionGroup  # whose members its constructor sets
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType) and name != "obj"  # of a failed look-up: anything
    ]
    members = {name: value for name in slots if (value := getattr(error, name, None)) is not None}
    return (rebuild_exception, (cls, error.args, members), *form[2:])


_OWN_REDUCTION = {"__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__"}


def _defined_in_python(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__ != "builtins"]


def rebuild_exception(
    cls: type[BaseException], args: tuple[Any, ...], members: dict[str, Any]
) -> BaseException:
    """Rebuild an exception without the constructor of its class."""
    builtin: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    error: BaseException = builtin.__new__(cls, *args)
    builtin.__init__(error, *args)
    for name, value in members.items():
        setattr(error, name, value)
    return error


SENTINELS: dict[int, str] = {
    id(getattr(dataclasses, name)): name
    for name in ("MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY")
    if hasattr(dataclasses, name)
}
"""Objects that are compared by identity: their names, by their ids; they travel as globals."""

_main_globals: dict[str, Any] | None = None
_predefined: Mapping[str, Any] = {}


def set_main_globals(namespace: dict[str, Any] | None, predefined: Mapping[str, Any] | None = None) -> None:
    """Make `namespace` the main globals of this process: functions sent from or to it share them.

    Parameters
    ----------
    namespace : dict or None
        The user's namespace on a rank; a rank calls this once.  None: this process has none.
    predefined : mapping, optional
        What every rank has under these names: it does not travel with functions.
    """
    global _main_globals, _predefined
    _main_globals, _predefined = namespace, predefined or {}


def current_main_globals() -> dict[str, Any] | None:
    """Return the namespace that `set_main_globals` was given."""
    return _main_globals


def is_predefined(name: str) -> bool:
    """Whether a name of this process's main globals is what every rank has under that name."""
    return _main_globals is not None and name in _predefined and _main_globals.get(name) is _predefined[name]


LOCK = threading.RLock()
"""Rebuilding a class and marking it complete is one step."""


def _placeholder(name: str) -> Callable[..., Any]:
    """Return what stands in the stream under a name of this module; the receiver has something else there."""

    def placeholder(*arguments: Any) -> NoReturn:
        raise InternalError(
            f"{name} is resolved by nbparallel.transfer.pickling.loads; do not use pickle.loads"
        )

    placeholder.__name__ = placeholder.__qualname__ = name
    return placeholder


rebuild_function = _placeholder("rebuild_function")
"""For `make_function` with the receiver's main globals."""
rebuild_class = _placeholder("rebuild_class")
"""For the receiver's way to make or find a class."""
set_class_state = _placeholder("set_class_state")
"""For the receiver's decision to complete a class."""
class_reference = _placeholder("class_reference")
"""For a class that was delivered before."""
attach = _placeholder("attach")
"""For a shared array."""
attach_private = _placeholder("attach_private")
"""For a shared array that the receiver maps copy-on-write."""
attach_storage = _placeholder("attach_storage")
"""For the storage of a tensor over a shared array."""
rebuild_tensor = _placeholder("rebuild_tensor")
"""For a tensor, which other streams of the same message may contain as well."""
