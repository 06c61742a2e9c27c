"""What DTensors of which a rank has a part let torch do with them."""

import copy
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
    end = _torch.refuse_parts(lambda _: True)
    assert type(_kept(parameter)) is torch.nn.Parameter and type(_kept(parameter * 2)) is torch.Tensor
    assert type(_kept(_torch.for_a_file(parameter))) is DTensor
    end()
    assert type(_kept(parameter)) is DTensor


class Twice:
    """Two ranks, of which the other has what is twice as large."""

    def share(self, tensors):
        with _torch.unchecked():
            return [x.full_tensor() * 2 for x in tensors]


@pytest.fixture
def of_stage(parameter):
    """A parameter of one pipeline stage."""
    _torch.refuse_parts(lambda _: False)()
    mesh = _torch.StageMesh(parameter.device_mesh, Twice())
    return torch.nn.Parameter(_torch.dtensor(parameter.detach()._local_tensor, mesh, parameter.placements))


def test_a_norm_is_that_of_all_stages(of_stage, parameter):
    with pytest.raises(StepError, match="stage"):
        _kept([of_stage])
    assert torch.nn.utils.get_total_norm(iter([of_stage, of_stage])).item() == pytest.approx((2 * 4 * 14) ** 0.5)
    assert torch.nn.utils.get_total_norm(iter([parameter])).item() == pytest.approx(14**0.5)


def test_what_is_refused_leaves_the_last_good_file(of_stage, tmp_path):
    path = tmp_path / "last.pt"
    torch.save({"x": torch.ones(3)}, path)
    with pytest.raises(StepError, match="one pipeline stage"):
        torch.save({"x": of_stage}, path)
    with pytest.raises(RuntimeError, match="directory"):
        torch.save({}, tmp_path / "none" / "file.pt")
    assert torch.load(path)["x"].tolist() == [1, 1, 1]
    torch.save({"x": torch.zeros(3)}, str(path))
    assert torch.load(path)["x"].tolist() == [0, 0, 0] and [x.name for x in tmp_path.iterdir()] == ["last.pt"]


def test_one_term_of_a_sum_is_not_read_as_the_sum(parameter, monkeypatch):
    _torch.refuse_parts(lambda _: True)()
    assert float(parameter.norm()) == pytest.approx(14**0.5)
    monkeypatch.setattr(parts, "_has_terms", lambda x: any(p.is_partial() for p in x.placements))
    for read in (float, bool, lambda x: x.item(), lambda x: f"{float(x):.1f}"):
        with pytest.raises(StepError, match=r"\.full_tensor\(\) before it, on all ranks"):
            read(parameter.norm())
    assert float(parameter.norm().full_tensor()) == pytest.approx(14**0.5)


def test_a_number_of_one_stage_is_that_of_all_where_it_is_added_stacked_or_read(of_stage):
    loss, norm = torch.ones((), requires_grad=True), of_stage.norm()
    total = torch.zeros(())
    total += norm
    numbers = [norm + norm, loss + norm, torch.stack([norm, norm]), norm.full_tensor(), total]
    vector = torch.cat([of_stage, of_stage])
    assert float(norm) == pytest.approx(2 * 14**0.5)
    assert (of_stage * norm).shape == of_stage.shape  # as an optimizer does with each of its own
    assert all(type(x) is torch.Tensor for x in numbers)
    assert [x.sum().item() / 14**0.5 for x in numbers] == pytest.approx([4, 2 + 14**-0.5, 4, 2, 2])
    assert isinstance(vector, DTensor) and vector._local_tensor.tolist() == [0, 2, 4, 6] * 2


def test_what_is_made_of_a_tensor_of_a_stage_is_of_it_beside_equal_ranks(of_stage, parameter):
    makers = [lambda x: x.detach() * 2, torch.clone, torch.zeros_like, torch.norm, copy.deepcopy, lambda x: x + x]
    for make in makers * 2:  # torch keeps what the first calls gave
        for x in (parameter, of_stage, of_stage.detach()):
            assert _torch.is_of_stage(make(x)) == (x is not parameter)
    same = _torch.StageMesh(parameter.device_mesh, of_stage._spec.mesh.spread)
    assert same == of_stage.device_mesh != parameter.device_mesh and parameter.device_mesh != same
    assert hash(same) == hash(of_stage.device_mesh)


def test_a_compiled_function_joins_tensors_in_one_graph():
    _torch.refuse_parts(lambda _: False)()

    def join(x):
        x = x.sum() + torch.stack([x, x]).sum()
        x += torch.ones(())
        return torch.cat([x[None], x[None]])

    assert torch.compile(join, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [7, 7]


def test_functions_that_join_tensors_are_pickled_and_scripted():
    _torch.refuse_parts(lambda _: False)()
    assert pickle.loads(pickle.dumps([torch.cat, torch.stack, torch.allclose])) == [
        torch.cat,
        torch.stack,
        torch.allclose,
    ]

    def join(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.stack([x, x]), x[None]])

    assert torch.jit.script(join)(torch.ones(2)).shape == (3, 2)


def test_a_penalty_of_parameters_is_added_to_a_plain_loss(parameter):
    end = _torch.refuse_parts(lambda _: True)
    plain = torch.tensor(2.0, requires_grad=True)
    loss = torch.nn.functional.smooth_l1_loss(plain, torch.zeros(())) + parameter.square().sum() * 0.5
    loss.backward()
    assert type(loss) is torch.Tensor and loss.item() == 1.5 + (1 + 4 + 9) / 2
    assert plain.grad.item() == 1.0 and parameter.grad.full_tensor().tolist() == [0, 1, 2, 3]
    end()


def test_all_values_are_read_where_a_rank_has_them(parameter, of_stage):
    x = parameter.detach()
    assert x.tolist() == [0, 1, 2, 3] and x.numpy().tolist() == [0, 1, 2, 3]
    assert torch.allclose(x, x + 1e-9) and not torch.allclose(x, x + 1) and torch.allclose(x, x + 1, atol=2)
    for name in ("tolist", "numpy"):
        with pytest.raises(StepError, match=rf"full_tensor\(\)\.{name}\(\)"):
            getattr(of_stage.detach(), name)()
