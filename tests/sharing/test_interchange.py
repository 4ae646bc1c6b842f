"""Interchange without a copy: numpy, torch, pickle and buffers take a shared array as any other."""

import collections
import copy
import ctypes
import functools
import importlib.util
import io
import pickle
import struct
import types

import IPython
import numpy as np
import pytest

import nbparallel as nbp

torchs_threads = pytest.mark.may_leave("thread", reason="torch starts its pool of threads with its first sum")
torch_only = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


every_strategy = pytest.mark.parametrize(
    "strategy", ["file_descriptor", "file_system", "file_region", "mmap"]
)


def make(strategy):
    """Return a shared array; no fixture, which pytest would keep beyond the test."""
    return nbp.share(np.arange(100_000.0), strategy=strategy)


def same_memory(x, other):
    """Return whether a write through each is seen through the other."""
    x[3] = -1
    if float(other[3]) != -1:
        return False
    other[4] = -2
    return float(x[4]) == -2


@every_strategy
def test_numpy_takes_it_without_a_copy(strategy):
    """`asarray`, `from_dlpack`, `frombuffer` and the array interface see the same memory, known as shared."""
    x = make(strategy)
    assert type(x) is np.ndarray
    assert np.asarray(x) is x

    class Holder:
        __array_interface__ = x.__array_interface__
        keep = x

    views = [
        np.from_dlpack(x),
        np.frombuffer(x),
        np.frombuffer(memoryview(x)[8:], count=1000),
        np.asarray(Holder()),
        np.lib.stride_tricks.as_strided(x, (10, 10), (8, 80)),
        np.ctypeslib.as_array(x.ctypes.data_as(ctypes.POINTER(ctypes.c_double)), x.shape),
        np.asarray(memoryview(x)),
        x.reshape(100, 1000).T[5:][::-1],
        x.view("u1"),
        x.view(np.recarray),
        np.ma.masked_array(x).data,
    ]
    for view in views:
        assert np.shares_memory(view, x)
        assert nbp.is_shared(view), type(view)
    if np.from_dlpack(x).flags.writeable:  # from numpy 2.1 on
        assert same_memory(x, np.from_dlpack(x))


@every_strategy
@torch_only
@torchs_threads
def test_torch_takes_it_without_a_copy(strategy):
    """`from_numpy`, `from_dlpack` and `as_tensor` see the same memory, and so does what torch gives back."""
    x = make(strategy)
    import torch

    for tensor in (torch.from_numpy(x), torch.from_dlpack(x), torch.as_tensor(x), torch.from_numpy(x[:9])):
        assert same_memory(x, tensor)
        assert nbp.is_shared(tensor.numpy())
        assert nbp.is_shared(np.from_dlpack(tensor))
        assert tensor.data_ptr() == x.ctypes.data
    tensor = torch.from_numpy(x).view(1000, 100).t()[::2]
    assert np.shares_memory(tensor.numpy(), x)
    tensor.add_(1)
    assert x[0] == 1
    assert not nbp.is_shared((tensor + 1).numpy())
    assert nbp.is_shared(tensor)
    assert not nbp.is_shared(tensor.clone().numpy())


@every_strategy
def test_the_buffer_protocol(strategy, tmp_path):
    """memoryview, `struct`, files and `ctypes` read and write it in place."""
    x = make(strategy)
    view = memoryview(x)
    assert (view.format, view.shape, view.readonly) == ("d", x.shape, False)
    struct.pack_into("d", view.cast("B"), 8, 42.0)
    assert x[1] == 42
    with open(tmp_path / "raw", "wb") as file:
        file.write(view)
    x[:] = 0
    with open(tmp_path / "raw", "rb") as file:
        assert file.readinto(view.cast("B")) == x.nbytes
    assert x[1] == 42
    (ctypes.c_double * 3).from_buffer(x)[2] = 5.0
    assert x[2] == 5
    assert io.BytesIO(view).getvalue() == x.tobytes()


