"""Reducers for torch's tensors: their memory beside the stream, or by handle if every rank may write it.

A storage travels once in each stream, and every tensor over it is rebuilt as the view that it was.  What is
no dense tensor on the CPU, and what has state of its own (a subclass, attributes, hooks), torch takes apart;
the storages inside come back here.  torch's reducers would copy each storage into the stream, several times.

Note [ties]
-----------
Names that share a tensor, such as a model and its optimiser, are pickled each by itself.  A stream numbers
its tensors (`pickling.Serialised.tensors`); a sender of several streams can say which of them are one
tensor, and the receiver makes one (`Ties`).
"""

from __future__ import annotations

import copyreg
import pickle
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from nbparallel.sharing import Store, tensor_storage
from nbparallel.transfer import definitions
from nbparallel.transfer.pickle_format import LARGE, CommonCopies
from nbparallel.wire.name_updates import ArrayHandle

if TYPE_CHECKING:
    import torch

Reduced: TypeAlias = Any
"""What ``__reduce_ex__`` returns, or `NotImplemented`."""


class TensorStream(Protocol):
    """The pickle stream into which tensors go."""

    tensors: list[Any]
    share_large: bool | CommonCopies
    store: Store
    broker: Any

    def attach(self, array: Any, handle: ArrayHandle, rebuild: Callable[..., Any]) -> Reduced:
        """Return what a shared array is rebuilt from, by one of the placeholders of `definitions`."""


Reducer: TypeAlias = Callable[[TensorStream, Any], Reduced]


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


class TensorReducers:
    """Takes apart what torch has."""

    def __init__(self) -> None:
        import torch

        self.by_class: dict[type, Reducer] = {  # the classes themselves
            torch.Tensor: _reduce_tensor,
            torch.nn.Parameter: _reduce_tensor,
            torch.UntypedStorage: _reduce_storage,
            torch.storage.TypedStorage: _reduce_typed,
        }
        self._module_class = module = torch.nn.Module
        blank = module.__new__(module)
        blank.__setstate__({})
        self._filled_in: dict[str, Any] = dict(blank.__dict__)
        self._own_ways = [(name, getattr(module, name)) for name in _WAYS if hasattr(module, name)]

    def reduce(self, stream: TensorStream, obj: Any) -> Reduced:
        """Return what an object of none of these classes is rebuilt from, if it is one of torch's."""
        return self._reduce_module(obj) if isinstance(obj, self._module_class) else NotImplemented

    def _reduce_module(self, module: Any) -> Reduced:
        """Leave out what `Module.__setstate__` fills in, a dozen empty dictionaries: a third of the time."""
        cls = type(module)
        if any(getattr(cls, name) is not way for name, way in self._own_ways) or hasattr(cls, "__slots__"):
            return NotImplemented
        fills = self._filled_in
        state = {
            name: value
            for name, value in module.__getstate__().items()
            if value or name not in fills or type(value) is not type(fills[name])
        }
        return copyreg.__newobj__, (cls,), state  # type: ignore[attr-defined]  # typeshed lacks it


_WAYS = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__new__")
"""Methods of a module's class that decide how it is pickled."""


def find_reducers() -> TensorReducers | None:
    """Return the reducers of this process; None before the user has imported torch."""
    return _reducers() if "torch" in sys.modules else None


_reducers = cache(TensorReducers)


def _reduce_tensor(stream: TensorStream, tensor: Any) -> Reduced:
    if not tensor_storage.is_dense(tensor) or tensor.__dict__ or tensor._backward_hooks:
        # what torch registers for processes loses the scale of a quantised tensor, and attributes
        own = not tensor.is_cpu or tensor.is_nested or tensor.layout is not sys.modules["torch"].strided
        return NotImplemented if own else tensor.__reduce_ex__(5)
    number = len(stream.tensors)
    stream.tensors.append(tensor)
    return definitions.rebuild_tensor, (
        number,
        type(tensor),
        tensor.untyped_storage(),
        tensor.dtype,
        tensor.storage_offset(),
        tuple(tensor.size()),
        tensor.stride(),
        tensor.requires_grad,
        (tensor.is_conj(), tensor.is_neg()),
    )


def _rebuild(
    kind: Any,
    storage: Any,
    dtype: Any,
    offset: int,
    size: Any,
    stride: Any,
    requires_grad: bool,
    signs: tuple[bool, bool],
) -> torch.Tensor:
    """Return the tensor; `signs`: whether its memory holds the conjugate, or the negative, of its values."""
    import torch

    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
    conjugate, negative = signs
    if conjugate:
        tensor = tensor.conj()
    if negative:
        tensor = torch._neg_view(tensor)
    if kind is not torch.Tensor:
        return kind(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _reduce_storage(stream: TensorStream, storage: Any) -> Reduced:
    if storage.device.type != "cpu":  # torch's own way cannot load what it has written: it misses a dtype
        return _storage_on, (str(storage.device), storage.cpu())
    known = storage.__dict__.get(_SENT)
    if known is not None and known[0] == _sent_to(stream):
        return stream.attach(known[1], known[2], definitions.attach_storage)
    content = tensor_storage.storage_bytes(storage)
    shared = tensor_storage.find_shared(storage, stream.store, content)
    if shared is not None:
        handle = stream.store.handle(shared, broker=stream.broker, writable=None)
        if handle is not None:
            if stream.broker is not None and tensor_storage.OURS in storage.__dict__:
                setattr(storage, _SENT, (_sent_to(stream), shared, handle))
            return stream.attach(shared, handle, definitions.attach_storage)
    if content.nbytes < LARGE:
        return _small_storage, (content.tobytes(),)
    if stream.share_large:
        copy = stream.store.share(content, for_all=True)
        handle = stream.store.handle(copy, broker=stream.broker, writable=True)
        if handle is not None:
            return stream.attach(copy, handle, definitions.attach_storage)
    return tensor_storage.private_storage, (pickle.PickleBuffer(content.data),)


_SENT = "_nbparallel_sent"
"""Attribute of a storage over shared memory that has been sent: `_sent_to`, its bytes and their handle."""


def _sent_to(stream: TensorStream) -> tuple[Any, int]:
    """Return what a handle is valid for: a session, and the rights that its processes have now."""
    return stream.broker and weakref.ref(stream.broker), stream.store.rights_changes


def _small_storage(content: bytes) -> Any:
    # memory of torch's own, which it can resize
    return tensor_storage.private_storage(bytearray(content)).clone()


def _storage_on(device: str, content: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy of bytes in the memory of a device, such as a GPU."""
    import torch

    return torch.UntypedStorage(content.nbytes(), device=device).copy_(content)


def _reduce_typed(stream: TensorStream, storage: Any) -> Reduced:
    return _typed_storage, (storage._untyped_storage, storage.dtype)


def _typed_storage(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
