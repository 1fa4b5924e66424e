"""What ours is compared with: other compilers' kernels and other libraries."""
