"""MoE layers on a GPU: ``python -m bench.moe``."""
