"""From PTX text and arguments to a run: linking, compiling, the order of execution."""
