"""Measures the machine on which it runs, and writes the hardware file that the cost model reads.

`run` starts or joins the ranks, `measure` times matrix products, kernels and collectives on them, `fit`
fits the cost model's constants to the measurements, and `document` writes them with their sources. `devices` has all
that differs between kinds of devices.
"""

from autopar.calibrate.document import to_hardware
from autopar.calibrate.measure import Measurements
from autopar.calibrate.run import calibrate
