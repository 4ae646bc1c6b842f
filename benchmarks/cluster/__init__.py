"""Figures of a session on hosts of a Dask cluster: ``python -m benchmarks.cluster`` writes their page."""
