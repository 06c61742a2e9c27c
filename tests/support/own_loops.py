"""Training loops as people write them for one device, each with the model that it is given plain or compiled.

A loop takes `ready`, which makes a module ready for training (it returns the module, or compiles it), and returns the
numbers by which two runs are compared. Nothing in it knows of autopar, but for methods that it asks the model for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import re
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrizations

import autopar
from autopar.capture.remedies import remedy_of_operands
from tests.support.loop import STEPS, Loop, Ready, batches, mlp, plain_loop, summed, whole
from tests.support.loops.modules import MODULES
from tests.support.loops.objectives import OBJECTIVES
from tests.support.loops.perturbations import PERTURBATIONS
from tests.support.loops.states import STATES
from tests.support.loops.updates import UPDATES
from tests.support.methods import METHODS
from tests.support.odd.odd_scripts import Verdict


def gan(ready: Ready) -> list[float]:
    """Two networks and two optimizers; the discriminator judges detached samples."""
    generator, judge = ready(mlp(2, 8, 6)), ready(mlp(6, 8, 1))
    of_generator = torch.optim.Adam(generator.parameters(), 1e-2, betas=(0.5, 0.999))
    of_judge = torch.optim.Adam(judge.parameters(), 1e-2)
    losses = []
    for real, _ in batches():
        noise = torch.linspace(-1, 1, 16, dtype=torch.float64).view(8, 2)
        of_judge.zero_grad()
        fake = generator(noise)
        ones, zeros = torch.ones(8, 1).double(), torch.zeros(8, 1).double()
        loss = F.binary_cross_entropy_with_logits(judge(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)
        loss.backward()
        of_judge.step()
        of_generator.zero_grad()
        fooled = F.binary_cross_entropy_with_logits(judge(fake), ones)
        fooled.backward()
        of_generator.step()
        losses += [loss.item(), fooled.item()]
    return [*losses, summed(generator), summed(judge)]


def ema_teacher(ready: Ready) -> list[float]:
    """A teacher that is a moving average of the student, over `zip(parameters(), parameters())`."""
    student = ready(mlp(6, 8, 3))
    teacher = copy.deepcopy(mlp(6, 8, 3).double())
    teacher.load_state_dict({k: whole(v) for k, v in student.state_dict().items()})
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    losses = []
    for x, y in batches():
        with torch.no_grad():
            target = teacher(x)
        loss = F.mse_loss(student(x), y) + F.mse_loss(student(x + 0.1), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.mul_(0.9).add_(whole(new), alpha=0.1)
        losses.append(loss.item())
    return [*losses, summed(student), summed(teacher)]


def accumulated(ready: Ready) -> list[float]:
    """Gradients of several backwards add up, and are clipped before a step."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for number, (x, y) in enumerate(batches(6)):
        loss = F.mse_loss(model(x), y) / 2
        loss.backward()
        if number % 2:
            losses.append(float(clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return [*losses, summed(model)]


def no_sync(ready: Ready) -> list[float]:
    """Accumulation with DDP's `no_sync`, which scripts ask for if the model has it."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for number, (x, y) in enumerate(batches(4)):
        quiet = model.no_sync() if number % 2 == 0 and hasattr(model, "no_sync") else contextlib.nullcontext()
        with quiet:
            loss = F.mse_loss(model(x), y)
            loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, summed(model)]


def gradient_penalty(ready: Ready) -> list[float]:
    """WGAN-GP: the norm of the gradient of the critic's result with respect to its input is pulled to 1."""
    critic = ready(mlp(6, 8, 1))
    optimizer = torch.optim.Adam(critic.parameters(), 1e-2)
    losses = []
    for x, _ in batches():
        x = x.clone().requires_grad_()
        out = critic(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.mean() + 10 * (slope.norm(2, dim=1) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, summed(critic)]


class LoRA(nn.Module):
    """A frozen linear layer beside a product of two narrow ones."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def lora(ready: Ready) -> list[float]:
    """LoRA by hand: layers are replaced before, and merged after training."""
    net = mlp(6, 8, 3)
    for at in (0, 2):
        net[at] = LoRA(net[at])  # type: ignore[arg-type]
    model = ready(net)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for x, y in batches():
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        for at in (0, 2):
            model[at].base.weight.add_(model[at].b @ model[at].a)
            model[at].b.zero_()
    return [*losses, F.mse_loss(model(x), y).item(), summed(model)]


def weight_norm(ready: Ready) -> list[float]:
    """`torch.nn.utils.parametrizations.weight_norm` and a spectral norm."""
    net = mlp(6, 8, 3)
    parametrizations.weight_norm(net[0])
    parametrizations.spectral_norm(net[2])
    return plain_loop(ready(net))


def lbfgs(ready: Ready) -> list[float]:
    """LBFGS, whose step calls a closure several times, under a schedule."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for x, y in batches(2):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)  # noqa: B023
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))
        schedule.step()
    return [*losses, summed(model)]


def early_stopping(ready: Ready) -> list[float]:
    """The best weights by `deepcopy(model.state_dict())`, loaded at the end."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    best, kept, losses = math.inf, None, []
    for x, y in batches(4):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if loss.item() < best:
            best, kept = loss.item(), copy.deepcopy(model.state_dict())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.load_state_dict(kept)
    return [*losses, best, F.mse_loss(model(x), y).item(), summed(model)]


def compiled_loss(ready: Ready) -> list[float]:
    """torch.compile around the loss function."""
    torch.compiler.reset()
    loss_fn = torch.compile(lambda out, y: (out - y).abs().mean() + (out - y).pow(2).mean(), backend="aot_eager")
    return plain_loop(ready(mlp(6, 8, 3)), loss_fn=loss_fn)


def mixed_losses(ready: Ready, *, gathers: bool = False) -> list[float]:
    """A weighted sum of losses of one result, whose weights come from their values, and a penalty of weights."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for x, y in batches():
        out = model(x)
        parts = [F.mse_loss(out, y), F.l1_loss(out, y), F.smooth_l1_loss(out.cumsum(1), y)]
        total = torch.stack([p / p.detach() for p in parts]).sum()
        penalty = 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
        if gathers and hasattr(penalty, "full_tensor"):
            penalty = penalty.full_tensor()
        (total + penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [float(parts[0]), float(whole(total)), float(whole(penalty))]
    return [*losses, summed(model)]


class Recurrent(nn.Module):
    """A GRU that takes and returns its hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        out, hidden = self.cell(x, hidden)
        return self.head(out), hidden


def hidden_state(ready: Ready) -> list[float]:
    """Truncated backpropagation: the hidden state is detached and carried to the next chunk."""
    model = ready(Recurrent())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hidden, losses = torch.zeros(1, 8, 8, dtype=torch.float64), []
    for x, y in batches():
        out, hidden = model(x.view(8, 2, 3), hidden.detach())
        loss = F.mse_loss(out[:, -1], y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), hidden.sum().item()]
    return [*losses, summed(model)]


def unfreezing(ready: Ready) -> list[float]:
    """The head alone at first, then all layers with another group of the optimizer; later the head is frozen."""
    model = ready(mlp(6, 8, 3))
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
    losses = []
    for number, (x, y) in enumerate(batches(4)):
        if number == 1:
            for p in model[0].parameters():
                p.requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
        if number == 3:
            model[2].requires_grad_(False)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, summed(model)]


def replaced_head(ready: Ready) -> list[float]:
    """A new head in the middle of the training, with a new optimizer."""
    model = ready(mlp(6, 8, 3))
    first = plain_loop(model)
    model.train()
    torch.manual_seed(3)
    model[2] = nn.Linear(8, 3).double()
    return [*first, *plain_loop(model)]


def smaller_last_batch(ready: Ready) -> list[float]:
    """A data set of 19 rows in batches of 8, by a DataLoader that shuffles; losses are weighed by their rows."""
    model = ready(mlp(6, 8, 3))
    (x, y), *_ = batches(1, rows=19)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(x, y)
    torch.manual_seed(5)
    loader = torch.utils.data.DataLoader(data, 8, shuffle=True)
    losses = []
    for _ in range(2):
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(inputs)
        losses.append(total / len(data))
    return [*losses, summed(model)]


def batch_norm(ready: Ready) -> list[float]:
    """Batch norm, evaluated between steps, with `momentum` changed as training goes on."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model = ready(net)
    losses = plain_loop(model)
    model.train()
    model[1].momentum = 0.5
    return [*losses, *plain_loop(model), whole(model[1].running_mean).sum().item()]


def contrastive(ready: Ready) -> list[float]:
    """InfoNCE over two views of a batch, with in-batch negatives and a learned temperature outside of the model."""
    model = ready(mlp(6, 8, 4))
    temperature = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], 0.1)
    losses = []
    for x, _ in batches():
        left, right = F.normalize(model(x)), F.normalize(model(x + 0.1))
        loss = F.cross_entropy(left @ right.T / temperature, torch.arange(8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, temperature.item(), summed(model)]


def sharpness_aware(ready: Ready) -> list[float]:
    """SAM: a step up along the gradient over its norm, a second backward, and back."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for x, y in batches():
        F.mse_loss(model(x), y).backward()
        norm = torch.norm(torch.stack([p.grad.norm(2) for p in model.parameters() if p.grad is not None]))
        moved = []
        with torch.no_grad():
            for p in model.parameters():
                step = p.grad * (0.05 / (norm + 1e-12))
                p.add_(step)
                moved.append((p, step))
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p, step in moved:
                p.sub_(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, summed(model)]


def reinforce(ready: Ready) -> list[float]:
    """PPO's inner loop: old log-probabilities under no_grad, several epochs, an entropy bonus, normed advantages."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    (x, y), *_ = batches(1)
    taken, gain = y.argmax(1), y.sum(1)
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    with torch.no_grad():
        old = torch.distributions.Categorical(logits=model(x)).log_prob(taken)
    losses = []
    for _ in range(STEPS):
        now = torch.distributions.Categorical(logits=model(x))
        ratio = (now.log_prob(taken) - old).exp()
        loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() - 0.01 * now.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, summed(model)]


