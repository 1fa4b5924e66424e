"""Schedules of INT4 products."""
