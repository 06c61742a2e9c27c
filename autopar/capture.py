"""Capture: an unmodified module becomes a functional graph of its forward, with names.

`torch.export` traces the module together with its loss; `run_decompositions({})` makes the graph
functional and leaves high-level ops (linear, layer_norm, attention) whole. What export gets wrong for
training is mended before (see [Note: no_grad regions]).
"""

from __future__ import annotations

import hashlib
import inspect
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar import _torch
from autopar.casts import absorb_casts, call_cast, dtype_of
from autopar.errors import CaptureError, StepError
from autopar.forgotten import OutsideLeaves, watching
from autopar.forms import capturable
from autopar.ir import MixedPrecision
from autopar.statistics import write_statistics
from autopar.strides import refuse_strides, say_elements
from autopar.uncaptured import traced_line, uncaptured

aten = torch.ops.aten

LossFunction = Callable[..., Tensor]
_MODEL = "model."


@dataclass(frozen=True)
class Captured:
    """A captured forward.

    Attributes:
        module: the functional graph; placeholders in the order parameters, buffers, constants, inputs.
        parameters: placeholder name -> qualified name in the user's model; tied names share one
            placeholder and stand under the first name.
        tied: every further name of a tied parameter -> its first name.
        frozen: names of parameters that take no gradient.
        buffers: placeholder name -> qualified name.
        constants: placeholder name -> the tensor that the model's code holds.
        inputs: placeholder name -> readable name; tensors only, in pytree order of (args, kwargs).
        in_spec: pytree of (args, kwargs).
        literals: leaf position -> the value that was built into the graph, for inputs that are no tensor.
        out_spec: pytree of the result.
        mutated: output position -> qualified name of the buffer whose new value it is; these come
            before the model's own outputs.
        is_step: whether the only output is the loss.
        training: the mode the model was in.
        precision: the policy under which it was captured, None for none.
        stored: name of a parameter -> its format at rest, where the graph takes a cast copy of it.
        differentiable: placeholders of inputs that take a gradient.
        whole_outputs: whether the results are to be whole on every rank.
        forms: a line for every class of modules that was captured in another form (`autopar.forms`).
    """

    module: fx.GraphModule
    parameters: Mapping[str, str]
    tied: Mapping[str, str]
    frozen: frozenset[str]
    buffers: Mapping[str, str]
    constants: Mapping[str, Tensor]
    inputs: Mapping[str, str]
    in_spec: pytree.TreeSpec
    literals: Mapping[int, Any]
    out_spec: pytree.TreeSpec
    mutated: Mapping[int, str]
    is_step: bool
    training: bool
    precision: MixedPrecision | None = None
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)
    differentiable: frozenset[str] = frozenset()
    whole_outputs: bool = False
    forms: tuple[str, ...] = ()

    def gradient_dtype(self, name: str, used: torch.dtype) -> torch.dtype:
        """The format in which the gradient of a parameter, used in the format `used`, is added up."""
        if self.precision is None or not used.is_floating_point:
            return used
        asked = self.precision.reduce_dtype
        return self.stored.get(name, used) if asked is None else dtype_of(asked)

    @property
    def fingerprint(self) -> str:
        """A hash of the graph: its ops, shapes, dtypes and parameter names, and of nothing else.

        Devices are left out, so that a plan made of a model on the meta device fits the real one.
        """
        digest = hashlib.sha256()
        for line in _lines(self.module.graph):
            digest.update(line.encode())
        digest.update(repr(sorted(self.parameters.items())).encode())
        if self.precision is not None:
            digest.update(str(self.precision).encode())
        return digest.hexdigest()[:16]


def _lines(graph: fx.Graph) -> Iterator[str]:
    """What every node computes; after one that stands for a graph of its own (joined experts), that graph."""
    for node in graph.nodes:
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory")}
        yield f"{node.op} {node.target} {node.args} {kwargs}"
        yield repr([(tuple(t.shape), t.dtype) for t in _tensors(node)])
        body = getattr(node.target, "body", None)
        if isinstance(body, fx.GraphModule):
            yield from _lines(body.graph)


