"""The tier nvme: tensors in files of a folder on a disk of the rank's machine.

Each tensor is one file, mapped into memory and unlinked immediately: no other process finds it, and its space is given
back when the tensor is freed, or when the process ends or is killed. The space is reserved before the file is mapped,
so that a full disk is an error here and not a signal that ends the process later.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from autopar import _torch
from autopar.errors import AutoparError
from autopar.units import counted, format_bytes

_PREFIX = "autopar-"  # of a file, for the moment that it has a name


class Files:
    """Tensors in files of one folder.

    Args:
        folder: a folder that exists, on the disk that is to be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def at(folder: str | os.PathLike[str]) -> Files:
        """Tensors in files of the folder that `compile(..., nvme=)` names. Raises AutoparError for no folder."""
        if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
            raise AutoparError(
                f"nvme={folder!r} does not name a folder; give a path, such as nvme='/path/on/the/disk', or leave it "
                "out where the plan keeps no parameters in files."
            )
        return Files(Path(folder))

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor in a new file. Raises AutoparError if the folder has no room or cannot be written to."""
        size_bytes = shape.numel() * dtype.itemsize
        if not size_bytes:
            return torch.empty(shape, dtype=dtype)
        try:
            descriptor, path = tempfile.mkstemp(prefix=_PREFIX, dir=self.folder)
            try:
                os.posix_fallocate(descriptor, 0, size_bytes)
                return _torch.map_file(path, shape, dtype)
            finally:
                os.close(descriptor)
                os.unlink(path)
        except OSError as error:
            raise AutoparError(
                f"Cannot keep {format_bytes(size_bytes)} in a file of {self.folder}: {error.strerror}. {self._remedy}"
            ) from error

    def check(self, needed_bytes: float, ranks: int) -> None:
        """Raises AutoparError unless the folder can be written to and has room.

        Args:
            needed_bytes: bytes that every rank will keep here.
            ranks: number of ranks that use the same disk.
        """
        if not self.folder.is_dir():
            raise AutoparError(
                f"nvme={str(self.folder)!r} is not a folder. Create it, on the disk that is to hold parameters."
            )
        self.empty(torch.Size([1]), torch.uint8)
        free_bytes = shutil.disk_usage(self.folder).free
        if needed_bytes * ranks > free_bytes:
            raise AutoparError(
                f"The plan keeps {format_bytes(needed_bytes)} in files of every rank. {self.folder} is on a disk for "
                f"{counted(ranks, 'rank')}, {format_bytes(needed_bytes * ranks)} together, and has "
                f"{format_bytes(free_bytes)} free. {self._remedy}"
            )

    @property
    def disk(self) -> int:
        """Number of the device that the folder is on, of this machine."""
        return self.folder.stat().st_dev if self.folder.is_dir() else -1

    @property
    def _remedy(self) -> str:
        return "Give another folder, nvme=..., or store the parameters on the host or the device."
