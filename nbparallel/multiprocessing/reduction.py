"""The library's own ``multiprocessing.reduction``, under our name."""

import sys
from multiprocessing import reduction

sys.modules[__name__] = reduction