def _tensors(node: fx.Node) -> list[Tensor]:
    return [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]


class _WithLoss(nn.Module):
    """The model and its loss as one module that returns a scalar."""

    loss_fn: LossFunction | None

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
        # Not a submodule: what a loss holds is no part of the model, and stays where it is.
        self.__dict__["loss_fn"] = loss_fn
        self.precision = precision
        self.is_step = is_step
        self.training = model.training  # not train(): submodules keep their own modes

    def forward(self, *batch: Any, **kwargs: Any) -> Any:
        if self.loss_fn is None:
            result = self._result(*batch, **kwargs)
            return _loss_in(result) if self.is_step else result
        targets = target_count(self.loss_fn)
        inputs = batch[: len(batch) - targets]
        return self.loss_fn(self._result(*inputs, **kwargs), *batch[len(batch) - targets :])

    def _result(self, *args: Any, **kwargs: Any) -> Any:
        if self.precision is None:
            return self.model(*args, **kwargs)
        return call_cast(self.model, args, kwargs, self.precision)


def _loss_in(result: Any) -> Any:
    """The loss of a model that returns one among other things, as those of transformers do."""
    if isinstance(result, Mapping) and "loss" in result:
        return result["loss"]
    return getattr(result, "loss", result)


def target_count(loss_fn: LossFunction) -> int:
    """How many entries at the end of a batch go to the loss: its parameters without default, less one.

    Raises StepError for a function of which that cannot be read.
    """
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature, such as torch.mean
        count = _torch.required_arguments(getattr(function, "__name__", ""))
        if count is None:
            raise StepError(
                f"How many entries of the batch the loss function {loss_fn!r} takes cannot be read from it. "
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
) -> Captured:
    """Captures forward and loss. Raises StepError where the result is not a scalar loss."""
    wrapper = _WithLoss(model, loss_fn, is_step=True, precision=precision)
    captured = _capture(wrapper, args, kwargs, is_step=True)
    _require_scalar_loss(captured, loss_fn)
    return captured


def capture_forward(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    precision: MixedPrecision | None = None,
) -> Captured:
    """Captures the forward alone."""
    return _capture(_WithLoss(model, None, precision=precision), args, kwargs, is_step=False)


def run_with_loss(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFunction | None,
    precision: MixedPrecision | None = None,
) -> Tensor:
    """Forward and loss without capture, as the single device runs them."""
    return _WithLoss(model, loss_fn, is_step=True, precision=precision)(*args, **kwargs)


def _require_scalar_loss(captured: Captured, loss_fn: LossFunction | None) -> None:
    output = next(iter(captured.module.graph.find_nodes(op="output"))).args[0]
    made = output[len(captured.mutated) :]
    values = [n.meta["val"] for n in made if n is not None]
    shapes = [list(v.shape) for v in values if isinstance(v, Tensor)]
    if len(shapes) == 1 and len(made) == 1 and values[0].numel() == 1:
        return
    if loss_fn is None and not shapes:
        raise StepError(
            "`step` needs a loss, and the model returned None as its loss: give it what it computes one "
            "from, such as labels=..., or pass loss_fn=... to autopar.compile."
        )
    if loss_fn is None:
        raise StepError(
            f"`step` needs a loss: the model returns tensors of shapes {shapes}, not one scalar, and "
            "no loss function was given. Pass loss_fn=... to autopar.compile."
        )
    raise StepError(
        f"The loss function returns tensors of shapes {shapes}; `step` needs one scalar. "
        "Reduce it, for example with .mean()."
    )


