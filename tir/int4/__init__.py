"""INT4 weights."""
