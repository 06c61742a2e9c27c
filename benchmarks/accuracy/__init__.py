"""Holding the cost model against published measurements: rows, their prices, and how far these are off."""
