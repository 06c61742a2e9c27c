"""Runs plans: the compiled module, parameters at rest and in use, executors, and checkpoints."""
