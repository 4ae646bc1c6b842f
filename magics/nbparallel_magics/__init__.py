"""The magics: parse, delegate, show.

`load` and `unload` are what ``%load_ext nbparallel`` and ``%unload_ext nbparallel`` call.
"""

from nbparallel_magics.extension import live_in, load, unload

__all__ = ["live_in", "load", "unload"]
