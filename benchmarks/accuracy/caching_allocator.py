"""A model of torch's caching allocator for CUDA, which replays the allocations of a program.

It follows `DeviceCachingAllocator` in c10/cuda/CUDACachingAllocator.cpp and the constants of
c10/core/AllocatorConfig.h (the constants read at torch 2.13, the algorithm in an earlier version; default settings, one
stream):

    round_size             a request is rounded up to 512 bytes
    get_pool               requests up to 1 MiB are cut from the small pool, others from the large pool
    get_free_block         best fit: of the smallest free blocks that are large enough the one that lies first
    get_allocation_size    if none is: a new segment of 2 MiB, of 20 MiB for less than 10 MiB, else of the request
                           rounded up to 2 MiB
    should_split           what is left of a block stays free if it has 512 bytes in the small pool, more than 1 MiB
                           in the large pool; else the request gets the whole block
    free_block             a freed block is joined with the free blocks before and after it in its segment
    try_allocate_expandable_block
                           with `expandable_segments:True` a pool is one segment without end, of which pages of 20 MiB
                           (of 2 MiB in the small pool) are mapped as they are needed; splits leave 512 bytes
    release_cached_blocks  where the device has no room for a segment, segments that are free as a whole are returned
                           to it; if there is no room then either, the allocation fails

Left out are several streams, private pools of CUDA graphs, pages that expandable segments unmap where the device has no
room, and all other settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MIB = 2**20
SMALLEST_BLOCK_BYTES = 512  # kMinBlockSize
MOST_SMALL_BYTES = MIB  # kSmallSize
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size_, kLargeBuffer before torch 2.10
LEAST_OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc
ROUND_SEGMENT_BYTES = 2 * MIB  # kRoundLarge
_POOL_BYTES = 2**50  # addresses of the expandable segment of the large pool, which lies before that of the small one


class Event(NamedTuple):
    """An allocation, or the free of one.

    Attributes:
        address: identity of the memory while it is allocated.
        size_bytes: bytes that were asked for; 0 for a free.
    """

    address: int
    size_bytes: int


class OutOfMemory(Exception):
    """The device has no room for a segment."""


@dataclass(eq=False)
class _Block:
    """A part of a segment, in a list of all parts of the segment."""

    address: int
    size_bytes: int
    is_small: bool
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None

    @property
    def is_whole_segment(self) -> bool:
        return self.before is None and self.after is None


class CachingAllocator:
    """The allocator of a device.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(3 * MIB)  # cut from a segment of 20 MiB
    >>> allocator.reserved_bytes // MIB, allocator.allocated_bytes // MIB
    (20, 3)

    Args:
        device_bytes: memory of the device; None if it never ends.
        expandable: whether segments expand, which is modelled for a device without end.

    Attributes:
        allocated_bytes: bytes of the blocks in use, as `torch.cuda.memory_allocated`.
        reserved_bytes: bytes of all segments, as `torch.cuda.memory_reserved`.
        most_allocated_bytes: the most of `allocated_bytes` so far.
        most_reserved_bytes: the most of `reserved_bytes` so far.
    """

    def __init__(self, device_bytes: int | None = None, *, expandable: bool = False) -> None:
        assert device_bytes is None or not expandable
        self._device_bytes, self._expandable = device_bytes, expandable
        self._tails: dict[bool, _Block] = {}  # the last block of each expandable segment
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (bytes, address)
        self._blocks: dict[int, _Block] = {}  # of all free blocks, by address
        self._end = 0  # of the last segment
        self.allocated_bytes = self.reserved_bytes = 0
        self.most_allocated_bytes = self.most_reserved_bytes = 0

    def allocate(self, size_bytes: int) -> _Block:
        """A block for a request. Raises OutOfMemory if the device has no room for it."""
        size_bytes = _rounded(max(size_bytes, 1), SMALLEST_BLOCK_BYTES)
        is_small = size_bytes <= MOST_SMALL_BYTES
        block = self._best(size_bytes, is_small) or self._segment(size_bytes, is_small)
        left_bytes = block.size_bytes - size_bytes
        cuts_finely = is_small or self._expandable
        if left_bytes >= SMALLEST_BLOCK_BYTES if cuts_finely else left_bytes > MOST_SMALL_BYTES:
            self._split(block, size_bytes)
        block.is_free = False
        self.allocated_bytes += block.size_bytes
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: _Block) -> None:
        """Frees a block, which is joined with free neighbours."""
        self.allocated_bytes -= block.size_bytes
        block.is_free = True
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._take(other)
                _join(block, other)
                if self._tails.get(block.is_small) is other:
                    self._tails[block.is_small] = block
        self._put(block)

    def _best(self, size_bytes: int, is_small: bool) -> _Block | None:
        free = self._free[is_small]
        position = bisect_left(free, (size_bytes, 0))
        if position == len(free):
            return None
        return self._take(self._blocks[free[position][1]])

    def _segment(self, size_bytes: int, is_small: bool) -> _Block:
        """A block of at least this size in memory that is new, at least in part."""
        if self._expandable:
            return self._expanded(size_bytes, is_small)
        segment_bytes = _segment_bytes(size_bytes)
        if not self._has_room(segment_bytes):
            self._release()
        if not self._has_room(segment_bytes):
            raise OutOfMemory
        self._reserve(segment_bytes)
        block = _Block(self._end, segment_bytes, is_small)
        self._end += segment_bytes
        return block

    def _expanded(self, size_bytes: int, is_small: bool) -> _Block:
        tail = self._tails.get(is_small)
        if tail is not None and tail.is_free:
            block = self._take(tail)
        else:
            begin = _POOL_BYTES * is_small if tail is None else tail.address + tail.size_bytes
            block = _Block(begin, 0, is_small, before=tail)
            if tail is not None:
                tail.after = block
        page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        mapped_bytes = _rounded(size_bytes - block.size_bytes, page_bytes)
        self._reserve(mapped_bytes)
        block.size_bytes += mapped_bytes
        self._tails[is_small] = block
        return block

    def _reserve(self, size_bytes: int) -> None:
        self.reserved_bytes += size_bytes
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)

    def _has_room(self, segment_bytes: int) -> bool:
        return self._device_bytes is None or self.reserved_bytes + segment_bytes <= self._device_bytes

    def _release(self) -> None:
        for block in [b for b in self._blocks.values() if b.is_whole_segment]:
            self.reserved_bytes -= self._take(block).size_bytes

    def _split(self, block: _Block, size_bytes: int) -> None:
        rest = _Block(
            block.address + size_bytes, block.size_bytes - size_bytes, block.is_small, before=block, after=block.after
        )
        if block.after is not None:
            block.after.before = rest
        if self._tails.get(block.is_small) is block:
            self._tails[block.is_small] = rest
        block.size_bytes, block.after = size_bytes, rest
        self._put(rest)

    def _put(self, block: _Block) -> None:
        self._blocks[block.address] = block
        insort(self._free[block.is_small], (block.size_bytes, block.address))

    def _take(self, block: _Block) -> _Block:
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.size_bytes, block.address))]
        return self._blocks.pop(block.address)


def _join(block: _Block, other: _Block) -> None:
    """Makes a neighbour a part of a block."""
    block.size_bytes += other.size_bytes
    if other is block.before:
        block.address, block.before = other.address, other.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = other.after
        if block.after is not None:
            block.after.before = block


def _rounded(size_bytes: int, unit_bytes: int) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes


def _segment_bytes(size_bytes: int) -> int:
    if size_bytes <= MOST_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < LEAST_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return _rounded(size_bytes, ROUND_SEGMENT_BYTES)


def replay(events: Iterable[Event], device_bytes: int | None = None, *, expandable: bool = False) -> CachingAllocator:
    """The allocator after a trace. Raises OutOfMemory if the trace does not fit onto the device."""
    allocator = CachingAllocator(device_bytes, expandable=expandable)
    blocks: dict[int, _Block] = {}
    for event in events:
        if event.address in blocks:  # also where the free of what lay there was not seen
            allocator.free(blocks.pop(event.address))
        if event.size_bytes:
            blocks[event.address] = allocator.allocate(event.size_bytes)
    return allocator


def in_one_block(events: Sequence[Event], addresses: Container[int]) -> list[Event]:
    """The trace with an arena in the place of the last allocations at some addresses, which are never freed.

    The arena is one allocation, made when the first of them is made; each begins at a multiple of 512 bytes.

    >>> in_one_block([Event(1, 512), Event(2, 8), Event(2, 0), Event(2, 40)], {1, 2})
    [Event(address=1, size_bytes=1024), Event(address=2, size_bytes=8), Event(address=2, size_bytes=0)]
    """
    lasting = set({e.address: i for i, e in enumerate(events) if e.address in addresses}.values())
    assert all(events[i].size_bytes for i in lasting), "freed"
    arena_bytes = sum(_rounded(events[i].size_bytes, SMALLEST_BLOCK_BYTES) for i in lasting)
    first = min(lasting)
    others = [e for i, e in enumerate(events[first + 1 :], first + 1) if i not in lasting]
    return [*events[:first], Event(events[first].address, arena_bytes), *others]


def least_device_bytes(events: list[Event]) -> int:
    """The memory of the smallest device on which a trace runs, to 2 MiB.

    Less than what is reserved on a device without end, because free segments are returned where there is no room.
    """
    found = replay(events)
    low, high = found.most_allocated_bytes - 1, found.most_reserved_bytes
    while high - low > ROUND_SEGMENT_BYTES:
        middle = (low + high) // 2
        try:
            replay(events, middle)
        except OutOfMemory:
            low = middle
        else:
            high = middle
    return high
