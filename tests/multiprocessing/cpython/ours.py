"""CPython's own tests of `multiprocessing`, with ours in its place.

The tests are taken from the installation and bound to our package on lines that are there: some compare
source lines in tracebacks.  Children import this module by its name.
"""

import re
from pathlib import Path

import test._test_multiprocessing as _library_suite

ROOT = Path(__file__).parents[3]
_OWN_SERVER = "nbparallel.multiprocessing.starting.start_methods"


def bind_to_ours(source: str) -> str:
    """Return the suite's source with our package in place of the library's, line by line."""
    source = re.sub(r"^import multiprocessing\.\w+$", "", source, flags=re.MULTILINE)
    source = re.sub(
        r"^import threading$",
        "import threading; import nbparallel.multiprocessing as multiprocessing",
        source,
        count=1,
        flags=re.MULTILINE,
    )
    source = source.replace("from multiprocessing.forkserver import", f"from {_OWN_SERVER} import")
    own_server = f"__import__({_OWN_SERVER!r}, fromlist=['present_server']).present_server"
    source = source.replace("multiprocessing.forkserver._forkserver", own_server)
    modules = "connection|managers|pool|process|sharedctypes|shared_memory"
    source = re.sub(
        rf"from multiprocessing\.({modules}) import", r"from nbparallel.multiprocessing.\1 import", source
    )
    source = re.sub(r"from multiprocessing import", "from nbparallel.multiprocessing import", source)
    # programs that a test runs do not look at PYTHONPATH
    there = f"import sys; {str(ROOT)!r} in sys.path or sys.path.insert(0, {str(ROOT)!r}); from nbparallel"
    return re.sub(r"^(    +)from nbparallel", rf"\1{there}", source, flags=re.MULTILINE)


__file__ = str(_library_suite.__file__)
exec(compile(bind_to_ours(Path(__file__).read_text()), __file__, "exec"))
