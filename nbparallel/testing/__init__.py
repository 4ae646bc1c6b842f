"""Test support for users and for this library: leak check, hang watchdog, kernel harness, conformance suites.

``pytest_plugins = ["nbparallel.testing.plugin"]`` in a ``conftest.py`` puts every test under the leak
check and the watchdog.  It offers the fixtures ``kernel``, ``any_kernel`` and ``shared_kernel`` (a real
kernel process, one for each supported ipykernel, and one of each for a whole module), the markers
``time_limit(seconds)``, ``may_leave(*kinds, reason=…)`` and ``alone``, and two tiers of tests
(`nbparallel.testing.tiers`).
`stores` counts what a store of shared arrays holds; `strategies` has the suite that every sharing strategy
passes, and `temporary_registry`, which undoes what a test does to the registry of strategies.
`waiting.wait_until` waits for a condition, in tests and in the programs and cells that they run.
What tests of this library see of its inside, functions in `ranks`, `processes`, `stores`, `clusters` return.
A pool that keeps memory for reuse is emptied before a difference is called a leak: see
`nbparallel.testing.leaks.register_drain`.
"""
