"""Failures of ranks: errors of ops, reports to the other ranks, and waits that end with an error."""
