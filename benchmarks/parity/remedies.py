"""Follows the remedy of every refusal of the contract and of own loops, as its error says it, on two Gloo ranks.

OMP_NUM_THREADS=1 python benchmarks/parity/remedies.py --markdown benchmarks/results/remedies.md

A case has the words of the error, a script that is refused with them, and the script with the remedy followed, which
has to find what the plain script finds in one process.
"""

from __future__ import annotations

import copy
import io
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

sys.path.insert(0, str(Path(__file__).parents[2]))
import autopar
from autopar.capture.remedies import remedy_of_operands
from autopar.runtime.parameters.adafactor import Adafactor
from benchmarks.tables import markdown_table
from tests.runtime.gloo_ranks import Ranks
from tests.support.contract.behaviour import Model, grads, loss_of, named, number, trained
from tests.support.contract.verdicts import by_backend, by_shards, differences
from tests.support.loop import whole

STAGES, ZERO3, DDP = {"mesh": {"pp": 2}}, {"recipe": "zero3"}, {"recipe": "ddp"}
Script = Callable[..., Any]


class Case(NamedTuple):
    """A refusal, and its remedy.

    Attributes:
        words: words of the error.
        remedy: the remedy in a few words.
        make: how the module is made ready.
        script: the script that is refused.
        followed: the same with the remedy; it makes its module itself, plain where `make` is None.
        expected: the plain script to compare with; None for `script`.
    """

    words: str
    remedy: str
    make: Any
    script: Script
    followed: Script
    expected: Script | None = None


def compiled(options: dict[str, Any], **further: Any) -> Callable[[nn.Module], Any]:
    """How a module is compiled."""
    return lambda module: autopar.compile(module.double(), **options, **further)


def _plain(module: nn.Module) -> nn.Module:
    return module.double()


def _batch() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6).sin()
    return x, torch.linspace(0, 1, 32, dtype=torch.float64).view(8, 4)


def _fresh(make: Any) -> Any:
    torch.manual_seed(0)
    return make(Model())


def _asked(script: Script, make: Any) -> Any:
    """What a script finds of a module that is made ready."""
    return script(_fresh(make), *_batch())


def _trained_first(script: Script) -> Script:
    """The script after a step of training."""

    def run(model: Any, x: Tensor, y: Tensor) -> Any:
        trained(model, torch.optim.SGD(model.parameters(), 0.1), x, y, 1)
        model.zero_grad()
        return script(model, x, y)

    return run


# --- stages


def step_then_evaluate(model: Any, x: Tensor, y: Tensor) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if isinstance(model, autopar.CompiledModule):
        model.step(x, y)
    else:
        loss_of(model, x, y).backward()
    optimizer.step()
    with torch.inference_mode():
        return number(model.eval()(x))


def untied(module: Any) -> Any:
    module.again.weight = nn.Parameter(module.second.weight.detach().clone())
    return module


def evaluated(model: Any, x: Tensor, y: Tensor) -> Any:
    return number(model.eval()(x))


def penalised_untied(model: Any, x: Tensor, y: Tensor) -> Any:
    return penalised(untied(model), x, y)


def penalised(model: Any, x: Tensor, y: Tensor) -> Any:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(model, x, y), x, create_graph=True)
    slope.square().sum().backward()
    return grads(model)


def replaced(model: Any, x: Tensor, y: Tensor, *, copies: bool = False) -> Any:
    new = torch.full_like(model.first.weight.detach(), 0.1)
    if copies:
        with torch.no_grad():
            model.first.weight.copy_(new)
    else:
        model.first.weight = nn.Parameter(new)
    return number(model.eval()(x))


def whole_by_torch(model: Any, x: Tensor, y: Tensor, *, gathers: bool = False) -> Any:
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if gathers:
        found = {name: whole(v) for name, v in model.state_dict().items()}
    plain = Model().double()
    plain.load_state_dict(found)
    return named(plain)


# --- no rows, functions, hooks


def without_rows(model: Any, x: Tensor, y: Tensor, *, has_plan: bool = False) -> Any:
    model.eval()
    if has_plan:
        model.prepare(x)
    return list(model(x[:0]).shape)


def halved(model: Any, x: Tensor, y: Tensor, *, copies: bool = False) -> Any:
    if not copies:
        halves = {name: p.detach() / 2 for name, p in model.named_parameters()}
        return number(torch.func.functional_call(model, halves, (x,)))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p / 2)
    return number(model(x))


def of_a_hook(model: Any, x: Tensor, y: Tensor) -> Any:
    seen: list[Any] = []
    model.register_forward_hook(lambda module, args, out: seen.append(number(out)))
    model(x)
    return seen


