"""The notebook's names: which ones a cell needs, and how their values reach the ranks."""
