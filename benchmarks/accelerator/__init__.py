"""One command that says what holds on an accelerator, and what does not; see benchmarks/results/accelerators.md."""
