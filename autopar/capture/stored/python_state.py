"""All that the Python of a model could read while it is captured, as text that is the same in every process.

A capture may be used at a later start of a script if nothing that it was made from is different there. `PythonState`
goes through everything in reach of the model, its loss and its arguments: attributes, containers, closures, the code of
functions and classes, the globals that the code names. Equal digests mean equal code and values. As objects are
numbered in the order in which they are met, the number of an object in one process is its number in any other one.

Not everything has a text: a lock, a logger or a compiled function has none. Such an object is *unknown*. That does no
harm as long as nothing reads it, which the guards of a capture show afterwards (`address`). Where they could not show
it, `obstacle` says that the state as a whole is not known.
"""

from __future__ import annotations

import enum
import functools
import gc
import hashlib
import types
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from autopar._torch import FakeTensor, has_storage, storage_key
from autopar.capture.guards.guards import Place
from autopar.capture.guards.stdlib_views import Cached, cached_by
from autopar.capture.guards.user_code import file_of, globals_of, is_installed, is_users, is_users_type
from autopar.capture.guards.values import MISSING, MUTABLE, elements, is_plain, slots
from autopar.capture.stored.state_text import (
    UNREAD,
    belongs_to_torch,
    bytes_of,
    has_source,
    hash_of_code,
    is_others,
    is_versioned,
    likeness,
    plain_text,
    with_inner,
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
_MOST_OBJECTS = 200_000
_BOUND = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)


class NoText(Exception):
    """Something of a capture cannot be written as text; says what."""


