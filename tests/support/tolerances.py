"""Tolerances of tests that compare real ranks with one device."""

# Relative error where a gradient passes through bfloat16, which rounds to 8 bits, that is by up to 4e-3 each time; sums
# over ranks are rounded once more for every rank.
TOLERANCE_HALF = 5e-2
