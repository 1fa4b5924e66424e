"""Schedules of linear layers and GEMMs."""
