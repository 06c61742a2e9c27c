"""Options: what people may ask, described once for Python, the command line and the docs.

    micro_batches: int | None = option(None, metavar="N")

A dataclass with such fields, each described under `Attributes:` of its docstring, gives `autopar.compile` and
`autopar.explain` their keyword arguments, the command line its flags (`autopar.cli.options`), and the docs their table
(docs/api.md).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from autopar.errors import did_you_mean

_F = TypeVar("_F", bound=Callable[..., Any])


def _as_it_is(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class Option:
    """How people ask for one thing.

    Attributes:
        name: the keyword argument of Python.
        default: the value where nobody asks.
        help: what it does, as the end of a sentence that begins with its name.
        flag: the flag of the command line; "" where it has none.
        also: other spellings of the flag.
        metavar: stands for the value of the flag in its help.
        choices: the texts that the flag takes; empty for any.
        repeats: whether the flag may be given several times.
        parse: makes the value of what people write, in Python or after the flag.
        write: the texts that follow the flag, one for each time that the flag is given for a value; None for the value,
            or each of its parts, as text.
        is_limit: whether it limits which plans are searched, so that it means nothing beside a given plan.
        is_constraint: whether a line that says what was asked names it; what is left is shown by itself.
        serves_backend: whether the backend of torch.compile takes it, too.
        may_differ: whether each rank may be given another value.
    """

    name: str
    default: Any
    help: str
    flag: str = ""
    also: tuple[str, ...] = ()
    metavar: str = ""
    choices: tuple[str, ...] = ()
    repeats: bool = False
    parse: Callable[[Any], Any] = _as_it_is
    write: Callable[[Any], Iterable[str]] | None = None
    is_limit: bool = False
    is_constraint: bool = True
    serves_backend: bool = False
    may_differ: bool = False

    @property
    def sentence(self) -> str:
        """The help text of the option, with its choices."""
        return f"{self.help.rstrip('.')}: {', '.join(self.choices)}." if self.choices else self.help

    def words(self, value: Any) -> list[str]:
        """A value as flags of the command line, such as `--stages 2`, or as `batch=local`; none for the default."""
        if value == self.default:
            return []
        parts = sorted(value) if isinstance(value, frozenset) else value if self.repeats else [value]
        name = f"{self.flag} " if self.flag else f"{self.name}="
        return [f"{name}{text}".rstrip() for text in (self.write(value) if self.write else parts)]


def option(default: Any, **how: Any) -> Any:
    """A field of a dataclass that people may set; `how` has further attributes of `Option`."""
    metadata = {"option": how}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def options_of(*kinds: Any) -> dict[str, Option]:
    """The options among the fields of dataclasses, by name; those of one that `has_flags` have a flag of that name."""
    return {
        field.name: Option(field.name, _default(field), help.get(field.name, ""), **flag | field.metadata["option"])
        for kind in kinds
        for help in [_described(kind)]
        for field in dataclasses.fields(kind)
        if "option" in field.metadata
        for flag in [{"flag": f"--{field.name.replace('_', '-')}"} if hasattr(kind, "has_flags") else {}]
    }


def _described(kind: type) -> dict[str, str]:
    """Field -> its description in the docstring of a dataclass."""
    _, _, attributes = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.+(?:\n     +.+)*)", attributes, re.M)
    return {name: " ".join(text.split()) for name, text in found}


def _default(field: dataclasses.Field[Any]) -> Any:
    make: Any = field.default_factory
    return field.default if make is dataclasses.MISSING else make()


def shared_words(given: object, kind: Any) -> list[str]:
    """The options of a dataclass that all ranks must be given alike, as words; those of the default value have none."""
    alike = [each for each in options_of(kind).values() if not each.may_differ]
    return [text for each in alike for text in each.words(getattr(given, each.name))]


def split_options(given: Mapping[str, Any], *kinds: Any) -> tuple[dict[str, Any], ...]:
    """The given options that belong to each of several dataclasses."""
    return tuple({name: given[name] for name in options_of(kind) if name in given} for kind in kinds)


def takes_options(*kinds: Any) -> Callable[[_F], _F]:
    """Has a function take the options of dataclasses as keyword arguments: names are checked, and help(...) lists them.

    The wrapped function raises TypeError for a keyword argument that it does not have, with the nearest name.
    """

    def decorate(function: _F) -> _F:
        code = function.__code__
        named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        options = {name: each for name, each in options_of(*kinds).items() if name not in named}
        known = (*named, *options)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            unknown = next((name for name in kwargs if name not in known), None)
            if unknown is not None:
                near = did_you_mean(unknown, known)
                all_of_them = "its help lists them all" if near else f"it takes {', '.join(known)}"
                raise TypeError(f"{function.__name__}() has no argument {unknown!r}{near}; {all_of_them}.")
            return function(*args, **kwargs)

        lines = [f"    {each.name}={each.default!r}: {each.sentence}" for each in options.values()]
        called.__doc__ = "\n".join([function.__doc__ or "", "Options:", *lines])
        return called  # type: ignore[return-value]

    return decorate


def table(*kinds: Any) -> str:
    """The options as a table in Markdown: the argument in Python, the flag on the command line, a description."""
    rows = [
        f"| `{each.name}={each.default!r}` | {f'`{each.flag}`' if each.flag else ''} | {each.sentence} |"
        for each in options_of(*kinds).values()
    ]
    return "\n".join(["| Python | command line | |", "|---|---|---|", *rows])