class PythonState:
    """What the Python of a model could read now.

    Args:
        roots: a name for each object from which all others are reached.

    Attributes:
        obstacle: why the state has no text; "" where it has one.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.obstacle = ""
        self._lines: list[str] = []
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}  # id of an object -> its place in `_objects`
        self._spaces: dict[int, int] = {}  # id of the dict of an object -> the object's number
        self._entries: set[tuple[int, Any]] = set()  # number of a holder, and a key of it
        self._unknown: set[int] = set()  # ids
        self._codes: dict[types.CodeType, str] = {}  # of functions that were met -> a hash
        self._functions: dict[types.CodeType, list[types.FunctionType]] = {}
        self._queue: deque[tuple[Any, bool]] = deque()
        self._bytes = 0
        for space in (torch, nn.functional, Tensor):
            self._names(space)
        for name, value in roots.items():
            # autopar calls them: no code that is watched has read them
            self._put(name, value, hidden=True)
        while self._queue and not self.obstacle:
            self._describe(*self._queue.popleft())
            if len(self._objects) > _MOST_OBJECTS:
                self._refuse(f"there are more than {_MOST_OBJECTS:,} objects in the model's reach")

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the state."""
        return hashlib.sha256("\n".join(self._lines).encode()).hexdigest()

    def address(self, place: Place) -> tuple[int, bool]:
        """The place's holder as a number, and whether it is the `__dict__` of the object that has the number.

        Raises NoText where the value at this place is not part of the state.
        """
        inner = id(gc.get_referents(place.holder)[0]) if isinstance(place.holder, types.MappingProxyType) else 0
        is_space = id(place.holder) in self._spaces or inner in self._spaces
        number = self._spaces.get(inner or id(place.holder))
        number = self._numbers.get(id(place.holder)) if number is None else number
        if number is None or not self._is_known(number, place, is_space):
            raise NoText(f"{place.words} ({place.line}) can be another one at every start")
        return number, is_space

    def holder(self, number: int, is_space: bool) -> Any:
        """The holder of a place with this address. Raises IndexError for a number that no object has."""
        found = self._objects[number]
        return vars(found) if is_space else found

    def number(self, value: object) -> int | None:
        """The number of an object; None for one that is not in reach."""
        return self._numbers.get(id(value))

    def object(self, number: int) -> Any:
        """The object with a number. Raises IndexError."""
        return self._objects[number]

    def shares_memory(self, x: Tensor) -> bool:
        """Whether a tensor in reach has the memory of `x`, and would change where `x` is written."""
        own = storage_key(x)
        held = (t for t in self._objects if isinstance(t, Tensor) and has_storage(t))
        return any(storage_key(t) == own for t in held)

    def has_code(self, code: types.CodeType) -> bool:
        """Whether the code of a function, or of one that it makes, is a part of the state."""
        return code in self._codes

    def has_unknown_default(self, code: types.CodeType) -> bool:
        """Whether a function with this code has a default that is not part of the state."""
        found = [f for f in self._functions.get(code, ()) if f.__defaults__ or f.__kwdefaults__]
        return any(map(self._has_unknown, (x for f in found for x in (f.__defaults__, f.__kwdefaults__))))

    def _is_known(self, number: int, place: Place, is_space: bool) -> bool:
        """Whether the value at a place, or that there is none, is said by the text."""
        value, holder = place.get(), self._objects[number]
        if self._has_unknown(value):
            return False
        if (number, place.key) in self._entries or belongs_to_torch(value):
            return True
        if is_space or isinstance(holder, dict):
            # Of globals and classes, not every key that is there is a part of the state.
            return value is MISSING and not isinstance(holder, (type, dict))
        kinds = holder.__mro__ if isinstance(holder, type) else type(holder).__mro__
        kind = next((k for k in kinds if place.key in vars(k)), None)
        if kind is None:
            return value is MISSING
        return (self._numbers.get(id(kind), -1), place.key) in self._entries or is_others(kind)

    def _has_unknown(self, value: Any) -> bool:
        """Whether a value, or an element of a container, is unknown."""
        if id(value) in self._unknown:
            return True
        inner = elements(value) if isinstance(value, (*MUTABLE, tuple)) else []
        inner += [value.__self__] if isinstance(value, _BOUND) else []
        return any(map(self._has_unknown, inner))

    # --- lines of text

    def _refuse(self, why: str) -> None:
        self.obstacle = self.obstacle or why

    def _put(self, label: str, value: Any, *, hidden: bool = False) -> None:
        """Adds a line for a value, and the object itself to those that are to be described.

        Args:
            label: the line's beginning.
            value: the value.
            hidden: whether the value is read by code of torch or of the standard library, of which no guard tells.
        """
        if is_plain(value) or value is MISSING:
            self._lines.append(f"{label} {plain_text(value)}")
            self._kinds(value)
            return
        number = self._numbers.get(id(value))
        if number is None:
            number = self._register(value)
            self._queue.append((value, hidden))
        elif hidden and id(value) in self._unknown:
            self._refuse(f"a {type(value).__name__} is read by code that is not watched")
        self._lines.append(f"{label} #{number}")

    def _kinds(self, value: Any) -> None:
        """Adds the user's classes of a plain value and of its elements, and the attributes that such values have.

        Such a value is not an object with a number, so that what is read of its own attributes has no address.
        """
        if isinstance(value, (tuple, frozenset)):
            for x in sorted(value, key=plain_text) if isinstance(value, frozenset) else value:
                self._kinds(x)
        if value is MISSING or not is_users_type(type(value)):
            return
        self._put("of", type(value))
        if not isinstance(value, enum.Enum):
            for name, x in getattr(value, "__dict__", {}).items():
                self._put(name, x, hidden=True)

    def _register(self, value: Any) -> int:
        number = self._numbers[id(value)] = len(self._objects)
        self._objects.append(value)
        return number

    def _entry(self, holder: Any, key: Any, value: Any, *, hidden: bool = False) -> None:
        """Adds a value that stands in an object, in its `__dict__`, or in a dict."""
        self._entries.add((self._numbers[id(holder)], key))
        self._put(str(key), value, hidden=hidden)

    # --- code

    def _class(self, kind: type) -> None:
        self._lines.append(f"{kind.__module__}.{kind.__qualname__}")
        if is_others(kind):
            self._names(kind)
            for base in kind.__bases__:
                if base is not object:
                    self._put("base", base)
            return
        if issubclass(kind, nn.Module) and is_installed(file_of(kind)):
            self._refuse(f"{kind.__name__} belongs to an installed library")
        self._spaces[id(gc.get_referents(vars(kind))[0])] = self._numbers[id(kind)]
        for base in kind.__mro__[1:]:
            self._put("base", base)
        self._put("metaclass", type(kind))
        for name, x in list(vars(kind).items()):
            if name not in UNREAD:
                self._entry(kind, name, x)

    def _names(self, space: Any) -> None:
        """Which functions stand in a module or class of torch; the user may have put others in their place."""
        for name, x in list(vars(space).items()):
            self._name_of(name, x)

    def _name_of(self, name: str, x: Any) -> None:
        """Which function stands under a name in a module or class of torch."""
        if isinstance(x, (types.FunctionType, types.BuiltinFunctionType)):
            self._lines.append(f"{name}: {x.__module__}.{x.__qualname__}")
        if isinstance(x, types.FunctionType) and is_users(x.__code__.co_filename):
            self._put(f"in torch {name}", x)

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        is_watched = is_users(code.co_filename)
        self._functions.setdefault(code, []).append(function)
        self._lines.append(f"{function.__module__}.{function.__qualname__} {hash_of_code(code, self._codes)}")
        for name in ("__defaults__", "__kwdefaults__"):
            self._entry(function, name, getattr(function, name), hidden=not is_watched)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._put(f"cell {name}", cell, hidden=not is_watched)
        self._spaces[id(vars(function))] = self._numbers[id(function)]
        for name, x in list(vars(function).items()):
            self._entry(function, name, x, hidden=not is_watched)
        is_generated = code.co_filename.startswith("<")  # by exec
        if (is_watched and not is_installed(code.co_filename)) or is_generated:
            self._globals(code, function.__globals__)

    def _globals(self, code: types.CodeType, space: dict[str, Any]) -> None:
        """The globals that a code names, and what it names of modules among these."""
        codes = list(with_inner(code))
        names = {name for each in codes for name in each.co_names}
        if "ops" in names:
            self._refuse(f"{code.co_qualname} may call operators that are registered with torch")
        self._namespace(space, space.get("__name__", ""))
        found = [name for each in codes for name, _ in globals_of(each) if name in space]
        for name in dict.fromkeys(found):
            self._entry(space, name, space[name])
            self._entries_of(space[name], names)

    def _namespace(self, space: dict[str, Any], name: str) -> None:
        if id(space) not in self._numbers:
            self._lines.append(f"#{self._register(space)} globals of {name}")

    def _entries_of(self, module: Any, names: set[str]) -> None:
        """What names of a code stand for in a module."""
        if not isinstance(module, types.ModuleType):
            return
        space = vars(module)
        if is_versioned(module.__name__):
            for name in sorted(names & set(space)):
                self._name_of(name, space[name])
                self._entries_of(space[name], names - {name})
            return
        self._namespace(space, module.__name__)
        for name in sorted(names & set(space)):
            if (self._numbers[id(space)], name) not in self._entries:
                self._entry(space, name, space[name])
            self._entries_of(space[name], names - {name})

    # --- objects

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