def saved_and_resumed(ready: Ready) -> list[float]:
    """Saved by `torch.save` of both state dicts in memory, loaded into a second model, and trained on."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    first = plain_loop(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    torch.manual_seed(11)
    again = ready(mlp(6, 8, 3))
    later = torch.optim.Adam(again.parameters(), 1e-2)
    again.load_state_dict(kept["model"])
    later.load_state_dict(kept["optimizer"])
    return [*first, *plain_loop(again, later)]


def swa(ready: Ready) -> list[float]:
    """Stochastic weight averaging with `AveragedModel`, whose averages are evaluated."""
    model = ready(mlp(6, 8, 3))
    plain_loop(model)
    averaged = torch.optim.swa_utils.AveragedModel(getattr(model, "original", model))
    losses = plain_loop(model)
    averaged.update_parameters(model)
    return [*losses, summed(averaged)]


def grad_norm_logging(ready: Ready) -> list[float]:
    """Norms of single layers' weights and gradients are logged, and gradients clipped by value."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for x, y in batches():
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for name, p in model.named_parameters():
            if name.endswith("weight"):
                losses += [float(whole(p.grad.norm())), float(whole(p.norm()))]
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, summed(model)]


def gradient_hook(ready: Ready) -> list[float]:
    """A hook on a parameter that scales its gradient, and one on a module that changes its result."""
    model = ready(mlp(6, 8, 3))
    for p in model[0].parameters():
        p.register_hook(lambda g: g * 0.5)
    model[2].register_forward_hook(lambda module, given, out: out + 0.1)
    return plain_loop(model)


