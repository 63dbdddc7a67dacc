"""Sums of sharded gradients, and gathers of sharded weights.

A row is a rank's part of a flat buffer: its shards of some parameters, one after the other, each padded to the same
length on all ranks.

[Note: Differences] Rounding a weight makes the same error at every step, which matters below 8 bits. If every rank
keeps what it gathered last, the owner of a shard sends only the difference. It is small, and what one message loses
becomes part of the next. A gather for the backward pass then sends nothing: all ranks have what the forward pass had.

[Note: Exact weights] Differences in bits (thinwire.exact) lose nothing: the copy equals what plain FSDP2 gathers,
whoever changed the weights and when. So every gather sends what changed, those for the backward pass too. A row
travels in pieces, the parts of some parameters. Each piece takes two messages: the length of its wire, and the wire.
A wire of no bytes means that nothing changed. If a difference would not be shorter, the wire is the numbers themselves,
as its length shows. On a GPU a row is one piece, and the host waits for the lengths.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import exact, feedback
from thinwire.codecs import Codec, Identity
from thinwire.collectives.channel import IssuedCall, bounded, channel_of
from thinwire.collectives.chunks import Flat, LaneSpec, Scratch
from thinwire.collectives.message import Hooks, RowMessage
from thinwire.collectives.pipeline import Operation
from thinwire.collectives.plan import CallPlan
from thinwire.collectives.programs import Workspace
from thinwire.collectives.transport import Stages
from thinwire.integrations import lanes
from thinwire.integrations.choice import Chooser
from thinwire.integrations.choice.options import EXACT, Rules, Weights
from thinwire.integrations.fsdp.torch_internals import ParameterGroup, ShardedParameter, gather_exactly
from thinwire.integrations.models import Names, ParameterSize
from thinwire.integrations.stats import Tally
from thinwire.integrations.sync import BucketPlan, GradientSync
from thinwire.kernels.rows import Bad, Picked
from thinwire.log import announce_once
from thinwire.wire import EXACT_BLOCK

_LENGTH_BYTES = 8
_MANY = 1 << 20  # elements, to compare the bytes of a codec with the numbers themselves
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that are compressed


class Columns:
    """Cuts rows of `width` elements into lanes: columns that share a codec and a feedback.

    The largest lane is the buffer itself, with zeros where small lanes were set aside ([Note: Bridges] in lanes.py).
    """

    def __init__(self, laid: Sequence[lanes.BucketLane], width: int, like: Tensor, message: RowMessage) -> None:
        self.message = message
        self._in_place = laid[0].stretches == ((0, width),)
        copied = laid[int(self._in_place) :]  # a lane in place has all columns
        spans = [[torch.arange(begin, end) for begin, end in lane.stretches] for lane in copied]
        self._index = [torch.cat(span).to(like.device) for span in spans]  # which columns each of the others has
        inside = [index for lane, index in zip(copied, self._index, strict=True) if lane.aside]
        self._bridged = torch.cat(inside) if inside else None
        self._places: dict[int, list[Tensor]] = {}  # by the number of rows, where in a matrix the others' numbers are
        if self._in_place and message.program is not None and lanes.can_pick(laid, like.dtype):
            for n in (1, message.channel.world):
                starts = torch.arange(n, device=like.device)[:, None] * width
                self._places[n] = [(starts + index).view(-1) for index in self._index]

    def __call__(self, space: Workspace, tensors: Sequence[Tensor], step: int, bad: Bad | None = None) -> None:
        """See Program: (output, input), matrices of which small lanes are picked."""
        each = [[rows, *[Picked(rows, index) for index in self._places[rows.shape[0]]]] for rows in tensors]
        self.message.program(space, each[0] + each[1], step, bad)

    def send(
        self, output: Tensor, input: Tensor, step: int, hooks: Hooks | None = None, note: Bad | None = None
    ) -> None:
        """Run the message on matrices; `input` is modified."""
        if self._places and hooks is None:
            self.message.launch(self, (output, input), step, note)
            return
        first = 1 - int(self._in_place)  # the largest lane, if it is copied, without what was set aside
        others = [input.index_select(1, index) for index in self._index[first:]]
        if self._bridged is not None:
            input.index_fill_(1, self._bridged, 0)
        inputs = [input if self._in_place else input.index_select(1, self._index[0]), *others]
        blanks = [output.new_empty((output.shape[0], index.numel())) for index in self._index]
        outputs = [output, *blanks] if self._in_place else blanks
        self.message.run(outputs, inputs, step, hooks, note)
        for part, index in zip(blanks, self._index, strict=True):
            output.index_copy_(1, index, part)


def row_pieces(lane: lanes.BucketLane, held: Sequence[Mapping[str, int]]) -> tuple[feedback.Piece, ...]:
    """The elements of a lane's rows, by parameter and row; what no parameter holds is padding."""
    found = []
    for row, numels in enumerate(held):
        for piece in lane.pieces:
            numel = 0 if piece.name is None else numels[piece.name]
            found.append(feedback.Piece(piece.name and row_name(piece.name, row), numel))
            found.append(feedback.Piece(None, piece.numel - numel))
    return tuple(piece for piece in found if piece.numel)


