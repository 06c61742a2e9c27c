"""What DTensors of which a rank has a part let torch do with them."""

import io

import pytest
import torch
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar._torch import parts
from autopar.errors import StepError


def _kept(x):
    """What `torch.save` keeps of a tensor."""
    file = io.BytesIO()
    torch.save({"x": x}, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)["x"]


def test_what_one_rank_has_whole_is_saved_as_a_plain_tensor(parameter):
    end = _torch.refuse_parts(lambda _: "model")
    assert type(_kept(parameter)) is torch.nn.Parameter and type(_kept(parameter * 2)) is torch.Tensor
    assert type(_kept(_torch.for_a_file(parameter))) is DTensor
    end()
    assert type(_kept(parameter)) is DTensor


def test_a_tensor_of_one_stage_is_refused_by_what_would_take_it_for_all(parameter):
    end = _torch.refuse_parts(lambda _: "stage")
    vector, of_torch = torch.zeros(4), torch.nn.utils
    for join in (
        lambda: _kept([parameter]),
        lambda: of_torch.get_total_norm(iter([parameter])),
        lambda: of_torch.parameters_to_vector([parameter]),
        lambda: of_torch.vector_to_parameters(vector, [parameter]),
    ):
        with pytest.raises(StepError, match="stage"):
            join()
    end()
    norm = of_torch.get_total_norm(iter([parameter])).item()
    assert norm == pytest.approx((1 + 4 + 9) ** 0.5)


def test_what_is_refused_leaves_the_last_good_file(parameter, tmp_path):
    path = tmp_path / "last.pt"
    torch.save({"x": torch.ones(3)}, path)
    end = _torch.refuse_parts(lambda _: "stage")
    with pytest.raises(StepError, match="one pipeline stage"):
        torch.save({"x": parameter}, path)
    with pytest.raises(RuntimeError, match="directory"):
        torch.save({}, tmp_path / "none" / "file.pt")
    end()
    assert torch.load(path)["x"].tolist() == [1, 1, 1]
    torch.save({"x": torch.zeros(3)}, str(path))
    assert torch.load(path)["x"].tolist() == [0, 0, 0] and [x.name for x in tmp_path.iterdir()] == ["last.pt"]


def test_an_entry_of_one_stage_does_not_pass_for_one_of_the_model(parameter):
    _torch.refuse_parts(lambda _: "stage")()
    entry = _torch.as_entry_of_stage(parameter.detach())
    with pytest.raises(StepError, match=r"model.export\(folder\)"):
        entry.full_tensor()
    assert _torch.for_a_file(entry).full_tensor().shape == parameter.shape


def test_one_term_of_a_sum_is_not_read_as_the_sum(parameter, monkeypatch):
    _torch.refuse_parts(lambda _: "model")()
    assert float(parameter.norm()) == pytest.approx(14**0.5)
    monkeypatch.setattr(parts, "_has_terms", lambda x: any(p.is_partial() for p in x.placements))
    for read in (float, bool, lambda x: x.item(), lambda x: f"{float(x):.1f}"):
        with pytest.raises(StepError, match=r"\.full_tensor\(\) before it, on all ranks"):
            read(parameter.norm())
    assert float(parameter.norm().full_tensor()) == pytest.approx(14**0.5)


def test_a_number_of_one_stage_is_not_added_stacked_or_read(parameter):
    end = _torch.refuse_parts(lambda _: "stage")
    loss = torch.ones((), requires_grad=True)
    for take in (
        lambda: sum(x.norm() for x in (parameter, parameter)),
        lambda: torch.stack([parameter.norm(), parameter.norm()]),
        lambda: loss + parameter.square().sum(),
        lambda: float(parameter.norm()),
        lambda: parameter.norm().full_tensor(),
    ):
        with pytest.raises(StepError, match=r"this rank's pipeline stages only.*recipe='zero3'"):
            take()
    assert (parameter * parameter.norm()).shape == parameter.shape  # as an optimizer does with each of its own
    end()
    assert torch.stack([parameter.norm(), parameter.norm()]).shape == (2,)


def test_a_penalty_of_parameters_is_added_to_a_plain_loss(parameter):
    end = _torch.refuse_parts(lambda _: "model")
    plain = torch.tensor(2.0, requires_grad=True)
    loss = torch.nn.functional.smooth_l1_loss(plain, torch.zeros(())) + parameter.square().sum() * 0.5
    loss.backward()
    assert type(loss) is torch.Tensor and loss.item() == 1.5 + (1 + 4 + 9) / 2
    assert plain.grad.item() == 1.0 and parameter.grad.full_tensor().tolist() == [0, 1, 2, 3]
    end()
