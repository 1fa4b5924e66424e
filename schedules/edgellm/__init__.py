"""Schedules of Edge-LLM's decode passes."""
