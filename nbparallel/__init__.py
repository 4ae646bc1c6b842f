"""Run notebook cells on parallel ranks that share the notebook's numpy arrays without a copy.

``import nbparallel`` is cheap: attributes load on first use.
"""
