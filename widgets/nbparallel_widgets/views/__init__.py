"""Views of what a flag of one cell has measured: its lines, its speed-up."""
