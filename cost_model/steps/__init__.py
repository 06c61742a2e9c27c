"""The time and memory of a whole training step."""
