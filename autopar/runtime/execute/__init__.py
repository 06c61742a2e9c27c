"""The run of one bound program: its inputs, its ops, what is saved for backward, its results."""