def row_name(name: str, row: int) -> str:
    """The name of a parameter's part in a rank's row."""
    return f"{name}{feedback.ROW}{row}"


class ShardSync(GradientSync):
    """Sums the gradients of a sharded model over shards (one row per rank), or averages them over replicas.

    FSDP2 does not say when a step begins: one begins when the gradients of a parameter come a second time.
    """

    def __init__(self, chooser: Chooser, *, timed: bool = False) -> None:
        super().__init__(chooser, timed=timed)
        self.step = 0  # steps that have begun
        self._reduced: set[int] | None = None  # parameters whose gradients this step has reduced; None before a step
        self._decided = 0  # the last step that `begin_step` was called for

    def expect(self, given: set[int], *, now: bool = True) -> bool:
        """The gradients of these parameters are reduced `now` or later. Returns whether a step begins with them."""
        before = self.step
        if self._reduced is None or given & self._reduced:
            self._reduced = set()
            self.step += 1
        if now:
            self._reduced |= given
        return self.step > before

    def begin(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Choose codecs and feedback, at the first call of a step."""
        if self._decided != self.step:
            self._decided = self.step
            self.begin_step(group, self.step - 1, device)

    def continue_from(self, step: int) -> None:
        """Continue from a checkpoint."""
        self.step = step
        self._decided = 0
        self._reduced = None

    def scatter(
        self,
        output: Tensor,
        input: Tensor,
        parameters: Sequence[ShardedParameter],
        group: dist.ProcessGroup,
        scale: float,
    ) -> bool:
        """output = scale * the sum of all ranks' rows for this rank; False if torch has to do it."""
        names = tuple(parameter.name for parameter in parameters)
        key = names, input.dtype, input.device, group.group_name, scale
        if key not in self._buckets:
            bounded(self._buckets)[key] = self._new_rows(names, parameters, input, group, scale)
        rows = self._buckets[key]
        if rows.message is None:
            self.tally.sent(rows.plain_bytes)
            return False
        hooks = note = None
        if rows.message.program is not None and not self.chooser.measuring:
            note = self.tally.note("rows", input.device)
        else:
            hooks = self._hooks(rows, input.device, group.size())
        rows.program.send(output.view(1, -1), input.view(group.size(), -1), self._step, hooks, note)
        self.tally.sent(rows.message.sent_bytes, rows.plain_bytes)
        return True

    def _new_rows(
        self, names: Names, parameters: Sequence[ShardedParameter], like: Tensor, group: dist.ProcessGroup, scale: float
    ) -> BucketPlan:
        world = group.size()
        specs = [self._spec(p.name, ParameterSize(p.shape, p.numel, like.dtype), whole=False) for p in parameters]
        found = lanes.lanes_of(names, specs, whole=True)
        width = sum(p.numel for p in parameters)
        plain_bytes = (world - 1) * width * like.itemsize
        if all(is_exact(lane.spec.codec, like.dtype) for lane in found):
            return BucketPlan(found, width, plain_bytes)
        message = RowMessage([lane.spec for lane in found], like, group, scale)
        columns = Columns(found, width, like, message)
        held = [{p.name: p.held_by(row) for p in parameters} for row in range(world)]
        carry = self.memories.carry
        carries = [carry(n.spec.feedback, n.pieces, like.device, row_pieces(n, held)) for n in found]
        return BucketPlan(found, width, plain_bytes, message, carries, columns)


def is_exact(codec: Codec, dtype: torch.dtype) -> bool:
    """Whether a codec saves no bytes on numbers of this dtype."""
    return isinstance(codec, Identity) or codec.wire_bytes(_MANY, dtype) >= _MANY * dtype.itemsize


def announce_plain(what: str) -> None:
    """Log, once, what is sent uncompressed."""
    if dist.get_rank() == 0:
        announce_once(f"compress_fsdp: {what} are not compressed")


class Gatherer:
    """Gathers the weights of one parameter group: rounded, as differences ([Note: Differences]), or exactly."""

    def __init__(self, group: ParameterGroup, codec: Weights, rules: Rules, tally: Tally, *, differences: bool) -> None:
        self._group = group
        self._parameters = group.parameters()
        self.name = self._parameters[0].name  # in checkpoints
        self._numels = [parameter.numel for parameter in self._parameters]
        self._width = sum(self._numels)  # of a row
        self._pieces = [self._width] if group.device.type == "cuda" else _pieces(self._numels)
        self._codec = codec
        self._rules = rules
        self._tally = tally
        self.differences = differences and codec != EXACT  # rounded ones, whose copy a checkpoint holds
        self.copy = feedback.RowCopy()  # all ranks' rows, as gathered last
        self.sent = 0  # gathers of differences; the first was exact
        self._loaded: Tensor | None = None  # this rank's row of a loaded copy; the next gather completes it
        self._columns: dict[object, Columns] = {}

    @functools.cached_property
    def _padding(self) -> Tensor:
        """The indices of this rank's row that belong to no parameter."""
        ends = itertools.accumulate(self._numels)
        spans = [torch.arange(end - p.numel + p.held, end) for end, p in zip(ends, self._parameters, strict=True)]
        return torch.cat(spans).to(self._group.device)

    def gather(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> bool:
        """output = the rows of all ranks, `input` is this rank's; False if torch has to do it."""
        plain_bytes = (group.size() - 1) * input.nbytes
        is_coded = not isinstance(self._codec, Identity)
        if is_coded and input.dtype not in DTYPES:
            announce_plain("weights of fp64, of several dtypes or of integers")
        if not is_coded or input.dtype not in DTYPES or self._width != input.numel() or self._group.is_resharded:
            self._tally.sent(plain_bytes)  # also for "none": bytes are compared between codecs of weights
            return False
        if self._codec == EXACT:
            sent = self._send_exactly(output, input, group)
        elif self.differences:
            sent = self._send_differences(output, input, group)
        else:
            sent = self._send(output, input, group, 0)
        self._tally.sent(plain_bytes if sent is None else sent, plain_bytes)
        return True

    # Each of these returns the bytes that it sent; None: what torch's own gather does.

    def _send_exactly(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> int | None:
        """See [Note: Exact weights]."""
        kept = self.copy.tensor
        if kept is None or group.size() == 1:
            gather_exactly(output, input, group)
            with torch.inference_mode(False):
                self.copy.tensor = output.detach().clone() if group.size() > 1 else None
            return None
        text = f"gather({len(self._pieces)} pieces of {self._width} {EXACT}; {str(input.dtype).removeprefix('torch.')})"
        plan = CallPlan(text, [LaneSpec(self._width, Identity(), Identity())])
        call = channel_of(group, input.device).issue(plan, outputs=[kept], step=self.sent)
        operation = ExactGather(call, input, kept, self._pieces)
        call.channel.submit(operation, call)
        output.copy_(kept)
        self._tally.plain_weights += operation.plain
        self.sent += 1
        return operation.sent_bytes

    def _send_differences(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> int | None:
        if self._loaded is not None:
            with torch.inference_mode(False):
                self.copy.tensor = torch.empty_like(output)
                gather_exactly(self.copy.tensor, self._loaded.to(input), group)
            self._loaded = None
        if self.copy.tensor is None:
            gather_exactly(output, input, group)
            self.copy.begin(output)
            sent = None
        elif self._group.in_backward:
            output.copy_(self.copy.tensor)
            return 0
        else:
            input.sub_(self.copy.tensor.view(group.size(), -1)[group.rank()])
            input.index_fill_(0, self._padding, 0)  # no checkpoint holds the copy's
            sent = self._send(output, input, group, self.sent)
            self.copy.add_to(output)
        self.sent += 1
        return sent

    def state(self) -> dict[str, Tensor]:
        """This rank's shards of the copy by parameter, for a checkpoint."""
        if not self.differences:
            return {}
        row = torch.zeros(self._width) if self._loaded is None else self._loaded.float()
        if self.copy.tensor is not None:
            rank = 0 if self._group.shards is None else self._group.shards.rank()
            row = self.copy.tensor.view(-1, self._width)[rank].float()
        parts = zip(self._parameters, row.split(self._numels), strict=True)
        return {parameter.name: parameter.shard(part) for parameter, part in parts}

    def load(self, saved: Mapping[str, Tensor], sent: int) -> None:
        """Load shards of a copy, which the next gather completes; start without a copy if some are missing."""
        parts = [parameter.part(saved[parameter.name]) for parameter in self._parameters if parameter.name in saved]
        self._loaded = torch.cat(parts) if sent and len(parts) == len(self._parameters) else None
        self.copy.tensor = None
        self.sent = sent

    def _send(self, output: Tensor, input: Tensor, group: dist.ProcessGroup, step: int) -> int:
        key = input.dtype, input.device, group.group_name
        if key not in self._columns:
            assert isinstance(self._codec, Codec)
            codecs = [self._rules.codec_of(p.name, p.shape, input.dtype, self._codec) for p in self._parameters]
            specs = [LaneSpec(p.numel, codec, codec) for p, codec in zip(self._parameters, codecs, strict=True)]
            found = lanes.lanes_of([p.name for p in self._parameters], specs, whole=True)
            message = RowMessage([lane.spec for lane in found], input, group)
            self._columns[key] = Columns(found, self._width, input, message)
        columns = self._columns[key]
        columns.send(output.view(group.size(), -1), input.view(1, -1), step)
        return columns.message.sent_bytes


class ExactGather(Operation):
    """Updates `copy` to the present rows of all ranks: see [Note: Exact weights]. A chunk is a piece."""

    def __init__(self, call: IssuedCall, row: Tensor, copy: Tensor, pieces: Sequence[int]) -> None:
        super().__init__(call, len(pieces), [Flat([copy])], [Flat([row])])
        self._new_P = row.detach().split(pieces)
        self._old_WP = [kept.split(pieces) for kept in copy.view(self._link.world, -1)]
        self.sent_bytes = 0
        self.plain = 0  # pieces that this rank sent as plain numbers

    def chunk(self, index: int, scratch: Scratch) -> Stages:
        """Encode, send and decode a piece."""
        rank, world = self._link.rank, self._link.world
        new = self._new_P[index]
        old_W = [old_P[index] for old_P in self._old_WP]
        own = _difference(new, old_W[rank])
        lengths_W = new.new_full((world, 1), own.numel(), dtype=torch.int64)
        yield self._link.all_gather_rows(lengths_W.view(torch.uint8).unbind(), self._tags[0])
        wires_W = [own.new_empty(length) for length in lengths_W.flatten().tolist()]
        wires_W[rank] = own
        yield self._link.exchange(*self._link.messages_of(wires_W), self._tags[0] + 1)
        self.sent_bytes += (world - 1) * (_LENGTH_BYTES + own.nbytes)
        self.plain += own.nbytes == new.nbytes
        wires_W[rank] = new.view(torch.uint8)
        for wire, old in zip(wires_W, old_W, strict=True):
            if wire.nbytes == old.nbytes:
                old.view(torch.uint8).copy_(wire)
            elif wire.nbytes:
                old.copy_(exact.decode(wire, old))


def _difference(new: Tensor, old: Tensor) -> Tensor:
    """The wire of a piece: empty if nothing changed, the numbers themselves if a difference is not shorter."""
    numbers = new.view(torch.uint8)
    if torch.equal(numbers, old.view(torch.uint8)):
        return numbers[:0]
    wire = exact.encode(new, old)
    return wire if wire.nbytes < new.nbytes else numbers


def _pieces(numels: Sequence[int]) -> list[int]:
    """Sizes of a row's pieces: parameters in order, joined up to EXACT_BLOCK; a shorter rest joins the last piece."""
    found = [0]
    for numel in numels:
        if found[-1] >= EXACT_BLOCK:
            found.append(0)
        found[-1] += numel
    if len(found) > 1 and found[-1] < EXACT_BLOCK:
        found[-2:] = [sum(found[-2:])]
    return found
