"""Capture: an unmodified module becomes a functional graph of its forward, with names.

`torch.export` traces the module together with its loss; `run_decompositions({})` makes the graph
functional and leaves high-level ops (linear, layer_norm, attention) whole. Before that, rewrites correct what export
gets wrong for training (`EXPORTED` of autopar.capture.rewrites).
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar import _torch
from autopar._torch import pytree
from autopar.capture.captured import Captured
from autopar.capture.casts import absorb_casts, call_cast
from autopar.capture.checks import (
    plain_name,
    refuse_bodies,
    refuse_changed_parameters,
    refuse_fake_constants,
    refuse_layouts,
    refuse_numbers_from_tensors,
    refuse_trained_constants,
    refusing_changed_arguments,
)
from autopar.capture.flex import keeping_flex_attention
from autopar.capture.forms import capturable
from autopar.capture.functional import make_functional
from autopar.capture.functions import keeping_functions
from autopar.capture.guards.guards import Place
from autopar.capture.guards.refusals import BACKEND_RUNS_IT
from autopar.capture.guards.untraced_effects import OutsideLeaves, watching
from autopar.capture.guards.watch import Watch
from autopar.capture.numbers import with_numbers
from autopar.capture.open_sizes import OpenDims, open_to_export
from autopar.capture.own_errors import own_error
from autopar.capture.remedies import MODEL, explained, has_remedy
from autopar.capture.results import loss_in, loss_last
from autopar.capture.rewrites import EXPORTED
from autopar.capture.rewrites.functionalize_strided_ops import refuse_strides
from autopar.errors import CaptureError, NoLossError, StepError
from autopar.ir import MixedPrecision

LossFunction = Callable[..., Any]  # returns the loss, or (loss, extra results)


class _WithLoss(nn.Module):
    """The model and its loss as one module, which returns the extra results of a step and then the scalar loss."""

    loss_fn: LossFunction | None
    watch: Watch | None
    results_with_more: set[type]  # types of results in which the model returned its loss among other things

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        *,
        is_step: bool = False,
        precision: MixedPrecision | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        # Not a submodule, because the tensors that a loss holds are not part of the model.
        self.__dict__["loss_fn"] = loss_fn
        self.__dict__["watch"] = None
        # A set that is changed in place, because export undoes assignments to attributes.
        self.__dict__["results_with_more"] = set()
        self.precision = precision
        self.is_step = is_step
        self.training = model.training  # not train(): submodules keep their own modes

    def forward(self, *batch: Any, **kwargs: Any) -> Any:
        watching_python = contextlib.nullcontext() if self.watch is None else self.watch.run()
        with watching_python, refusing_changed_arguments((batch, kwargs)):
            results = self._run(*batch, **kwargs)
        pytree.register_objects(results)
        return results

    def _run(self, *batch: Any, **kwargs: Any) -> Any:
        if self.loss_fn is None:
            result = self._result(*batch, **kwargs)
            if not self.is_step:
                return result
            loss = loss_in(result)
            self.results_with_more.update({type(result)} if loss is not result else ())
            return loss_last(loss)
        targets = target_count(self.loss_fn)
        inputs = batch[: len(batch) - targets]
        result = self._result(*inputs, **kwargs)
        return loss_last(self.loss_fn(result, *batch[len(batch) - targets :]))

    def _result(self, *args: Any, **kwargs: Any) -> Any:
        if self.precision is None:
            return self.model(*args, **kwargs)
        return call_cast(self.model, args, kwargs, self.precision)


def target_count(loss_fn: LossFunction) -> int:
    """Number of entries at the end of a batch that go to the loss: its parameters without default, less one.

    Raises StepError for a function whose signature cannot be read.
    """
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature, such as torch.mean
        count = _torch.required_arguments(getattr(function, "__name__", ""))
        if count is None:
            raise StepError(
                f"The number of batch entries that the loss function {loss_fn!r} takes is not in its signature. "
                "Wrap it in a function that names them: lambda result, target: ..."
            ) from None
        return max(count - 1, 0)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.default is p.empty and p.kind in positional]
    return max(len(required) - 1, 0)


def capture_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFunction | None,
    precision: MixedPrecision | None = None,
    numbers: Sequence[Place] = (),
    open_dims: OpenDims = (),
) -> Captured:
    """Captures forward and loss. Raises StepError if the result is not a scalar loss.

    Args:
        numbers: places of Python numbers that are to become inputs if they can (`autopar.capture.numbers`).
        open_dims: dims of inputs whose sizes are left open (`autopar.capture.open_sizes`).
    """
    _require_targets(model, args, kwargs, loss_fn)
    asked = partial(_WithLoss, model, loss_fn, is_step=True, precision=precision)
    return with_numbers(partial(_capture, asked, args, kwargs, open_dims), numbers)


def capture_forward(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    precision: MixedPrecision | None = None,
    numbers: Sequence[Place] = (),
    open_dims: OpenDims = (),
) -> Captured:
    """Captures the forward alone; `numbers` and `open_dims` as in `capture_step`."""
    asked = partial(_WithLoss, model, None, precision=precision)
    return with_numbers(partial(_capture, asked, args, kwargs, open_dims), numbers)


def run_with_loss(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFunction | None,
    precision: MixedPrecision | None = None,
) -> Tensor:
    """The loss without capture, as a single device computes it."""
    with _torch.flex_attention_by_definition():
        result = _WithLoss(model, loss_fn, is_step=True, precision=precision)(*args, **kwargs)
    loss: Tensor = result[-1] if isinstance(result, tuple) else result
    return loss


def _require_targets(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: LossFunction | None
) -> None:
    """Raises StepError for a batch of which nothing is left for the loss, or which has a target where there is none."""
    if loss_fn is None and len(args) > 1 and not _takes(model, args, kwargs) and _takes(model, args[:-1], kwargs):
        raise NoLossError(
            f"`step` was given {len(args)} arguments, but the model's forward takes {len(args) - 1} of them. If the "
            "last is a target, name the loss that takes it: autopar.compile(model, loss_fn=...)."
        )
    count = 0 if loss_fn is None else target_count(loss_fn)
    is_split = len(args) >= count and _takes(model, args[: len(args) - count], kwargs)
    if count == 0 or is_split or not _takes(model, args, kwargs):
        return
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    targets = "a target" if count == 1 else f"{count} targets"
    raise StepError(
        f"The loss function {name} asks for {targets} at the end of the batch, but none was given: the model's "
        f"forward takes the whole batch of {len(args)}. Call step(*inputs, {', '.join(_target_names(count))}), or "
        "compile a model that returns its loss without loss_fn."
    )


def _takes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the model's forward can be called with this many arguments."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a forward without a signature
        return True
    return True


def _require_scalar_loss(captured: Captured, loss_fn: LossFunction | None) -> None:
    output = next(iter(captured.module.graph.find_nodes(op="output"))).args[0]
    made = output[len(captured.mutated) :]
    values = [n.meta["val"] for n in made if isinstance(n, fx.Node)]
    shapes = [list(v.shape) for v in values if isinstance(v, Tensor)]
    kind = captured.out_spec.type
    has_extras = kind in (tuple, collections.namedtuple)
    if isinstance(made[-1], fx.Node) and (len(made) == 1 or has_extras) and values[-1].numel() == 1:
        return
    if loss_fn is None and not shapes:
        raise NoLossError(
            "`step` needs a loss, but the model returned None as its loss: give it what it computes one "
            "from, such as labels=..., or pass loss_fn=... to autopar.compile."
        )
    if loss_fn is None:
        if has_extras:  # the first was put last, as a loss is
            shapes = [*shapes[-1:], *shapes[:-1]]
        if has_extras and [] in shapes[1:]:
            place = shapes.index([])
            raise NoLossError(
                f"`step` needs a loss: the model returns tensors of shapes {shapes}, of which number {place} is one "
                f"scalar, and the loss comes first. If that is the loss, pass loss_fn=lambda found: found[{place}] to "
                f"autopar.compile, or run backward of it yourself: model(...)[{place}].backward()."
            )
        raise NoLossError(
            f"`step` needs a loss: the model returns tensors of shapes {shapes}, the first of which is not one scalar, "
            "and no loss function was given. Pass loss_fn=... to autopar.compile, or return the loss first: "
            "(loss, {'logits': logits})."
        )
    if kind in (list, dict):
        raise StepError(
            f"The loss function returns a {kind.__name__} with tensors of shapes {shapes}; `step` needs the loss "
            "first. Return a tuple of the loss and any other results of the step: (loss, {'accuracy': accuracy})."
        )
    raise StepError(
        f"The loss function returns tensors of shapes {shapes}; `step` needs one scalar. "
        "Reduce it, for example with .mean(), and return any other results of the step after it: "
        "(loss, {'logits': logits})."
    )


def _capture(
    make: Callable[[], _WithLoss], args: tuple[Any, ...], kwargs: dict[str, Any], open_dims: OpenDims
) -> Captured:
    wrapper = make()
    pytree.register_objects((args, kwargs))
    refuse_layouts(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    # Export merges inputs that are one object, and a batch may contain one tensor twice.
    args, kwargs = pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs))

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return wrapper(*args, **kwargs)
        except CaptureError:
            raise
        except Exception as error:
            raise _reported(error, wrapper, args, kwargs) from None

    watch = wrapper.__dict__["watch"] = Watch(wrapper.model, wrapper.loss_fn)
    with _torch.code_when_called():
        with watch.keeping(), capturable(run, wrapper, args, kwargs) as forms:
            exported = _export(wrapper, args, kwargs, open_dims)
        described = _describe(exported, wrapper, args, kwargs)
    described.module.recompile()
    if wrapper.is_step:
        _require_scalar_loss(described, wrapper.loss_fn)
    return replace(
        described, forms=forms, guards=watch.guards, writes=watch.writes, ran=watch.ran, sets_up=watch.sets_up
    )


def _export(wrapper: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], open_dims: OpenDims) -> Any:
    with (
        keeping_functions(wrapper) as put_functions,
        keeping_flex_attention() as put_flex_attention,
        _torch.without_value_checks(),
        _torch.plain_checkpoints(),
        _torch.quiet_export(),
        _torch.quick_decompositions(),
        _torch.quick_notes(),
        _torch.quick_examples(),
        watching(wrapper) as forgotten,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # export's own deprecations are not the user's business
        try:
            asked = open_to_export(wrapper, args, kwargs, open_dims)
            # Not around all that follows: torch asks a mode at each read of a tensor's attribute, too.
            with OutsideLeaves(wrapper) as outside:
                exported = torch.export.export(wrapper, args, kwargs, strict=False, **asked)
            for rewrite in EXPORTED:
                rewrite(exported.graph_module)
            exported = make_functional(exported)
            put_functions(exported.graph_module)
            put_flex_attention(exported.graph_module)
            refuse_strides(exported.graph_module)
        except CaptureError:
            raise
        except Exception as error:
            raise _reported(error, wrapper, args, kwargs) from None
    if forgotten:
        raise CaptureError(f"The model cannot be captured as it is: {forgotten[0]}")
    refuse_fake_constants(exported)
    refuse_trained_constants(exported, list(outside.found.values()))
    return exported


def _reported(error: Exception, wrapper: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception:
    """The error to report for a failed trace: the model's own error, or one that names the line and the remedy."""
    if not has_remedy(error, wrapper):
        own = own_error(wrapper, args, kwargs)
        if own is not None:
            return own
    found = explained(error, wrapper)
    found.__cause__ = error
    return found