def _capture(
    wrapper: _WithLoss, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_step: bool
) -> Captured:
    # Export merges inputs that are one object; a batch may well use one tensor twice.
    args, kwargs = pytree.tree_map(
        lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs)
    )

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return wrapper(*args, **kwargs)
        except CaptureError:
            raise
        except Exception as error:
            raise _explained(error, wrapper) from error

    with capturable(run, wrapper, args, kwargs) as forms:
        exported = _export(wrapper, args, kwargs)
    return replace(_describe(exported, wrapper, args, kwargs, is_step), forms=forms)


def _export(wrapper: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with (
        _torch.custom_functions() as custom,
        _torch.without_value_checks(),
        _torch.quiet_export(),
        watching(wrapper) as forgotten,
        OutsideLeaves(wrapper) as outside,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # export's own deprecations are not the user's business
        try:
            exported = torch.export.export(wrapper, args, kwargs, strict=False)
            keep_no_grad(exported.graph_module)
            say_elements(exported.graph_module)
            write_statistics(exported.graph_module)
            exported = exported.run_decompositions({})
            refuse_strides(exported.graph_module)
        except CaptureError:
            raise
        except Exception as error:
            raise _explained(error, wrapper) from error
    if forgotten:
        raise CaptureError(f"The model cannot be captured as it is: {forgotten[0]}.")
    _refuse_trained_constants(exported, list(outside.found.values()))
    if custom:
        warnings.warn(
            f"The model uses the torch.autograd.Functions {sorted(set(custom))}. The captured graph "
            "keeps their forward, and takes its derivative as the backward; where the written "
            "backward is another (a straight-through estimator), write the function as a "
            "torch.library.custom_op. autopar.verify tells the difference.",
            stacklevel=2,
        )
    return exported


def keep_no_grad(module: fx.GraphModule) -> None:
    """[Note: no_grad regions] Decomposition inlines `with torch.no_grad():` and forgets it, so that
    parameters inside would get gradients that eager gives not. Every floating result of such a
    region is detached before, but one that came in and goes out as it is: `x.to(x.dtype)` is x, and keeps
    its gradient. Export itself forgets a no_grad region inside an autocast one; there the proof
    (autopar.verify) tells.
    """
    for node in list(module.graph.nodes):
        if "wrap_with_set_grad_enabled" not in str(node.target) or node.args[0] is not False:
            continue
        for user in list(node.users):
            value, given = user.meta.get("val"), _given_back(module, node, user)
            if given is not None:
                user.replace_all_uses_with(given)
            elif isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                outside, last = list(user.users), user
                # A copy: what is added in place to a detached view would be detached with it.
                for op in (aten.detach.default, aten.clone.default):
                    with module.graph.inserting_after(last):
                        last = module.graph.call_function(op, (last,))
                    last.meta = dict(user.meta)
                user.replace_all_uses_with(last, outside.__contains__)
    module.recompile()


def _given_back(module: fx.GraphModule, region: fx.Node, result: fx.Node) -> fx.Node | None:
    """The argument of a region that one of its results is, None for what the region makes."""
    body = getattr(module, str(region.args[1].target))  # type: ignore[union-attr]
    results, inside = body.graph.output_node().args[0], body.graph.find_nodes(op="placeholder")
    made = results[result.args[1]] if result.target is operator.getitem else results
    while isinstance(made, fx.Node) and _is_no_copy(made):
        made = made.args[0]
    return region.args[2 + inside.index(made)] if made in inside else None


def _is_no_copy(node: fx.Node) -> bool:
    """Whether an op gives back its very argument, as `x.to(x.dtype)` and `x.contiguous()` do."""
    if getattr(node.target, "overloadpacket", None) not in (aten.to, aten.contiguous):
        return False
    after, before = node.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]
    kinds = [(x.dtype, x.device, x.stride()) for x in (after, before)]
    return kinds[0] == kinds[1] and True not in node.args[1:] and not node.kwargs.get("copy")


def _explained(error: Exception, wrapper: nn.Module) -> CaptureError:
    """An error that names the line of the model and the remedy."""
    text = str(error).strip().splitlines()
    reason = text[0] if text else type(error).__name__
    if isinstance(error, _torch.SizeDependsOnValues):  # says its name alone
        reason += " has no kernel that export takes: the size of a result depends on values"
    line = _torch.user_line(error) or _module_named_in(reason, wrapper)
    return uncaptured(line, reason, _remedy(error, line, wrapper))


def _module_named_in(reason: str, wrapper: nn.Module) -> str:
    """Where the forward of the module is whose path an error says, where it has no line of a model."""
    modules = dict(wrapper.named_modules())
    for path in re.findall(r"[\w.]+\.\w+", reason):
        module = modules.get(path.rpartition(".")[0])
        if module is not None and module is not wrapper:
            code = inspect.unwrap(type(module).forward).__code__
            return (
                f"{code.co_filename}:{code.co_firstlineno}, in the forward of {type(module).__name__} "
                f"({path.rpartition('.')[0].removeprefix('model.')}) or of what it calls"
            )
    return "a line that torch.export does not name"


def _expert_remedy(wrapper: nn.Module) -> str:
    """A loop over the experts that rows went to; `experts_implementation` is the switch of transformers."""
    configs = (getattr(module, "config", None) for module in wrapper.modules())
    if any(getattr(x, "_experts_implementation", None) == "eager" for x in configs):
        return (
            'Choose the grouped form of the experts, model.set_experts_implementation("grouped_mm")'
        )
    return (
        "Sort the rows by expert and multiply them with torch.nn.functional.grouped_mm, or run every expert "
        "on all rows and mask what is not its own"
    )


def _remedy(error: Exception, line: str, wrapper: nn.Module) -> str:
    if isinstance(error, _torch.SizeDependsOnValues):
        return (
            "Compute this outside of what is captured, as a CTC loss of the model's result: "
            'torch.compile(model, backend="autopar") takes the model alone'
        )
    if "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__:
        if _torch.validates_distribution(error):
            return "Make the distribution with validate_args=False: its checks read values"
        if "expert" in line:
            return _expert_remedy(wrapper)
        return (
            "Keep Python control flow independent of tensor values (use torch.where or torch.cond instead of "
            "`if`, and avoid .item())"
        )
    if "NoneType" in str(error):
        return (
            "Give the optional inputs that are None here, such as attention_mask: some models fill them in "
            "only where they are not traced"
        )
    if "fake tensor in the exported program constant" in str(error):
        return (
            "Read x.detach() where this forward reads x.data, which no graph follows, and change parameters after "
            "optimizer.step()"
        )
    if re.search(r"Constant \S+ is mutated in the forward", str(error)):
        return (
            "The loss changes a tensor that is no buffer of the model: make one module that holds both and whose "
            "forward returns the loss, and give that without loss_fn"
        )
    shared = _shared_buffers(wrapper)
    if isinstance(error, AssertionError) and shared:
        return f"Keep under one name the buffer that {' and '.join(shared)} are, which forward may change"
    if isinstance(error, TypeError) and f"{_forward_name(wrapper)}()" in str(error):
        return "Call it with the arguments that the model's forward takes"
    if isinstance(error, TypeError) and "FakeTensor" in str(error):
        return (
            "Use no tensor as a Python number here. Packed sequences do: give the recurrent layer the padded "
            "batch, and mask what is behind the lengths"
        )
    return "Write this line so that torch.export takes it"


def _forward_name(wrapper: nn.Module) -> str:
    """How Python names the forward of the model where it is called with other arguments."""
    return getattr(wrapper.model.forward, "__qualname__", "forward")  # type: ignore[union-attr]


def _shared_buffers(wrapper: nn.Module) -> list[str]:
    """The names of the first buffer that has several, as those of a module used under two names have."""
    names: dict[int, list[str]] = {}
    for name, buffer in wrapper.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name.removeprefix(_MODEL))
    return next((found for found in names.values() if len(found) > 1), [])


