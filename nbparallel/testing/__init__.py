"""Test support for users and for this library: leak check, hang watchdog, the suite for sharing strategies.

``pytest_plugins = ["nbparallel.testing.plugin"]`` in a ``conftest.py`` puts every test under the leak
check and the watchdog, and offers the markers ``time_limit(seconds)`` and ``may_leave(*kinds, reason=…)``.
`strategies` has the suite that every sharing strategy passes, and `temporary_registry`, which undoes what a
test does to the registry of strategies.  `waiting.wait_until` waits for a condition, in tests and in the
programs and cells that they run.
A pool that keeps memory for reuse is emptied before a difference is called a leak: see
`nbparallel.testing.leaks.register_drain`.
"""
