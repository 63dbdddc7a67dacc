"""What one program of a kernel works on: the compile-time half of every launch.

[Note: A tile]
A program holds `rows` blocks. A block of `block` elements is cut into `lanes` runs of `span` elements, so that the
codes which share a byte lie in different lanes, and a lane into groups of `vector` neighbors, which one thread holds.
Element i = lane * span + column * vector + v of every row therefore lives in one tensor of shape (rows, columns), and a
tile is the tuple of these tensors, with index lane * vector + v. Packing, unpacking and all butterflies of the rotation
except those between columns are arithmetic between tensors of the tuple: no thread needs another one's registers.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from thinwire.kernels.schema import LLOYD, STRAND, TRELLIS, Encoding, LloydTable
from thinwire.wire import PLANES, CastVariant, Format, IntVariant, Kind, LloydVariant

MOST_CODES = 8192  # in a tile; a longer block is read twice, piece by piece
MOST_RAGGED = 128  # columns of a short last block; a longer one too is read piece by piece
LONG_COLUMNS = 512  # of blocks longer than a tile
LONG_WARPS = 16


@dataclass
class Tile:
    """Format, encoder's choices, shape and task. Kernels are compiled once for each; see [Note: A tile]."""

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
    whole: bool = False  # True => the columns cover the span exactly
    grouped: bool = False  # True => floats are read and written `vector` at a time
    even: bool = False  # True => scales are read and written as 16-bit numbers, else as bytes
    loose: bool = False  # True => blocks have any length up to `block`, and elements past it are masked

    # What a kernel does with its blocks:
    tail: bool = False  # True => the last one may be short
    mode: int = 0  # of feedback: tiles.ALONE and the others there
    world: int = 0  # wires that are added; 0 => any number, in a loop
    calm: bool = False  # True => a usual sum is in the range of the output, as that is a wire, or scales are small
    check: bool = False  # True => headers are checked, and the key is taken from them
    notes: bool = False  # True => a call that meets numbers that are not finite is noted: decode_blocks.Sink

    def __post_init__(self) -> None:
        """Set what follows from the fields."""
        self.span = self.block // self.lanes  # elements of a lane
        self.size = self.lanes * self.vector  # tensors of a tile
        self.planes = PLANES.get(self.bits, (self.bits,))  # widths of the code planes
        self.banks = tuple(width * self.lanes // 8 for width in self.planes)  # bytes of a plane for one column and v
        self.shifts = tuple(sum(self.planes[:p]) for p in range(len(self.planes)))  # bits of a code below each plane's
        self.starts = tuple(sum(self.banks[:p]) for p in range(len(self.planes)))  # banks of all planes before each
        self.affine = self.kind == Kind.BLOCK_INT and self.variant == IntVariant.AFFINE  # blocks have a minimum
        self.trellis = self.kind == Kind.TRELLIS  # the codes of a strand were chosen together
        self.gaussian = self.trellis or self.kind == Kind.LLOYD  # codes stand for levels of a Gaussian
        self.rotated = self.gaussian and self.variant == LloydVariant.ROTATED
        self.cast = self.kind == Kind.CAST  # codes are short floats
        self.e4m3 = self.cast and self.variant == CastVariant.E4M3  # which of the 8-bit formats
        self.count = self.size if self.bits == 16 or self.trellis else sum(self.banks)  # words of a tile, of all planes
        self.pieces = self.columns * self.vector < self.span  # a block is longer than a tile
        self.half = 1 << self.bits - 1  # the code of zero, or of the smallest positive level
        self.blank = 0 if self.trellis else self.half  # the code of all elements of a block of zeros, as levels
        self.zero = 0 if self.affine else self.half  # an integer code less this is its number
        table = TRELLIS[self.bits] if self.trellis else LLOYD[self.bits] if self.gaussian else None
        self.grid = table.grid if table else 0  # cells per standard deviation
        self.levels = table.levels if table else ()  # positive ones
        self.edges = table.edges if isinstance(table, LloydTable) else ()
        self.paired = self.kind == Kind.LLOYD and self.bits != 3  # levels are looked up in registers: sums.py
        # Whether sums use only the way that serves all scales: a second, faster one would double what is compiled,
        # which does not pay for trellis codes and a short last block.
        self.rare = self.trellis or (self.loose and self.columns < LONG_COLUMNS)
        self._seen = tuple(vars(self).values())
        self.each = tuple(range(self.size))  # the numbers of the tensors

    @cached_property
    def ragged(self) -> "Tile":
        """This tile, adapted to a short last block."""
        if self.pieces:
            return self
        columns = power_of_two(self.block // ragged_lanes(self.kind))
        return self.loosened(columns if self.gaussian else min(columns, MOST_RAGGED))

    def loosened(self, columns: int) -> "Tile":
        """This tile for blocks of any length up to `block`: one row, columns of one element, bytes instead of words."""
        lanes = ragged_lanes(self.kind)
        words = (False,) * len(self.words)
        plain = replace(self, words=words, whole=False, grouped=False, even=False)
        return replace(plain, lanes=lanes, vector=1, columns=columns, rows=1, loose=True)

    def __hash__(self) -> int:
        return hash(self._text)

    @cached_property
    def _text(self) -> str:
        """Everything that a kernel sees: Triton keeps compiled kernels on disk under this."""
        ragged = None if self.pieces else (self.ragged.lanes, self.ragged.columns)
        return f"Tile{(*self._seen, ragged)}"

    def __repr__(self) -> str:  # part of the key under which a compiled kernel is found, at every launch
        return self._text


@lru_cache(maxsize=4096)
def tile(how: Encoding, *, lanes: int, threads: int, words: tuple[bool, ...], grouped: bool, even: bool) -> Tile:
    """The tile of a format, with at least `lanes` lanes, for programs of `threads` threads."""
    format = how.format
    lanes = _lanes(format, lanes)
    span = format.block // lanes
    vector = 1 if format.kind == Kind.TRELLIS else next(v for v in (4, 2, 1) if span % v == 0)
    columns = power_of_two(span // vector)
    rows = max(1, threads // columns)
    shape = (int(format.kind), format.bits, int(format.variant), format.block, lanes, vector, columns, rows)
    whole = columns * vector == span
    found = Tile(*shape, how.stochastic, how.unbiased, words, whole, grouped, even)
    return found.loosened(LONG_COLUMNS) if lanes * vector * columns > MOST_CODES else found


def ragged_lanes(kind: int) -> int:
    """Lanes of blocks of any length: they have a multiple of 8 codes, except casts."""
    return 1 if kind == Kind.CAST else 8


def _lanes(format: Format, wanted: int) -> int:
    """`wanted`, or the nearest number that cuts a block into whole groups; for trellis codes, a strand's positions."""
    if format.kind == Kind.TRELLIS:
        return min(STRAND, format.block)
    lanes = max(1, 8 // min(PLANES.get(format.bits, (8,))))  # codes that share a byte of the narrowest plane
    while lanes < wanted and format.block % (8 * lanes) == 0:
        lanes *= 2
    return lanes


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()
