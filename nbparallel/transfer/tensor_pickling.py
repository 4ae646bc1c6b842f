"""Reducers for torch's tensors: their memory beside the stream, or by handle if every rank may write it.

A storage travels once in each stream, and every tensor over it is rebuilt as the view that it was.  What is
no dense tensor on the CPU, and what has state of its own (a subclass, attributes, hooks), torch takes apart;
the storages inside come back here.  torch's reducers would copy each storage into the stream, several times.

Note [ties]
-----------
Names that share a tensor, such as a model and its optimiser, are pickled each by itself.  A stream numbers
its tensors (`pickling.Serialised.tensors`); a sender of several streams at once can say which of them are one
tensor, and the receiver makes one (`Ties`).
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from nbparallel.sharing import tensor_storage
from nbparallel.transfer import definitions
from nbparallel.transfer.blobs import ArrayStore
from nbparallel.transfer.pickle_format import LARGE

if TYPE_CHECKING:
    import torch

Reduced: TypeAlias = Any
"""What ``__reduce_ex__`` returns, or `NotImplemented`."""
Reducer: TypeAlias = Callable[[list[Any], ArrayStore, Any], Reduced]
"""Called with the stream's tensors so far, the store, and the object."""


class Ties:
    """Tensors that several streams of one message have in common.

    Parameters
    ----------
    tied : mapping of int to int
        Number of a tensor in one stream -> its number in the whole message.
    made : dict
        Tensors that were made so far, by that number: one for all streams.
    """

    def __init__(self, tied: Mapping[int, int], made: dict[int, Any]) -> None:
        self._tied, self._made = tied, made

    def rebuild(self, number: int, *form: Any) -> torch.Tensor:
        """Return a tensor of a stream: the one that another stream has made, or a new one."""
        shared = self._tied.get(number)
        if shared is None:
            return _rebuild(*form)
        if shared not in self._made:
            self._made[shared] = _rebuild(*form)
        return self._made[shared]


_NONE: Mapping[type, Reducer] = MappingProxyType({})


def find_reducers() -> Mapping[type, Reducer]:
    """Return the reducers by class of the object; none before the user has imported torch."""
    return _reducers() if "torch" in sys.modules else _NONE


@cache
def _reducers() -> Mapping[type, Reducer]:
    import torch

    return {
        torch.Tensor: _reduce_tensor,
        torch.nn.Parameter: _reduce_tensor,
        torch.UntypedStorage: _reduce_storage,
        torch.storage.TypedStorage: _reduce_typed,
    }


def _reduce_tensor(tensors: list[Any], store: ArrayStore, tensor: Any) -> Reduced:
    if (
        not tensor_storage.is_dense(tensor)
        or tensor.__dict__
        or tensor._backward_hooks
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return NotImplemented
    number = len(tensors)
    tensors.append(tensor)
    return definitions.rebuild_tensor, (
        number,
        type(tensor),
        tensor.untyped_storage(),
        tensor.dtype,
        tensor.storage_offset(),
        tuple(tensor.size()),
        tensor.stride(),
        tensor.requires_grad,
    )


def _rebuild(
    kind: Any, storage: Any, dtype: Any, offset: int, size: Any, stride: Any, requires_grad: bool
) -> torch.Tensor:
    import torch

    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
    if kind is not torch.Tensor:
        return kind(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _reduce_storage(tensors: list[Any], store: ArrayStore, storage: Any) -> Reduced:
    if storage.device.type != "cpu":
        return NotImplemented
    shared = tensor_storage.find_shared(storage, store)
    if shared is not None:
        return tensor_storage.shared_storage, (shared,)
    content = tensor_storage.storage_bytes(storage)
    if content.nbytes < LARGE:
        return _small_storage, (content.tobytes(),)
    return tensor_storage.private_storage, (pickle.PickleBuffer(content.data),)


def _small_storage(content: bytes) -> Any:
    # memory of torch's own, which it can resize
    return tensor_storage.private_storage(bytearray(content)).clone()


def _reduce_typed(tensors: list[Any], store: ArrayStore, storage: Any) -> Reduced:
    return _typed_storage, (storage._untyped_storage, storage.dtype)


def _typed_storage(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
