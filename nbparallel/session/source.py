"""Checking a cell before anything is sent: what does not compile is reported once, not by every rank."""

from __future__ import annotations

import ast
import warnings
from functools import lru_cache
from typing import Any

MOST_GOOD = 64
"""Cells that are remembered to compile: a script's loop runs the same one again and again."""
_good: set[str] = set()


@lru_cache(maxsize=1)
def _transformer() -> Any:
    from IPython.core.inputtransformer2 import TransformerManager

    manager: Any = TransformerManager  # IPython's class has no annotations
    return manager()


def check(source: str, *, line_offset: int = 0, execution_count: int | None = None) -> None:
    """Raise `SyntaxError` if `source` is no cell that IPython could run.

    Parameters
    ----------
    line_offset : int
        Lines of the cell above `source`: the error's line counts as the notebook's gutter does.
    execution_count : int, optional
        The notebook's ``In[n]``, for the error's file name.
    """
    if source.lstrip().startswith("%%"):
        return  # the cell magic decides what its body means
    filename = "<cell>" if execution_count is None else f"In[{execution_count}]"
    text = "# %%parallel\n" * line_offset + source
    if not text.endswith("\n"):
        text += "\n"
    if text in _good:
        return
    try:
        transformed = _transformer().transform_cell(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks warn
            # as a whole: `return` outside of a function is no mistake of the grammar
            compile(transformed, filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        if len(_good) >= MOST_GOOD:
            _good.clear()
        _good.add(text)
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:  # a null byte, too deep …
        raise SyntaxError(f"the cell cannot be compiled: {error}", (filename, None, None, None)) from None
    except SyntaxError as error:
        if error.filename in (None, "<string>"):
            error.filename = filename
        raise error.with_traceback(None) from None
