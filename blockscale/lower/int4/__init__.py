"""INT4 products on GPUs: plans and host code."""
