"""Single-device training scripts that know nothing of autopar: each takes what compiles its model or step.

A script returns numbers, and the parameters that it ended with; started with `torch.compile` and the
backend autopar on many ranks it has to return the same as on one without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from torch import Tensor, nn

from tests.runtime.models import Tied
from tests.support.experts import MixtureModel
from tests.support.functions import StraightRound

Compile = Callable[[Any], Any]
Result = dict[str, Any]
SCRIPTS: dict[str, Callable[[Compile], Result]] = {}


def _script(function: Callable[[Compile], Result]) -> Callable[[Compile], Result]:
    SCRIPTS[function.__name__] = function
    return function


def run(name: str, compile: Compile = lambda f: f) -> Result:
    """What the script gives in float64, from one seed."""
    torch.manual_seed(0)
    return SCRIPTS[name](compile)


def run_compiled(name: str, options: dict[str, Any]) -> Result:
    """The same with the backend; no more than its name is given."""
    torch.compiler.reset()
    return run(name, lambda f: torch.compile(f, backend="autopar", options=options))


def _train(parameters: Any, losses: Any) -> Result:
    """A step of AdamW for each loss that the iterator makes."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-6)
    seen = []
    for loss in losses:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return {"losses": seen} | {str(i): p.detach().clone() for i, p in enumerate(parameters)}


def _gpt() -> tuple[nn.Module, Tensor, Tensor]:
    tokens = torch.randint(0, 256, (4, 8))
    model = GPT(GPTConfig(seq_len=8, layers=2, heads=4, width=16)).double()
    return model, tokens, tokens.roll(1, 1)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@_script
def loss_outside(compile: Compile) -> Result:
    model, tokens, targets = _gpt()
    compiled = compile(model)
    return _train(model.parameters(), (_cross_entropy(compiled(tokens), targets) for _ in range(3)))


@_script
def loss_inside(compile: Compile) -> Result:
    model, tokens, targets = _gpt()

    @compile
    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return _cross_entropy(model(tokens), targets)

    return _train(model.parameters(), (loss(tokens, targets) for _ in range(3)))


@_script
def llama(compile: Compile) -> Result:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    model = LlamaForCausalLM(config).double()
    compiled, tokens = compile(model), torch.randint(0, 32, (4, 8))
    losses = (compiled(input_ids=tokens, labels=tokens).loss for _ in range(3))
    return _train(model.parameters(), losses)


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.tracked = nn.InstanceNorm2d(8, track_running_stats=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.tracked(F.relu(self.norm(self.first(x)))).sin().mean((2, 3)))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 4)
        self.layer = nn.LSTM(4, 4, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.words(tokens))[0]


@_script
def recurrent(compile: Compile) -> Result:
    model, tokens = _Recurrent().double(), torch.randint(0, 16, (4, 6))
    compiled = compile(model)
    return _train(model.parameters(), (compiled(tokens).square().mean() for _ in range(2)))


@_script
def batch_norm(compile: Compile) -> Result:
    model, x = _Convolutions().double(), torch.randn(4, 3, 4, 4, dtype=torch.float64)
    compiled = compile(model)
    result = _train(model.parameters(), (compiled(x).square().mean() for _ in range(3)))
    model.eval()
    with torch.no_grad():
        return result | {"evaluated": compiled(x), **dict(model.named_buffers())}


class _Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        h = torch.relu(self.up(x))
        torch._dynamo.graph_break()
        return x + self.down(h), x.shape[0]


@_script
def graph_break(compile: Compile) -> Result:
    model, x = _Broken().double(), torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    compiled = compile(model)
    result = _train(model.parameters(), (compiled(x)[0].square().mean() for _ in range(3)))
    return result | {"gradient of the input": x.grad, "size": compiled(x)[1]}


@_script
def other_batches(compile: Compile) -> Result:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    compiled = compile(model)
    batches = [torch.randn(rows, 8, dtype=torch.float64) for rows in (4, 8, 3, 1)]
    return _train(model.parameters(), (compiled(x).square().mean() for x in batches))


@_script
def inference(compile: Compile) -> Result:
    model, tokens, _ = _gpt()
    compiled = compile(model.eval())
    with torch.no_grad():
        first = compiled(tokens)
    with torch.inference_mode():
        inside = tokens.clone()  # itself a tensor of inference mode
        return {"logits": first, "again": compiled(tokens).clone(), "inside": compiled(inside).clone()}


