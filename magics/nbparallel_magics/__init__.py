"""The magics: parse, delegate, show."""
