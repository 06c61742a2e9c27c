"""Options: what people may ask, described once for Python, the command line and the docs.

    micro_batches: int | None = option(None, "number of micro-batches ...", flag="--micro-batches", metavar="N")

A dataclass with such fields gives `autopar.compile` and `autopar.explain` their keyword arguments, the command line its
flags (`autopar.cli.options`), and the docs their table (docs/options.md).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from autopar.errors import did_you_mean

_F = TypeVar("_F", bound=Callable[..., Any])


def _as_it_is(value: Any) -> Any:
    return value


def _one_text(value: Any) -> Iterable[str]:
    return (str(value),)


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
        write: the texts that follow the flag, one for each time that the flag is given for a value.
        is_limit: whether it limits which plans are searched, so that it means nothing beside a given plan.
        is_constraint: whether a line that says what was asked names it; what is left is shown by itself.
        serves_backend: whether the backend of torch.compile takes it, too.
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
    write: Callable[[Any], Iterable[str]] = _one_text
    is_limit: bool = False
    is_constraint: bool = True
    serves_backend: bool = False

    def words(self, value: Any) -> list[str]:
        """A value as flags of the command line, such as `--stages 2`; empty for the default."""
        if value == self.default:
            return []
        return [f"{self.flag} {text}".rstrip() for text in self.write(value)]


def option(default: Any, help: str, **how: Any) -> Any:
    """A field of a dataclass that people may set; `how` has further attributes of `Option`."""
    metadata = {"help": help, **how}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def options_of(*kinds: Any) -> dict[str, Option]:
    """The options among the fields of dataclasses, by name."""
    return {
        field.name: Option(field.name, _default(field), **field.metadata)
        for kind in kinds
        for field in dataclasses.fields(kind)
        if "help" in field.metadata
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    make: Any = field.default_factory
    return field.default if make is dataclasses.MISSING else make()


def split_options(given: Mapping[str, Any], *kinds: Any) -> tuple[dict[str, Any], ...]:
    """The given options that belong to each of several dataclasses."""
    return tuple(
        {name: given[name] for name in options_of(kind) if name in given} for kind in kinds
    )


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
                raise TypeError(
                    f"{function.__name__}() has no argument {unknown!r}{near}; it takes {', '.join(known)}."
                )
            return function(*args, **kwargs)

        lines = [f"    {each.name}={each.default!r}: {each.help}" for each in options.values()]
        called.__doc__ = "\n".join([function.__doc__ or "", "Options:", *lines])
        return called  # type: ignore[return-value]

    return decorate


def table(*kinds: Any) -> str:
    """The options as a table in Markdown: the argument of Python, the flag of the command line, what it does."""
    rows = [
        f"| `{each.name}={each.default!r}` | {f'`{each.flag}`' if each.flag else ''} | {each.help} |"
        for each in options_of(*kinds).values()
    ]
    return "\n".join(["| Python | command line | |", "|---|---|---|", *rows])
