"""The first difference between ranks: which ranks hold other data than most, and where.

`assert_same` gets here once digests have differed.  Every rank works from what all have sent, so all of them
go through the same steps and raise the same error.  Of arrays only the chunks whose checksums differ travel,
at most `MAX_CHUNKS`.
"""

from __future__ import annotations

import copyreg
import hashlib
import types
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sequence, ValuesView
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.distributed.runtime.shared_arrays import AnyArray, as_plain_array
from nbparallel.errors import DifferentDataError, UnpicklableError, grouped, rank_list, with_article
from nbparallel.sharing.tensors import bits_name, readable_bits, shown_dtype
from nbparallel.transfer.pickle_format import checksum_buffer

# Flattening: a value as a list of leaves, each with a digest that is equal where the data are.
#
# Pickles would not do: they differ by the order of a dict's keys, by whether equal objects are one object,
# and by where copies of one class were made.  Every value stands before its parts, with their number: so two
# lists that differ first differ at a place which both have.

# Digests of arrays, and the elements in which two arrays differ, by bytes that are equal where values are.
#
# An array is read chunk by chunk, in its logical order, so that layout plays no part and what is copied
# stays in cache. Bytes say more than values in two places, which are evened out on request: a NaN has many
# bit patterns, and the gaps of structured and long double elements hold whatever was there before.

CHUNK = 1 << 20
"""Bytes: what differs is compared in pieces of this size, and only pieces that differ travel."""
DIGEST = 16
"""Bytes of one chunk's checksum."""
_X87_DIGITS, _X87_NBYTES = 63, 10
"""How numpy describes the long double of x86: 10 bytes of value, then a gap."""


