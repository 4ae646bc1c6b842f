"""The library's own ``multiprocessing.synchronize``, under our name."""

import sys
from multiprocessing import synchronize

sys.modules[__name__] = synchronize
