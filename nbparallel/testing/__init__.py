"""Shipped test ground: leak check, hang watchdog, kernel harness, conformance suites.

``pytest_plugins = ["nbparallel.testing.plugin"]`` in a ``conftest.py`` puts every test under the leak
check and the watchdog, and offers the fixtures ``kernel`` and ``any_kernel`` (a real kernel process, and
one for each supported ipykernel) and the markers ``time_limit(seconds)`` and ``may_leave(*kinds, reason=…)``.
`stores` counts what a store of shared arrays holds; `strategies` has the suite that every sharing strategy
passes, and `temporary_registry`, which undoes what a test does to the registry of strategies.
A pool that keeps memory for reuse is emptied before a difference is called a leak: see
`nbparallel.testing.leaks.register_drain`.
"""