class Returning(Model):
    """The forward returns what a hook would have collected."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        h = self.second(self.norm(torch.tanh(self.first(x))))
        return self.head(torch.tanh(self.again(h))) * self.scale, h.square().mean()


def of_a_layers_hook(model: Any, x: Tensor, y: Tensor) -> Any:
    seen: list[Any] = []
    model.second.register_forward_hook(lambda module, args, out: seen.append(out.detach().square().mean()))
    model(x)
    return number(seen[0])


def returned(make: Any) -> Any:
    torch.manual_seed(0)
    return number(make(Returning())(_batch()[0])[1])


def of_gradient_hooks(model: Any, x: Tensor, y: Tensor, *, between: bool = False) -> Any:
    if not between:
        model.first.weight.register_hook(lambda grad: grad * 2)
    loss_of(model, x, y).backward()
    if between:
        model.first.weight.grad.mul_(2)
    torch.optim.SGD(model.parameters(), 0.1).step()
    return named(model)


def of_all_modules(model: Any, x: Tensor, y: Tensor, *, resets: bool = False) -> Any:
    seen: list[bool] = []
    model(x)
    handle = nn.modules.module.register_module_forward_hook(lambda m, given, out: seen.append(isinstance(m, nn.Linear)))
    try:
        if resets:
            torch.compiler.reset()
        found = number(model(x))
    finally:
        handle.remove()
    if resets:
        torch.compiler.reset()
    return found, seen.count(True), number(model(x))


# --- parameters in shards


def a_layer(model: Any, x: Tensor, y: Tensor, *, gathers: bool = False) -> Any:
    with torch.no_grad():
        if not gathers:
            return number(F.linear(x, model.first.weight, model.first.bias))
        values = {name: p.full_tensor() for name, p in model.first.named_parameters()}
        return number(torch.func.functional_call(model.first, values, (x,)))


def a_norm(model: Any, x: Tensor, y: Tensor, *, gathers: bool = False) -> Any:
    loss_of(model, x, y).backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return [float(n.full_tensor() if gathers and hasattr(n, "full_tensor") else n) for n in norms]


def by_adafactor(model: Any, x: Tensor, y: Tensor, kind: Any = torch.optim.Adafactor) -> Any:
    return trained(model, kind(model.parameters(), 0.1), x, y)


def as_array(model: Any, x: Tensor, y: Tensor, *, gathers: bool = False) -> Any:
    bias = model.head.bias.detach()
    return (bias.full_tensor() if gathers else bias).numpy().tolist()


def a_row_written(model: Any, x: Tensor, y: Tensor, *, gathers: bool = False) -> Any:
    p = model.first.weight
    with torch.no_grad():
        if gathers:
            full = p.detach().full_tensor()
            full[0].add_(1)
            p.copy_(full)
        else:
            p[0].add_(1)
    return number(p)


# --- copies and files


def averaged(model: Any, x: Tensor, y: Tensor, *, inner: bool = False) -> Any:
    average = AveragedModel(model.original if inner else model)
    for _ in range(2):
        trained(model, torch.optim.SGD(model.parameters(), 0.1), x, y, 1)
        average.update_parameters(model)
    return named(average.module)


def averaged_with_buffers(model: Any, x: Tensor, y: Tensor, *, later: bool = False) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if later:
        trained(model, optimizer, x, y, 1)
    inner = getattr(model, "original", model)
    average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    for _ in range(2):
        trained(model, optimizer, x, y, 1)
        average.update_parameters(model)
    return named(average.module)


def averaged_after_a_step(model: Any, x: Tensor, y: Tensor) -> Any:
    return averaged_with_buffers(model, x, y, later=True)


def through_a_file(model: Any, x: Tensor, y: Tensor, *, folder: bool = False) -> Any:
    first = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    trained(model, first, x, y)
    second = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    if folder:
        _through_a_folder(lambda at: autopar.checkpoint.save_checkpoint(at, model, first), model, second)
    else:
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second.load_state_dict(torch.load(file, weights_only=True))
    return trained(model, second, x, y), second.param_groups[0]["lr"]


def _through_a_folder(save: Callable[[str], Any], model: Any, optimizer: Any = None) -> None:
    """Saves and loads a checkpoint in a folder that all ranks see."""
    places: list[Any] = [tempfile.mkdtemp() if not dist.is_initialized() or dist.get_rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(places, src=0)
    save(f"{places[0]}/c")
    autopar.checkpoint.load_checkpoint(f"{places[0]}/c", model, optimizer)


def state_saved(model: Any, x: Tensor, y: Tensor, how: str = "file") -> Any:
    if how == "file":
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
    if how == "folder":
        _through_a_folder(lambda at: autopar.checkpoint.save_checkpoint(at, model), model)
    if how == "shards":
        file = io.BytesIO()
        torch.save(model.state_dict().shards(), file)
        file.seek(0)
        model.load_state_dict(torch.load(file, weights_only=False))
    return named(model)


def copied(model: Any, x: Tensor, y: Tensor, *, inner: bool = False) -> Any:
    other = copy.deepcopy(model.original if inner else model)
    with torch.no_grad():
        other.first.weight.zero_()
    return number(model.eval()(x)), number(other.first.weight)


_STAGE_WORDS = "only model.step adds up its gradients"
_SHARD_WORDS = "was given to torch.save or pickle"
_NORM = "of which this rank has its own term"
CASES = (
    Case(
        _STAGE_WORDS,
        "loss_fn and model.step",
        compiled(STAGES),
        evaluated,
        lambda: _asked(step_then_evaluate, compiled(STAGES, loss_fn=F.mse_loss)),
        step_then_evaluate,
    ),
    Case(
        _STAGE_WORDS,
        "the parameter untied",
        compiled(STAGES),
        evaluated,
        lambda: _asked(evaluated, lambda m: compiled(STAGES)(untied(m))),
    ),
    Case(_STAGE_WORDS, "without stages", compiled(STAGES), evaluated, lambda: _asked(evaluated, compiled(ZERO3))),
    Case(
        "create_graph=True",
        "recipe='zero3'",
        lambda m: compiled(STAGES)(untied(m)),
        penalised,
        lambda: _asked(penalised, lambda m: compiled(ZERO3)(untied(m))),
        penalised_untied,
    ),
    *(
        Case(
            "has no rows",
            "prepared with a batch that has rows",
            compiled(options),
            without_rows,
            lambda options=options: _asked(lambda *a: without_rows(*a, has_plan=True), compiled(options)),
        )
        for options in (DDP, {"mesh": {"tp": 2}, "recipe": "tp"})
    ),
    Case(
        "is not an instance of torch.nn.Parameter",
        "copied into the parameters",
        compiled(DDP),
        halved,
        lambda: _asked(lambda *a: halved(*a, copies=True), compiled(DDP)),
    ),
    Case(
        "The model cannot be captured", "the backend", compiled(DDP), of_a_hook, lambda: _asked(of_a_hook, by_backend)
    ),
    Case(
        "a captured program does not do that in each step",
        "returned from the forward",
        compiled(DDP),
        of_a_layers_hook,
        lambda: returned(compiled(DDP)),
    ),
    Case(
        "A captured program does not call them",
        "done between step and the optimizer's",
        compiled(DDP),
        of_gradient_hooks,
        lambda: _asked(lambda *a: of_gradient_hooks(*a, between=True), compiled(DDP)),
    ),
    Case(
        "Hooks of all modules",
        "torch.compiler.reset()",
        by_backend,
        of_all_modules,
        lambda: _asked(lambda *a: of_all_modules(*a, resets=True), by_backend),
    ),
    *(
        Case(
            "got mixed torch.Tensor and DTensor",
            "the layer called with whole parameters",
            make,
            a_layer,
            lambda make=make: _asked(lambda *a: a_layer(*a, gathers=True), make),
        )
        for make in (compiled(ZERO3, example_inputs=_batch()[:1]), by_shards)
    ),
    *(
        Case(_NORM, ".full_tensor()", make, a_norm, lambda make=make: _asked(lambda *a: a_norm(*a, gathers=True), make))
        for make in (compiled(ZERO3), by_shards)
    ),
    Case(
        _NORM,
        "the Adafactor that is named",
        compiled(ZERO3),
        by_adafactor,
        lambda: _asked(lambda m, x, y: by_adafactor(m, x, y, Adafactor), compiled(ZERO3)),
    ),
    Case(
        "numpy() reads all values",
        ".full_tensor().numpy()",
        compiled(ZERO3),
        _trained_first(as_array),
        lambda: _asked(_trained_first(lambda *a: as_array(*a, gathers=True)), compiled(ZERO3)),
    ),
    Case(
        "the write would be lost",
        "the whole written",
        compiled(ZERO3),
        _trained_first(a_row_written),
        lambda: _asked(_trained_first(lambda *a: a_row_written(*a, gathers=True)), compiled(ZERO3)),
    ),
    Case(
        "was replaced by another",
        "copied into it",
        lambda m: compiled(STAGES)(untied(m)),
        _trained_first(replaced),
        lambda: _asked(_trained_first(lambda *a: replaced(*a, copies=True)), lambda m: compiled(STAGES)(untied(m))),
    ),
    Case(
        "AveragedModel was given a model that has no plan yet",
        "example_inputs=, and the model inside",
        compiled(DDP),
        averaged,
        lambda: _asked(lambda *a: averaged(*a, inner=True), compiled(DDP, example_inputs=_batch()[:1])),
    ),
    *(
        Case(
            "on inputs with different meshes",
            "copied after the first step",
            compiled(options),
            averaged_with_buffers,
            lambda options=options: _asked(averaged_after_a_step, compiled(options)),
            averaged_after_a_step,
        )
        for options in (DDP, ZERO3)
    ),
    Case(
        "no rank has both",
        "recipe='zero3'",
        lambda m: compiled(STAGES)(untied(m)),
        averaged_with_buffers,
        lambda: _asked(averaged_after_a_step, compiled(ZERO3)),
        averaged_after_a_step,
    ),
    Case(
        "no rank has both",
        "full_tensor() of the state",
        compiled(STAGES),
        _trained_first(whole_by_torch),
        lambda: _asked(_trained_first(lambda *a: whole_by_torch(*a, gathers=True)), compiled(STAGES)),
    ),
    *(
        Case(
            _SHARD_WORDS,
            "save_checkpoint(folder, model, optimizer)",
            make,
            through_a_file,
            lambda make=make: _asked(lambda *a: through_a_file(*a, folder=True), make),
        )
        for make in (compiled(ZERO3), by_shards)
    ),
    *(
        Case(
            _SHARD_WORDS,
            words,
            compiled(ZERO3),
            _trained_first(state_saved),
            lambda how=how: _asked(_trained_first(lambda m, x, y: state_saved(m, x, y, how)), compiled(ZERO3)),
        )
        for how, words in (("folder", "save_checkpoint(folder, model)"), ("shards", "state_dict().shards()"))
    ),
    Case(
        "A compiled module was to be copied",
        "model.original copied, after the plan",
        compiled(DDP),
        _trained_first(copied),
        lambda: _asked(_trained_first(lambda *a: copied(*a, inner=True)), compiled(DDP)),
    ),
)


def met(number: int) -> tuple[str, str]:
    """What a case says, and what its remedy finds: "equal", or what differs; every rank calls it."""
    case = CASES[number]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _said(case), _found(case)


def _said(case: Case) -> str:
    try:
        _asked(case.script, case.make)
    except Exception as error:  # whatever a script would meet
        text = f"{error} {remedy_of_operands(error) or ''}"
        return "refused" if case.words in text else f"other words: {text[:300]}"
    return "not refused"


def _found(case: Case) -> str:
    expected = _asked(case.expected or case.script, _plain)
    try:
        apart = differences(case.followed(), expected)
    except Exception as error:  # a remedy that does not work
        return f"{type(error).__name__}: {str(error)[:400]}"
    return "; ".join(apart)[:400] or "equal"


def page(found: Sequence[tuple[str, str]]) -> str:
    """The page of results."""
    rows = [
        (f"... {case.words} ...", case.remedy, said, re.sub(r"\s+", " ", end).replace("|", "\\|"))
        for case, (said, end) in zip(CASES, found, strict=True)
    ]
    lines = [
        "# Remedies, followed",
        "",
        "Every kind of refusal of [the contract](contract.md) and of [own loops](own_loops.md), with its remedy "
        "followed as the error says it, on 2 Gloo ranks. *Equal*: what the script then finds agrees with the plain "
        "script in one process, within 1e-9 in float64. Written by",
        "",
        "    OMP_NUM_THREADS=1 python benchmarks/parity/remedies.py --markdown benchmarks/results/remedies.md",
        "",
        *markdown_table(("words of the error", "remedy", "the script", "with the remedy"), rows, text_columns=4),
    ]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--only", default="", help="Part of the words of the cases to run.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Where to write the page.")
def main(only: str, markdown: Path | None) -> None:
    """Follows all remedies, and exits with 1 if one does not work."""
    found, ranks = [], Ranks(2)
    try:
        for at, case in enumerate(CASES):
            if only not in f"{case.words} {case.remedy}":
                found.append(("not run", ""))
                continue
            found.append(ranks.run(met, at)[0])
            click.echo(f"{case.words} | {case.remedy} | {' | '.join(found[-1])}")
    finally:
        ranks.stop()
    if markdown is not None:
        markdown.write_text(page(found))
    sys.exit(any(end != ("refused", "equal") for end in found))


if __name__ == "__main__":
    main()
