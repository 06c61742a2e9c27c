"""The program of one rank, and of each of its pipeline stages."""