def warmup_and_groups(ready: Ready) -> list[float]:
    """No decay for biases, warmup by LambdaLR, then cosine, and a ReduceLROnPlateau on top."""
    model = ready(mlp(6, 8, 3))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, 1e-2)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 2))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    losses = []
    for x, y in batches(5):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm.step()
        plateau.step(loss.detach())
        losses += [loss.item(), optimizer.param_groups[0]["lr"]]
    return [*losses, summed(model)]


LOOPS: dict[str, Loop] = {
    "GAN with two optimizers": gan,
    "EMA teacher": ema_teacher,
    "accumulation and clipping": accumulated,
    "accumulation with no_sync": no_sync,
    "gradient penalty": gradient_penalty,
    "LoRA by hand, merged": lora,
    "weight and spectral norm": weight_norm,
    "LBFGS with a closure": lbfgs,
    "early stopping by deepcopy": early_stopping,
    "torch.compile around the loss": compiled_loss,
    "mixed losses and a penalty": mixed_losses,
    "the same, gathered as the error says": functools.partial(mixed_losses, gathers=True),
    "hidden state carried": hidden_state,
    "unfrozen, then frozen": unfreezing,
    "head replaced in between": replaced_head,
    "last batch smaller": smaller_last_batch,
    "batch norm, evaluated": batch_norm,
    "contrastive, own temperature": contrastive,
    "SAM": sharpness_aware,
    "PPO": reinforce,
    "saved, loaded, trained on": saved_and_resumed,
    "AveragedModel": swa,
    "norms logged, clipped by value": grad_norm_logging,
    "hooks of the script": gradient_hook,
    "groups, warmup and plateau": warmup_and_groups,
    **METHODS,
    **UPDATES,
    **MODULES,
    **OBJECTIVES,
    **STATES,
    **PERTURBATIONS,
}