@_script
def dropout_off(compile: Compile) -> Result:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)).double().eval()
    compiled, x = compile(model), torch.randn(4, 8, dtype=torch.float64)
    return _train(model.parameters(), (compiled(x).square().mean() for _ in range(3)))


@_script
def tied(compile: Compile) -> Result:
    model, tokens = Tied().double(), torch.randint(0, 16, (4, 4))
    compiled = compile(model)
    return _train(model.parameters(), (_cross_entropy(compiled(tokens), tokens) for _ in range(3)))


@_script
def gradient_penalty(compile: Compile) -> Result:
    """The gradients themselves have one: of parameters, and of an input."""
    model, x = _Broken().double(), torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    compiled, parameters = compile(model), list(model.parameters())

    def losses() -> Iterator[Tensor]:
        for _ in range(2):
            loss = torch.tanh(compiled(x)[0]).square().mean()
            *gradients, to_input = torch.autograd.grad(loss, [*parameters, x], create_graph=True)
            sum(g.square().sum() for g in gradients).backward(retain_graph=True)  # type: ignore[union-attr]
            yield loss + to_input.square().sum()

    return _train(parameters, losses())


@_script
def experts_by_mask(compile: Compile) -> Result:
    model = MixtureModel().double()
    compiled = compile(model)
    batches = [torch.randn(4, 16, 8, dtype=torch.float64) for _ in range(14)]
    return _train(model.parameters(), ((compiled(x) - x).square().mean() for x in batches))


class _Filter(nn.Module):
    """A complex weight that is stored as real numbers, as those of filters of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(8, 6), nn.Parameter(torch.randn(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.view_as_complex(self.weight)
        return torch.view_as_real(torch.fft.fft(self.first(x)) * weight * weight.conj())


@_script
def complex_weight(compile: Compile) -> Result:
    model, x = _Filter().double(), torch.randn(4, 8, dtype=torch.float64)
    compiled = compile(model)
    return _train(model.parameters(), (compiled(x).square().mean() for _ in range(2)))


@_script
def masked(compile: Compile) -> Result:
    """A mask of the batch is gathered and looked up, as in the models of transformers."""
    linear = nn.Linear(8, 8).double()
    x, mask = torch.randn(4, 6, 8, dtype=torch.float64), torch.ones(4, 6, dtype=torch.long)
    mask[1, 4:] = 0
    rows, keys = torch.arange(4)[:, None, None], torch.arange(6)[None, None, :]

    @compile
    def loss(x: Tensor, mask: Tensor) -> Tensor:
        seen = (keys <= keys.mT) & mask.bool()[rows, keys]
        return (linear(x).sum(-1)[:, None, :] * seen).square().mean()

    return _train(linear.parameters(), (loss(x, mask) for _ in range(2)))


@_script
def reshaped(compile: Compile) -> Result:
    """A parameter is reshaped before ranks use it for their parts, as attention sinks are."""
    linear, sinks = nn.Linear(8, 8).double(), nn.Parameter(torch.randn(4, dtype=torch.float64))
    x = torch.randn(4, 6, 8, dtype=torch.float64)

    @compile
    def loss(x: Tensor) -> Tensor:
        q = linear(x).view(4, 6, 4, 2).transpose(1, 2)
        own = sinks.reshape(1, -1, 1, 1).expand(4, -1, 6, -1)
        return (torch.cat([q @ q.mT, own], -1).softmax(-1)[..., :-1] @ q).square().mean()

    return _train([*linear.parameters(), sinks], (loss(x) for _ in range(2)))


@_script
def queue(compile: Compile) -> Result:
    """What a copy was read from is changed between forward and backward, as the queue of MoCo is."""
    linear, held = nn.Linear(8, 6).double(), torch.randn(4, 6, dtype=torch.float64)
    x = torch.randn(4, 8, dtype=torch.float64)

    @compile
    def logits(x: Tensor) -> Tensor:
        return linear(x) @ held.t().clone()

    def losses() -> Iterator[Tensor]:
        for _ in range(2):
            loss = logits(x).square().mean()
            held[0] = 1
            yield loss

    return _train(linear.parameters(), losses())


class _Slope(nn.Sequential):
    """The forward takes a gradient itself, as physics-informed losses do: the graph breaks there."""

    def forward(self, points: Tensor) -> Tensor:
        points = points.detach().requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(points).sum(), points, create_graph=True)
        return slope.square().mean()


@_script
def inner_gradient(compile: Compile) -> Result:
    model = _Slope(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    points, loss = torch.randn(4, 2, dtype=torch.float64), compile(model)
    return _train(model.parameters(), (loss(points) for _ in range(2)))


class _PerSample(nn.Linear):
    """The squares of each row's own gradient, by vmap of grad."""

    def forward(self, points: Tensor) -> Tensor:
        def loss(weight: Tensor, row: Tensor) -> Tensor:
            return F.linear(row, weight, self.bias).square().mean()

        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(self.weight, points)
        return gradients.square().sum()


