"""Models of public kernels, and of ops without a rule: their plans give what one device gives."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.support.kernels import KERNELS, stand_in

FLASH, LOSS, NORM, ROPE, SILU = (
    stand_in(name, kernel)
    for end in ("FlashAttnFunc", "CrossEntropyFunction", "LigerRMSNormFunction", "RopeFunction", "SiLUMulFunction")
    for name, kernel in KERNELS.items()
    if name.endswith(end)
)
WIDTH, HEADS, GROUPS, HIDDEN, WORDS, LENGTH = 16, 4, 2, 32, 12, 6


class Llama(nn.Module):
    """One block and its loss, with the kernels that Liger and FlashAttention put into a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ParameterList([torch.ones(WIDTH), torch.ones(WIDTH)])
        self.query, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, WIDTH * GROUPS // HEADS, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down, self.head = (nn.Linear(HIDDEN, WIDTH, bias=False), nn.Linear(WIDTH, WORDS, bias=False))
        angles = torch.outer(torch.arange(LENGTH), 1 / 10.0 ** torch.arange(2)).repeat(1, 2)
        self.register_buffer("cos", angles.cos()[None])
        self.register_buffer("sin", angles.sin()[None])

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.words(ids)
        x = x + self._attention(NORM.apply(x, self.norms[0], 1e-6, 0.0, "llama", True))
        y = NORM.apply(x, self.norms[1], 1e-6, 0.0, "llama", True)
        x = x + self.down(SILU.apply(self.gate(y), self.up(y)))
        rows, weight = x.reshape(-1, WIDTH), self.head.weight
        return LOSS.apply(rows, weight, targets.reshape(-1), None, None, -100, 0.0, 0.0, "sum")

    def _attention(self, x: Tensor) -> Tensor:
        heads = (f(x).unflatten(-1, (-1, WIDTH // HEADS)) for f in (self.query, self.key, self.value))
        q, k, v = (each.transpose(1, 2) for each in heads)
        q, k = ROPE.apply(q, k, self.cos, self.sin)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = FLASH.apply(q, k, v, 0.0, None, True, (-1, -1), 0.0, None, False, False)
        return self.output(y.flatten(2))


@pytest.mark.parametrize("recipe", ["dp:zero3,tp:tp", pytest.param("dp:ddp,tp:tp+sp", marks=pytest.mark.slow)])
def test_a_llama_of_public_kernels_trains_as_on_one_device(recipe: str) -> None:
    torch.manual_seed(0)
    batch = torch.randint(WORDS, (4, LENGTH)), torch.randint(WORDS, (4, LENGTH))
    report = autopar.verify(Llama().double(), batch, mesh={"dp": 2, "tp": 2}, recipe=recipe)
    assert report.passed, report


@torch.library.custom_op("kernels_test::damped", mutates_args=())
def damped(x: Tensor) -> Tensor:
    """x, where its batch is small: else less, by as much as the largest number of the batch says."""
    return _damped(x)


def _damped(x: Tensor) -> Tensor:
    return x * (1e6 / x.abs().amax()).clamp(max=1)


damped.register_fake(torch.empty_like)
damped.register_autograd(
    lambda ctx, grad: torch.autograd.functional.vjp(_damped, ctx.saved_tensors[0], grad)[1],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Damped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(damped(self.layer(x))).mean()


def test_verify_finds_a_guess_that_does_not_hold_on_a_batch() -> None:
    torch.manual_seed(0)
    model, x = Damped().double(), torch.randn(8, 4).double()
    how = {"mesh": {"dp": 2}, "recipe": "ddp"}
    assert autopar.verify(model, (x,), **how).passed  # type: ignore[arg-type]
    x[0] *= 1e9
    assert not autopar.verify(model, (x,), **how).passed  # type: ignore[arg-type]


def test_explain_says_which_op_is_split_by_a_guess() -> None:
    found = autopar.explain(Damped(), (torch.randn(8, 4),), mesh={"dp": 2}, recipe="ddp")
    text = " ".join(str(found).split())
    assert "kernels_test.damped (1 call)" in text and "autopar verify" in text
