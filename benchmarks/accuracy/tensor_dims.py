"""Bytes that one layer sends under tensor parallelism in one, two and three dims, against the papers' formulas.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/tensor_dims.py

The layer is x + down(gelu(up(norm(x)))). A model of three such layers is compiled for each mesh, and one step runs on
rank 0, while a process group that moves nothing answers for the others. Every collective is counted where it is
dispatched, as the bytes that a rank receives by a ring: (n - 1) / n of the larger side, and twice that for an
all-reduce. The bytes of one layer are those of three layers less those of two, so that the ends of the model do not
count.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar
from autopar.runtime.parameters.gather import Gathers

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.tables import markdown_table

BATCH, SEQ = 16, 16
ROWS = BATCH * SEQ  # of the operands of a product
ITEMSIZE = 4  # float32


class Layer(nn.Module):
    """The feed-forward half of a transformer's layer; its norm has no parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, elementwise_affine=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Layers(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mean_square(y: Tensor) -> Tensor:
    return y.pow(2).mean()


# --- formulas: bytes that a rank receives in a step of one layer, of width h and inner width f = 4 h, with M rows


def moved(ranks: int, elements: float) -> float:
    """Bytes that a rank receives when `elements` numbers, all that it has or gets, are gathered or scattered."""
    return (ranks - 1) / ranks * elements * ITEMSIZE


def one_dim(width: int, sizes: tuple[int, ...]) -> float:
    """Megatron-LM (Shoeybi et al. 2019): an all-reduce of M h in forward, and one in backward."""
    return 2 * 2 * moved(sizes[0], ROWS * width)


def summa(width: int, sizes: tuple[int, ...]) -> float:
    """SUMMA (van de Geijn and Watts 1997; Xu et al. 2021), with depth c Tesseract (Wang et al. 2021).

    For gradients A', B' and C' the products C = A B, A' = C' B^T and B' = A^T C' each move a block row of A (or A')
    along x, and a block column of B (or B') along y: three times each. The layers of Tesseract add up B'. The norm
    needs whole rows: to get them from blocks is an all-to-all of one block, and so is its transpose.
    """
    x, y, depth = (*sizes, 1)[:3]
    inner, rows = 4 * width, ROWS / (y * depth)
    operands = 3 * (moved(x, rows * width) + moved(x, rows * inner))
    weights = 2 * 3 * moved(y, width * inner / x)
    copies = 2 * 2 * moved(depth, width * inner / (x * y))
    return operands + weights + copies + 2 * moved(x, rows * width / x)


def three_dims(width: int, sizes: tuple[int, ...]) -> float:
    """Agarwal et al. (1995), Bian et al. (2021): in every product A, B and C move once, each along its own axis.

    For A and B that makes three times in a step, as for `summa`. C' is gathered once for both of its products, where
    three products by themselves would move it three times: C moves twice. The norm takes an all-to-all of one block
    before and after it, and their transposes.
    """
    x, y, z = sizes
    inner, rows = 4 * width, ROWS / z
    narrow, wide = moved(x, rows * width / y), moved(y, rows * inner / x)
    # A: gathered in forward, gathered again and scattered in backward; C: scattered in forward, gathered in backward
    products = (3 + 2) * (narrow + wide)
    weights = 2 * 3 * moved(z, width * inner / (x * y))
    return products + weights + 4 * moved(y, rows * width / (x * y))


@dataclass(frozen=True)
class Case:
    """One row of the table: a recipe on a mesh, and the formula of its bytes.

    Attributes:
        name: name of the recipe, or 1d.
        sizes: number of ranks along x, y and z.
        turned: whether the mesh names its axes the other way round, z first.
    """

    name: str
    sizes: tuple[int, ...]
    turned: bool = False

    @property
    def axes(self) -> str:
        return "xyz"[: len(self.sizes)]

    @property
    def mesh(self) -> dict[str, int]:
        named = dict(zip(self.axes, self.sizes, strict=True))
        return dict(reversed(named.items())) if self.turned else named

    @property
    def recipe(self) -> dict[str, str]:
        return {",".join(self.axes): {"1d": "tp"}.get(self.name, self.name)}

    def formula(self, width: int) -> float:
        """Bytes that a rank receives for one layer, by the papers."""
        formulas = {"1d": one_dim, "2d": summa, "2.5d": summa, "3d": three_dims}
        return formulas[self.name](width, self.sizes)


