"""The magics: parse, delegate, show.

`load` and `unload` are what ``%load_ext nbparallel`` and ``%unload_ext nbparallel`` call.
"""

from nbparallel_magics.extension import load, unload

__all__ = ["load", "unload"]
