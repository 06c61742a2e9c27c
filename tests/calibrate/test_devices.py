"""The clock of kernels on a GPU, as far as a machine without one can tell."""

from __future__ import annotations

import pytest

from autopar.calibrate.devices import Cuda


class Slow(Cuda):
    """A GPU that is through with its queue before the calls are issued, unless enough products are ahead of them."""

    def __init__(self, needed: int) -> None:
        self._needed, self._ahead = needed, 1

    def _behind_queue(self, run: object, times: int) -> tuple[float, bool]:
        waits = self._ahead < self._needed
        return (20e-6 if waits else 3e-6), waits


@pytest.mark.parametrize("needed", [1, 9, 500])
def test_a_sample_in_which_the_gpu_waited_for_the_host_is_taken_again(needed: int) -> None:
    device = Slow(needed)
    assert device.kernel_seconds(lambda: None, 50) == 3e-6
    assert needed <= device._ahead < 2 * needed


def test_a_kernel_that_the_host_never_gets_ahead_of_is_taken_as_it_is() -> None:
    assert Slow(10**9).kernel_seconds(lambda: None, 50) == 20e-6
