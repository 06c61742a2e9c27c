"""Module to ATen graph: what is captured, how, and what to change where it cannot be."""
