"""Checks plans: simulates all ranks in one process, and compares with a single device."""
