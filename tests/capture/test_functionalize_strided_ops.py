"""What a model writes to its memory, a graph gives to its tensors, gradients included; or it is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.export import capture_step
from autopar.errors import CaptureError
from autopar.planning.planning import prepare_step
from autopar.proof.verify import verify


class Writing(nn.Module):
    """A linear layer, and a function of its result that may write to it."""

    def __init__(self, write):
        super().__init__()
        self.linear, self.write = nn.Linear(8, 6), write

    def forward(self, x):
        return self.write(self.linear(x) * 1.0)


def _weighted(x):
    """A sum in which every element counts otherwise."""
    return (x.square() * torch.arange(x.numel()).view(x.shape)).sum()


def diagonals(z):
    cube = z[:, :4].expand(4, 4, 4).clone()
    # 12 x 2 and 8 x 3: the diagonal begins again below, where it is wrapped
    tall = (z.reshape(-1, width).clone() for width in (2, 3))
    filled = [x.fill_diagonal_(2.0, wrap=wrap) for x in tall for wrap in (False, True)]
    filled += [(z @ z.t()).fill_diagonal_(2.0), cube.fill_diagonal_(2.0)]
    filled += [z.clone().fill_diagonal_(2.0), z.clone().t().fill_diagonal_(2.0)]
    return sum(_weighted(x) for x in filled)


def slices_and_selections(z):
    z[::2, 1::2] *= 2
    z[:, 1].mul_(3)
    z[1:3] = z[:2].clone() * 5
    z.narrow(1, 1, 3).mul_(2)
    z.view(4, 2, 3)[:, 0].mul_(3)
    z.unflatten(1, (2, 3))[..., 1].add_(z[:, :2].clone())
    return _weighted(z)


def turned_and_tiled(z):
    z.diagonal(1).mul_(3)
    z.t()[1:].mul_(2)
    z.unfold(1, 2, 2)[:, 1].mul_(3)
    z.unsqueeze_(0)[:, :2].mul_(2)
    z.squeeze_(0).transpose_(0, 1)[:3].mul_(3)
    z.triu_(-2)
    return _weighted(z)


@pytest.mark.parametrize("write", [diagonals, slices_and_selections, turned_and_tiled])
def test_a_write_has_the_gradient_of_one_device(write):
    torch.manual_seed(0)
    model, x = Writing(write).double(), torch.randn(4, 8).double()
    captured = prepare_step(model, (x,)).captured
    own = dict(model.named_parameters())
    parameters = [own[name] for name in captured.parameters.values()]
    (loss,) = captured.module(*parameters, *captured.constants.values(), x)
    found, expected = (torch.autograd.grad(value, parameters) for value in (loss, model(x)))
    torch.testing.assert_close(loss, model(x), rtol=1e-12, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Contrastive(nn.Module):
    """SimCLR's loss: no row is its own positive or negative (Chen et al. 2020, eq. 1)."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 6)

    def forward(self, x):
        z = F.normalize(self.encoder(x), dim=1)
        similarity = (z @ z.t() / 0.1).fill_diagonal_(-1e9)
        return F.cross_entropy(similarity, torch.arange(x.shape[0]).roll(1))


def test_a_masked_diagonal_is_split():
    model, x = Contrastive().double(), torch.randn(8, 8).double()
    report = verify(model, x, mesh={"dp": 2}, plan="random", seed=1)
    assert report.passed, report


def through_strides(z):
    view = z.as_strided((2, 3), (6, 1))
    view[0].mul_(2)
    return z.sum()


def after_strides(z):
    view = z.as_strided((2, 3), (6, 1))
    z.view(24).mul_(2)
    return view.sum()


def through_windows(z):  # the third and sixth of six columns are in none
    torch._foreach_mul_([z.unfold(1, 2, 3)], 2.0)
    return z.sum()


@pytest.mark.parametrize(
    ("write", "view"), [(through_strides, "as_strided"), (after_strides, "as_strided"), (through_windows, "unfold")]
)
def test_a_write_that_a_graph_would_lose_is_refused_with_its_line(write, view):
    with pytest.raises(CaptureError, match=rf"writes to memory of which aten.{view}.default") as refused:
        capture_step(Writing(write), (torch.ones(4, 8),), {}, None)
    assert "test_functionalize_strided_ops.py" in str(refused.value)
    assert "Write to slices or to a diagonal of the tensor itself" in str(refused.value)


def test_what_is_read_by_strides_before_a_write_is_no_obstacle():
    def read(z):
        return z.as_strided((2, 3), (6, 1)).sum() + z.mul_(2).sum()

    captured = capture_step(Writing(read), (torch.ones(4, 8),), {}, None)
    assert captured.module.graph.find_nodes(op="call_function", target=torch.ops.aten.index_select.default)


def test_a_scatter_by_strides_is_refused():
    def scatter(z):
        return torch.as_strided_scatter(z, torch.zeros(4), (4,), (7,)).sum()

    with pytest.raises(CaptureError, match=r"as_strided_scatter.default depends on the layout in memory"):
        capture_step(Writing(scatter), (torch.ones(4, 8),), {}, None)


@pytest.mark.parametrize(("rows", "columns"), [(0, 1), (1, 0)])
def test_strides_beyond_the_tensor_are_refused(rows, columns):
    def reach(z):  # columns of a larger matrix; or from its first row, 6 elements before the second
        return z[rows:, columns:].as_strided((2, 4), (6, 1), 0).sum()

    with pytest.raises(CaptureError, match="reads memory outside of its argument"):
        capture_step(Writing(reach), (torch.ones(4, 8),), {}, None)
