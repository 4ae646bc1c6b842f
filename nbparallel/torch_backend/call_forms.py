"""The forms in which torch's group object is called: lists and options, or what a person writes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOptions, Work

_OPTIONS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def one_tensor(count: int, *further: str) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Give an operation torch's form for users too: tensors without a list around them, ``allreduce(x, op)``.

    Its own form has `count` lists, one for each tensor of a call, and options; more than one tensor is
    refused, since backends differ in what that means.  `further` are the arguments after the tensors.
    """

    def decorate(method: Callable[..., Work]) -> Callable[..., Work]:
        name = method.__name__

        @functools.wraps(method)
        def call(self: Any, *args: Any, **named: Any) -> Work:
            values, rest = args[:count], args[count:]
            if any(isinstance(value, torch.Tensor) for value in values):
                values = tuple([value] for value in values)
            for value in values:
                if len(value) > 1:
                    raise ValueError(f"{name} takes one tensor in a call, not {len(value)}: call it for each")
            if named or (rest and not hasattr(rest[0], "timeout")):
                given = dict(zip((*further, "timeout"), rest, strict=False), **named)
                rest = (given.pop("opts", None) or ReduceOptions(),)
                for key, option in given.items():
                    if option is not None:
                        setattr(rest[0], _OPTIONS[key], option)
            return method(self, *values, *rest)

        return call

    return decorate
