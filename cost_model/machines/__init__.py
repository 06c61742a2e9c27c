"""Machines: their figures, their names, their files."""
