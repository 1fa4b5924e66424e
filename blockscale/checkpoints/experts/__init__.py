"""The experts of a module."""
