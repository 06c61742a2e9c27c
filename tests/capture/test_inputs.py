"""Batches and results of classes of the script's own."""

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.export import capture_forward
from autopar.errors import CaptureError
from autopar.proof.verify import verify


class Rows:
    """Pictures and a mask, as detection scripts have them."""

    def __init__(self, values: Any, mask: Any) -> None:
        self.mask, self.values, self.name = mask, values, "rows"


@dataclass(frozen=True)
class Found:
    scores: Tensor
    rows: Rows


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, rows: Rows) -> Found:
        return Found(self.linear(rows.values) * rows.mask, rows)


def rows() -> Rows:
    return Rows(torch.randn(8, 4), torch.rand(8, 1))


def mean_square(found: Found) -> Tensor:
    return found.scores.square().mean()


def test_attributes_that_are_tensors_are_inputs():
    captured = capture_forward(Model(), (rows(),), {})
    assert list(captured.inputs.values()) == ["rows.mask", "rows.values"]
    assert list(captured.literals.values()) == ["rows"]


def test_each_batch_is_read_and_results_keep_their_class():
    plain = Model()
    compiled = autopar.compile(copy.deepcopy(plain))
    for batch in (rows(), rows()):
        found = compiled(batch)
        found.scores.square().mean().backward()
        plain(batch).scores.square().mean().backward()
        assert isinstance(found, Found) and isinstance(found.rows, Rows)
        assert found.rows.name == "rows" and torch.equal(found.rows.values, batch.values)
    assert torch.equal(compiled.linear.weight.grad, plain.linear.weight.grad)


class Numbers:
    """Batches whose numbers are used, unused, and a condition."""

    def __init__(self, values: Tensor, scale: int | float, doubles: bool = True) -> None:
        self.a, self.doubles, self.scale, self.unused = values, doubles, scale, 3
        self.device, self.zeros, self.ones = values.device, torch.zeros(8, 1), torch.ones(8, 1)


class Scaled(Model):
    def forward(self, rows: Numbers) -> Numbers:
        factor = 2 if rows.doubles else 1
        return Numbers(self.linear(rows.a) * rows.scale * factor * rows.ones, rows.scale, rows.doubles)


def test_numbers_of_an_object_are_used_as_those_of_a_dict():
    plain = Scaled()
    compiled = autopar.compile(copy.deepcopy(plain), loss_fn=lambda found: found.a.square().mean())
    forward = autopar.compile(copy.deepcopy(plain))
    for scale, doubles in ((3, True), (4, True), (4, False), (0.5, False)):
        batch = Numbers(torch.randn(8, 4), scale, doubles)
        found = forward(batch)
        torch.testing.assert_close(found.a, plain(batch).a)
        assert (found.scale, found.doubles, found.unused) == (scale, doubles, 3)
        torch.testing.assert_close(compiled.step(batch), plain(batch).a.square().mean())


def test_rows_of_an_object_are_split():
    report = verify(Model(), (rows(),), loss_fn=mean_square, mesh={"dp": 2}, recipe="ddp")
    assert report.passed


class Doubled(Model):
    def forward(self, rows: Rows) -> Found:
        rows.values = rows.values * 2
        return super().forward(rows)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_forward_that_sets_an_attribute_of_its_argument_is_refused(precision: str | None):
    with pytest.raises(CaptureError, match=r"sets or deletes Rows.values of its argument.*copy\.copy of the Rows"):
        autopar.compile(Doubled(), loss_fn=mean_square, precision=precision).step(rows())

    class Copied(Doubled):
        def forward(self, rows: Rows) -> Found:
            return super().forward(copy.copy(rows))

    assert autopar.compile(Copied(), loss_fn=mean_square).step(rows()).isfinite()


CHANGES = {
    "a new key": lambda batch, y: batch.update(y=y),
    "another number": lambda batch, y: batch.update(scale=batch["scale"] + 1),
    "an append": lambda batch, y: batch["names"].append("b"),
    "a queue's next": lambda batch, y: batch["queue"].append("b"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_forward_that_changes_a_dict_or_list_of_its_arguments_is_refused(change: Callable[..., object]):
    class Changing(nn.Linear):
        def forward(self, batch: dict[str, Any]) -> Tensor:
            y = super().forward(batch["x"])
            change(batch, y)
            return y.square().mean()

    class Copied(Changing):
        def forward(self, batch: dict[str, Any]) -> Tensor:
            return super().forward({**batch, "names": [*batch["names"]], "queue": deque(batch["queue"])})

    def batch() -> dict[str, Any]:
        return {"x": torch.ones(2, 4), "names": ["a"], "queue": deque(["a"]), "scale": 2}

    with pytest.raises(
        CaptureError, match=r"sets or deletes \[.*\] of a (dict|list|deque) of its argument.*a copy of its own"
    ):
        autopar.compile(Changing(4, 4)).step(batch())
    assert autopar.compile(Copied(4, 4)).step(batch()).isfinite()


def test_what_a_forward_takes_out_of_a_dict_stays_in_that_of_the_caller():
    class Popping(nn.Linear):
        def forward(self, batch: dict[str, Any]) -> Tensor:
            target = batch.pop("target")
            return nn.functional.mse_loss(super().forward(batch["x"]), target)

    model, batch = Popping(4, 4), {"x": torch.ones(2, 4), "target": torch.zeros(2, 4)}
    expected = model(dict(batch)).item()
    assert autopar.compile(model).step(batch).item() == pytest.approx(expected) and "target" in batch


def test_a_loss_that_sets_an_attribute_of_its_target_is_refused():
    def loss_fn(found: Found, target: Rows) -> Tensor:
        target.mask = (found.scores - target.mask).abs()
        return target.mask.mean()

    with pytest.raises(CaptureError, match=r"loss sets or deletes Rows.mask of its argument"):
        autopar.compile(Model(), loss_fn=loss_fn).step(rows(), rows())


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_input_is_refused_and_a_dense_one_trains():
    class Convolution(nn.Linear):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return torch.spmm(edges, super().forward(x))

    x, edges = torch.randn(8, 4), torch.eye(8).to_sparse()
    compiled = autopar.compile(Convolution(4, 2), loss_fn=lambda y: y.square().mean())
    for given in (edges, edges.to_sparse_csr()):
        with pytest.raises(CaptureError, match=r"stored as torch.sparse_(coo|csr).*x\.to_dense\(\).*backend="):
            compiled.step(x, given)
    assert compiled.step(x, edges.to_dense()).isfinite()
