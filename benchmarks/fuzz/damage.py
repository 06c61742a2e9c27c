"""Flipped bits in everything that is saved, places that cannot be written, and the cost of checksums.

OMP_NUM_THREADS=1 python -m benchmarks.fuzz.damage flips     200 bits of each file
OMP_NUM_THREADS=1 python -m benchmarks.fuzz.damage places    as root, which can make a small disk
OMP_NUM_THREADS=1 python -m benchmarks.fuzz.damage cost      of a save and of a load

With `--markdown benchmarks/fuzz/results.md` each writes its part of the page.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn

from autopar.cost_model import find_hardware
from autopar.errors import AutoparError
from autopar.ir import Mesh, Plan
from autopar.planning.planning import make_plan, prepare_step
from autopar.planning.stored_plans import StoredPlans
from autopar.runtime.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from autopar.runtime.formats import shard_file
from autopar.search.request.request import Request
from benchmarks.fuzz.formats import X, formats, model
from benchmarks.fuzz.mutations import flip
from benchmarks.fuzz.page import replace_part
from benchmarks.tables import markdown_table

FLIPS = 200
PLAN = Plan(Mesh.parse("dp=2"), "0" * 16, "ddp", 1, {}, {}, {})


@click.group()
def main() -> None:
    """Measures what damage does."""


def _write(markdown: Path | None, title: str, lines: Sequence[str], name: str) -> None:
    print(*lines, sep="\n")
    if markdown:
        replace_part(markdown, title, lines, f"python -m benchmarks.fuzz.damage {name}")


_PAGE = click.option("--markdown", type=click.Path(path_type=Path), help="Page to write a part of.")


# --- flipped bits


@main.command()
@_PAGE
def flips(markdown: Path | None) -> None:
    """Turns single bits of every saved file."""
    # Where a cache is not used is a line of its log.
    logging.getLogger("autopar").setLevel(logging.CRITICAL)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in formats(Path(folder) / "samples"):
            if not (kind.is_sealed or kind.name == "safetensors header"):
                continue
            path = Path(folder, f"file{kind.ending}")
            path.write_bytes(kind.content)
            meant, found = kind.read(path), {"refused": 0, "same": 0, "other": 0}
            for number in range(FLIPS):
                path.write_bytes(flip(kind.content, random.Random(f"{kind.name}/{number}")))
                try:
                    found["same" if kind.read(path) == meant else "other"] += 1
                except AutoparError:
                    found["refused"] += 1
            rows.append((kind.name, f"{8 * len(kind.content):,}", *map(str, found.values())))
    heads = ("file", "bits", "refused", "read as it was, or made again", "read as another")
    _write(markdown, f"{FLIPS} flipped bits", markdown_table(heads, rows, text_columns=1), "flips")


# --- places


@contextlib.contextmanager
def small_disk(folder: Path, *options: str) -> Iterator[Path]:
    """A disk in memory; needs root."""
    place = folder / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def said(work: Callable[[], Any]) -> str:
    """What is said where some work is done: the error, or what it returns."""
    try:
        return str(work() or "written")
    except AutoparError as error:
        return f"AutoparError: {error}"


def on_a_full_disk(folder: Path) -> str:
    """Saves a checkpoint of 400 kB on a disk of 1 MB until it is full, and loads the last good one."""
    small = nn.Linear(316, 316)
    with small_disk(folder, "-o", "size=1m") as disk:
        save_checkpoint(disk / "c", small, step=1)
        (disk / "rest").write_bytes(bytes(300_000))
        error = said(lambda: save_checkpoint(disk / "c", small, step=2))
        return f"{error} Then step {load_checkpoint(disk / 'c', small)['step']} loads."


def plan_on_a_full_disk(folder: Path) -> str:
    """Replaces a plan on a full disk."""
    with small_disk(folder, "-o", "size=64k") as disk:
        PLAN.save(disk / "plan.json")
        with contextlib.suppress(OSError):
            (disk / "rest").write_bytes(bytes(10**6))
        error = said(lambda: PLAN.save(disk / "plan.json"))
        return f"{error} Then {'the old plan loads' if Plan.load(disk / 'plan.json') == PLAN else 'it is lost'}."


def on_a_read_only_disk(folder: Path) -> str:
    """A plan and a checkpoint in a folder that cannot be written."""
    with small_disk(folder, "-o", "ro") as disk:
        first = said(lambda: PLAN.save(disk / "plan.json"))
        return f"{first} {said(lambda: save_checkpoint(disk / 'c', nn.Linear(2, 2)))}"


def through_links(folder: Path) -> str:
    """A plan under a symbolic link: the file to which it leads is written, and the link stays."""
    (folder / "link").symlink_to(folder / "target")
    PLAN.save(folder / "link")
    stays = (folder / "link").is_symlink() and Plan.load(folder / "target") == PLAN
    return "written to the file to which it leads; the link stays" if stays else "the link is gone"


def under_a_umask(folder: Path) -> str:
    """New files under another umask, and one that is there with permissions of its own."""
    before = os.umask(0o027)
    try:
        PLAN.save(folder / "new")
        (folder / "old").write_text("")
        (folder / "old").chmod(0o604)
        PLAN.save(folder / "old")
    finally:
        os.umask(before)
    modes = [f"{(folder / name).stat().st_mode & 0o777:o}" for name in ("new", "old")]
    return f"a new file has {modes[0]}, one of 604 keeps {modes[1]}"


def _one_job(folder: str, count: int = 20) -> str:
    prepared = prepare_step(model(), (X, X), loss_fn=nn.functional.mse_loss)
    request = Request(find_hardware("h100"), mesh={"dp": 2})
    stored = StoredPlans(Path(folder))
    return "".join(str(stored.plan(make_plan, prepared, request).to_json()) for _ in range(count))


@contextlib.contextmanager
def _as_nobody(mode: int) -> Iterator[str]:
    """A folder with these permissions, which root meets as nobody."""
    was = os.geteuid()
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, mode)
        if not was:
            os.seteuid(65534)
        try:
            yield place
        finally:
            os.seteuid(was)
            os.chmod(place, 0o700)


def in_a_folder_of_others(folder: Path) -> str:
    """A plan and a checkpoint in a folder that is read-only for this user."""
    with _as_nobody(0o555) as place:
        first = said(lambda: PLAN.save(f"{place}/plan.json"))
        second = said(lambda: save_checkpoint(f"{place}/c", nn.Linear(2, 2)))
        return f"{first} {second}".replace(place, "folder")


def in_a_locked_cache(folder: Path) -> str:
    """A plan whose cache lies in a folder that this user may not enter."""
    # Once before, since nobody may not read all that the first job imports.
    _one_job(str(folder), 1)
    with _as_nobody(0o000) as place:
        return "a plan is searched" if _one_job(f"{place}/cache", 1) else "no plan"


def a_link_to_a_device(folder: Path) -> str:
    """A plan under a symbolic link that leads to a device."""
    (folder / "link").symlink_to("/dev/full")
    return said(lambda: PLAN.save(folder / "link"))


def a_pipe(folder: Path) -> str:
    """A plan where a pipe is, which nobody reads."""
    os.mkfifo(folder / "pipe")
    return said(lambda: PLAN.save(folder / "pipe"))


def full_stdout(folder: Path) -> str:
    """What a command says on stderr where its stdout is on a full disk."""
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "autopar", "--version"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    return f"{ended.stderr.strip()} Exit code {ended.returncode}."


def two_jobs(folder: Path) -> str:
    """Two processes that read and write one cache."""
    with multiprocessing.get_context("spawn").Pool(2) as jobs:
        first, second = jobs.map(_one_job, [str(folder)] * 2)
    names = sorted(path.suffix for path in folder.iterdir())
    return f"both have {'the same plan' if first == second else 'other plans'}; the folder has {' '.join(names)}"


def a_file_of_others(folder: Path) -> str:
    """A stored plan that the group may write is not read, but searched again and replaced."""
    _one_job(str(folder))
    (path,) = folder.iterdir()
    path.chmod(0o664)
    _one_job(str(folder))  # a file that is read is not written anew
    return f"not read; replaced by one of {path.stat().st_mode & 0o777:o}"


def in_place_of_a_cached_file(folder: Path, put: Callable[[Path], None]) -> str:
    """What is said, and is there, where somebody who may write into a cache has put something in a file's place."""
    cache, own = folder / "cache", folder / "own"
    own.write_text("mine")
    _one_job(str(cache))
    (path,) = cache.iterdir()
    path.unlink()
    put(path)
    _one_job(str(cache), 1)
    there = "the pipe is there" if path.is_fifo() else "a file of ours is there"
    return (
        f"a plan is searched; {there}, and the user's file {'is' if own.read_text() == 'mine' else 'is not'} as it was"
    )


