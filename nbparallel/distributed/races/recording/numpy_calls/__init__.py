"""What numpy does with traced arrays that it is passed: ufuncs, functions, methods."""
