"""Shipped test ground: leak check, hang watchdog, kernel harness, conformance suites."""
