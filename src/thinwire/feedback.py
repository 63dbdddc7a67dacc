"""Error feedback: what a rank remembers of the gradients it sent, by parameter.

Numbers are kept in units of the mean over ranks: the sum over ranks of what they remember is what the mean still owes.
So it may be dealt to another number of ranks (see `deal`) and moved between them.

| kind | travels | remembered per rank | the result |
|---|---|---|---|
| classic | x + W * error | error = what was lost | the mean of what was read |
| ef21 | x - W * sent | sent = the sum of what was read | mean = the sum of all means read so far |

kernels/rows.py says what travels and what is remembered in two phases (see [Note: Feedback] in collectives/chunks.py).
To add a kind: an entry in `KINDS`, its formula in kernels/rows.py, and its launches in kernels/triton.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.errors import CodecError
from thinwire.kernels.rows import Memory

Span = tuple[int, int]  # elements begin <= i < end of a lane
DTYPES = (torch.float32, torch.bfloat16)


class Carry(NamedTuple):
    """The feedback of a lane: what is remembered, and with EF21 the mean too."""

    kept: Tensor  # one number per element, in fp32 or bf16
    mean: Tensor | None = None
    gaps: Sequence[Span] = ()  # elements that belong to none of the lane's parameters: nothing is remembered of them

    def part(self, span: Span, x: Tensor, mean: Span | None) -> Memory:
        """What kernels remember of a span, x being its numbers, and of a span of the mean; gaps are cleared in both."""
        kept = self.kept[span[0] : span[1]]
        for begin, end in self.gaps:
            if begin < span[1] and end > span[0]:
                gap = slice(max(begin, span[0]) - span[0], end - span[0])
                kept[gap].zero_()
                x[gap].zero_()
        return Memory(kept, kept, None if mean is None or self.mean is None else self.mean[mean[0] : mean[1]])


KINDS = ("classic", "ef21")
ROW = "#"  # between the name of a parameter and the number of a row: its part there


class Piece(NamedTuple):
    """Elements of a lane that belong to one parameter; to none where a lane bridges another."""

    name: str | None
    numel: int


def gaps_of(pieces: Sequence[Piece]) -> list[Span]:
    """The parts of a lane that belong to none of its parameters."""
    spans = itertools.pairwise(itertools.accumulate((piece.numel for piece in pieces), initial=0))
    return [span for piece, span in zip(pieces, spans, strict=True) if piece.name is None]


class Ledger:
    """Numbers remembered by parameter, kept in one memory per lane. They move when the lanes change."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in DTYPES:
            raise CodecError(f"residuals are kept as float32 or bfloat16, got {dtype}")
        self.dtype = dtype
        self._held: dict[str, Tensor] = {}  # parts of lanes' memories; what was loaded and is in no lane
        self._lanes: dict[tuple[Piece, ...], tuple[Tensor, dict[str, Tensor]]] = {}  # memory, and its parts by name

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        storages = [held.untyped_storage() for held in self._held.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def lane(self, pieces: Sequence[Piece], device: torch.device) -> Tensor:
        """The memory of a lane; what its parameters remember moves into it."""
        key = tuple(pieces)
        memory, parts = self._lanes.get(key, (None, {}))
        if memory is None or not self._uses(parts, all):
            memory = torch.zeros(sum(piece.numel for piece in key), dtype=self.dtype, device=device)
            split = zip(key, memory.split([piece.numel for piece in key]), strict=True)
            parts = {piece.name: part for piece, part in split if piece.name is not None}
            known = [name for name in parts if name in self._held]
            if known:
                torch._foreach_copy_([parts[n] for n in known], [self._held[n].view_as(parts[n]) for n in known])
            self._held |= parts
            self._lanes[key] = memory, parts
            self._drop_empty()
        return memory

    def _uses(self, parts: Mapping[str, Tensor], how: Callable[[Iterable[bool]], bool]) -> bool:
        """Whether `how` many (any, all) of a lane's parts are where its parameters remember."""
        return how(self._held.get(name) is part for name, part in parts.items())

    def _drop_empty(self) -> None:
        self._lanes = {key: lane for key, lane in self._lanes.items() if self._uses(lane[1], any)}

    def read(self) -> dict[str, Tensor]:
        """What is remembered, flat, by parameter."""
        return {name: held.clone() for name, held in self._held.items()}

    def decay(self, names: Iterable[str], factor: float) -> None:
        """Multiply what these parameters remember by `factor`."""
        if held := [self._held[name] for name in names if name in self._held]:
            torch._foreach_mul_(held, factor)

    def drop(self, names: Iterable[str]) -> None:
        """Forget these."""
        for name in names:
            if name in self._held:
                self._held.pop(name).zero_()
        self._drop_empty()

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Forget everything and remember `values`."""
        self._lanes.clear()
        self._held = {name: value.detach().clone().view(-1) for name, value in values.items()}


class Memories:
    """What feedback remembers, by parameter, and which kind of feedback that comes from."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.residuals = Ledger(dtype)
        self.means = Ledger(torch.float32)
        self.kinds: dict[str, str] = {}

    def load(self, residuals: Mapping[str, Tensor], means: Mapping[str, Tensor], kinds: Mapping[str, str]) -> None:
        """Forget everything and remember these."""
        self.residuals.load(residuals)
        self.means.load(means)
        self.kinds = dict(kinds)

    def carry(
        self, kind: str, pieces: Sequence[Piece], device: torch.device, rows: Sequence[Piece] = ()
    ) -> Carry | None:
        """The feedback of a lane with the memories of its parameters; None where `kind` is "".

        rows: where a lane has a row per rank, the pieces of all rows, named by parameter and row.
        """
        if not kind:
            return None
        names = [piece.name for piece in pieces if piece.name is not None]
        stale = {name for name in names if self.kinds.get(name, kind) != kind}  # another kind remembered something
        self.kinds.update(dict.fromkeys(names, kind))
        self.means.drop(stale)
        self.residuals.drop([p.name for p in rows if p.name and p.name.rpartition(ROW)[0] in stale] if rows else stale)
        residual = self.residuals.lane(rows or pieces, device)
        gaps = gaps_of(rows or pieces)
        if kind == "classic":
            return Carry(residual, None, gaps)
        if self.residuals.dtype != torch.float32:
            raise CodecError(
                "this optimizer needs feedback='ef21', which adds up what was sent, exactly: residual_dtype must be "
                f"float32, got {self.residuals.dtype}; or name another feedback"
            )
        return Carry(residual, self.means.lane(pieces, device), gaps)


class RowFeedback:
    """Error feedback for reduce_scatter_tensor. Make one per flat buffer and pass it at every call.

    All ranks use the same kind. It remembers one number per element of the input, in `dtype`; "ef21" remembers one more
    per element of the output.
    """

    def __init__(self, kind: str = "classic", dtype: torch.dtype = torch.float32) -> None:
        if kind not in KINDS:
            raise CodecError(f"feedback must be one of {', '.join(KINDS)}, got {kind!r}")
        if dtype not in DTYPES or (kind == "ef21" and dtype != torch.float32):
            raise CodecError(f"residuals are kept as float32 or bfloat16, with 'ef21' as float32: got {dtype}")
        self.kind = kind
        self._numel = 0  # of the buffer, once it is known
        self._ledgers = {"residual": Ledger(dtype), "mean": Ledger()}

    def carry(self, numel: int, part: int, device: torch.device) -> Carry:
        """The feedback of one call, whose rows have `numel` elements in all and `part` each."""
        if self._numel not in (0, numel):
            raise CodecError(
                f"this RowFeedback is of a buffer of {self._numel} elements, got one of {numel}: make one per buffer"
            )
        self._numel = numel
        residual = self._ledgers["residual"].lane([Piece("residual", numel)], device)
        mean = self._ledgers["mean"].lane([Piece("mean", part if self.kind == "ef21" else 0)], device)
        return Carry(residual, mean if self.kind == "ef21" else None)

    def state_dict(self) -> dict[str, Tensor]:
        """What is remembered; it differs between ranks."""
        return {name: values for ledger in self._ledgers.values() for name, values in ledger.read().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what this rank saved."""
        self._numel = state["residual"].numel() if state else 0
        for name, ledger in self._ledgers.items():
            ledger.load({name: state[name]} if state else {})


class RowCopy:
    """What all_gather_into_tensor gathered last, so that ranks send only differences. Make one per flat buffer.

    The first call is exact. The copy takes as much memory as the output.
    """

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def begin(self, gathered: Tensor) -> None:
        """Remember what was gathered exactly, with zeros for what is not finite."""
        with torch.inference_mode(False):  # the copy outlives an evaluation in inference mode
            self.tensor = gathered.detach().nan_to_num(0.0, 0.0, 0.0)

    def add_to(self, gathered: Tensor) -> None:
        """gathered += the copy; the copy takes over what is finite: NaN is visible, but not kept."""
        assert self.tensor is not None
        gathered.add_(self.tensor)
        torch.where(gathered.isfinite(), gathered, self.tensor, out=self.tensor)


def deal(parts: Mapping[int, Mapping[str, Tensor]], world: int, rank: int, new_world: int) -> dict[str, Tensor]:
    """What `rank` of `new_world` ranks remembers of what `world` ranks did: rank k's goes to rank k % new_world.

    What several ranks give to one is added, so that the sum over ranks is kept. A rank that gets nothing starts from
    zero.
    """
    dealt: dict[str, Tensor] = {}
    for k in range(rank, world, new_world):
        for name, values in parts[k].items():
            dealt[name] = dealt[name] + values.float() if name in dealt else values
    return dealt
