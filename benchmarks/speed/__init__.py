"""How long planning, pricing and steps take."""
