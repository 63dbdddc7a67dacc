"""How a call is carried out: decided once for calls of one kind, here, and looked up afterwards.

All ranks decide alike, from what they agreed on: lengths, dtype, codec, algorithm, world and measured times.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh

from thinwire.codecs import Codec, Identity
from thinwire.collectives import chunks, programs
from thinwire.collectives.checks import Reduction, check_algorithm, check_recodes, codec_for
from thinwire.collectives.chunks import NOTE_BYTES, Chunking, LaneSpec, Span, aligned
from thinwire.collectives.cost import Choose
from thinwire.collectives.programs import Program
from thinwire.collectives.sums import SumProgram, check_order
from thinwire.collectives.transport import Transport
from thinwire.errors import CollectiveError

SumAlgorithm = Literal["auto", "two_phase", "one_shot", "hierarchical", "plain"]
VerbAlgorithm = Literal["auto", "compressed", "plain"]
_GLOO_DTYPES = (  # that all of its verbs take
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool),
)
_MESSAGE_BYTES = 1 << 19  # of wire, to one rank; in an exchange ranks know only their own lengths
_SUM = Reduction("sum")
_KINDS = {
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class PlanKey(NamedTuple):
    """Calls of one kind: what ranks have to agree on. str() is the description that they compare."""

    verb: str
    lengths: tuple[int, ...]  # elements of the tensors; () where they may differ between ranks
    dtype: torch.dtype
    codecs: tuple[Codec | str, ...]  # two for a hierarchy; a string that names no codec is kept until ranks compared it
    algorithm: str
    reduction: Reduction | None = None
    source: int | None = None  # of a broadcast
    row: tuple[int, ...] | None = None  # the shape of what an exchange does not cut

    def __str__(self) -> str:
        numel = "+".join(map(str, self.lengths))
        parts = [
            f"lengths={list(self.lengths)}" if self.verb == "all_gather" else numel and f"numel={numel}",
            "" if self.reduction is None else f"op={self.reduction}",
            "" if self.source is None else f"from rank {self.source}",
            "" if self.row is None else f"rows of {self.row}",
            str(self.dtype).removeprefix("torch."),
            f"codec={'/'.join(map(str, self.codecs))}",
            f"algorithm={self.algorithm}",
        ]
        return f"{self.verb}({', '.join(part for part in parts if part)})"

    @property
    def kind(self) -> str:
        """The verb by which times are measured: variants of it take as long."""
        return _KINDS.get(self.verb, self.verb)

    def numel(self, world: int) -> int:
        """Elements of the message of all ranks; 0 where a rank knows only its own."""
        return sum(self.lengths) * (world if self.verb == "all_gather_into_tensor" else 1)


@dataclass(frozen=True)
class CallPlan:
    """What is the same at every call of a kind. Without lanes torch's own verb runs."""

    text: str
    lanes: Sequence[LaneSpec] = ()
    chunk_bytes: int = 0  # scratch of one chunk
    scratch_bytes: int = 0  # scratch of the operation
    sum: SumProgram | None = None  # of a sum: its chunks, row by row
    program: Program | None = None  # on a stream of a GPU: what runs in place of an operation
    reduction: Reduction = _SUM
    scale: float | None = None  # of rows that are summed
    source: int | None = None  # of a broadcast
    even: Callable[[int], Program] | None = None  # of an exchange: the program for parts of so many elements each

    def sent_bytes(self, world: int) -> int:
        """Bytes of wires that this rank hands to the transport; of a gather or scatter a row to every other rank."""
        if self.sum is not None:
            return self.sum.sent_bytes
        spans = [(lane, lane.chunking.span(i).numel) for lane in self.lanes for i in range(lane.chunking.num_chunks)]
        return (world - 1) * sum(lane.codec.wire_bytes(numel, lane.encoded) for lane, numel in spans)


def sum_plan(
    text: str, lanes: Sequence[LaneSpec], links: Sequence[Transport], algorithm: str, scale: float
) -> CallPlan:
    """The plan of a sum of lanes on a group, or on a mesh of nodes (two links: across, inside)."""
    shards = links[-1].world  # for the ranks of a group or of a node
    held = shards if algorithm == "one_shot" else 2
    wires = [lane.codec.wire_bytes(lane.numel, lane.encoded) for lane in lanes]
    lanes = [_chunked(lane, wire, links, shards, held) for lane, wire in zip(lanes, wires, strict=True)]
    program = None
    if all(link.on_stream for link in links) and all(_is_fused(lane, len(links) == 2) for lane in lanes):
        program = SumProgram(links, algorithm, lanes, scale, fused=True)
    by_rows = SumProgram(links, algorithm, lanes, scale, fused=False)
    chunk_bytes = by_rows.scratch_bytes
    chunk_wire = 0
    for lane in lanes:
        numel = min(lane.chunking.chunk, lane.numel)
        chunk_bytes += aligned(numel * lane.dtype.itemsize) if lane.scattered else 0
        chunk_bytes += 0 if lane.feedback else lane.copy_bytes(numel)  # kernels convert what has feedback
        chunk_wire += lane.codec.wire_bytes(numel, lane.encoded)
    limit = chunks.scratch_limit(sum(wires), chunk_wire, chunk_bytes, by_rows.count)
    return CallPlan(text, lanes, chunk_bytes, limit, by_rows, program)