def _describe(
    exported: Any, wrapper: _WithLoss, args: tuple[Any, ...], kwargs: dict[str, Any], is_step: bool
) -> Captured:
    signature, module = exported.graph_signature, exported.graph_module
    kinds = torch.export.graph_signature.InputKind
    specs = signature.input_specs
    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    named = {s.arg.name: _plain_name(s.target) for s in specs if s.kind == kinds.PARAMETER}
    parameters, tied = _merge_tied(
        module, named, dict(wrapper.named_parameters(remove_duplicate=False))
    )
    policy = wrapper.precision
    stored = absorb_casts(module, parameters, policy) if policy is not None else {}
    _order_placeholders(module, specs, (kinds.PARAMETER, kinds.BUFFER, kinds.CONSTANT_TENSOR))
    users = [s for s in specs if s.kind == kinds.USER_INPUT]
    tensors = {i: s.arg.name for i, s in enumerate(users) if isinstance(leaves[i], Tensor)}
    mutated = [s for s in signature.output_specs if "MUTATION" in s.kind.name]
    if any("USER_INPUT" in s.kind.name for s in mutated):
        raise CaptureError("The model changes one of its inputs in place; clone it first.")
    _refuse_changed_parameters(mutated, set(named.values()))
    _refuse_numbers_from_tensors(module)
    _refuse_bodies(module)
    paths = _leaf_names(wrapper, args, kwargs)
    return Captured(
        module=module,
        parameters=parameters,
        tied=tied,
        frozen=frozenset(
            _plain_name(n) for n, p in wrapper.named_parameters() if not p.requires_grad
        ),
        buffers={s.arg.name: _plain_name(s.target) for s in specs if s.kind == kinds.BUFFER},
        constants={
            s.arg.name: exported.constants[s.target]
            for s in specs
            if s.kind == kinds.CONSTANT_TENSOR
        },
        inputs={name: paths[i] for i, name in tensors.items()},
        in_spec=in_spec,
        literals={i: leaf for i, leaf in enumerate(leaves) if i not in tensors},
        out_spec=exported.call_spec.out_spec,
        mutated={i: _plain_name(s.target) for i, s in enumerate(mutated)},
        is_step=is_step,
        training=wrapper.training,
        precision=policy,
        stored=stored,
    )


