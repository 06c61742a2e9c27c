"""Running a plan: collectives, parameters at rest and in use, the compiled module, and its simulation."""