def _describe(exported: Any, wrapper: _WithLoss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    signature, module = exported.graph_signature, exported.graph_module
    kinds = torch.export.graph_signature.InputKind
    specs = signature.input_specs
    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    named = {s.arg.name: plain_name(s.target) for s in specs if s.kind == kinds.PARAMETER}
    parameters, tied = _merge_tied(module, named, dict(wrapper.named_parameters(remove_duplicate=False)))
    policy = wrapper.precision
    stored = absorb_casts(module, parameters, policy) if policy is not None else {}
    _order_placeholders(module, specs, (kinds.PARAMETER, kinds.BUFFER, kinds.CONSTANT_TENSOR))
    users = [s for s in specs if s.kind == kinds.USER_INPUT]
    tensors = {i: s.arg.name for i, s in enumerate(users) if isinstance(leaves[i], Tensor)}
    mutated = [s for s in signature.output_specs if "MUTATION" in s.kind.name]
    _refuse_unplannable(module, mutated, set(named.values()))
    paths = _leaf_names(wrapper, args, kwargs)
    return Captured(
        module=module,
        parameters=parameters,
        tied=tied,
        frozen=frozenset(plain_name(n) for n, p in wrapper.named_parameters() if not p.requires_grad),
        buffers={s.arg.name: plain_name(s.target) for s in specs if s.kind == kinds.BUFFER},
        constants={s.arg.name: exported.constants[s.target] for s in specs if s.kind == kinds.CONSTANT_TENSOR},
        inputs={name: paths[i] for i, name in tensors.items()},
        in_spec=in_spec,
        literals={i: leaf for i, leaf in enumerate(leaves) if i not in tensors},
        out_spec=exported.call_spec.out_spec,
        mutated={i: plain_name(s.target) for i, s in enumerate(mutated)},
        is_step=wrapper.is_step,
        has_loss_fn=wrapper.loss_fn is not None,
        has_more=bool(wrapper.results_with_more),
        training=wrapper.training,
        precision=policy,
        stored=stored,
    )


def _refuse_unplannable(module: fx.GraphModule, mutated: list[Any], parameters: set[str]) -> None:
    """Raises CaptureError for ops of an exported graph that no plan can repeat, and for changed inputs or parameters.

    Args:
        module: exported graph.
        mutated: output specs of export for tensors that the graph changes in place.
        parameters: names of the model's parameters.
    """
    if any("USER_INPUT" in s.kind.name for s in mutated):
        raise CaptureError(f"The model changes one of its inputs in place; clone it first. {BACKEND_RUNS_IT}")
    refuse_changed_parameters(mutated, parameters)
    refuse_numbers_from_tensors(module)
    refuse_bodies(module)


def _merge_tied(
    module: fx.GraphModule, named: dict[str, str], parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, str], dict[str, str]]:
    """Merges the placeholders of each parameter object into one, under the first of its names."""
    first: dict[int, str] = {}
    nodes = {n.name: n for n in module.graph.find_nodes(op="placeholder")}
    kept: dict[str, str] = {}
    tied: dict[str, str] = {}
    for placeholder, name in named.items():
        parameter = parameters[MODEL + name]
        owner = first.setdefault(id(parameter), placeholder)
        if owner == placeholder:
            kept[placeholder] = name
            continue
        nodes[placeholder].replace_all_uses_with(nodes[owner])
        module.graph.erase_node(nodes[placeholder])
        tied[name] = kept[owner]
    module.recompile()
    return kept, tied


