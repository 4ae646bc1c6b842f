"""Framed bytes and file descriptors between two processes; knows nothing of arrays."""

from nbparallel.channel.channel import Channel
from nbparallel.channel.segment_client import SegmentClient

__all__ = ["Channel", "SegmentClient"]
