"""Explanations of a plan: its costs, their causes, and changes that would lead to another plan."""
