"""The plan for a given mesh, with pipeline stages or without."""
