"""The library's own ``multiprocessing.process``, under our name."""

import sys
from multiprocessing import process

sys.modules[__name__] = process
