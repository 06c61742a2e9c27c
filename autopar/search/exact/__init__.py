"""The search for a plan on one mesh."""
