"""Objects and arrays on their way: pickling, handles."""