def _refuse_trained_constants(exported: Any, leaves: list[Tensor]) -> None:
    """What takes a gradient outside the model would get none, or a rank's part, see `OutsideLeaves`."""
    trained = set(map(_torch.storage_reference, leaves))
    nodes = {n.name: n for n in exported.graph.find_nodes(op="placeholder")}
    for spec in exported.graph_signature.input_specs:
        constant = exported.constants.get(spec.target)
        if not isinstance(constant, Tensor) or spec.arg.name not in nodes:
            continue
        if _torch.storage_reference(constant) in trained and _takes_gradient(nodes[spec.arg.name]):
            raise CaptureError(
                f"The loss or the model computes with a tensor of shape {list(constant.shape)} that takes a gradient "
                "and is no parameter of the model: it would not be trained. Make one module that holds both and "
                "whose forward returns the loss, and give that without loss_fn; or compute what is not to be trained "
                "under torch.no_grad(). (A closure over the model reads the original, not the copy that is proved: "
                "give a method of the model, or functools.partial.)"
            )


def _takes_gradient(node: fx.Node) -> bool:
    """Whether a result of the graph is computed with `node`, no detach between."""
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output":
                return True
            if user not in seen and not _cuts_gradient(user):
                waiting.append(user)
                seen.add(user)
    return False


def _cuts_gradient(node: fx.Node) -> bool:
    """Whether no gradient goes through: it is detached, no real or complex number, or made of a shape alone."""
    value, name = node.meta.get("val"), getattr(node.target, "__name__", "")
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        return True
    return (
        node.target is aten.detach.default
        or name.startswith("new_")
        or name.partition(".")[0].endswith("_like")
    )


