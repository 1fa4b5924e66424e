"""Converting checkpoints."""
