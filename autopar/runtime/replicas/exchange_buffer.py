"""Messages between a replica and an asynchronous server: tensors, of which some count in a few rows alone.

A row is an index of dim 0. A step of SGD changes only the rows of an embedding that the batch looks up. Such a message
has these rows and their numbers in place of the whole tensor, where that is shorter. What is left out is zero in a
difference, and of common parameters what the replica has: the result is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

_ALIGNED_BYTES = 16  # of a tensor's place in a buffer; no element type of torch is larger
_WHOLE = -1  # in place of a number of rows
_INDEX = torch.int64


class ExchangeBuffer:
    """Tensors in one buffer of the host.

    Args:
        like: names and tensors that give shapes and element types.

    Attributes:
        tensors: name -> its part of the buffer.
        rows: name -> indices of the rows that count, of shape `(rows,)`; a name that is missing counts in all rows.
        nbytes: size of the buffer.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self._places, size = dict[str, int](), 0
        for name, x in like.items():
            self._places[name] = size
            size += -(-x.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._data = bytearray(max(size, 1))  # torch makes no tensor of an empty buffer
        flat = torch.frombuffer(self._data, dtype=torch.uint8)
        self.tensors = {
            name: flat[at : at + like[name].nbytes].view(like[name].dtype).view(like[name].shape)
            for name, at in self._places.items()
        }
        self.rows: dict[str, Tensor] = {}
        self.nbytes = size

    def keep_rows(self, name: str, rows: Tensor) -> None:
        """Says which rows of a tensor count, if a message without the others is shorter.

        Args:
            name: name of the tensor.
            rows: whether each row counts, of shape `(rows,)`.
        """
        x, count = self.tensors[name], int(rows.sum())
        is_shorter = count * (x[:1].nbytes + _INDEX.itemsize) < x.nbytes
        self.rows.pop(name, None)
        if is_shorter:
            self.rows[name] = rows.nonzero().flatten()

    def keep_changed_rows(self) -> None:
        """Keeps, of every difference, only the rows that have a non-zero entry."""
        self.rows.clear()
        for name, x in self.tensors.items():
            if x.ndim > 1:
                self.keep_rows(name, (x != 0).flatten(1).any(1))

    def pieces(self) -> Iterator[bytearray | memoryview]:
        """The bytes to send: the row count of each tensor, then its row indices and rows, or the whole tensor."""
        counts = [len(self.rows[name]) if name in self.rows else _WHOLE for name in self.tensors]
        yield _bytes_of(torch.tensor(counts, dtype=_INDEX))
        for name, x in self.tensors.items():
            if name in self.rows:
                yield _bytes_of(self.rows[name])
                yield _bytes_of(x[self.rows[name]])
            else:
                yield self._piece(name)

    def fill(self, read: Callable[[bytearray | memoryview], object]) -> None:
        """Receives the tensors that another buffer sends. Raises ConnectionError for row indices out of range.

        Args:
            read: function that fills a buffer with the bytes that come next.
        """
        counts = _read(read, torch.empty(len(self.tensors), dtype=_INDEX)).tolist()
        self.rows = {}
        for (name, x), count in zip(self.tensors.items(), counts, strict=True):
            if count == _WHOLE:
                read(self._piece(name))
            else:
                self.rows[name] = _rows(read, count, len(x) if x.ndim else 0)
                x[self.rows[name]] = _read(read, x.new_empty((count, *x.shape[1:])))

    def _piece(self, name: str) -> memoryview:
        at = self._places[name]
        return memoryview(self._data)[at : at + self.tensors[name].nbytes]


def _rows(read: Callable[[bytearray | memoryview], object], count: int, rows: int) -> Tensor:
    """So many numbers of rows from the bytes that come next, of a tensor that has `rows` rows."""
    if not 0 <= count <= rows:
        raise ConnectionAbortedError(f"the other end announced {count} rows of a tensor of {rows}")
    found = _read(read, torch.empty(count, dtype=_INDEX))
    if count and not 0 <= int(found.min()) <= int(found.max()) < rows:
        raise ConnectionAbortedError(f"the other end sent rows that a tensor of {rows} does not have")
    return found


def _bytes_of(x: Tensor) -> bytearray:
    """The bytes of a tensor."""
    data = bytearray(x.nbytes)
    if x.nbytes:
        torch.frombuffer(data, dtype=x.dtype).view(x.shape).copy_(x)
    return data


def _read(read: Callable[[bytearray | memoryview], object], like: Tensor) -> Tensor:
    """A tensor of this shape and element type from the bytes that come next."""
    data = bytearray(like.nbytes)
    read(data)
    return torch.frombuffer(data, dtype=like.dtype).view(like.shape) if like.nbytes else like
