"""What a plan costs and why, and what would change it."""
