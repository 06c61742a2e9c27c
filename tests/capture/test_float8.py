"""Which layers of a model multiply in float8."""

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture_forward
from autopar.errors import CaptureError
from autopar.ir import MixedPrecision


class Layers(nn.Module):
    """A stack of two layers and a head, on which sizes and names can differ."""

    def __init__(self, width: int = 128, classes: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def products(text: str, model: nn.Module | None = None) -> list[str]:
    """The products of the captured graph, in their order."""
    policy = MixedPrecision.parse(text)
    model = Layers() if model is None else model
    captured = capture_forward(model, (torch.randn(4, 128),), {}, policy)
    names = [str(node.target) for node in captured.module.graph.nodes]
    return [name.split(".")[1] for name in names if "linear" in name]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16", ["linear", "linear", "linear"]),
        ("fp8", ["float8_linear"] * 3),
        ("fp8 exempt=head", ["float8_linear", "float8_linear", "linear"]),
        ("fp32 products=fp8 exempt=blocks.1,head", ["float8_linear", "linear", "linear"]),
        ("bf16 products=fp8 exempt=blocks.*", ["linear", "linear", "float8_linear"]),
    ],
)
def test_layers_are_rounded_but_for_those_that_are_exempt(text, expected):
    assert products(text) == expected


def test_a_layer_that_is_no_whole_number_of_tiles_is_left():
    assert products("fp8", Layers(classes=100)) == ["float8_linear", "float8_linear", "linear"]


def test_a_head_that_shares_its_weight_with_another_layer_is_known_by_both_names():
    model = Layers(classes=128)
    model.head.weight = model.blocks[0][0].weight
    assert products("fp8 exempt=head", model)[-1] == "linear"


def test_a_weight_that_is_computed_is_left():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.inner(x), self.inner.weight * 2)

    assert products("fp8", Scaled()) == ["float8_linear", "linear"]


def test_models_without_memory_are_rounded():
    policy = MixedPrecision.parse("fp8")
    captured = capture_forward(Layers().to("meta"), (torch.randn(4, 128, device="meta"),), {}, policy)
    names = [str(node.target) for node in captured.module.graph.nodes]
    assert sum("float8_linear" in name for name in names) == 3


def test_autocast_casts_the_operands_as_it_does_elsewhere():
    class Under(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    formats = []
    for text in ("fp32", "fp32 products=fp8"):
        policy = MixedPrecision.parse(text)
        captured = capture_forward(Under(), (torch.randn(4, 128),), {}, policy)
        (output,) = captured.module.graph.find_nodes(op="output")
        formats.append(output.args[0][0].meta["val"].dtype)
    assert formats == [torch.bfloat16, torch.bfloat16]


def test_operands_of_two_formats_are_left_to_torch():
    """It refuses them in a run."""

    class Mixed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    both = nn.Sequential(nn.Linear(128, 128), Mixed(128, 128))
    assert products("fp8", both) == ["float8_linear", "linear"]


def test_a_layer_of_one_row_is_left():
    class OneRow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[0])

    with pytest.raises(CaptureError, match="on an input of two dims or more"):
        products("fp8", OneRow(128, 128))


def test_a_policy_that_rounds_nothing_is_an_error():
    small = nn.Sequential(nn.Linear(128, 100), nn.ReLU())
    with pytest.raises(CaptureError, match=r"the first is '0' with a weight of shape \[100, 128\]"):
        products("fp8", small)
    with pytest.raises(CaptureError, match="the model calls no linear layer"):
        products("fp8", nn.ReLU())


def test_a_name_that_exempts_nothing_is_an_error():
    with pytest.raises(CaptureError, match=r"'lm_head', which no linear layer is called.*blocks\.0\.0"):
        products("fp8 exempt=lm_head")
