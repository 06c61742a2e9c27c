"""Rules over a whole graph: factors, their roles, and what every op may choose."""
