"""Kinds of objects that may be the last to look at an array; ranks run this file's source."""

import ctypes
import functools
import types

import numpy as np


def by_traceback(x):
    """Hold an array in the frame of a function that raised."""

    def fail(inside):
        raise ValueError(str(len(inside)))

    try:
        fail(x[1:])
    except ValueError as error:
        return error.with_traceback(error.__traceback__.tb_next)


def by_generator(x):
    """Hold an array in a generator that has begun."""

    def count(inside):
        for value in inside:
            yield float(value)

    running = count(x[1:])
    next(running)
    return running


def by_closure(x):
    """Hold an array in a cell of a function."""
    return lambda: x[1:].sum()


def by_tensor(x):
    """Hold an array in a view of a tensor of it."""
    import torch

    return torch.from_numpy(x).reshape(100, -1)[1:].t()


HOLDERS = {
    "view of a view": lambda x: x[1:][::-1].reshape(-1, 1),
    "memoryview": lambda x: memoryview(x)[1:],
    "memoryview of bytes": lambda x: memoryview(x).cast("B")[8:],
    "frombuffer": lambda x: np.frombuffer(memoryview(x)[1:], "i2"),
    "view of another dtype": lambda x: x.view("u1")[5:],
    "list": lambda x: [[x[1:]]],
    "attribute": lambda x: types.SimpleNamespace(deep=types.SimpleNamespace(x=x[1:])),
    "bound method": lambda x: x[1:].sum,
    "partial": lambda x: functools.partial(np.add, x[1:]),
    "iterator": lambda x: iter(x[1:]),
    "masked array": lambda x: np.ma.masked_array(x[1:]),
    "subclass": lambda x: x[1:].view(np.recarray),
    "ctypes": lambda x: (ctypes.c_double * 10).from_buffer(x),
    "dlpack": lambda x: np.from_dlpack(x)[1:],
    "capsule": lambda x: x.__dlpack__(),
    "generator": by_generator,
    "traceback": by_traceback,
    "closure": by_closure,
    "cycle": lambda x: (lambda made: made.append(made) or made)([x[1:]]),
    "tensor": by_tensor,
}
