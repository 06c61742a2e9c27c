"""An optimizer's state by names of parameters, which are the same under every plan.

torch.optim numbers parameters in the order of the optimizer's groups, and a pipeline rank has only the parameters of
its stages. So numbers differ between ranks and plans, and a checkpoint stores the state of every parameter by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from autopar import _torch
from autopar.errors import AutoparError
from autopar.ir.files import check_keys
from autopar.runtime.formats.block_states import formats_here

_NO_OPTIONS = ("params", "param_names")
Group = tuple[list[str], dict[str, Any]]  # names of parameters, and options of the group such as `lr`


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer, by parameter.

    Attributes:
        tensors: name of a parameter -> key such as `exp_avg` -> tensor, for parameters that have a state.
        values: the same for entries of the state that are not tensors.
        groups: names of the parameters and the options of every group.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    values: Mapping[str, Mapping[str, Any]]
    groups: list[Group]


def ties(model: nn.Module) -> dict[str, str]:
    """The names of tied parameters: each further name -> the name that `named_parameters` gives the parameter."""
    first = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


def read_state(model: nn.Module, optimizer: Optimizer) -> OptimizerState:
    """The state of an optimizer by names. Raises AutoparError for a parameter that the model does not have."""
    states, groups = [], []
    for names, group in _named_groups(model, optimizer):
        states += [
            (name, parameter, optimizer.state.get(parameter, {}))
            for name, parameter in zip(names, group["params"], strict=True)
            if not _torch.is_elsewhere(parameter)
        ]
        groups.append((names, {k: v for k, v in group.items() if k not in _NO_OPTIONS}))
    return OptimizerState(
        {name: {k: _torch.owned_as(v, p) for k, v in s.items() if isinstance(v, Tensor)} for name, p, s in states},
        {name: {k: v for k, v in s.items() if not isinstance(v, Tensor)} for name, _, s in states},
        groups,
    )


def empty_like(parameter: nn.Parameter, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor without values yet for one entry of a parameter's state.

    A state of the parameter's shape gets the parameter's layout. A state of shape `()` is a plain tensor, as `step`
    always is in torch.optim. Any other state is replicated. Of a parameter of other pipeline stages it is a stand-in,
    but for plain tensors, which count steps on all ranks alike.

    Args:
        parameter: parameter that the state belongs to.
        key: key of the state, such as `exp_avg`.
        shape: global shape of the state.
        dtype: dtype of the state.
    """
    if key != "step" and shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if shape and _torch.is_elsewhere(parameter):
        return parameter.new_empty(shape, dtype=dtype)
    plain = torch.empty(shape, dtype=dtype)
    if not shape or not isinstance(parameter, DTensor):
        return plain
    mesh = parameter.device_mesh
    return _torch.dtensor(plain.to(parameter.device), mesh, [Replicate()] * mesh.ndim, tuple(shape))


def placed_like(parameter: nn.Parameter, key: str, value: Tensor) -> Tensor:
    """A whole tensor of a parameter's state, converted to the layout that `empty_like` gives it."""
    room = empty_like(parameter, key, value.shape, value.dtype)
    if not isinstance(room, DTensor):
        return value.clone()
    return _torch.cut_like(value, room)


