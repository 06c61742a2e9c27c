"""Watches what the user's Python reads and writes while a model is captured."""