@every_strategy
def test_what_numpy_computes_is_private(strategy):
    """Results, copies and gathered elements are ordinary arrays; in-place operations and `out=` are not."""
    x = make(strategy)
    private = [
        x + 1,
        np.sqrt(x),
        x.copy(),
        np.array(x),
        x[[1, 2, 3]],
        x[x > 5],
        x.astype("f4"),
        x.flatten(),
        np.concatenate([x, x]),
        np.zeros_like(x),
        np.empty_like(x),
        x.sum(keepdims=True),
        copy.copy(x),
        copy.deepcopy(x),
        copy.deepcopy({"a": [x]})["a"][0],
        np.sort(x),
        np.broadcast_to(x[:1].copy(), (3,)),
    ]
    for result in private:
        assert not nbp.is_shared(result)
    assert nbp.is_shared(np.add(x, 1, out=x))
    y = x
    y += 1
    y.sort()
    assert y is x
    for scalar in (x[0], x.sum(), 3.0, None, "x", [x], {"x": x}):
        assert not nbp.is_shared(scalar)


@every_strategy
def test_an_ordinary_pickle_is_a_copy(strategy):
    """`pickle` knows no session: its bytes hold the values, and loading makes a private array."""
    x = make(strategy)
    x[7] = 70
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps({"a": [x, x[5:10]]}, protocol)
        assert len(data) > x.nbytes
        back = pickle.loads(data)["a"]
        assert type(back[0]) is np.ndarray
        assert np.array_equal(back[0], x)
        assert back[1][2] == 70
        assert not nbp.is_shared(back[0])
        assert back[0].flags.writeable
    buffers = []
    data = pickle.dumps(x, 5, buffer_callback=buffers.append)
    assert nbp.is_shared(pickle.loads(data, buffers=buffers)), "out of band nothing is copied"


CHECK = """
def arrays_in(value, depth=0):
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif callable(value) and getattr(value, "__closure__", None):
        value = [cell.cell_contents for cell in value.__closure__]
    elif isinstance(value, functools.partial):
        value = [*value.args, *value.keywords.values()]
    elif not isinstance(value, (list, tuple, set, collections.deque)):
        value = list(vars(value).values())
    return [found for part in value for found in arrays_in(part)]
"""


def wrapped(x):
    """Return objects that hold an array or views of it, by what they are called."""

    def closure():
        return x.sum()

    looped = [x]
    looped.append({"me": x[1:]})
    return {
        "dict": {"a": {"b": [x, (x[1:], x[::-2])]}},
        "namespace": types.SimpleNamespace(deep=types.SimpleNamespace(x=x)),
        "closure": closure,
        "partial": functools.partial(np.add, x, out=x[:0]),
        "deque": collections.deque([[x]]),
        "twice": [x, x, x[2:3]],
        "looped": looped,
        "object array": [np.array([None, 1], object), x],
    }


@pytest.mark.slow
@pytest.mark.parametrize("way", ["name", "call", "push", "rank to rank"])
def test_inside_any_object_the_handle_travels(ranks, way):
    """In dicts, closures, partials and nested lists an array arrives as the same memory, on every way."""
    x = nbp.zeros(100_000)
    value = wrapped(x)
    names = {"np": np, "nbp": nbp, "functools": functools, "collections": collections}
    exec(CHECK, names)
    if way == "name":
        ranks.run("got = value", namespace={**names, "value": value})
    elif way == "call":
        ranks.call(lambda got: IPython.get_ipython().push({"got": got}), value)
    elif way == "push":
        ranks.push(got=value)
    else:
        cell = "if rank == 0: send(value, 1); got = value\nelse: got = recv(src=0)"
        ranks.run(cell, namespace={**names, "value": value})
    cell = """
kinds = {}
for at, (kind, part) in enumerate(got.items()):
    found = [a for a in arrays_in(part) if a.size and a.dtype == float]
    found[0][10 * rank + at] = at + 1
    kinds[kind] = len({nbp.sharing.current_store().location(a).segment for a in found})
kinds
"""
    assert ranks.run(cell, namespace=names).values == [dict.fromkeys(value, 1)] * 2
    assert x[: len(value)].tolist() == x[10 : 10 + len(value)].tolist() == list(range(1, len(value) + 1))
    ranks.run("del got, found, part; globals().pop('value', None); None")


@pytest.fixture(scope="module")
def ranks():
    """Start two ranks for all tests."""
    with nbp.Session(2) as session:
        session.run("pass", namespace={})
        yield session


def test_a_subclass_with_an_interface_of_its_own_is_looked_at_as_an_array():
    """Where its bytes lie is numpy's to say: what a class makes of the protocol does not matter."""

    class Odd(np.ndarray):
        @property
        def __array_interface__(self):
            raise AttributeError("not mine")

    x = nbp.zeros(10)
    assert nbp.is_shared(x.view(Odd))
    assert not nbp.is_shared(np.zeros(10).view(Odd))
