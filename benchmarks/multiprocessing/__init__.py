"""Figures of `nbparallel.multiprocessing` beside the standard library, torch and joblib."""
