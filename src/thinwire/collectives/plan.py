"""How a call is carried out: decided once for calls of one kind, here, and looked up afterwards.

All ranks decide alike, from what they agreed on: lengths, dtype, codec, algorithm, world and measured times.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

import torch

from thinwire.codecs import Codec, Identity
from thinwire.collectives import chunks, programs
from thinwire.collectives.checks import Reduction, check_algorithm, check_recodes, codec_for
from thinwire.collectives.chunks import Cut, Flat, Span
from thinwire.collectives.hierarchical import Hierarchical, Reducer, flat_reducer
from thinwire.collectives.lane import Lane
from thinwire.collectives.programs import Program, StreamLane
from thinwire.collectives.transport import RowTransport, Transport
from thinwire.errors import CollectiveError

SumAlgorithm = Literal["auto", "two_phase", "one_shot", "hierarchical", "plain"]
VerbAlgorithm = Literal["auto", "compressed", "plain"]
SUM_ALGORITHMS = ("auto", "two_phase", "one_shot", "hierarchical", "plain")
VERB_ALGORITHMS = ("auto", "compressed", "plain")
_UNCUT = Cut(0, 1)
_GLOO_DTYPES = (  # of all its verbs alike
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool),
)
_MESSAGE_BYTES = 1 << 19  # of wire, to one rank; in an exchange ranks know only their own lengths


class PlanKey(NamedTuple):
    """Calls of one kind: what ranks have to agree on. str() is the line of text that they compare."""

    verb: str
    lengths: tuple[int, ...]  # elements of the tensors; () where they may differ between ranks
    dtype: torch.dtype
    codecs: tuple[Codec | str, ...]  # two of a hierarchy; a string that names no codec is kept until all have seen it
    algorithm: str
    reduction: Reduction | None = None
    source: int | None = None  # of a broadcast
    row: tuple[int, ...] | None = None  # the shape of what an exchange does not cut

    def __str__(self) -> str:
        lengths = list(self.lengths) if self.verb == "all_gather" else "+".join(map(str, self.lengths))
        parts = [
            "" if not self.lengths else f"{'lengths' if self.verb == 'all_gather' else 'numel'}={lengths}",
            "" if self.reduction is None else f"op={self.reduction}",
            "" if self.source is None else f"from rank {self.source}",
            "" if self.row is None else f"rows of {self.row}",
            str(self.dtype).removeprefix("torch."),
            f"codec={'/'.join(map(str, self.codecs))}",
            f"algorithm={self.algorithm}",
        ]
        return f"{self.verb}({', '.join(part for part in parts if part)})"


@dataclass(frozen=True)
class CallPlan:
    text: str
    codec: Codec | None = None  # None: torch's own verb
    cut: Cut = _UNCUT
    chunk_bytes: int = 0  # scratch of one chunk
    scratch_bytes: int = 0  # scratch of the operation
    reducer: Reducer | None = None  # of a sum
    across: tuple[Codec, Codec] | None = None  # of a hierarchy: codec and first of the sums of nodes
    program: Program | None = None  # on a stream of a GPU: what runs in place of an operation


Choose = Callable[[tuple[Codec, ...], Sequence[str]], str]  # the fastest of these algorithms with these codecs


def plan_sum(key: PlanKey, flat: Flat, links: tuple[Transport, ...], choose: Choose) -> CallPlan:
    """Decide how an all_reduce runs on a group (one transport) or on a mesh of nodes (two: across, inside)."""
    check_algorithm(key.algorithm, SUM_ALGORITHMS)
    on_mesh = len(links) == 2
    if on_mesh != (key.algorithm == "hierarchical") and not (on_mesh and key.algorithm in ("auto", "plain")):
        raise CollectiveError(
            "algorithm='hierarchical' goes with a DeviceMesh of two dimensions, 'two_phase' and 'one_shot' with a group"
        )
    if len(key.codecs) == 2 and not on_mesh:
        pair = tuple(map(str, key.codecs))
        raise CollectiveError(f"a pair of codecs goes with algorithm='hierarchical', got {pair} for {key.algorithm!r}")
    codecs = _named(key, flat.numel)
    if all(link.world == 1 for link in links):
        return CallPlan(str(key))  # exact, whatever the codec
    if on_mesh or key.algorithm == "two_phase":
        check_recodes(codecs, f"algorithm={'hierarchical' if on_mesh else key.algorithm!r}")
    names = ("plain", "hierarchical") if on_mesh else to_choose_from(codecs)
    algorithm = _algorithm(key, codecs, flat.numel, names, choose)
    if algorithm == "plain":
        _check_torch_takes(key.dtype, links)
        return CallPlan(str(key))
    codec = codecs[0]
    cut = sum_cut(codec, flat.numel, flat.dtype, links, algorithm)
    across = (codecs[-1], codecs[-1]) if on_mesh else None
    reducer: Reducer = Hierarchical(*links) if on_mesh else flat_reducer(links[0], algorithm)
    lane = Lane(flat, cut, codec, codec, across=across)
    assert key.reduction is not None
    scale = key.reduction.scale(math.prod(link.world for link in links))
    streamed = StreamLane(flat.numel, flat.dtype, codec, codec, across=across)
    program = sum_program(links, algorithm, [streamed], [cut], scale)
    return CallPlan(str(key), codec, cut, *lanes_scratch([lane], reducer), reducer, across, program)


def to_choose_from(codecs: Sequence[Codec]) -> Sequence[str]:
    """The algorithms that "auto" knows in a group, which `measure` measures."""
    return ("plain", "one_shot", "two_phase") if all(codec.recodes for codec in codecs) else ("plain", "one_shot")


def sum_cut(codec: Codec, numel: int, dtype: torch.dtype, links: Sequence[Transport], algorithm: str) -> Cut:
    """The chunks of a sum, which fall into shards for the ranks of a group or of a node."""
    wire = codec.wire_bytes(numel, dtype)
    shards = links[-1].world
    if links[0].on_stream:
        return programs.stream_cut(numel, wire, shards, codec.unit, shards if algorithm == "one_shot" else 2)
    return chunks.cut(numel, wire, math.prod(link.world for link in links), shards, codec.unit)


def sum_program(
    links: Sequence[Transport], algorithm: str, lanes: Sequence[StreamLane], cuts: Sequence[Cut], scale: float
) -> programs.Sum | None:
    """The program of a sum on a stream of a GPU; None where operations run it."""
    if not all(isinstance(link, RowTransport) for link in links) or not all(lane.numel for lane in lanes):
        return None
    for lane in lanes:
        codecs = {lane.codec, lane.first, *(lane.across or ())}
        if not all(programs.fits(codec, lane.encoded, lane.feedback) for codec in codecs):
            return None
        if len(links) == 2 and isinstance(lane.codec, Identity) and lane.dtype != torch.float32:
            return None  # sums in fp32 of numbers that travel as they are
    return programs.Sum([cast(RowTransport, link) for link in links], algorithm, lanes, cuts, scale)


def plan_verb(key: PlanKey, verb: str, part: int, numel: int, link: Transport, choose: Choose) -> CallPlan:
    """Decide how a verb moves `numel` elements, of which the largest part of a rank has `part`."""
    world = link.world
    codec = _chosen(key, numel, link, choose)
    if codec is None:
        return CallPlan(str(key))
    if verb == "broadcast":
        check_recodes([codec], verb)
    wire = codec.wire_bytes(part, key.dtype) * max(1, -(-numel // max(part, 1)))
    shards = world - 1 if verb == "broadcast" else 1
    cut = verb_cut(codec, part, wire, link, shards)
    span = Span(0, min(cut.chunk, part))
    if verb == "broadcast":
        chunk_wire = sum(chunks.wire_sizes(codec, chunks.shards(span, world - 1, codec.unit), key.dtype))
    else:
        chunk_wire = world * codec.wire_bytes(span.numel, key.dtype)
    chunk_bytes = 2 * chunk_wire if verb == "reduce_scatter" else chunk_wire
    limit = chunks.scratch_limit(wire, chunk_wire, chunk_bytes, cut.num_chunks)
    program = _verb_program(key, part, link, codec) if cut.num_chunks == 1 else None
    return CallPlan(str(key), codec, cut, chunk_bytes, limit, program=program)


def verb_cut(codec: Codec, part: int, wire: int, link: Transport, shards: int = 1) -> Cut:
    """The chunks of a rank's part, where the parts of all ranks take `wire` bytes."""
    if link.on_stream:
        return programs.stream_cut(part, wire, shards, codec.unit)
    return chunks.cut(part, wire, link.world, shards, codec.unit)


