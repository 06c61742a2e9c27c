"""Collectives and random draws as ops, and the building and verifying of graphs that hold them."""
