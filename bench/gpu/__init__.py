"""Memory-bound and fused ops on a GPU: ``python -m bench.gpu``."""
