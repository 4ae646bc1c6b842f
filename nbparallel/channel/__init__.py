"""Framed bytes and file descriptors between two processes; knows nothing of arrays."""

from nbparallel.channel.channel import Channel, SegmentClient

__all__ = ["Channel", "SegmentClient"]
