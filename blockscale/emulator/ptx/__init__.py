"""PTX text to a syntax tree, and a kernel of it as a program of units."""
