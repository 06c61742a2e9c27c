"""Proves a rule: an op alone in a graph, run with every choice on an axis of two ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from autopar.analysis.factors import analyze
from autopar.capture.export import capture_step
from autopar.ir import UNSPLIT, VARIED, Mesh, ParameterPlan, Plan, R, is_legal
from autopar.passes import clean_up
from autopar.program.program import build_program
from autopar.proof.lockstep import run

MESH = Mesh.of({"a": 2})


class Alone(nn.Module):
    """sum(op(tensors) * weights): floating tensors are parameters, the others buffers."""

    def __init__(self, op: Callable[..., object], tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.op, self.names = op, []
        for i, x in enumerate(tensors):
            self.names.append(f"x{i}")
            if x.is_floating_point():
                self.register_parameter(f"x{i}", nn.Parameter(x.clone()))
            else:
                self.register_buffer(f"x{i}", x.clone())

    def forward(self) -> Tensor:
        result = self.op(*(getattr(self, name) for name in self.names))
        parts = [r for r in (result if isinstance(result, (tuple, list)) else [result])]
        floating = [r for r in parts if r.is_floating_point()]
        weighted = [torch.linspace(1, 2, r.numel(), dtype=r.dtype).reshape(r.shape) * r for r in floating]
        return torch.stack([w.sum() for w in weighted]).sum()


def labels_of(op: Callable[..., object], *tensors: Tensor, kind: str) -> set[str]:
    """The choices that the rule of the op called `kind` offers (any op of parameters may also run in V)."""
    graph = analyze(_captured(op, tensors)[1]).graph
    return {c.label for o in graph.ops if o.kind == kind for c in o.choices} - {VARIED}


def prove(op: Callable[..., object], *tensors: Tensor, kind: str, mesh: Mesh = MESH, rows: int = 0) -> int:
    """Compares every choice of every op called `kind` with the unsplit op; returns how many there were.

    With a number of rows it compares choices that split as many alone, also in parts of different sizes.
    """
    module, captured = _captured(op, tensors)
    module.zero_grad()
    module().backward()
    analysis = analyze(captured)
    graph = analysis.graph
    tried = 0
    for node in (o for o in graph.ops if o.kind == kind):
        assert node.has_rule, f"no rule for {kind}"
        for choice in node.choices:
            if rows and choice.size == rows:
                graph.__dict__["batch"] = frozenset({choice.factor})
            if rows in (0, choice.size) and is_legal(graph, node, (choice.label,), mesh):
                _compare(module, captured, analysis, node.name, choice.label, mesh)
                tried += 1
    assert tried, f"{kind} is not in the graph: {[o.kind for o in graph.ops]}"
    return tried


@functools.lru_cache(maxsize=1)  # a test asks for the labels of an op, and then proves them
def _captured(op, tensors):
    module = Alone(op, tensors)
    captured = capture_step(module, (), {}, None)
    clean_up(captured.module)
    return module, captured


def _compare(module, captured, analysis, name, label, mesh):
    ops = {o.name: (label if o.name == name else UNSPLIT,) for o in analysis.graph.ops}
    parameters = {n: ParameterPlan((R,), (R,)) for n in analysis.graph.parameters}
    plan = Plan(mesh, captured.fingerprint, "", 1, parameters, {}, ops)
    program = build_program(captured, analysis, plan)
    own = dict(module.named_parameters())
    ranks = range(mesh.size)
    leaves = {s.name: [own[s.name].detach().clone().requires_grad_() for _ in ranks] for s in program.parameters}
    buffers = dict(module.named_buffers())
    fixed = [[x] * mesh.size for x in (*(buffers[s.name] for s in program.buffers), *program.constants)]
    (losses,) = run(program, [*leaves.values(), *fixed])
    want = module()
    torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
    for loss in losses:
        torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-12, msg=f"{name} split by {label}")
    for parameter, ranks in leaves.items():
        grad = own[parameter].grad
        for x in ranks:
            got = torch.zeros_like(x) if x.grad is None else x.grad
            wanted = torch.zeros_like(x) if grad is None else grad
            torch.testing.assert_close(
                got, wanted, rtol=1e-9, atol=1e-11, msg=f"gradient of {parameter}, {name} split by {label}"
            )
