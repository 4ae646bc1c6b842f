"""Layouts of everything that crosses a process boundary; standard library only."""
