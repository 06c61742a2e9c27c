"""The model of CUDA's caching allocator, by hand: what it cuts, joins, reserves and returns."""

from __future__ import annotations

import pytest

from benchmarks.accuracy.caching_allocator import MIB, CachingAllocator, Event, OutOfMemory, least_device_bytes, replay


@pytest.mark.parametrize(
    ("asked_bytes", "allocated_bytes", "reserved_bytes"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB is left, too little to be cut off
        (33 * MIB + 1, 34 * MIB, 34 * MIB),
    ],
)
def test_a_request_is_cut_from_a_segment_of_its_class(
    asked_bytes: int, allocated_bytes: int, reserved_bytes: int
) -> None:
    allocator = CachingAllocator()
    allocator.allocate(asked_bytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated_bytes, reserved_bytes)


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(30 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(12 * MIB).address == 40 * MIB  # where the 30 MiB began
    assert allocator.allocate(19 * MIB).address == 0  # 18 are left of the 30


def test_freed_neighbours_become_one_block() -> None:
    """9 + 9 + 2 MiB of a segment of 20: in turn they leave room for 18, which two holes of 9 would not."""
    allocator = CachingAllocator()
    first, second, _third = (allocator.allocate(x * MIB) for x in (9, 9, 2))
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(18 * MIB).address == 0
    assert allocator.reserved_bytes == 20 * MIB


def test_segments_that_are_free_as_a_whole_are_returned_where_there_is_no_room() -> None:
    """Two segments of 12 MiB are free when one of 16 and one of 20 are asked for: 36 MiB are enough for all."""
    freed = [Event(1, 12 * MIB), Event(2, 12 * MIB), Event(1, 0), Event(2, 0)]
    events = [*freed, Event(3, 16 * MIB), Event(4, 20 * MIB)]
    assert replay(events).most_reserved_bytes == 60 * MIB
    assert 36 * MIB <= least_device_bytes(events) <= 38 * MIB


def test_a_block_in_use_keeps_its_segment_from_the_device() -> None:
    """8 of 20 MiB are in use, and 9 are asked for: what is free beside them does not reach 9 in one piece."""
    events = [Event(1, 8 * MIB), Event(2, 8 * MIB), Event(1, 0), Event(3, 9 * MIB)]
    assert replay(events, 40 * MIB).reserved_bytes == 40 * MIB
    with pytest.raises(OutOfMemory):
        replay(events, 39 * MIB)


def test_an_address_that_is_given_again_was_freed() -> None:
    allocator = replay([Event(1, MIB), Event(1, MIB), Event(2, 0)])
    assert allocator.allocated_bytes == MIB
