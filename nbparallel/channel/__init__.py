"""Framed bytes and file descriptors between two processes; knows nothing of arrays."""

from nbparallel.channel.channel import Channel

__all__ = ["Channel"]
