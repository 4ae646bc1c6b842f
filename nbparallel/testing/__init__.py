"""Test support for users and for this library: leak check, the suite for sharing strategies, arrays.

``pytest_plugins = ["nbparallel.testing.plugin"]`` in a ``conftest.py`` puts every test under the leak
check, and offers the marker ``may_leave(*kinds, reason=…)``.
`strategies` has the suite that every sharing strategy passes, and `temporary_registry`, which undoes what a
test does to the registry of strategies.  `waiting.wait_until` waits for a condition, in tests and in the
programs and cells that they run.
"""
