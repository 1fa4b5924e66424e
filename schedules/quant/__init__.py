"""Schedules of quantise, dequantise, swizzle and sweep."""
