"""What one program of a kernel works on: the compile-time half of every launch.

[Note: A tile]
A program holds `rows` blocks. A block of `block` elements is cut into `lanes` runs of `span` elements, so that the
codes which share a byte lie in different lanes, and a lane into groups of `vector` neighbours, which one thread holds.
Element i = lane * span + column * vector + v of every row therefore lives in one tensor of shape (rows, columns), and a
tile is the tuple of these tensors, index lane * vector + v. Packing, unpacking and all butterflies of the rotation but
those between columns are arithmetic between tensors of the tuple: no thread needs another one's registers.
"""

from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache

from thinwire.kernels.schema import LLOYD, STRAND, TRELLIS, Encoding, LloydTable, TrellisTable
from thinwire.wire import PLANES, CastVariant, Format, IntVariant, Kind, LloydVariant

MOST_CODES = 8192  # in a tile; a longer block is read twice, piece by piece
MOST_RAGGED = 128  # columns of a short last block; a longer one too is read piece by piece
LONG_COLUMNS = 512  # of blocks longer than a tile
LONG_WARPS = 16


@dataclass(frozen=True)
class Tile:
    """Format, encoder's choices and shape. Kernels are compiled once for each; see [Note: A tile]."""

    kind: int
    bits: int
    variant: int
    block: int
    lanes: int
    vector: int
    columns: int  # a power of two; covers span / vector
    rows: int
    stochastic: bool = False
    unbiased: bool = False
    words: tuple[bool, ...] = (False,)  # planes whose bytes are read and written `vector` at a time
    whole: bool = False  # True => the columns are exactly those of the span
    grouped: bool = False  # True => floats are read and written `vector` at a time
    even: bool = False  # True => scales are read and written as 16-bit numbers, else as bytes
    loose: bool = False  # True => blocks have any length up to `block`, and elements past it are masked

    @cached_property
    def span(self) -> int:
        """Elements of a lane."""
        return self.block // self.lanes

    @cached_property
    def size(self) -> int:
        """Tensors of a tile."""
        return self.lanes * self.vector

    @cached_property
    def planes(self) -> tuple[int, ...]:
        """Widths of the code planes."""
        return PLANES.get(self.bits, (self.bits,))

    @cached_property
    def banks(self) -> tuple[int, ...]:
        """Bytes that hold the codes of one column and v of all lanes, in each plane."""
        return tuple(width * self.lanes // 8 for width in self.planes)

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        """Bits of a code below those in each plane."""
        return tuple(sum(self.planes[:p]) for p in range(len(self.planes)))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Banks of all planes before each."""
        return tuple(sum(self.banks[:p]) for p in range(len(self.planes)))

    @cached_property
    def count(self) -> int:
        """Words of a tile, of all planes."""
        return self.size if self.bits == 16 or self.trellis else sum(self.banks)

    @cached_property
    def affine(self) -> bool:
        """Whether blocks have a minimum."""
        return self.kind == Kind.BLOCK_INT and self.variant == IntVariant.AFFINE

    @cached_property
    def gaussian(self) -> bool:
        """Whether codes stand for levels of a Gaussian: Lloyd's, and those of trellis codes."""
        return self.kind in (Kind.LLOYD, Kind.TRELLIS)

    @cached_property
    def trellis(self) -> bool:
        """Whether the codes of a strand were chosen together."""
        return self.kind == Kind.TRELLIS

    @cached_property
    def cast(self) -> bool:
        """Whether codes are short floats."""
        return self.kind == Kind.CAST

    @cached_property
    def rotated(self) -> bool:
        """Whether blocks are rotated."""
        return self.gaussian and self.variant == LloydVariant.ROTATED

    @cached_property
    def e4m3(self) -> bool:
        """Which of the 8-bit float formats."""
        return self.cast and self.variant == CastVariant.E4M3

    @cached_property
    def pieces(self) -> bool:
        """Whether a block is longer than a tile."""
        return self.columns * self.vector < self.span

    @cached_property
    def half(self) -> int:
        """The code of zero, or of the smallest positive level."""
        return 1 << self.bits - 1

    @cached_property
    def blank(self) -> int:
        """The code of all elements of a block of zeros: of levels the smallest positive one, of trellis codes 0."""
        return 0 if self.trellis else self.half

    @cached_property
    def zero(self) -> int:
        """What an integer code stands for, less this, is its number."""
        return 0 if self.affine else self.half

    @cached_property
    def grid(self) -> int:
        """Cells per standard deviation of the table."""
        return self._table.grid

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Positive levels of the table."""
        return self._table.levels

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """Edges of a Lloyd table."""
        return LLOYD[self.bits].edges

    @cached_property
    def reach(self) -> int:
        """The largest value of a code, without its sign, in units of its scale."""
        return self.levels[-1] if self.gaussian else self.half

    @cached_property
    def narrow(self) -> bool:
        """Whether sums of a few wires are made of integers: exact_sums.py."""
        return self.bits in (1, 2, 4) and not self.affine and self.vector == 4

    @cached_property
    def rare(self) -> bool:
        """Whether it is summed in the one way that serves all scales: a second, faster one would double what is
        compiled, which trellis codes and a short last block are not worth.
        """
        return self.trellis or (self.loose and self.columns < LONG_COLUMNS)

    @cached_property
    def ragged(self) -> "Tile":
        """The same for a short last block."""
        if self.pieces:
            return self
        columns = _power_of_two(self.block // ragged_lanes(self.kind))
        return self.loosened(columns if self.gaussian else min(columns, MOST_RAGGED))

    def loosened(self, columns: int) -> "Tile":
        """The same for blocks of any length up to `block`: one row, columns of one element, bytes instead of words."""
        lanes = ragged_lanes(self.kind)
        words = (False,) * len(self.words)
        plain = replace(self, words=words, whole=False, grouped=False, even=False)
        return replace(plain, lanes=lanes, vector=1, columns=columns, rows=1, loose=True)

    def __hash__(self) -> int:
        return hash(self._text)

    @property
    def _table(self) -> LloydTable | TrellisTable:
        return TRELLIS[self.bits] if self.trellis else LLOYD[self.bits]

    @cached_property
    def _text(self) -> str:
        """Everything that a kernel sees, derived numbers too: Triton keeps compiled kernels on disk under this."""
        table = self._table if self.gaussian else None
        ragged = None if self.pieces else (self.ragged.lanes, self.ragged.columns)
        return f"Tile{(*astuple(self), self.planes, table, ragged)}"

    def __repr__(self) -> str:  # part of the key under which a compiled kernel is found, at every launch
        return self._text


@lru_cache(maxsize=4096)
def tile(how: Encoding, *, lanes: int, threads: int, words: tuple[bool, ...], grouped: bool, even: bool) -> Tile:
    """The tile of a format, with at least `lanes` lanes, for programs of `threads` threads."""
    format = how.format
    lanes = _lanes(format, lanes)
    span = format.block // lanes
    vector = 1 if format.kind == Kind.TRELLIS else next(v for v in (4, 2, 1) if span % v == 0)
    columns = _power_of_two(span // vector)
    rows = max(1, threads // columns)
    shape = (int(format.kind), format.bits, int(format.variant), format.block, lanes, vector, columns, rows)
    whole = columns * vector == span
    found = Tile(*shape, how.stochastic, how.unbiased, words, whole, grouped, even)
    return found.loosened(LONG_COLUMNS) if lanes * vector * columns > MOST_CODES else found


def ragged_lanes(kind: int) -> int:
    """Lanes of blocks of any length: their codes are a multiple of 8, but those of casts."""
    return 1 if kind == Kind.CAST else 8


def _lanes(format: Format, wanted: int) -> int:
    """`wanted`, or the nearest number that cuts a block into whole groups of neighbours; positions of a strand."""
    if format.kind == Kind.TRELLIS:
        return min(STRAND, format.block)
    lanes = max(1, 8 // min(PLANES.get(format.bits, (8,))))  # codes that share a byte of the narrowest plane
    while lanes < wanted and format.block % (8 * lanes) == 0:
        lanes *= 2
    return lanes


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
