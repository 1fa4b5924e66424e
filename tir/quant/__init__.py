"""Quantise, dequantise, swizzle, scale sweep."""
