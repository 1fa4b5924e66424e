"""Scheduled MoE GEMMs -> plans, constants, host code."""
