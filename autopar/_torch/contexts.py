"""Contexts in which other packages do something else: an attribute is replaced, or messages are hidden."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
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
def quiet_torchao() -> Iterator[None]:
    """Inside, an import of torchao, such as that by transformers, logs no such line; errors are raised."""

    def is_no_noise(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_NOISE[record.name])

    logs = list(map(logging.getLogger, _NOISE))
    for log in logs:
        log.addFilter(is_no_noise)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(is_no_noise)
