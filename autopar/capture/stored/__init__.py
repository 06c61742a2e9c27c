"""Captures that are kept in files."""
