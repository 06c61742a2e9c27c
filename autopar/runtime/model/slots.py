"""The cache of generation: keys and values of a fixed number of positions, see [Note: few lengths].

Nothing here imports transformers; methods have the names of a cache of its version 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from autopar._torch import pytree
from autopar.program.stages import Staying


class Past:
    """The cache that `generate` holds.

    Attributes:
        slots: keys and values; None before the first forward.
        length: number of positions that they have.
        tokens: all tokens so far, of shape `(batch, length)`; None before the first forward.
        positions: position of each of them; None where the caller gives none.
        serves: whether a forward with the slots gives the logits of a forward of all tokens, as far as compared.
    """

    is_compileable = False

    def __init__(self) -> None:
        self.slots: Slots | None = None
        self.length = 0
        self.tokens: Tensor | None = None
        self.positions: Tensor | None = None
        self.serves = True

    def note(self, tokens: Tensor, positions: Tensor | None) -> None:
        """Appends the tokens of a forward, and their positions."""
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], 1)
        if positions is not None:
            before = self.positions
            self.positions = positions if before is None else torch.cat([before, positions], 1)

    def get_seq_length(self, *_: Any) -> int:
        """The number of positions that the cache has."""
        return self.length


class Slots(Staying):
    """Keys and values of a fixed number of positions, which the layers of a captured forward read and update.

    Under pipeline stages those of a layer stay with its stage.

    Attributes:
        keys: number of a layer -> keys, of shape `(batch, heads, slots, head size)`.
        values: the same for values.
        place: slot of the new token, of shape `(1,)`; None where the forward has all positions.
    """

    is_compileable = False

    def __init__(self, keys: Mapping[int, Tensor], values: Mapping[int, Tensor], place: Tensor | None) -> None:
        self.keys, self.values, self.place = dict(keys), dict(values), place

    @property
    def count(self) -> int:
        """The number of slots."""
        return next(iter(self.keys.values())).shape[2]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer, including the new ones."""
        if self.place is not None:
            is_new = (torch.arange(self.count, device=keys.device) == self.place)[:, None]
            keys = torch.where(is_new, keys, self.keys[layer])
            values = torch.where(is_new, values, self.values[layer])
        self.keys[layer], self.values[layer] = keys, values
        return keys, values

    def get_seq_length(self, *_: Any) -> Any:
        """The number of positions before those of the forward."""
        return 0 if self.place is None else self.place

    def get_query_offset(self, *_: Any) -> Any:
        """The position of the first query."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        """Number of keys, and position of the first."""
        return query_length if self.place is None else self.count, 0

    def longer(self, count: int) -> Slots:
        """These slots with empty ones added, up to the given number."""

        def pad(x: Tensor) -> Tensor:
            longer = F.pad(whole(x), (0, 0, 0, count - self.count))
            if not isinstance(x, DTensor):
                return longer
            whole_on_all = [Replicate()] * x.device_mesh.ndim
            return DTensor.from_local(longer, x.device_mesh, whole_on_all, run_check=False)

        keys = {layer: pad(x) for layer, x in self.keys.items()}
        return Slots(keys, {layer: pad(x) for layer, x in self.values.items()}, self.place)


pytree.register_container(Slots, ("keys", "values", "place"))


def whole(x: Tensor) -> Tensor:
    """A tensor with the parts of all ranks."""
    return x.full_tensor() if isinstance(x, DTensor) else x
