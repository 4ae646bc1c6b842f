"""The library's own ``multiprocessing.util``, under our name."""

import sys
from multiprocessing import util

sys.modules[__name__] = util
