"""Measures the machine it runs on, and writes the hardware file that the cost model prices with.

`run` starts or joins the ranks, `measure` times products, kernels and collectives on them, `fit`
makes the cost model's constants of the curves, `document` writes them down with their sources.
What differs between devices is all in `devices`.
"""

from autopar.calibrate.document import to_hardware, write
from autopar.calibrate.measure import Measurements, Message, Product
from autopar.calibrate.run import calibrate

__all__ = ["Measurements", "Message", "Product", "calibrate", "to_hardware", "write"]
