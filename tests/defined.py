"""The verbs in one process: what every rank must hold to the bit, from the inputs of all ranks.

It knows how messages are cut and how steps become keys, as the verbs do; nothing here sends anything. Within
use_backend("reference") the numbers are those of the definition.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cases import recoded, wire_of, wires_of
from thinwire import Codec
from thinwire.collectives import plan
from thinwire.collectives.chunks import Chunking, Key, Span, choose_chunking, shards

Parts = Sequence[Tensor]  # one per rank


def all_reduce(codec: Codec, inputs: Parts, algorithm: str, scale: float, step: int) -> Tensor:
    """scale * sum of the inputs, by "two_phase" or "one_shot", on every rank."""
    world = len(inputs)
    numel = inputs[0].numel()
    dtype = inputs[0].dtype
    out = torch.full((numel,), math.nan, dtype=dtype)
    whole = choose_chunking(numel, codec.wire_bytes(numel, dtype), world, world, codec.unit)
    for index, span in spans(whole):
        parts = [span] if algorithm == "one_shot" else shards(span, world, codec.unit)
        for shard, part in enumerate(parts):
            if not part.numel:
                continue
            key = Key(step, index).of(shard)
            wires_WN = wires_of(codec, [taken(x, part) for x in inputs], step=key)
            if algorithm == "one_shot":
                codec.decode_sum(wires_WN, taken(out, part), scale=scale)
            else:
                wire = recoded(codec, wires_WN, part.numel, abs(scale), key, dtype)
                codec.decode(wire, taken(out, part), scale=math.copysign(1.0, scale))
    return out


def reduce_scatter(codec: Codec, inputs: Parts, rank: int, scale: float, step: int) -> Tensor:
    """This rank's part of scale * sum of the inputs."""
    rows = [x.view(len(inputs), -1)[rank] for x in inputs]
    numel = rows[0].numel()
    out = torch.full((numel,), math.nan, dtype=rows[0].dtype)
    wire = codec.wire_bytes(numel, out.dtype) * (len(inputs) if numel else 1)
    for index, span in spans(choose_chunking(numel, wire, len(inputs), unit=codec.unit)):
        if span.numel:
            wires_WN = wires_of(codec, [taken(row, span) for row in rows], step=Key(step, index).of(rank))
            codec.decode_sum(wires_WN, taken(out, span), scale=scale)
    return out


def all_gather(codec: Codec, inputs: Parts, step: int) -> list[Tensor]:
    """What every rank holds of the inputs, which may differ in length."""
    longest = max(x.numel() for x in inputs)
    total = sum(x.numel() for x in inputs)
    wire = codec.wire_bytes(longest, inputs[0].dtype) * max(1, -(-total // max(longest, 1)))
    most = choose_chunking(longest, wire, len(inputs), unit=codec.unit)
    chunkings = [Chunking(x.numel(), most.chunk, most.edge, most.unit) for x in inputs]
    return [sent(codec, x, chunkings[rank], rank, step) for rank, x in enumerate(inputs)]


def all_to_all(codec: Codec, inputs: Parts, rank: int, step: int) -> list[Tensor]:
    """What this rank holds: inputs[r] is what rank r sends it. What it keeps is exact."""
    dtype = inputs[0].dtype
    chunk = max(1024, int(plan._MESSAGE_BYTES / (codec.wire_bytes(1 << 16, dtype) / (1 << 16))) // 1024 * 1024)
    return [
        x if source == rank else sent(codec, x, Chunking(x.numel(), chunk), source, step)
        for source, x in enumerate(inputs)
    ]


def broadcast(codec: Codec, x: Tensor, world: int, step: int) -> Tensor:
    """What every rank holds of the source's x."""
    out = torch.full_like(x, math.nan)
    wire = codec.wire_bytes(x.numel(), x.dtype)
    for index, span in spans(choose_chunking(x.numel(), wire, world, world - 1, codec.unit)):
        for shard, part in enumerate(shards(span, world - 1, codec.unit)):
            passed(codec, taken(x, part), taken(out, part), Key(step, index).of(shard))
    return out


def spans(whole: Chunking) -> list[tuple[int, Span]]:
    """Chunks with their numbers."""
    return [(index, whole.span(index)) for index in range(whole.num_chunks)]


def taken(x: Tensor, span: Span) -> Tensor:
    return x[span.begin : span.end]


def sent(codec: Codec, x: Tensor, whole: Chunking, shard: int, step: int) -> Tensor:
    """x through encode and decode, chunk by chunk."""
    out = torch.full_like(x, math.nan)
    for index, span in spans(whole):
        passed(codec, taken(x, span), taken(out, span), Key(step, index).of(shard))
    return out


def passed(codec: Codec, x: Tensor, out: Tensor, key: int) -> None:
    if x.numel():
        codec.decode(wire_of(codec, x, step=key), out)
