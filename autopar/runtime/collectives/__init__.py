"""Conversions of local tensors between layouts, as collectives of process groups."""