PLACES: dict[str, Callable[[Path], str]] = {
    "a checkpoint on a full disk": on_a_full_disk,
    "a plan on a full disk": plan_on_a_full_disk,
    "a disk that is read-only": on_a_read_only_disk,
    "a folder that this user may not write": in_a_folder_of_others,
    "stdout on a full disk": full_stdout,
    "a cache in a folder that this user may not enter": in_a_locked_cache,
    "a device": lambda folder: said(lambda: PLAN.save("/dev/full")),
    "a folder": lambda folder: said(lambda: PLAN.save(folder)),
    "a folder that is not there": lambda folder: said(lambda: PLAN.save(folder / "no" / "plan.json")),
    "a symbolic link": through_links,
    "a symbolic link to a device": a_link_to_a_device,
    "a pipe": a_pipe,
    "a umask of 027": under_a_umask,
    "two jobs in one cache": two_jobs,
    "a cached file that others may write": a_file_of_others,
    "a link to a file of this user in a cache": lambda folder: in_place_of_a_cached_file(
        folder, lambda path: path.symlink_to(folder / "own")
    ),
    "a pipe in a cache": lambda folder: in_place_of_a_cached_file(folder, os.mkfifo),
}


@main.command()
@_PAGE
def places(markdown: Path | None) -> None:
    """Writes to where that does not go."""
    rows = []
    for name, work in PLACES.items():
        with tempfile.TemporaryDirectory() as folder:
            rows.append((name, work(Path(folder)).replace(f"{folder}/", "").replace(folder, "folder")))
    lines = markdown_table(("where", "what is said, and what is there"), rows)
    _write(markdown, "Places that cannot be written, and others", lines, "places")


