"""Parameters between steps and inside a step, and their gradients."""
