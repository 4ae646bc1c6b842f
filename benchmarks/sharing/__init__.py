"""Figures of shared arrays: making, handing over, reading, reclaiming."""
