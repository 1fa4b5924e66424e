"""Independent, slow references in NumPy; they share no code with the package."""
