"""Tensors and other libraries' arrays as numpy arrays over the same memory, and back.

Nothing here imports torch before the user has: an object is a tensor only if ``sys.modules`` has torch.  Only
`tensor_of` imports it, where a tensor arrives that another process sent.  What stands above this room knows
numpy arrays alone; it asks `as_array` about what is none, and `tensor_of` gives a tensor back.

Tensors are moved into shared memory elsewhere: `sharing.shared_tensors` (whole models, by `move_tensors`)
over `sharing.tensor_storage`; `session.names.delivery` does so for the notebook's names, and
`transfer.tensor_pickling` has what travels.
"""

from nbparallel.sharing.tensors.bits import bits_dtype, bits_name, bits_operator, readable_bits, shown_dtype
from nbparallel.sharing.tensors.conversion import array_of, as_array, is_tensor, tensor_of
from nbparallel.sharing.tensors.extension_dtypes import describe_extension, number_kind, rebuild_extension
from nbparallel.sharing.tensors.parameters import fill_module, gradient_of, is_module, named_gradients

__all__ = [
    "array_of",
    "as_array",
    "bits_dtype",
    "bits_name",
    "bits_operator",
    "describe_extension",
    "fill_module",
    "gradient_of",
    "is_module",
    "is_tensor",
    "named_gradients",
    "number_kind",
    "readable_bits",
    "rebuild_extension",
    "shown_dtype",
    "tensor_of",
]
