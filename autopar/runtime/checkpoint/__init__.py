"""Checkpoints of a compiled module and its optimizer: saved, kept and loaded."""
