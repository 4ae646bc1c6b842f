"""Shipped test ground: leak check, hang watchdog, kernel harness, conformance suites.

``pytest_plugins = ["nbparallel.testing.plugin"]`` in a ``conftest.py`` puts every test under the leak
check and the watchdog.
"""