def _order_placeholders(module: fx.GraphModule, specs: Any, kinds: tuple[Any, ...]) -> None:
    """Orders placeholders: parameters, buffers, constants, then inputs."""
    nodes = {n.name: n for n in module.graph.find_nodes(op="placeholder")}
    ordered = [s for kind in kinds for s in specs if s.kind == kind]
    ordered += [s for s in specs if s.kind not in kinds]
    anchor = next(n for n in module.graph.nodes if n.op != "placeholder")
    for spec in ordered:
        if spec.arg.name in nodes:
            anchor.prepend(nodes[spec.arg.name])
    module.recompile()


def _target_names(count: int) -> list[str]:
    return ["target"] if count == 1 else [f"target{i}" for i in range(count)]


def _leaf_names(wrapper: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A readable name for every leaf of the inputs: the name of the parameter of `forward`, and the path inside it."""
    model, loss_fn = wrapper.model, wrapper.loss_fn
    names = [p.name for p in inspect.signature(model.forward).parameters.values()]  # type: ignore[union-attr]
    targets = target_count(loss_fn) if loss_fn is not None else 0  # type: ignore[arg-type]
    inputs = len(args) - targets
    positional = [names[i] if i < len(names) else f"input{i}" for i in range(inputs)]
    positional += _target_names(targets)
    paths, _ = pytree.tree_flatten_with_path((args, kwargs))
    result: list[str] = []
    for (kind, head, *rest), _ in paths:
        base = positional[head.idx] if kind.idx == 0 else head.key  # type: ignore[attr-defined]
        name = base + pytree.keystr(tuple(rest))
        result.append(name if name not in result else f"{name}~{len(result)}")
    return result
