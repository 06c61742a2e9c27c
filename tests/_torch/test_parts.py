"""What DTensors of which a rank has a part let torch do with them."""

import io
import pickle

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
    end = _torch.refuse_parts(lambda _: "model", list)
    assert type(_kept(parameter)) is torch.nn.Parameter and type(_kept(parameter * 2)) is torch.Tensor
    assert type(_kept(_torch.for_a_file(parameter))) is DTensor
    end()
    assert type(_kept(parameter)) is DTensor


def share(tensors):
    """The tensors as two ranks have them together: what the other has is twice as large."""
    with _torch.unchecked():
        return [x.full_tensor() * 2 for x in tensors]


def test_a_norm_is_that_of_all_stages(parameter):
    end = _torch.refuse_parts(lambda _: "stage", share)
    with pytest.raises(StepError, match="stage"):
        _kept([parameter])
    found = torch.nn.utils.get_total_norm(iter([parameter, parameter])).item()
    end()
    assert found == pytest.approx((2 * 4 * 14) ** 0.5)
    assert torch.nn.utils.get_total_norm(iter([parameter])).item() == pytest.approx(14**0.5)


def test_what_is_refused_leaves_the_last_good_file(parameter, tmp_path):
    path = tmp_path / "last.pt"
    torch.save({"x": torch.ones(3)}, path)
    end = _torch.refuse_parts(lambda _: "stage", share)
    with pytest.raises(StepError, match="one pipeline stage"):
        torch.save({"x": parameter}, path)
    with pytest.raises(RuntimeError, match="directory"):
        torch.save({}, tmp_path / "none" / "file.pt")
    end()
    assert torch.load(path)["x"].tolist() == [1, 1, 1]
    torch.save({"x": torch.zeros(3)}, str(path))
    assert torch.load(path)["x"].tolist() == [0, 0, 0] and [x.name for x in tmp_path.iterdir()] == ["last.pt"]


def test_an_entry_of_one_stage_does_not_pass_for_one_of_the_model(parameter):
    _torch.refuse_parts(lambda _: "stage", share)()
    entry = _torch.as_entry_of_stage(parameter.detach())
    with pytest.raises(StepError, match=r"model.export\(folder\)"):
        entry.full_tensor()
    assert _torch.for_a_file(entry).full_tensor().shape == parameter.shape


def test_one_term_of_a_sum_is_not_read_as_the_sum(parameter, monkeypatch):
    _torch.refuse_parts(lambda _: "model", list)()
    assert float(parameter.norm()) == pytest.approx(14**0.5)
    monkeypatch.setattr(parts, "_has_terms", lambda x: any(p.is_partial() for p in x.placements))
    for read in (float, bool, lambda x: x.item(), lambda x: f"{float(x):.1f}"):
        with pytest.raises(StepError, match=r"\.full_tensor\(\) before it, on all ranks"):
            read(parameter.norm())
    assert float(parameter.norm().full_tensor()) == pytest.approx(14**0.5)


def test_a_number_of_one_stage_is_that_of_all_where_it_is_added_stacked_or_read(parameter):
    end = _torch.refuse_parts(lambda _: "stage", share)
    loss, norm = torch.ones((), requires_grad=True), parameter.norm()
    total = torch.zeros(())
    total += norm
    numbers = [norm + norm, loss + norm, torch.stack([norm, norm]), norm.full_tensor(), total]
    vector = torch.cat([parameter, parameter])
    assert float(norm) == pytest.approx(2 * 14**0.5)
    assert (parameter * norm).shape == parameter.shape  # as an optimizer does with each of its own
    end()
    assert all(type(x) is torch.Tensor for x in numbers)
    assert [x.sum().item() / 14**0.5 for x in numbers] == pytest.approx([4, 2 + 14**-0.5, 4, 2, 2])
    assert isinstance(vector, DTensor) and vector.full_tensor().tolist() == [0, 2, 4, 6] * 2


def test_a_model_without_stages_on_an_equal_mesh_hides_none(parameter):
    ends = [_torch.refuse_parts(lambda _, kind=kind: kind, share) for kind in ("", "model", "stage", "model")]
    found = float(parameter.norm())
    for end in ends:
        end()
    assert found == pytest.approx(2 * 14**0.5)


def test_a_compiled_function_joins_tensors_in_one_graph():
    _torch.refuse_parts(lambda _: "stage", share)()

    def join(x):
        x = x.sum() + torch.stack([x, x]).sum()
        x += torch.ones(())
        return torch.cat([x[None], x[None]])

    assert torch.compile(join, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [7, 7]


def test_functions_that_join_tensors_are_pickled_and_scripted():
    _torch.refuse_parts(lambda _: "stage", share)()
    assert pickle.loads(pickle.dumps([torch.cat, torch.stack])) == [torch.cat, torch.stack]

    def join(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.stack([x, x]), x[None]])

    assert torch.jit.script(join)(torch.ones(2)).shape == (3, 2)


def test_a_penalty_of_parameters_is_added_to_a_plain_loss(parameter):
    end = _torch.refuse_parts(lambda _: "model", list)
    plain = torch.tensor(2.0, requires_grad=True)
    loss = torch.nn.functional.smooth_l1_loss(plain, torch.zeros(())) + parameter.square().sum() * 0.5
    loss.backward()
    assert type(loss) is torch.Tensor and loss.item() == 1.5 + (1 + 4 + 9) / 2
    assert plain.grad.item() == 1.0 and parameter.grad.full_tensor().tolist() == [0, 1, 2, 3]
    end()