def _verb_program(key: PlanKey, part: int, link: Transport, codec: Codec) -> Program | None:
    """The program of a verb on a stream of a GPU; None where an operation runs it."""
    if not isinstance(link, RowTransport) or not part or not programs.fits(codec, key.dtype):
        return None
    lane = StreamLane(part, key.dtype, codec, codec)
    if key.verb == "reduce_scatter_tensor":
        assert key.reduction is not None
        return programs.ReduceScatter(link, [lane], key.reduction.scale(link.world))
    if key.verb == "all_gather_into_tensor":
        return programs.Gather(link, [lane])
    if key.verb == "broadcast":
        assert key.source is not None
        return programs.Broadcast(link, codec, key.dtype, part, key.source)
    return None


def plan_exchange(key: PlanKey, numel: int, link: Transport, choose: Choose) -> CallPlan:
    """Decide how ranks exchange; what it takes depends on the lengths of a call, which others do not know."""
    codec = _chosen(key, numel, link, choose)
    if codec is None:
        return CallPlan(str(key))
    check_recodes([codec], key.verb)
    if isinstance(link, RowTransport) and programs.fits(codec, key.dtype):
        return CallPlan(str(key), codec, program=programs.UnevenExchange(link, codec))
    per_element = codec.wire_bytes(1 << 16, key.dtype) / (1 << 16)
    chunk = max(1024, int(_MESSAGE_BYTES / per_element) // 1024 * 1024)
    return CallPlan(str(key), codec, Cut(0, chunk))


def sized(plan: CallPlan, lengths: Sequence[int], dtype: torch.dtype) -> CallPlan:
    """The plan of an exchange, with the scratch that messages of these lengths take."""
    assert plan.codec is not None
    chunk = plan.cut.chunk
    wire = sum(plan.codec.wire_bytes(numel, dtype) for numel in lengths)
    chunk_bytes = sum(plan.codec.wire_bytes(min(numel, chunk), dtype) for numel in lengths)
    num_chunks = -(-max(lengths, default=1) // chunk)
    limit = chunks.scratch_limit(wire, chunk_bytes, chunk_bytes, num_chunks)
    return replace(plan, chunk_bytes=chunk_bytes, scratch_bytes=limit)


def lanes_scratch(lanes: Sequence[Lane], reducer: Reducer) -> tuple[int, int]:
    """Scratch of one chunk, and of all, of a sum of these lanes."""
    chunk_bytes = 0
    chunk_wire = 0
    for lane in lanes:
        numel = min(lane.cut.chunk, lane.cut.numel)
        chunk_bytes += reducer.scratch_bytes(lane.codec, numel, lane.dtype, lane.outer[0]) + lane.room_bytes(numel)
        chunk_wire += lane.codec.wire_bytes(numel, lane.dtype)
    wire = sum(lane.codec.wire_bytes(lane.cut.numel, lane.dtype) for lane in lanes)
    most = max(lane.cut.num_chunks for lane in lanes)
    return chunk_bytes, chunks.scratch_limit(wire, chunk_wire, chunk_bytes, most)


def _chosen(key: PlanKey, numel: int, link: Transport, choose: Choose) -> Codec | None:
    """The codec that a verb uses, or None for an exact call."""
    check_algorithm(key.algorithm, VERB_ALGORITHMS)
    codecs = _named(key, numel)
    if link.world == 1:
        return None
    if _algorithm(key, codecs, numel, ("plain", "compressed"), choose) == "plain":
        _check_torch_takes(key.dtype, [link])
        return None
    return codecs[0]


def _check_torch_takes(dtype: torch.dtype, links: Sequence[Transport]) -> None:
    """Raise where torch's own verbs would, in the middle of a call, after which the group is lost."""
    if dtype not in _GLOO_DTYPES and not all(link.on_stream for link in links):
        known = ", ".join(str(known).removeprefix("torch.") for known in _GLOO_DTYPES)
        raise CollectiveError(f"gloo takes {known}, got {dtype}: convert the tensor, or copy its view(torch.uint8)")


def _algorithm(key: PlanKey, codecs: tuple[Codec, ...], numel: int, names: Sequence[str], choose: Choose) -> str:
    """The algorithm of a call; "auto" is the fastest of `names`, or plain where there is nothing to choose."""
    if key.algorithm == "plain":
        return "plain"
    for codec in codecs:
        codec.wire_bytes(numel, key.dtype)  # raises where the codec does not take the dtype
    if key.algorithm != "auto":
        return key.algorithm
    is_exact = numel == 0 or (len(codecs) == 1 and isinstance(codecs[0], Identity))
    return "plain" if is_exact else choose(codecs, names)


def _named(key: PlanKey, numel: int) -> tuple[Codec, ...]:
    """The codecs of a call, those too that it has no use for; raises where a string names none."""
    return tuple(codec_for(codec, (numel,)) for codec in key.codecs)
