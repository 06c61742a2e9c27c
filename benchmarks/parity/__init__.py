"""Plans, recipes, operators and executors against a single device."""
