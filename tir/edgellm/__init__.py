"""Edge-LLM's decode passes."""