def flat_lane(spec: LaneSpec, dtype: torch.dtype) -> LaneSpec:
    """A lane of numbers of `dtype`, summed on one group: a rank adds its own numbers without rounding them."""
    return spec._replace(dtype=dtype, exact_local=not isinstance(spec.codec, Identity))


def _chunked(lane: LaneSpec, wire: int, links: Sequence[Transport], shards: int = 1, held: int = 2) -> LaneSpec:
    """A lane that takes `wire` bytes in all, with its chunks, each of which falls into `shards` shards.

    `held`: the wires that the scratch of a chunk holds on a stream.
    """
    if links[0].on_stream:
        found = programs.stream_chunking(lane.numel, wire, shards, lane.codec.unit, held)
    else:
        world = math.prod(link.world for link in links)
        found = chunks.choose_chunking(lane.numel, wire, world, shards, lane.codec.unit)
    return lane._replace(chunking=found)


def _is_fused(lane: LaneSpec, on_nodes: bool) -> bool:
    """Whether a sum of the lane can be a few launches on a stream of a GPU."""
    if on_nodes and isinstance(lane.codec, Identity) and lane.dtype != torch.float32:
        return False  # sums in fp32 of numbers that travel as they are
    dtype = torch.float32 if lane.feedback else lane.dtype
    codecs = {lane.codec, lane.first_phase, *(lane.across or ())}
    return lane.numel > 0 and all(programs.fits(codec, dtype, lane.feedback) for codec in codecs)