CASES = (
    Case("1d", (4,)),
    Case("2d", (2, 2)),
    Case("1d", (8,)),
    Case("2.5d", (2, 2, 2)),
    Case("3d", (2, 2, 2)),
    Case("1d", (16,)),
    Case("2d", (4, 4)),
    Case("2.5d", (2, 2, 4)),
    Case("3d", (2, 2, 4)),
)


# --- counting


class Counted(TorchDispatchMode):
    """Counts the bytes that this rank receives by collectives: those of the program, and those of its parameters."""

    TIMES = {  # noqa: RUF012
        "all_gather": 1,
        "reduce_scatter": 1,
        "all_to_all": 1,
        "all_reduce": 2,
        "allreduce": 2,
        "_allgather_base": 1,
        "_reduce_scatter_base": 1,
    }

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "autopar"):
            name = func._schema.name.split("::")[1].rstrip("_")
            if name != "barrier" and not name.startswith(("wait", "to_device")):
                self._count(name, args, result)
        return result

    def _count(self, name: str, args: Any, result: Any) -> None:
        tensors = [x for x in tree_leaves((args, result)) if isinstance(x, Tensor)]
        ranks = args[2] if isinstance(args[-1], str) else _size_of(args)
        if name in self.TIMES:
            larger = max(x.nbytes for x in tensors)
            self.bytes += self.TIMES[name] * (ranks - 1) / ranks * larger
        else:
            assert name in ("shard", "pad", "vary", "partial", "kept"), f"{name} is not counted"


def _size_of(args: Any) -> int:
    """Number of ranks of the process group among the arguments of an op of c10d."""
    (group,) = (x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()))
    return dist.ProcessGroup.unbox(group).size()


@contextmanager
def watching_saved() -> Iterator[dict[int, torch.UntypedStorage]]:
    """Gives a dict that gets every storage that autograd keeps, by its address.

    Where parameters are gathered, the runtime's own hooks are the last ones, and their result is what is kept.
    """
    kept: dict[int, torch.UntypedStorage] = {}
    pack_gathered = Gathers._pack

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    def pack_beside(self: Gathers, x: Tensor) -> Any:
        packed = pack_gathered(self, x)
        return pack(packed) if isinstance(packed, Tensor) else packed

    with patch.object(Gathers, "_pack", pack_beside), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield kept


def of_layers(case: Case, width: int, count: int) -> tuple[float, int]:
    """Bytes received and bytes saved on rank 0 in a step of so many layers."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, SEQ, width)
    model = autopar.compile(
        Layers(width, count),
        example_inputs=(x,),
        loss_fn=mean_square,
        mesh=case.mesh,
        recipe=case.recipe,
        recompute="none",
        bucket_bytes=1,
    )
    model.step(x)
    model.zero_grad()
    stored = {p.to_local().untyped_storage().data_ptr() for p in model.parameters()}
    with watching_saved() as saved, Counted() as counted:
        model.step(x)
    return counted.bytes, sum(each.nbytes() for at, each in saved.items() if at not in stored)


def of_a_layer(case: Case, width: int) -> tuple[float, int]:
    """Bytes received and bytes saved on rank 0 for one layer."""
    (more, kept), (less, left) = (of_layers(case, width, count) for count in (3, 2))
    return more - less, kept - left


@contextmanager
def simulated(ranks: int) -> Iterator[None]:
    """A process group of so many ranks, of which only this one runs."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Prints the table of width 1024; with `--turned` that of meshes which name their axes the other way round."""
    width, rows = 1024, []
    turned = [replace(case, turned=True) for case in CASES if len(case.sizes) > 1]
    for case in turned if "--turned" in sys.argv else CASES:
        ranks = torch.Size(case.sizes).numel()
        with simulated(ranks):
            counted, saved = of_a_layer(case, width)
        sizes = " x ".join(map(str, case.mesh.values()))
        rows.append((str(ranks), case.name, sizes, f"{counted:,.0f}", f"{case.formula(width):,.0f}", f"{saved:,}"))
    print(*markdown_table(("ranks", "recipe", "mesh", "counted", "formula", "saved"), rows, text_columns=3), sep="\n")


if __name__ == "__main__":
    main()
