"""Requests for plans, and the words about the answers: options, recipes, pins, notes, refusals."""