def rows_plan(
    text: str, lanes: Sequence[LaneSpec], link: Transport, *, total: int = 0, scale: float | None = None
) -> CallPlan:
    """The plan of a gather or, with a `scale`, a scatter of lanes, whose `numel` is that of a rank's longest row.

    `total`: the elements of all rows, where they are not all as long.
    """
    held = 1 if scale is None else 2  # matrices of wires in a chunk's scratch
    chunked = []
    wire = 0
    chunk_wire = 0
    copies = 0
    for lane in lanes:
        rows = max(1, -(-(total or link.world * lane.numel) // max(lane.numel, 1)))
        whole = rows * lane.codec.wire_bytes(lane.numel, lane.encoded)
        chunked.append(_chunked(lane, whole, [link]))
        numel = min(chunked[-1].chunking.chunk, lane.numel)
        wire += whole
        chunk_wire += link.world * lane.codec.wire_bytes(numel, lane.encoded)
        copies += (link.world + 1) * lane.copy_bytes(numel)
    chunk_bytes = held * (chunk_wire + link.world * NOTE_BYTES) + copies
    limit = chunks.scratch_limit(wire, chunk_wire, chunk_bytes, max(lane.chunking.num_chunks for lane in chunked))
    is_fused = link.on_stream and not total and all(map(_has_rows, chunked))
    program = programs.row_program(link, lanes, scale) if is_fused else None
    return CallPlan(text, chunked, chunk_bytes, limit, program=program, scale=scale)


def _has_rows(lane: LaneSpec) -> bool:
    """Whether one launch encodes a lane's rows."""
    fits = programs.fits(lane.codec, lane.dtype)
    return lane.chunking.num_chunks == 1 and lane.numel > 0 and not lane.feedback and fits


def _broadcast_plan(text: str, lane: LaneSpec, link: Transport, source: int) -> CallPlan:
    count = link.world - 1
    wire = lane.codec.wire_bytes(lane.numel, lane.dtype)
    lane = _chunked(lane, wire, [link], count)
    parts = chunks.shards(Span(0, min(lane.chunking.chunk, lane.numel)), count, lane.codec.unit)
    chunk_bytes = sum(chunks.wire_sizes(lane.codec, parts, lane.dtype))
    limit = chunks.scratch_limit(wire, chunk_bytes, chunk_bytes, lane.chunking.num_chunks)
    program = programs.broadcast_program(link, lane, source) if link.on_stream and _has_rows(lane) else None
    return CallPlan(text, [lane], chunk_bytes, limit, program=program)


def plan_call(
    key: PlanKey, links: tuple[Transport, ...], mesh: DeviceMesh | None, most: int, choose: Choose
) -> CallPlan:
    """Decide how a verb runs on a group (one transport) or on a mesh of nodes (two: across, inside).

    `most`: the elements of the message where a rank knows only its own.
    """
    is_sum = key.kind == "all_reduce"
    check_algorithm(key.algorithm, get_args(SumAlgorithm if is_sum else VerbAlgorithm))
    if is_sum:
        _check_mesh(key, mesh)
    world = math.prod(link.world for link in links)
    numel = key.numel(world) or most
    codecs = tuple(codec_for(codec, (numel,)) for codec in key.codecs)  # used or not; raises if a string names none
    plain = CallPlan(str(key), reduction=key.reduction or _SUM, source=key.source)
    if world == 1:
        return plain  # exact, whatever the codec
    if mesh is not None or key.algorithm == "two_phase":
        check_recodes(codecs, f"algorithm={'hierarchical' if mesh is not None else key.algorithm!r}")
    algorithm = key.algorithm
    if algorithm != "plain":
        for codec in codecs:
            codec.wire_bytes(numel, key.dtype)  # raises where the codec does not take the dtype
    if algorithm == "auto":
        names = to_choose_from(codecs) if is_sum else ("plain", "compressed")
        is_exact = numel == 0 or (len(codecs) == 1 and isinstance(codecs[0], Identity))
        algorithm = "plain" if is_exact else choose(codecs, names if mesh is None else ("plain", "hierarchical"))
    if algorithm == "plain":
        if key.dtype not in _GLOO_DTYPES and not all(n.on_stream for n in links):  # torch would fail halfway
            known = ", ".join(str(known).removeprefix("torch.") for known in _GLOO_DTYPES)
            raise CollectiveError(f"gloo takes {known}, got {key.dtype}: convert it, or copy its view(torch.uint8)")
        return plain
    across = None if mesh is None else (codecs[-1], codecs[-1])
    lane = LaneSpec(numel, codecs[0], codecs[0], dtype=key.dtype, across=across)
    scale = None if key.reduction is None else key.reduction.scale(world)
    if is_sum and scale is not None:
        several = len(key.lengths) > 1
        plan = sum_plan(plain.text, [lane._replace(scattered=several)], links, algorithm, scale)
        if several and plan.program is not None:
            plan = replace(plan, program=functools.partial(programs.coalesced, plan.program))
        return replace(plan, reduction=plain.reduction)
    if key.kind in ("broadcast", "all_to_all"):
        check_recodes(codecs, key.verb)
    longest = max(key.lengths, default=0) // (world if key.kind == "reduce_scatter" else 1)
    lane = lane._replace(numel=longest)
    if key.source is not None:
        plan = _broadcast_plan(plain.text, lane, links[0], key.source)
    elif key.kind == "all_to_all":
        plan = _exchange_plan(plain.text, lane, links[0])
    else:
        total = numel if key.verb == "all_gather" else 0
        plan = rows_plan(plain.text, [lane], links[0], total=total, scale=scale)
    return replace(plan, reduction=plain.reduction, source=key.source)


def _check_mesh(key: PlanKey, mesh: DeviceMesh | None) -> None:
    """Raise unless the algorithm and codecs of a sum fit its mesh or group."""
    if mesh is not None and key.algorithm != "plain":
        check_order(mesh)
    if key.algorithm in (("hierarchical",) if mesh is None else ("one_shot", "two_phase")):
        raise CollectiveError("'hierarchical' needs a DeviceMesh of two dimensions, 'two_phase' and 'one_shot' a group")
    if len(key.codecs) == 2 and mesh is None:
        pair = tuple(map(str, key.codecs))
        raise CollectiveError(f"a pair of codecs requires algorithm='hierarchical', got {pair} for {key.algorithm!r}")


def to_choose_from(codecs: Sequence[Codec]) -> Sequence[str]:
    """The algorithms that "auto" knows in a group, which `measure` measures."""
    return ("plain", "one_shot", "two_phase") if all(codec.recodes for codec in codecs) else ("plain", "one_shot")


def _exchange_plan(text: str, lane: LaneSpec, link: Transport) -> CallPlan:
    """The scratch of an exchange depends on the lengths of a call, which other ranks do not know."""
    per_element = lane.codec.wire_bytes(1 << 16, lane.dtype) / (1 << 16)
    chunking = Chunking(0, max(1024, int(_MESSAGE_BYTES / per_element) // 1024 * 1024))
    plan = CallPlan(text, [lane._replace(chunking=chunking)])
    if not link.on_stream or not programs.fits(lane.codec, lane.dtype):
        return plan
    even = functools.lru_cache(maxsize=1024)(functools.partial(programs.exchange_program, link, lane))
    return replace(plan, program=functools.partial(programs.exchange_uneven, link, lane.codec), even=even)
