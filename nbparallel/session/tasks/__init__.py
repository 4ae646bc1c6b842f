"""One cell, from its source to its results or its error."""
