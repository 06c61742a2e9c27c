"""Runs a training script, writes down every loss whose backward it calls, and ends it after some of them.

python benchmarks/scripts/record.py OUT LOSSES SCRIPT ARGUMENTS...

OUT gets `.0`, `.1` for the ranks. With the variable STARTED (seconds since the epoch) it has the seconds from
then to the end of the first update, too.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import sys
import time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Record:
    """The losses so far; the update or backward after the last wanted one ends the script."""

    def __init__(self, path: str, losses: int) -> None:
        self.path, self.wanted, self.losses = path, losses, list[float]()
        self.to_update = self.to_second = float("nan")  # seconds to the first update, and to the second backward
        self._is_inside = False
        self._backward = torch.Tensor.backward

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """`loss.backward()`, noted where no other backward runs."""
        if self._is_inside:
            return self._backward(loss, *args, **kwargs)
        if len(self.losses) == 1:
            self.to_second = _elapsed()
        self._end_if_done()
        whole = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        self.losses.append(float(whole.detach()))
        self._is_inside = True
        try:
            return self._backward(loss, *args, **kwargs)
        finally:
            self._is_inside = False

    def updated(self, *_: Any) -> None:
        """Called after every update of an optimizer."""
        if math.isnan(self.to_update):
            self.to_update = _elapsed()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if len(self.losses) < self.wanted:
            return
        seconds = self.to_second if math.isnan(self.to_update) else self.to_update  # the script may update by itself
        with open(f"{self.path}.{os.environ.get('RANK', '0')}", "w") as file:
            json.dump({"losses": self.losses, "seconds": seconds}, file)
        raise SystemExit(0)


def _elapsed() -> float:
    return time.time() - float(os.environ.get("STARTED", "nan"))


def main(path: str, losses: str, script: str, *args: str) -> None:
    record = Record(path, int(losses))
    torch.Tensor.backward = lambda loss, *args, **kwargs: record.backward(loss, *args, **kwargs)  # type: ignore[method-assign]
    register_optimizer_step_post_hook(record.updated)
    sys.argv, sys.path[0] = [script, *args], os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")
    raise SystemExit(f"The script ended after {len(record.losses)} losses.")


if __name__ == "__main__":
    main(*sys.argv[1:])
