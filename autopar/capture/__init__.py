"""Captures a module as an ATen graph, or says what to change in a model that cannot be captured."""
