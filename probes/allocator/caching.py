"""`CachingAllocator`: what PyTorch's CUDA caching allocator does with one stream of requests.

Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp (read at eb42ad6, and for 2.9 to 2.13 the same rules through
c10/core/AllocatorConfig.h), https://github.com/pytorch/pytorch. Settings: no max_split_size, no garbage collection
threshold, no power-of-two rounding (the defaults); one stream, no private pools.

Not modelled: several streams (a block freed on one is not reused on another), CUDA graphs' private pools, the driver's
own choice of addresses (new segments get rising addresses here; it only breaks ties between free blocks of one size).
"""

from planner.core.units import MIN_BLOCK_BYTES
from probes.allocator.blocks import (
    LARGE_SEGMENT_BYTES,
    MIN_LARGE_BYTES,
    ROUND_LARGE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    Pool,
)

_FIRST_ADDRESS = 1 << 21
_ADDRESS_SPACE_BYTES = 1 << 46  # of one expandable segment: more than any card, so a second is never needed


class OutOfDeviceMemory(MemoryError):
    """`malloc` found no memory, cached blocks given back and tried again."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"cannot allocate {size_bytes} bytes")
        self.size_bytes = size_bytes


class CachingAllocator:
    """One device's allocator.

    Attributes:
        allocated_bytes, reserved_bytes: what `torch.cuda.memory_allocated` and `memory_reserved` would say now.
        peak_allocated_bytes, peak_reserved_bytes: their highest values since made or since `reset_peaks`.
        num_retries: how often cached blocks had to be given back to serve a request (`num_alloc_retries`).
        limit_bytes: what the driver would hand out at most, None for no limit.
    """

    def __init__(self, *, expandable_segments: bool = False, limit_bytes: int | None = None) -> None:
        if limit_bytes is not None and limit_bytes < 0:
            raise ValueError(f"limit_bytes must not be negative, got {limit_bytes}")
        self.expandable_segments = expandable_segments
        self.limit_bytes = limit_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_retries = 0
        self.num_driver_calls = 0
        self.small = Pool(small=True)
        self.large = Pool(small=False)
        self._next_address = _FIRST_ADDRESS
        if expandable_segments:
            for pool in (self.small, self.large):
                segment = Block(self._next_address, _ADDRESS_SPACE_BYTES)
                segment.mapped = False
                pool.insert_unmapped(segment)
                self._next_address += _ADDRESS_SPACE_BYTES

    def malloc(self, size_bytes: int) -> Block:
        """A block for `size_bytes` (above 0), rounded up to 512 bytes.

        The block may be larger than asked for: a remainder that is not worth splitting off stays in it, and PyTorch
        counts it as allocated.

        Raises:
            OutOfDeviceMemory: the limit does not allow it, even with all cached memory given back.
        """
        size = (size_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES
        small = size <= SMALL_BYTES
        pool = self.small if small else self.large
        expandable = self.expandable_segments
        block = pool.take_best_fit_expandable(size) if expandable else pool.take_best_fit(size)
        if block is None:
            block = self._from_driver(pool, size)
            if block is None:
                self.num_retries += 1
                self.empty_cache()
                block = self._from_driver(pool, size)
            if block is None:
                raise OutOfDeviceMemory(size_bytes)
        remaining = block.size - size
        if remaining >= MIN_BLOCK_BYTES if small or expandable else remaining > SMALL_BYTES:
            # The request gets the low end, the remainder keeps the high end.
            block.size = size
            pool.insert(Block(block.address + size, remaining, block, block.next))
        block.allocated = True
        allocated = self.allocated_bytes = self.allocated_bytes + block.size
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return block

    def free(self, block: Block, size_bytes: int) -> None:
        """Return a block, which was asked for with `size_bytes`, to its pool; free neighbours become one block."""
        pool = self.small if size_bytes <= SMALL_BYTES else self.large
        block.allocated = False
        self.allocated_bytes -= block.size
        self._merge_neighbours(block, pool)
        pool.insert(block)

    def empty_cache(self) -> None:
        """Give every segment (of expandable segments: every page) without a live block back to the driver."""
        for pool in (self.large, self.small):
            for block in pool.free_blocks():
                if self.expandable_segments:
                    self._unmap(block, pool)
                elif block.prev is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def reset_peaks(self) -> None:
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _merge_neighbours(self, block: Block, pool: Pool) -> None:
        before = block.prev
        if before is not None and not before.allocated and before.mapped is block.mapped:
            (pool.remove if before.mapped else pool.unmapped.remove)(before)
            block.address = before.address
            block.size += before.size
            first = block.prev = before.prev
            if first is not None:
                first.next = block
        after = block.next
        if after is not None and not after.allocated and after.mapped is block.mapped:
            (pool.remove if after.mapped else pool.unmapped.remove)(after)
            block.size += after.size
            last = block.next = after.next
            if last is not None:
                last.prev = block

    # What the driver is asked for.

    def _from_driver(self, pool: Pool, size: int) -> Block | None:
        if self.expandable_segments:
            return self._grow(pool, size)
        segment_bytes = segment_size(size)
        if not self._reserve(segment_bytes):
            return None
        block = Block(self._next_address, segment_bytes)
        self._next_address += -(-segment_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        return block

    def _reserve(self, size: int) -> bool:
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            return False
        self.num_driver_calls += 1
        self.reserved_bytes += size
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
        return True

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """A free block of at least `size` bytes at the lowest address where unmapped space helps; taken out."""
        candidate = self._expandable_candidate(pool, size)
        if not candidate.mapped and not self._map(candidate, min(candidate.size, size), pool):
            return None
        while candidate.size < size:
            following = candidate.next
            assert following is not None  # the candidate was chosen because its neighbours have the space
            if not self._map(following, min(size - candidate.size, following.size), pool):
                return None
            candidate = following  # it has swallowed the block before it
        pool.remove(candidate)
        return candidate

    @staticmethod
    def _expandable_candidate(pool: Pool, size: int) -> Block:
        for unmapped in pool.unmapped:
            before = unmapped.prev
            start = before if before is not None and not before.allocated else unmapped
            space, block = 0, start
            while True:
                space += block.size
                if space >= size:
                    return start
                if block.next is None or block.next.allocated:
                    break
                block = block.next
        raise OutOfDeviceMemory(size)  # the address space itself is used up

    def _map(self, block: Block, size: int, pool: Pool) -> bool:
        """Back the first `size` bytes of an unmapped block with whole pages; the mapped part becomes a free block."""
        page = SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES
        size = -(-size // page) * page
        if not self._reserve(size):
            return False
        pool.unmapped.remove(block)
        if size < block.size:
            rest = Block(block.address + size, block.size - size, block, block.next)
            rest.mapped = False
            pool.insert_unmapped(rest)
            block.size = size
        block.mapped = True
        self._merge_neighbours(block, pool)
        pool.insert(block)
        return True

    def _unmap(self, block: Block, pool: Pool) -> None:
        """Give the whole pages inside a free block back; what is left at either end stays free."""
        page = SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES
        base = _FIRST_ADDRESS if pool.small else _FIRST_ADDRESS + _ADDRESS_SPACE_BYTES  # of its segment
        begin = base + -(-(block.address - base) // page) * page
        end = base + (block.address + block.size - base) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            pool.insert(Block(block.address, begin - block.address, block.prev, block))
        if end < block.address + block.size:
            pool.insert(Block(end, block.address + block.size - end, block, block.next))
        block.address = begin
        block.size = end - begin
        block.mapped = False
        self.reserved_bytes -= block.size
        self._merge_neighbours(block, pool)
        pool.insert_unmapped(block)


def segment_size(size_bytes: int) -> int:
    """Bytes that the allocator asks of the driver to serve a (rounded) request: 2 MiB, 20 MiB or a multiple of 2 MiB.

    Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp, `get_allocation_size`.
    """
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