def plainly(module: nn.Module) -> nn.Module:
    """The module as one device trains it."""
    return module.double()


def by_compile(options: dict[str, Any]) -> Ready:
    """The module compiled."""
    return lambda module: autopar.compile(module.double(), **options)


def by_backend(module: nn.Module) -> Any:
    """The module under torch.compile."""
    torch.compiler.reset()
    module = module.double()
    options = {"mesh": {"dp": 2}, "recipe": "ddp"}
    module.forward = torch.compile(module.forward, backend="autopar", options=options)  # type: ignore[method-assign]
    return module


LOOP_DOORS: dict[str, Ready] = {
    "ddp": by_compile({"recipe": "ddp"}),
    "zero3": by_compile({"recipe": "zero3"}),
    "everything open": by_compile({}),
    "stages": by_compile({"mesh": {"pp": 2}}),
    "backend": by_backend,
}


def numbers_of(name: str, ready: Ready) -> list[float]:
    """What a loop returns, from one seed."""
    torch.manual_seed(0)
    return LOOPS[name](ready)


def verdict_of_loop(name: str, door: str) -> Verdict:
    """Runs a loop plainly and at a door, over all ranks of the process group."""
    label = f"{name}, {door}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = numbers_of(name, plainly)
        try:
            found = numbers_of(name, LOOP_DOORS[door])
        except autopar.AutoparError as error:
            return Verdict(label, "refused", f"{type(error).__name__}: {error}")
        except Exception as error:
            has_our_words = re.search(r"autopar|docs/", str(error)) or remedy_of_operands(error)
            return Verdict(label, "refused" if has_our_words else "breaks", f"{type(error).__name__}: {error}")
    apart = max((abs(a - b) / max(1.0, abs(b)) for a, b in zip(found, expected, strict=True)), default=0.0)
    word = "equal" if apart < 1e-9 else "differs"
    return Verdict(label, word, "" if word == "equal" else f"{apart:.1e}: {found}, and plainly {expected}")
