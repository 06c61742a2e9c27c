"""What is asked of a plan, and what is said about it: options, recipes, notes, refusals."""
