"""Specs -> tuning logs -> schedules -> machine code -> one library."""