def plain_groups(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> list[tuple[Group, list[int]]]:
    """The groups of a plain optimizer's `state_dict()`: names, options, and the indices of the parameters.

    Names are the state's `param_names`. Without them they are the names of the parameters at the same positions in the
    groups of `optimizer`.

    Raises AutoparError for what no `state_dict()` of an optimizer is, and if `optimizer` has groups of other sizes.
    """
    _refuse_other_than_state(state)
    saved, live = state["param_groups"], _named_groups(model, optimizer)
    counts = [len(group["params"]) for group in saved]
    if all("param_names" in group for group in saved):
        names = [list(group["param_names"]) for group in saved]
    elif counts == [len(names) for names, _ in live]:
        names = [names for names, _ in live]
    else:
        raise AutoparError(
            f"The optimizer's state has groups of {counts} parameters, but the optimizer here has groups of "
            f"{[len(names) for names, _ in live]}. Make it with the same groups; where a rank has only some "
            "parameters, as with pipeline stages, make the plain optimizer of model.named_parameters(), whose state "
            "has names."
        )
    return [
        ((own, {k: v for k, v in group.items() if k not in _NO_OPTIONS}), list(group["params"]))
        for own, group in zip(names, saved, strict=True)
    ]


def _refuse_other_than_state(state: Any) -> None:
    """Raises AutoparError unless a value has the fields of the `state_dict()` of an optimizer."""
    try:
        check_keys(state, ("state", "param_groups"))
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        names = [group.get("param_names", group["params"]) for group in state["param_groups"]]
        fits = [len(x) for x in names] == [len(g["params"]) for g in state["param_groups"]]
        if not fits or len({*numbers}) < len(numbers) or not {*state["state"]} <= {*numbers}:
            raise ValueError("its states, parameters and names do not match")
        if not all(isinstance(values, dict) for values in state["state"].values()):
            raise ValueError("its states are not dicts")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise AutoparError(
            f"This is not the state_dict() of an optimizer: {type(error).__name__}: {error}. Save it again with "
            "torch.save(optimizer.state_dict(), ...)."
        ) from error


class Restorer:
    """Loads a saved state into an optimizer, matching parameters by name.

    Args:
        model: model whose parameters the optimizer updates.
        optimizer: optimizer that gets the state.
        groups: saved groups, with names of parameters and options.
        saved_ties: names of tied parameters in the saved model, as `ties` returned them.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, groups: list[Group], saved_ties: Mapping[str, str]
    ) -> None:
        self._optimizer = optimizer
        self._options = {name: options for names, options in groups for name in names}
        self._ties, self._saved_ties = ties(model), saved_ties
        self._groups = list(_named_groups(model, optimizer))
        # Found now, so that options which cannot be loaded are refused before anything is.
        self._shared = [self._shared_options([*map(self._source, names)], live) for names, live in self._groups]

    def formats(self) -> dict[tuple[str, str], Tensor]:
        """(saved name of a parameter of this rank, key) -> state whose dtype differs from that of the parameter."""
        return {
            (name, key): state
            for name, parameter in self.sources().items()
            if not _torch.is_elsewhere(parameter)
            for key, state in formats_here(self._optimizer, parameter).items()
        }

    def sources(self) -> dict[str, nn.Parameter]:
        """Saved name of a parameter -> the parameter; those that the saved optimizer did not have are left out."""
        found = {}
        for names, group in self._groups:
            for name, parameter in zip(names, group["params"], strict=True):
                source = self._source(name)
                if source is not None:
                    found[source] = parameter
        return found

    def _source(self, name: str) -> str | None:
        """The name that a parameter was saved under, which may be another one of a tied parameter's names."""
        own = [name, *(other for other, first in self._ties.items() if first == name)]
        candidates = own + [self._saved_ties[each] for each in own if each in self._saved_ties]
        return next((each for each in candidates if each in self._options), None)

    def restore(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Loads states, which are given by the names of `sources`, and the options of the groups."""
        numbers: dict[int, Mapping[str, Any]] = {}
        groups = self._optimizer.state_dict()["param_groups"]
        for (names, _), shared, group in zip(self._groups, self._shared, groups, strict=True):
            group.update(shared)
            for number, source in zip(group["params"], map(self._source, names), strict=True):
                if source is not None and states.get(source):
                    numbers[number] = states[source]
        own, parameters = self.formats(), self.sources()
        self._optimizer.load_state_dict({"state": numbers, "param_groups": groups})
        # torch.optim has cast these states to the parameter's dtype.
        for (name, key), state in own.items():
            if key in states.get(name, {}):
                self._optimizer.state[parameters[name]][key] = state

    def _shared_options(self, sources: list[str | None], live: dict[str, Any]) -> dict[str, Any]:
        """The saved options of a group; an option is a tensor if it is one in the optimizer that gets it.

        Raises AutoparError if parameters of the group were saved with different options.
        """
        known = [source for source in sources if source is not None]
        if not known:
            return {}
        first = self._options[known[0]]
        for source in known:
            for key, value in self._options[source].items():
                if value != first.get(key):
                    raise AutoparError(
                        f"Parameters {known[0]} and {source} are in one group of the optimizer, but were saved with "
                        f"{key}={first.get(key)} and {key}={value}. Make the optimizer with the groups it had."
                    )
        return {key: _like(live.get(key), value) for key, value in first.items()}


def _like(live: Any, value: Any) -> Any:
    """An option of a group as a tensor or a number, whichever the optimizer that gets it has."""
    if isinstance(live, Tensor):
        return torch.as_tensor(value, dtype=live.dtype, device=live.device)
    is_number = isinstance(live, (int, float)) and isinstance(value, Tensor)
    return value.item() if is_number else value


def _named_groups(model: nn.Module, optimizer: Optimizer) -> list[tuple[list[str], dict[str, Any]]]:
    """The optimizer's groups, each with the names of its parameters."""
    names = {id(p): name for name, p in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise AutoparError(
                    f"Parameter {position} of group {number} of the optimizer, of shape "
                    f"{list(parameter.shape)}, is not a parameter of the model. Make the optimizer from "
                    "model.parameters()."
                )
    return [([names[id(p)] for p in g["params"]], g) for g in optimizer.param_groups]
