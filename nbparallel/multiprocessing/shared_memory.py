"""The library's own ``multiprocessing.shared_memory``, under our name."""

import sys
from multiprocessing import shared_memory

sys.modules[__name__] = shared_memory
