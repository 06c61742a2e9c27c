"""Wrong inputs as users give them, and what the first screen then says."""