@_script
def per_sample_gradients(compile: Compile) -> Result:
    model = _PerSample(3, 2).double()
    points, loss = torch.randn(4, 3, dtype=torch.float64), compile(model)
    return _train(model.parameters(), (loss(points) for _ in range(2)))


@_script
def no_module(compile: Compile) -> Result:
    weight = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    count, x = torch.zeros(()), torch.randn(4, 8, dtype=torch.float64)

    @compile
    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        count.add_(1)
        return F.softplus(x @ weight).mean(), x.T

    result = _train([weight], (loss(x)[0] for _ in range(3)))
    return result | {"count": count, "is a view": loss(x)[1].data_ptr() == x.data_ptr()}


@_script
def in_place(compile: Compile) -> Result:
    """Arguments that are changed, and results that are views of them."""
    x = torch.ones(4, 4, dtype=torch.float64)
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    @compile
    def loss(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.mul_(2)
        x[0] = 5
        return (x * weight).sum(), x.view(2, 8), weight.detach()

    result = _train([weight], (loss(x)[0] for _ in range(3)))
    _, view, detached = loss(x)
    view[0, 0] = 7
    return result | {"x": x, "is a view": detached.data_ptr() == weight.data_ptr()}


@_script
def autocast(compile: Compile) -> Result:
    """Around the call, and inside it."""
    model, x = _Broken(), torch.randn(4, 8)

    @compile
    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = model.up(x)
        return F.mse_loss(model.down(h.float()).float(), x)

    def losses() -> Iterator[Tensor]:
        yield loss(x)
        with torch.autocast("cpu", torch.bfloat16):
            yield loss(x)

    return _train(model.parameters(), losses())


@_script
def dropout(compile: Compile) -> Result:
    """Not the masks of one device, but the same ones from one seed, and on all ranks."""
    compiled = compile(nn.Dropout(0.5))
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(compiled(torch.ones(8, 8)))
    return {
        "same": torch.equal(draws[0], draws[1]),
        "kept": [x.count_nonzero() for x in draws],
        "other": not torch.equal(draws[0], draws[2]),
    }


@_script
def draws_in_backward(compile: Compile) -> Result:
    """It cannot be captured, and so runs whole."""

    class Noisy(StraightRound):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient + torch.rand_like(gradient)

    model, x = nn.Linear(8, 8).double(), torch.randn(4, 8, dtype=torch.float64)
    loss = compile(lambda x: (Noisy.apply(model(x)) - 1).square().mean())
    return _train(model.parameters(), (loss(x) for _ in range(3)))


@_script
def custom_backward(compile: Compile) -> Result:
    """The gradient goes straight through, which is not the derivative of rounding."""
    model, x = nn.Linear(8, 8).double(), torch.randn(4, 8, dtype=torch.float64)
    loss = compile(lambda x: (StraightRound.apply(model(x)) - 1).square().mean())
    return _train(model.parameters(), (loss(x) for _ in range(3)))


@_script
def checkpointed(compile: Compile) -> Result:
    from torch.utils.checkpoint import checkpoint

    model, x = _Broken().double(), torch.randn(4, 8, dtype=torch.float64)

    @compile
    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = model.up(x).std()
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            h = checkpoint(lambda x: torch.relu(model.up(x)), x, use_reentrant=False)
        return (model.down(h) * scale).square().mean()

    return _train(model.parameters(), (loss(x) for _ in range(3)))
