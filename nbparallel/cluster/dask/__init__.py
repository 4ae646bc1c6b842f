"""Hosts of a Dask cluster: the only room that imports `distributed`."""
