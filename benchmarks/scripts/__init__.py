"""Public training scripts, as they are and under autopar."""