# --- what checksums cost


def _seconds(work: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    begin = clock()
    work()
    return clock() - begin


def _leave_memory(folder: Path) -> None:
    """Has the system forget what it keeps of files in its memory, so that they are read from the disk again."""
    gc.collect()  # what still maps them would keep them
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load_by_torch(folder: Path, to: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Loads a checkpoint's tensors as torch alone does it, without checksums."""
    state = to.state_dict()
    moments = {
        f"optimizer.{name}.{key}": value
        for name, parameter in to.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    room = {f"model.{name}": value for name, value in state.items()} | moments
    dcp.load(room, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    to.load_state_dict(state)


def _with_adamw(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module of 16 layers and its AdamW after a step, with this size together."""
    width = int((megabytes * 1e6 / 3 / 16 / 4) ** 0.5)
    big = nn.Sequential(*(nn.Linear(width, width) for _ in range(16)))
    optimizer = torch.optim.AdamW(big.parameters())
    for parameter in big.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return big, optimizer


def _in_turns(
    works: Mapping[str, Callable[[], Any]], count: int, clock: Callable[[], float], before: Callable[[], Any]
) -> list[str]:
    """The median of each work's seconds, and how it stands to the first one's, for a table."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(count):
        for name, work in works.items():
            before()
            found[name].append(_seconds(work, clock))
    first, *_ = found.values()
    return [
        f"{name} {statistics.median(own):.3f} s"
        + (
            f" ({statistics.median(a / b - 1 for a, b in zip(own, first, strict=True)):+.1%})"
            if own is not first
            else ""
        )
        for name, own in found.items()
    ]


def _columns(data: memoryview) -> np.ndarray:
    """Sums of the 512 columns of 64-bit words, as a checksum could have."""
    found: np.ndarray = np.add.reduce(np.frombuffer(data, np.uint64).reshape(-1, 512), axis=0)
    return found


def _file_rates(path: Path, data: memoryview) -> list[tuple[str, str]]:
    """Rates at which a file in the system's memory is read, and is read and summed while it is in the cache."""
    path.write_bytes(data)
    room = memoryview(bytearray(len(data)))

    def read(piece_bytes: int, work: Callable[[memoryview], Any], *, keeps: bool) -> None:
        with path.open("rb", buffering=0) as file:
            for begin in range(0, len(data), piece_bytes):
                piece = room[begin * keeps : begin * keeps + piece_bytes]
                file.readinto(piece)  # type: ignore[attr-defined]
                work(piece)

    ways = {
        "a read of a file": lambda: read(len(data), len, keeps=True),
        "a read of 256 KiB at a time, each summed in columns where it now lies": lambda: read(
            2**18, _columns, keeps=True
        ),
        "the same, into one room of 256 KiB, from which nothing is loaded": lambda: read(2**18, _columns, keeps=False),
    }
    return [(name, _rate(work, len(data))) for name, work in ways.items()]


def _rate(work: Callable[[], Any], size_bytes: int) -> str:
    return f"{size_bytes / min(_seconds(work) for _ in range(4)) / 1e9:.2f} GB/s"


@main.command()
@click.option("--megabytes", default=256)
@click.option("--count", default=7)
@_PAGE
def cost(megabytes: int, count: int, markdown: Path | None) -> None:
    """Saves and loads with checksums and without, in turns."""
    torch.manual_seed(0)
    own = _with_adamw(megabytes)
    data = memoryview(torch.randn(16 * 2**20).numpy()).cast("B")
    rates = {
        "xxhash.xxh3_64, here": lambda: xxhash.xxh3_64(data).digest(),
        "sums of columns by numpy": lambda: _columns(data),
        "sum of 64-bit words by torch, without a checksum": lambda: torch.frombuffer(data, dtype=torch.int64).sum(),
        "zlib.crc32": lambda: zlib.crc32(data),
        "zlib.adler32": lambda: zlib.adler32(data),
        "hashlib.sha1": lambda: hashlib.sha1(data).digest(),
        "hashlib.blake2b": lambda: hashlib.blake2b(data).digest(),
    }
    rows = [(name, _rate(work, len(data))) for name, work in rates.items()]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        place = Path(folder, "c")
        rows += _file_rates(Path(folder, "data"), data)

        def save_unsummed() -> None:
            unsummed = mock.Mock(hexdigest=lambda: 16 * "0")
            with mock.patch.object(shard_file.xxhash, "xxh3_64", return_value=unsummed):
                save_checkpoint(place, *own)

        saves = {"without sums": save_unsummed, "with": lambda: save_checkpoint(place, *own)}
        loads = {
            "by torch alone": lambda: load_by_torch(place, *own),
            "without checks": lambda: load_checkpoint(place, *own, check_bytes=False),
            "with": lambda: load_checkpoint(place, *own),
        }
        for what, works, clock, before in (
            ("save, by the clock", saves, time.perf_counter, gc.collect),
            ("save, time of the processor", saves, time.process_time, gc.collect),
            ("load from the system's memory, time of the processor", loads, time.process_time, gc.collect),
            ("load from the disk, by the clock", loads, time.perf_counter, lambda: _leave_memory(place)),
        ):
            save_checkpoint(place, *own)
            rows.append(
                (f"{what}, a module with AdamW, {megabytes} MB", ", ".join(_in_turns(works, count, clock, before)))
            )
        shutil.rmtree(place)
    heads = ("checksum of 67 MB in memory, one thread; or what was done", f"measured; medians of {count} in turns")
    _write(markdown, "What checksums cost", markdown_table(heads, rows), "cost")


if __name__ == "__main__":
    main()
