"""Scheduled tcgen05 GEMMs -> plans, constants, host code."""
