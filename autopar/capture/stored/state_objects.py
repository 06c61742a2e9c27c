"""The objects in reach of a model as text: modules, tensors, containers, and objects of the user's classes."""

from __future__ import annotations

import functools
import hashlib
import types
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from autopar._torch import FakeTensor
from autopar.capture.guards.guards import Place
from autopar.capture.guards.stdlib_views import Cached, cached_by
from autopar.capture.guards.user_code import is_users_type
from autopar.capture.guards.values import MISSING, MUTABLE, is_plain, slots
from autopar.capture.stored.state_code import StateOfCode
from autopar.capture.stored.state_text import (
    UNREAD,
    belongs_to_torch,
    bytes_of,
    has_source,
    is_versioned,
    likeness,
    plain_text,
)

_MOST_BYTES = 2**28  # of tensors and arrays whose values are a part of the state
_TABLES = frozenset(vars(nn.Module()))
_DICTS = (dict, OrderedDict)
_OWN_TABLES = ("_parameters", "_buffers", "_modules")
_NAMED = (
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_ATTRIBUTES = (types.GetSetDescriptorType, types.MemberDescriptorType)  # of slots
_FIELD: Any = type(vars(namedtuple("_Named", "field"))["field"])
_PARTS = {
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.cached_property: ("func", "attrname"),
    functools.partial: ("func", "args", "keywords"),
    types.MethodType: ("__func__", "__self__"),
}


class StateOfObjects(StateOfCode):
    """Describes all kinds of objects."""

    def _describe(self, value: Any, hidden: bool) -> None:
        number, kind = self._numbers[id(value)], type(value)
        self._lines.append(f"#{number} {kind.__module__}.{kind.__qualname__}")
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, (Tensor, np.ndarray)):
            self._array(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            self._lines.append(value.__name__)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.CellType):
            self._entry(value, None, Place(value, None, "", "").get(), hidden=hidden)
        elif isinstance(value, _NAMED):
            self._named(value)
        elif isinstance(value, _FIELD):
            self._lines.append(plain_text(value.__reduce__()[1]))  # its number, and words about it
        elif isinstance(value, Cached):
            self._cached(value)
        elif kind in _PARTS:
            for name in _PARTS[kind]:
                self._entry(value, name, getattr(value, name), hidden=hidden)
        elif isinstance(value, (*MUTABLE, tuple, frozenset)):
            self._container(value, hidden)
        elif (is_users_type(kind) and has_source(kind)) or (hidden and hasattr(value, "__dict__")):
            self._attributes(value, hidden)
        elif not belongs_to_torch(value):
            self._unknown.add(id(value))
            if hidden:
                self._refuse(f"a {kind.__name__} is read by code that is not watched")

    def _module(self, module: nn.Module) -> None:
        if isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)):
            self._refuse(f"the model has a submodule of generated code ({type(module).__name__})")
        self._put("class", type(module))
        for name, x in (*module._parameters.items(), *module._buffers.items()):
            if x is None:
                self._lines.append(f"{name} None")
                continue
            number = self._numbers.get(id(x))
            if number is None:
                number = self._register(x)
                self._array(x)
            self._lines.append(f"{name} #{number}")
        for name, child in module._modules.items():
            self._put(f"module {name}", child)
        self._spaces[id(vars(module))] = self._numbers[id(module)]
        hooks = {name: x for name, x in vars(module).items() if name in _TABLES and type(x) in _DICTS}
        for name, x in vars(module).items():
            if name not in _OWN_TABLES and name not in hooks:
                self._entry(module, name, x)
        self._hooks({name: table for name, table in hooks.items() if name not in _OWN_TABLES})

    def _hooks(self, tables: Mapping[str, Mapping[int, Any]]) -> None:
        """A module's hooks, each with the place of its number: the numbers are those of all hooks of the process."""
        places = {key: i for i, key in enumerate(sorted(set().union(*tables.values())))}
        for name, table in tables.items():
            for key, hook in table.items():
                self._put(f"{name} {places[key]}", hook, hidden=True)  # which torch calls

    def _attributes(self, value: Any, hidden: bool) -> None:
        """The attributes of an object of the user's, or of one of torch's that only torch's own code reads."""
        self._put("class", type(value))
        if hasattr(value, "__dict__"):
            self._spaces[id(vars(value))] = self._numbers[id(value)]
            for name, x in list(vars(value).items()):
                self._entry(value, name, x, hidden=hidden)
        for name in slots(type(value)):
            if name not in UNREAD:
                self._entry(value, name, getattr(value, name, MISSING), hidden=hidden)

    def _container(self, value: Any, hidden: bool) -> None:
        if isinstance(value, (set, frozenset)):
            if all(map(is_plain, value)):
                self._lines.append(repr(sorted(map(plain_text, value))))
            else:
                self._unknown.add(id(value))  # its elements have no order
                if hidden:
                    self._refuse("a set of objects is read by code that is not watched")
            return
        self._lines.append(str(len(value)))
        if isinstance(value, dict):
            for key, x in list(value.items()):
                self._put("key", key, hidden=hidden)
                self._put("value", x, hidden=hidden)
                if isinstance(key, str):
                    self._entries.add((self._numbers[id(value)], key))
        else:
            for x in value:
                self._put("-", x, hidden=hidden)
        if isinstance(value, defaultdict):
            self._put("default", value.default_factory)
        if is_users_type(type(value)):
            self._attributes(value, hidden)

    def _array(self, x: Any) -> None:
        """A tensor or array: code may have built its values in, if it has any."""
        if isinstance(x, np.ndarray):
            size, known = x.nbytes, x.dtype.kind != "O"
            self._lines.append(f"{x.dtype} {x.shape}")
        else:
            size, known = x.numel() * x.element_size(), type(x) in (Tensor, nn.Parameter)
            known = known and x.layout == torch.strided and not vars(x)  # of which no guard tells
            self._lines.append(likeness(x))
            if isinstance(x, FakeTensor) or x.is_meta:
                return
        if not known:
            self._unknown.add(id(x))
            return
        self._bytes += size
        if self._bytes > _MOST_BYTES:
            self._refuse(f"constants have more than {_MOST_BYTES / 1e6:.0f} MB")
            return
        self._lines.append(hashlib.sha256(bytes_of(x)).hexdigest())

    def _named(self, value: Any) -> None:
        """A function or descriptor in C."""
        owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
        module = owner if isinstance(owner, (types.ModuleType, type)) else type(owner)
        name = module.__module__ if isinstance(module, type) else module.__name__
        name = getattr(value, "__module__", None) or name
        self._lines.append(f"{name}.{getattr(value, '__qualname__', value.__name__)}")
        if owner is not module and owner is not None:
            self._put("of", owner)
        elif not is_versioned(name) and not isinstance(value, _ATTRIBUTES):
            self._unknown.add(id(value))  # of an extension of the user's, whose code has no text

    def _cached(self, value: Any) -> None:
        """A function that keeps its results: nobody can say what those were made from."""
        if value.cache_info().currsize and cached_by(value) is not None:
            self._refuse(f"{value.__name__} keeps results of earlier calls")
        self._unknown.add(id(value))
