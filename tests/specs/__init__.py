"""Tests of blockscale/specs."""
