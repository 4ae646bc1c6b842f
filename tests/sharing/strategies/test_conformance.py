"""Every strategy that shares memory keeps the promises of all."""

import os
import sys

import pytest

from nbparallel.testing.strategies import StrategyTests

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason=f"{sys.platform} has no /proc")


class TestFileDescriptor(StrategyTests):
    """Anonymous memory."""

    strategy = "file_descriptor"


class TestFileSystem(StrategyTests):
    """Names in /dev/shm."""

    strategy = "file_system"


class TestFileRegion(StrategyTests):
    """Blocks of a region."""

    strategy = "file_region"


class TestMemoryMap(StrategyTests):
    """Files on a disk."""

    strategy = "mmap"