def _refuse_changed_parameters(mutated: list[Any], parameters: set[str]) -> None:
    changed = sorted({_plain_name(s.target) for s in mutated} & parameters)
    if changed:
        raise changed_in_place(changed[0])


def changed_in_place(parameter: str) -> CaptureError:
    """What is said of a forward that changes a parameter."""
    return CaptureError(
        f"The forward changes the parameter {parameter} in place; do that outside, after "
        "optimizer.step() (an embedding's max_norm is such a change)."
    )


def _refuse_numbers_from_tensors(module: fx.GraphModule) -> None:
    """A Python number read off a tensor (`.item()`, `x[:, i]` with a tensor i) is unknown to a plan."""
    for node in module.graph.nodes:
        if node.op == "call_function" and _is_unknown(node) and _is_read(node):
            made = "size" if isinstance(node.meta["val"], Tensor) else "Python number"
            raise uncaptured(
                traced_line(node),
                f"{node.target} makes a {made} of a tensor's value",
                "Keep it a tensor (no .item(); index with torch.index_select, and mask with torch.where "
                "instead of x[mask])",
            )


def _refuse_bodies(module: fx.GraphModule) -> None:
    """Ops that run graphs (torch.cond, a scan) have no rule."""
    for node in module.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(module, node.target, None), fx.GraphModule):
            call = next(iter(node.users))
            raise uncaptured(
                traced_line(call),
                f"{call.target} runs graphs inside the graph",
                "Compute what its branches compute, and choose with torch.where",
            )


def _is_unknown(node: fx.Node) -> bool:
    """Whether a result, or its shape, is a Python number that only a run tells."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    return any(isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) for x in sizes)


def _is_read(number: fx.Node) -> bool:
    """Whether more than assertions comes of a number; those are removed, and with them the number."""
    return any(
        _is_read(user) if _is_unknown(user) else "_assert" not in str(user.target)
        for user in number.users
    )


def _plain_name(name: str) -> str:
    return name.removeprefix(_MODEL)


def _merge_tied(
    module: fx.GraphModule, named: dict[str, str], parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, str], dict[str, str]]:
    """One placeholder per parameter object, under the first of its names."""
    first: dict[int, str] = {}
    nodes = {n.name: n for n in module.graph.find_nodes(op="placeholder")}
    kept: dict[str, str] = {}
    tied: dict[str, str] = {}
    for placeholder, name in named.items():
        parameter = parameters[_MODEL + name]
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
    """Parameters, buffers, constants, then inputs, whatever order export gave them."""
    nodes = {n.name: n for n in module.graph.find_nodes(op="placeholder")}
    ordered = [s for kind in kinds for s in specs if s.kind == kind]
    ordered += [s for s in specs if s.kind not in kinds]
    anchor = next(n for n in module.graph.nodes if n.op != "placeholder")
    for spec in ordered:
        if spec.arg.name in nodes:
            anchor.prepend(nodes[spec.arg.name])
    module.recompile()


def _leaf_names(wrapper: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A readable name for every leaf of the inputs: the parameter of `forward`, then the path in it."""
    model, loss_fn = wrapper.model, wrapper.loss_fn
    names = [p.name for p in inspect.signature(model.forward).parameters.values()]  # type: ignore[union-attr]
    targets = target_count(loss_fn) if loss_fn is not None else 0  # type: ignore[arg-type]
    inputs = len(args) - targets
    positional = [names[i] if i < len(names) else f"input{i}" for i in range(inputs)]
    positional += ["target" if targets == 1 else f"target{i}" for i in range(targets)]
    paths, _ = pytree.tree_flatten_with_path((args, kwargs))
    result: list[str] = []
    for (kind, head, *rest), _ in paths:
        base = positional[head.idx] if kind.idx == 0 else head.key  # type: ignore[attr-defined]
        name = base + pytree.keystr(tuple(rest))
        result.append(name if name not in result else f"{name}~{len(result)}")
    return result
