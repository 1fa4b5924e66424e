"""Functions of other libraries, by their names and with their conventions, on our kernels."""
