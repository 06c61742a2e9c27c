"""What is said where no plan can be made, and is known before the search."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.cost_model import find_hardware
from autopar.errors import SearchError
from autopar.planning.planning import make_plan, prepare_step
from autopar.search.request.request import Request


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}])
def test_a_first_batch_without_rows_says_how_to_plan(mesh: dict[str, int]) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(0, 4)
    prepared = prepare_step(model, (x, x), loss_fn=nn.functional.mse_loss)
    request = Request(find_hardware("h100"), mesh=mesh, recipe="ddp" if "dp" in mesh else "auto")
    with pytest.raises(
        SearchError, match=r"The first batch has no rows, .* model.prepare\(\*batch\) or example_inputs="
    ):
        make_plan(prepared, request)
