"""Recorded calls of the doors: what each makes of its arguments, beside what it made of them when it was recorded."""
