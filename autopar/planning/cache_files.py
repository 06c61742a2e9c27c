"""Files of a cache folder: whose they may be, and the key that users of one folder may share.

A file counts if its last line is the HMAC-SHA256 of its name and its text (RFC 2104), which shows damage, and a file
that stands for another question than its name says. Without a key it must also belong to this user, and no other user
may be able to write it. With a key, which the environment variable AUTOPAR_CACHE_KEY names the file of, it counts
whoever has written it: so users who trust each other share a folder, and others cannot add to it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

from autopar.errors import AutoparError
from autopar.ir.files import OTHERS_WRITE, open_regular, read_text, write_whole

KEY_VARIABLE = "AUTOPAR_CACHE_KEY"
_LEAST_BYTES, _MOST_BYTES = 32, 4096  # of a key; HMAC-SHA256 has no more strength than 32 bytes give
_EVERYONE = stat.S_IRWXO  # permissions of who is neither the owner nor in the group


def cache_key() -> bytes | None:
    """The key that the users of a cache folder share; None where they share none.

    Raises AutoparError for a file that cannot be read, is too short or too long, or that everyone can read or write.
    """
    path = os.environ.get(KEY_VARIABLE)
    if not path:
        return None
    try:
        with open_regular(path) as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise AutoparError(f"{KEY_VARIABLE} names {path}, which cannot be read: {error.strerror}.") from error
    if not _LEAST_BYTES <= len(key) <= _MOST_BYTES:
        found = f"more than {_MOST_BYTES}" if len(key) > _MOST_BYTES else len(key)
        raise AutoparError(
            f"{KEY_VARIABLE} names {path}, which has {found} bytes, and a key has {_LEAST_BYTES} to {_MOST_BYTES}: "
            f"make one by head -c {_LEAST_BYTES} /dev/urandom > {path}."
        )
    if mode & _EVERYONE:
        raise AutoparError(f"{KEY_VARIABLE} names {path}, which everyone can read or write: chmod o= {path}.")
    return key


def read_cached(path: Path) -> str:
    """The text of a file of a cache folder. Raises OSError, and ValueError for a file that does not count."""
    key = cache_key()
    text, _, seal = read_text(path, only_own=key is None).rpartition("\n")
    if not hmac.compare_digest(seal.encode(), _seal(key, path, text).encode()):
        by_key = f", or was not written with the key of {KEY_VARIABLE}" if key is not None else ""
        raise ValueError(f"it is incomplete, or was written for another name{by_key}")
    return text


def write_cached(text: str, path: Path) -> None:
    """Writes a file of a cache folder, which is made if it is not there. Raises OSError where that is not possible."""
    key = cache_key()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Others may make links in a shared folder; to follow one would overwrite any file of this user.
    write_whole(f"{text}\n{_seal(key, path, text)}", path, without=OTHERS_WRITE, follows=False)


def _seal(key: bytes | None, path: Path, text: str) -> str:
    return hmac.new(key or b"", f"{path.name}\n{text}".encode(), hashlib.sha256).hexdigest()
