"""Blocks and pools: the bookkeeping of PyTorch's caching allocator.

A segment is a run of blocks linked by `prev` and `next`; a pool keeps the free ones ordered by (size, address), which
is the order in which "best fit" looks for one.
"""

from bisect import bisect_left, insort

SMALL_BYTES = 1 << 20  # largest request served by the small pool
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
MIN_LARGE_BYTES = 10 << 20  # requests from here on get a segment of their own
ROUND_LARGE_BYTES = 2 << 20

_UNIT_BITS = 9  # sizes and addresses are multiples of 512 bytes
_SIZE_SHIFT = 49 - 2 * _UNIT_BITS  # a size in bytes stands above an address of 48 bits, without its zeros


class Block:
    """A range of device memory: allocated, cached (free and backed by memory) or unmapped (address space only)."""

    __slots__ = ("address", "allocated", "key", "mapped", "next", "prev", "size")

    def __init__(self, address: int, size: int, before: "Block | None" = None, after: "Block | None" = None) -> None:
        """Put between two neighbours of its segment; `key` is its place in its pool's order."""
        self.address = address
        self.size = size
        self.allocated = False
        self.mapped = True
        self.key = 0
        self.prev = before
        self.next = after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


class Pool:
    """The free blocks of one size class.

    One whole number per block, size above address, keeps the order in a plain sorted list: `bisect` on numbers is
    several times faster than on tuples, and a replay lives in this structure.
    """

    __slots__ = ("_blocks", "_keys", "small", "unmapped")

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.unmapped: list[Block] = []  # by address
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def insert(self, block: Block) -> None:
        key = block.key = (block.size << _SIZE_SHIFT) | (block.address >> _UNIT_BITS)
        insort(self._keys, key)
        self._blocks[key] = block

    def remove(self, block: Block) -> None:
        key = block.key
        keys = self._keys
        del keys[bisect_left(keys, key)]
        del self._blocks[key]

    def take_best_fit(self, size: int) -> Block | None:
        """The smallest free block of at least `size` bytes, the lowest address among equals; taken out."""
        keys = self._keys
        index = bisect_left(keys, size << _SIZE_SHIFT)
        if index == len(keys):
            return None
        return self._blocks.pop(keys.pop(index))

    def take_best_fit_expandable(self, size: int) -> Block | None:
        """As `take_best_fit`, but a block in front of unmapped space counts with the size it could grow to.

        So the tail of the growing segment is used last.
        """
        keys = self._keys
        index = bisect_left(keys, size << _SIZE_SHIFT)
        if index == len(keys):
            return None
        block = self._blocks[keys[index]]
        while (growth := _growth(block)) and index + 1 < len(keys):
            following = self._blocks[keys[index + 1]]
            if following.size + _growth(following) >= block.size + growth:
                break
            block = following
            index += 1
        return self._blocks.pop(keys.pop(index))

    def free_blocks(self) -> list[Block]:
        return [self._blocks[key] for key in self._keys]

    def layout(self) -> tuple[object, ...]:
        """Sizes and places of the free blocks and of unmapped space, to be compared."""
        return tuple(self._keys), tuple((block.address, block.size) for block in self.unmapped)

    def insert_unmapped(self, block: Block) -> None:
        """Add a range of address space without memory."""
        self.unmapped.append(block)
        self.unmapped.sort(key=lambda unmapped: unmapped.address)


def _growth(block: Block) -> int:
    following = block.next
    return following.size if following is not None and not following.mapped else 0
