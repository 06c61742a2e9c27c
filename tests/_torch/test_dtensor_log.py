"""What torch logs of DTensors on every rank is said by the first one."""

import logging

import pytest
import torch.distributed as dist

from autopar import _torch


@pytest.mark.parametrize(("rank", "lines"), [(0, 2), (1, 1)])
def test_a_slow_gather_is_told_by_the_first_rank(rank, lines, monkeypatch, caplog):
    _torch.warn_once_of_redistribution()
    _torch.warn_once_of_redistribution()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    log = logging.getLogger("torch.distributed.tensor._redistribute")
    assert len(log.filters) == 1
    log.warning("While redistributing from %s to %s", 1, 2)
    log.warning("another line")
    assert len(caplog.records) == lines


def test_torch_logs_it_there_and_so():
    from torch.distributed.tensor import _redistribute

    assert _redistribute.logger.name == "torch.distributed.tensor._redistribute"
    constants = _redistribute._warn_flatten_optimization_not_possible.__code__.co_consts
    assert any(str(each).startswith("While redistributing from") for each in constants)
