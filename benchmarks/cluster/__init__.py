"""Figures of a session on hosts; they need Dask, and are printed, not written to the page."""
