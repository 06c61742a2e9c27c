"""Hides messages that other packages log while they are imported."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

# Logger -> beginning of the messages that torchao causes where all is well: libraries for other devices and versions of
# Python that do not load here, and a registration that torch no longer needs.
_NOISE = {"torchao": "Failed to load ", "torch.utils._pytree": "%s is an Enum subclass and is now natively supported"}


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
