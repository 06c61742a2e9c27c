"""Applies the rules to a whole graph: finds factors, their roles, and the choices of every op."""