def chunk_size(dtype: np.dtype[Any]) -> int:
    """Return how many elements of an array are one chunk."""
    return max(1, CHUNK // max(1, dtype.itemsize))


def chunk_of(array: AnyArray, number: int) -> AnyArray:
    """Return one chunk, flat and contiguous; a view if the array is contiguous."""
    count = chunk_size(array.dtype)
    start = number * count
    if array.flags.c_contiguous:
        return array.reshape(-1)[start : start + count]
    return np.asarray(array.flat[start : start + count])


def chunks(array: AnyArray) -> Iterator[AnyArray]:
    """Yield all chunks in order."""
    for number in range(-(-array.size // chunk_size(array.dtype))):
        yield chunk_of(array, number)


def checksums(array: AnyArray, *, exact: bool) -> bytes:
    """Return 16 bytes for each chunk; with `exact`, also NaN's bits and gaps make a difference."""
    if not array.dtype.itemsize:
        return b""
    found = []
    for chunk in chunks(array):
        octets = chunk.view(np.uint8) if exact else comparable(chunk)
        found.append(checksum_buffer(octets.reshape(-1).data))
    return b"".join(found)


def comparable(x: AnyArray) -> AnyArray:
    """Return the bytes of each element of a flat contiguous array, equal where the values are; (n, width)."""
    dtype, n = x.dtype, x.size
    if not (n and dtype.itemsize):
        return np.empty((n, 0), np.uint8)
    if dtype.names is not None:
        fields = [comparable(np.ascontiguousarray(x[name]).reshape(-1)) for name in dtype.names]
        return np.concatenate([np.empty((n, 0), np.uint8), *(f.reshape(n, -1) for f in fields)], axis=1)
    if dtype.kind in "fc":
        part = x.real.dtype if dtype.kind == "c" else dtype
        x = x.view(part)
        missing = np.isnan(x)
        if missing.any():
            x = np.where(missing, np.array(np.nan, part), x).astype(part, copy=False)
        octets = x.view(np.uint8).reshape(x.size, part.itemsize)
        if part.itemsize > _X87_NBYTES and np.finfo(part).nmant == _X87_DIGITS:
            octets = octets[:, :_X87_NBYTES]
        return np.ascontiguousarray(octets).reshape(n, -1)
    return x.view(np.uint8).reshape(n, dtype.itemsize)


@dataclass(slots=True)
class Differences:
    """Where two arrays of the same dtype and shape differ, as far as their chunks have been compared."""

    count: int = 0
    first: int = -1
    """Its index in the flat array."""
    here: str = ""
    there: str = ""
    apart: float = 0.0
    """The largest distance of two numbers that differ; NaN if one of them is no finite number."""

    def add(self, number: int, here: AnyArray, there: AnyArray) -> None:
        """Compare chunk `number` of both."""
        where = np.flatnonzero((comparable(here) != comparable(there)).any(axis=1))
        if not where.size:
            return
        if bits_name(here.dtype):
            here, there = readable_bits(here), readable_bits(there)
        if not self.count:
            self.first = number * chunk_size(here.dtype) + int(where[0])
            self.here, self.there = shown(here[where[0]]), shown(there[where[0]])
        self.count += where.size
        if here.dtype.kind in "fc":
            with np.errstate(all="ignore"):
                distance = np.abs(here[where] - there[where]).max()
            self.apart = max(self.apart, float(distance)) if np.isfinite(distance) else float("nan")


def shown(value: Any, limit: int = 60) -> str:
    """Return one element as people write it, cut to `limit` characters."""
    text = repr(value.item()) if isinstance(value, np.str_ | np.bytes_) else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


MAX_DEPTH = 150
"""Of containers within containers."""
_MANY = 16
"""A list of as many numbers of one kind is compared as an array."""
_SHORT = 50
"""A longer text is compared as an array of letters."""
_NUMBERS: dict[type, Any] = {float: np.float64, int: np.int64, bool: np.bool_}


class Leaf:
    """One thing that a value holds.

    Attributes
    ----------
    path : str
        Where, as one would write it behind the value's name: ``['w'][0].bias``.
    array : array or None
        If it is compared by its elements.
    checksums : bytes
        Of the array's chunks.
    digest : bytes
        Equal where path and data are.
    """

    __slots__ = ("_description", "_value", "array", "checksums", "digest", "path")

    def __init__(
        self, path: str, value: Any, description: str, content: bytes = b"", array: AnyArray | None = None
    ) -> None:
        self.path, self._value, self._description = path, value, description
        self.array, self.checksums = array, content if array is not None else b""
        head = f"{path}\0{description}\0".encode("utf-8", "surrogatepass")
        self.digest = hashlib.blake2b(head + content, digest_size=DIGEST).digest()

    def __str__(self) -> str:
        """Return what it is: type and value, or form."""
        if isinstance(self._value, str | bytes | bytearray | int | float | complex | np.generic):
            return f"{self._description} {_brief(self._value)}"
        return self._description


def digest_of(leaves: Iterable[Leaf]) -> bytes:
    """Return one digest of all."""
    return hashlib.blake2b(b"".join(leaf.digest for leaf in leaves), digest_size=DIGEST).digest()


def flatten(x: Any, *, exact: bool) -> list[Leaf]:
    """Return what `x` holds.

    Parameters
    ----------
    exact : bool
        Compare the bytes of arrays as they are, which is faster; else NaNs are equal, and gaps mean nothing.

    Raises
    ------
    UnpicklableError
        Something inside cannot be taken apart: it cannot be pickled either.
    """
    return list(_Walk(exact=exact).of(x, ""))


def _brief(value: Any) -> str:
    if isinstance(value, np.generic):
        return shown(value)
    if isinstance(value, int) and value.bit_length() > 200:
        return f"of {value.bit_length()} bits"
    return repr(value)


class _Walk:
    """One way through a value; `_open` are the containers around the place where it is."""

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._open: list[int] = []

    def of(self, x: Any, path: str) -> Iterator[Leaf]:
        content = _plain(x)
        array = None
        if content is None:
            array = as_plain_array(np.asarray(x) if isinstance(x, np.generic) else x)
        if type(x) in (str, bytes, bytearray) and len(x) > _SHORT:
            records = np.frombuffer(x, np.uint8) if type(x) is not str else np.array([x]).view("U1")
            name = f"{type(x).__name__} of {len(x)}"
            yield Leaf(path, None, name, checksums(records, exact=self._exact), records)
        elif content is not None:
            yield Leaf(path, x, _kind(x), content)
        elif array is not None:
            yield self._array(path, x, array)
        elif id(x) in self._open:
            up = len(self._open) - self._open.index(id(x))
            yield Leaf(path, None, f"the container {up} above it")
        elif len(self._open) >= MAX_DEPTH:
            raise UnpicklableError(f"the value is nested more than {MAX_DEPTH} deep, and cannot be compared")
        else:
            self._open.append(id(x))
            yield from self._container(x, path)
            self._open.pop()

    def _array(self, path: str, x: Any, array: AnyArray) -> Leaf:
        description = shown_dtype(array.dtype)
        if isinstance(x, np.ndarray):
            description = f"{description} array of shape {array.shape}"
        elif not isinstance(x, np.generic):
            description = f"{description} {type(x).__name__} of shape {array.shape}"
        return Leaf(path, x, description, checksums(array, exact=self._exact), array)

    def _container(self, x: Any, path: str) -> Iterator[Leaf]:
        kind = type(x)
        if kind in (list, tuple):
            yield Leaf(path, None, f"{kind.__name__} of {len(x)}")
            numbers = _as_array(x)
            if numbers is not None:
                yield Leaf(path, None, f"{kind.__name__} of {type(x[0]).__name__}",
                           checksums(numbers, exact=self._exact), numbers)  # fmt: skip
                return
            for i, value in enumerate(x):
                yield from self.of(value, f"{path}[{i}]")
        elif kind is dict:
            yield from self._dict(x, path)
        elif kind is types.MappingProxyType:
            yield from self._dict(dict(x), path, "mappingproxy")
        elif isinstance(
            x, KeysView | ValuesView | ItemsView
        ):  # of keys, values or items: what is in it, in order
            yield Leaf(path, None, f"{kind.__name__} of {len(x)}")
            yield from self.of(list(x), path)
        elif kind in (set, frozenset):
            parts = sorted(digest_of(self.of(value, "")) for value in x)
            yield Leaf(path, None, f"{kind.__name__} of {len(x)}", b"".join(parts))
        elif kind is np.ndarray:  # of Python objects
            yield Leaf(path, None, f"{x.dtype} array of shape {x.shape}")
            for index, value in np.ndenumerate(x):
                yield from self.of(value, f"{path}{list(index)}")
        else:
            yield from self._object(x, path)

    def _dict(self, x: dict[Any, Any], path: str, name: str = "dict") -> Iterator[Leaf]:
        keys = [(digest_of(self.of(key, "")), key, value) for key, value in x.items()]
        if all(type(key) is str for key in x):
            keys.sort(key=lambda entry: entry[1])
        else:
            keys.sort(key=lambda entry: entry[0])
        names = [_key(key) for _, key, _ in keys]
        listed = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        yield Leaf(path, None, f"{name} of {len(x)} with {listed}" if x else f"{name} of 0",
                   b"".join(digest for digest, _, _ in keys))  # fmt: skip
        for shown_key, (_, _, value) in zip(names, keys, strict=True):
            yield from self.of(value, f"{path}[{shown_key}]")

    def _object(self, x: Any, path: str) -> Iterator[Leaf]:
        """Take an object apart as pickle would: what makes it, from what, and its state."""
        cls = type(x)
        name = f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")
        try:
            reduce = copyreg.dispatch_table.get(cls)
            reduced = x.__reduce_ex__(4) if reduce is None else reduce(x)
        except Exception as error:
            where = f" at {path}" if path else ""
            raise UnpicklableError(
                f"{with_article(name)}{where} cannot be compared between ranks: {error}"
            ) from error
        if isinstance(reduced, str):
            yield Leaf(path, None, f"{name} {reduced}")
            return
        maker, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        attributes = _attributes(state)
        names = sorted(map(str, attributes))
        listed = f" with {', '.join(names[:8])}" if names else ""
        yield Leaf(path, None, name + listed, repr(names).encode("utf-8", "backslashreplace"))
        yield from self.of(maker, path)
        if isinstance(x, tuple):
            yield from self.of(tuple(x), path)
        else:
            yield from self.of(tuple(arguments), f"{path}(arguments)")
        for key in sorted(attributes, key=str):
            yield from self.of(attributes[key], f"{path}.{key}")
        if not attributes:
            yield from self.of(state, f"{path}(state)")
        yield from self.of(None if items is None else list(items), path)
        if pairs is not None:
            entries = list(pairs)
            yield Leaf(path, None, f"{name} of {len(entries)}")
            for key, value in entries:  # in order: that of an OrderedDict counts
                yield from self.of(key, path)
                yield from self.of(value, f"{path}[{_key(key)}]")


def _attributes(state: Any) -> dict[Any, Any]:
    """Return the attributes in an object's state, as pickle knows it: its own, and those in slots."""
    if type(state) is dict:
        return state
    if (
        type(state) is tuple
        and len(state) == 2
        and type(state[1]) is dict
        and type(state[0]) in (dict, types.NoneType)
    ):
        return {**(state[0] or {}), **state[1]}
    return {}


_CONTENTS: dict[type, Callable[[Any], bytes]] = {
    int: lambda x: hex(x).encode(),
    float: lambda x: b"nan" if x != x else x.hex().encode(),
    complex: lambda x: b"%s %s" % (_CONTENTS[float](x.real), _CONTENTS[float](x.imag)),
    str: lambda x: x.encode("utf-8", "surrogatepass"),
    types.ModuleType: lambda x: str(x.__name__).encode(),
    **dict.fromkeys((bytes, bytearray), bytes),
    **dict.fromkeys(
        (bool, types.NoneType, types.EllipsisType, types.NotImplementedType), lambda x: repr(x).encode()
    ),
}
"""Of values without parts, by type."""


def _plain(x: Any) -> bytes | None:
    """Return the content of a value without parts, None if `x` is something else."""
    kind = type(x)
    if kind in _CONTENTS:
        return _CONTENTS[kind](x)
    if isinstance(x, type) or (
        kind is types.BuiltinFunctionType and isinstance(x.__self__, types.ModuleType | None)
    ):
        return f"{x.__module__}.{x.__qualname__}".encode()
    if kind is types.FunctionType:
        code = x.__code__
        constants = [_plain(constant) for constant in code.co_consts]
        said = repr((x.__module__, x.__qualname__, code.co_code, code.co_names, constants))
        return said.encode("utf-8", "backslashreplace")
    return repr(x).encode() if isinstance(x, np.dtype) else None


def _kind(x: Any) -> str:
    """Return what a value without parts is, in words."""
    if x is None:
        return "None"
    if isinstance(x, type):
        return f"the class {x.__qualname__}"
    return f"the function {x.__qualname__}" if callable(x) else type(x).__name__


def _as_array(x: Any) -> AnyArray | None:
    """Return a long list of equal numbers as an array."""
    kinds = set(map(type, x))
    dtype = _NUMBERS.get(kinds.pop()) if len(x) >= _MANY and len(kinds) == 1 else None
    with suppress(OverflowError):
        return None if dtype is None else np.array(x, dtype)
    return None


def _key(key: Any) -> str:
    text = (
        _brief(key)
        if type(key) in (str, int, float, bool, bytes, types.NoneType)
        else f"<{type(key).__name__}>"
    )
    return text if len(text) <= _SHORT else text[: _SHORT - 1] + "…"


Tell = Callable[[Any], list[Any]]
"""Sends this rank's value to all, and returns the values of all ranks, in the order of the group."""
MAX_GROUPS = 8
"""Of ranks that are described; the others are only named."""
MAX_CHUNKS = 16
"""Chunks of one array that are sent to be compared; differing elements in further ones are not counted."""


@dataclass(slots=True)
class DifferingRanks:
    """Members that hold the same as each other, and not what the reference does."""

    members: list[int]
    leaf: int
    """The first that differs."""
    chunks: Sequence[int] = ()
    """The first `MAX_CHUNKS` of its chunks that differ, if it is an array of the same form on both sides."""
    partial: bool = False
    """Whether further ones differ."""


def find_difference(x: Any, ranks: Sequence[int], index: int, tell: Tell) -> DifferentDataError | None:
    """Return what is to be raised on every rank, None if all hold the same after all.

    Parameters
    ----------
    ranks : sequence of int
        The members of the group.
    index : int
        Which of them this is.
    """
    mine = flatten(x, exact=False)
    all_digests: list[bytes] = tell(b"".join(leaf.digest for leaf in mine))
    groups = grouped((digests, member) for member, digests in enumerate(all_digests))
    if len(groups) == 1:
        return None
    same = max(groups.values(), key=len)
    others = [
        DifferingRanks(members, _differing(all_digests[same[0]], all_digests[members[0]])[0])
        for members in groups.values()
        if members is not same
    ]
    described = others[:MAX_GROUPS]
    places = {other.leaf for other in described}
    leaves = tell({i: _described(mine[i]) for i in places if i < len(mine)})
    found = _compare(mine, described, same[0], index, leaves, tell)
    texts = [_text(other, found.get(other.members[0]), leaves, same, ranks) for other in described]
    if len(others) > len(described):
        rest = [ranks[i] for other in others[MAX_GROUPS:] for i in other.members]
        texts.append(f"so {'do' if len(rest) > 1 else 'does'} {rank_list(rest)}")
    agree = f"{rank_list(ranks[i] for i in same)} agree; " if len(same) > 1 else ""
    return DifferentDataError(
        f"not all ranks hold the same data: {agree}{'; '.join(texts)}",
        groups=tuple(tuple(ranks[i] for i in part) for part in [same, *(other.members for other in others)]),
    )


def _differing(digests: bytes, others: bytes) -> list[int]:
    """Return which digests differ."""
    starts = range(0, max(len(digests), len(others)), DIGEST)
    return [i // DIGEST for i in starts if digests[i : i + DIGEST] != others[i : i + DIGEST]]


def _described(leaf: Leaf) -> tuple[str, str, Any, bytes]:
    """Return path, words, form of the array, and the checksums of its chunks."""
    array = leaf.array
    return leaf.path, str(leaf), None if array is None else (str(array.dtype), array.shape), leaf.checksums


def _compare(
    mine: list[Leaf],
    others: list[DifferingRanks],
    reference: int,
    index: int,
    leaves: list[dict[int, tuple[str, str, Any, bytes]]],
    tell: Tell,
) -> dict[int, Differences]:
    """Return, by the first member of each other group, where its elements differ from the reference's."""
    for other in others:
        _, _, form, checksums = leaves[reference].get(other.leaf, ("", "", None, b""))
        _, _, its_form, its_checksums = leaves[other.members[0]].get(other.leaf, ("", "", None, b""))
        if form is not None and form == its_form:
            differing = _differing(checksums, its_checksums)
            other.chunks, other.partial = differing[:MAX_CHUNKS], len(differing) > MAX_CHUNKS
    others = [other for other in others if other.chunks]
    if not others:
        return {}

    arrays = {other.leaf: np.asarray(mine[other.leaf].array) for other in others if other.leaf < len(mine)}
    sent = {
        (other.leaf, number): chunk_of(arrays[other.leaf], number)
        for other in others
        for number in other.chunks
        if index == reference
    }
    received: dict[tuple[int, int], AnyArray] = tell(sent)[reference]
    found = Differences()
    for other in others:
        for number in other.chunks if index == other.members[0] else ():
            found.add(number, chunk_of(arrays[other.leaf], number), received[other.leaf, number])
    results: list[Differences] = tell(found)
    return {other.members[0]: results[other.members[0]] for other in others}


def _text(
    other: DifferingRanks,
    found: Differences | None,
    leaves: list[dict[int, tuple[str, str, Any, bytes]]],
    same: list[int],
    ranks: Sequence[int],
) -> str:
    """Return how one group of ranks differs from the reference."""
    nothing = ("", "nothing", None, b"")
    path, there, form, _ = leaves[same[0]].get(other.leaf, nothing)
    its_path, here, _, _ = leaves[other.members[0]].get(other.leaf, nothing)
    names = rank_list(ranks[i] for i in other.members)
    several = len(other.members) > 1
    reference = f" from {rank_list([ranks[same[0]]])}" if len(same) == 1 else ""
    where = f" at {path or its_path}" if path or its_path else ""
    if found is None:
        return f"{names} differ{'' if several else 's'}{reference}{where}: {here} instead of {there}"
    if not found.count:
        return (
            f"{names} differed{reference}{where}, and no more when compared again: "
            "another process writes to that memory"
        )
    shape = form[1]
    place = [int(i) for i in np.unravel_index(found.first, shape)]
    where = f" at {path}{place}" if path and place else f" at {place}" if place else where
    size = int(np.prod(shape, dtype=object))
    apart = f", at most {found.apart:.2g} apart" if 0 < found.apart < float("inf") else ""
    least = "at least " if other.partial else ""
    extent = f" ({least}{found.count} of {size} elements{apart})" if size > 1 else ""
    verb = "differ" if several else "differs"
    return f"{names} {verb}{reference}{where}: {found.here} instead of {found.there}{extent}"
