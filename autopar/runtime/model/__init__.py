"""The compiled module: its programs, found by the arguments of a call, and their runs."""
