"""Contexts in which other packages do something else: an attribute is replaced, or messages are hidden."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Logger -> beginning of the messages that torchao causes where all is well: libraries for other devices and versions of
# Python that do not load here, and a registration that torch no longer needs.
_NOISE = {"torchao": "Failed to load ", "torch.utils._pytree": "%s is an Enum subclass and is now natively supported"}


_ABSENT = object()


@contextlib.contextmanager
def replaced(holder: Any, **attributes: Any) -> Iterator[None]:
    """Context in which a module, a class or an object has other attributes; afterwards it has its own again.

    An attribute that the holder does not have itself, but of a base or not at all, is removed afterwards.
    """
    before = {name: vars(holder).get(name, _ABSENT) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(holder, name, value)
        yield
    finally:
        for name, value in before.items():
            delattr(holder, name) if value is _ABSENT else setattr(holder, name, value)


@contextlib.contextmanager
def logging_only(loggers: Iterable[str], is_wanted: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """Context in which loggers take no other records than those that are wanted."""
    logs = list(map(logging.getLogger, loggers))
    for log in logs:
        log.addFilter(is_wanted)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(is_wanted)


def quiet_torchao() -> contextlib.AbstractContextManager[None]:
    """Inside, an import of torchao, such as that by transformers, logs no such line; errors are raised."""
    return logging_only(_NOISE, lambda record: not str(record.msg).startswith(_NOISE[record.name]))
