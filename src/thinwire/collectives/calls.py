"""What every verb does first: check its arguments, find its channel, agree with the other ranks, count the call."""

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import Codec, Identity, registry
from thinwire.collectives import chunks, cost, handshake, primitives, schedule, steps
from thinwire.collectives.handshake import BrokenError, Handshake
from thinwire.collectives.primitives import Group
from thinwire.collectives.schedule import Channel, Work
from thinwire.errors import CodecError, CollectiveError


class Traffic(NamedTuple):
    """Bytes of wires that this rank handed to the transport and took from it."""

    sent: int
    received: int


def traffic(group: Group = None) -> Traffic:
    """What thinwire's compressed collectives moved in a group so far. Calls served by torch itself are not counted."""
    kept = schedule.transports(primitives.resolve(group))
    return Traffic(sum(t.sent for t in kept), sum(t.received for t in kept))


class Reduction(NamedTuple):
    """A sum times a factor; AVG's factor depends on the world."""

    name: str
    factor: float = 1.0

    def scale(self, world: int) -> float:
        """What the sum is multiplied by."""
        return 1.0 / world if self.name == "avg" else self.factor

    @property
    def torch_op(self) -> Any:
        """torch's own op."""
        if self.name == "premul_sum":
            return dist._make_nccl_premul_sum(self.factor)  # type: ignore[attr-defined]
        return dist.ReduceOp.AVG if self.name == "avg" else dist.ReduceOp.SUM


_SUM, _AVG = Reduction("sum"), Reduction("avg")


def reduction(op: Any) -> Reduction:
    """The reduction that torch's `op` names."""
    if op == dist.ReduceOp.SUM:
        return _SUM
    if op == dist.ReduceOp.AVG:
        return _AVG
    if op == dist.ReduceOp.PREMUL_SUM:
        return _premul(op)
    raise CollectiveError(f"op must be ReduceOp.SUM, AVG or PREMUL_SUM, got {op!r}: use torch.distributed for others")


def _premul(op: Any) -> Reduction:
    factor = op.__getstate__()[1] if hasattr(op, "__getstate__") else None
    if isinstance(factor, Tensor) and factor.numel() == 1:
        factor = factor.item()
    if not isinstance(factor, float | int) or not math.isfinite(factor):
        raise CollectiveError(f"PREMUL_SUM needs a finite factor, got {factor!r}")
    return Reduction("premul_sum", float(factor))


@functools.lru_cache(maxsize=1024)
def codec_named(spec: str) -> Codec:
    """The codec a string names, parsed once."""
    return registry.codec(spec)


def check_codec(*specs: object) -> None:
    """Raise unless each is a codec or a string."""
    for spec in specs:
        if not isinstance(spec, str | Codec):
            raise CodecError(f"expected a codec or a string such as 'int4:block=128', got {spec!r}")


def codec_for(spec: str | Codec, shape: Sequence[int]) -> Codec:
    """The codec that serves a tensor of `shape`."""
    codec = codec_named(spec) if isinstance(spec, str) else registry.codec(spec)
    return codec.pick(shape=shape)


def check_tensors(tensors: Sequence[Any], what: str) -> list[Tensor]:
    """`tensors` as a list of dense tensors of one dtype and device; complex ones as pairs of reals."""
    listed = list(tensors)
    if not listed:
        raise CollectiveError(f"{what}: expected at least one tensor, got none")
    for tensor in listed:
        if not isinstance(tensor, Tensor):
            raise CollectiveError(f"{what}: expected tensors, got {type(tensor).__name__}")
        if hasattr(tensor, "__tensor_flatten__"):
            raise CollectiveError(
                f"{what}: expected plain tensors, got {type(tensor).__name__}: use its local tensor, e.g. to_local()"
            )
        if tensor.layout != torch.strided:
            raise CollectiveError(f"{what}: expected dense tensors, got {tensor.layout}: convert with to_dense()")
    first = listed[0]
    for tensor in listed[1:]:
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise CollectiveError(
                f"{what}: expected one dtype and device, got {first.dtype} on {first.device} "
                f"and {tensor.dtype} on {tensor.device}"
            )
    if first.is_complex():
        if any(tensor.is_conj() for tensor in listed):
            raise CollectiveError(f"{what}: a conjugated view shares its memory: call resolve_conj() on it first")
        return [torch.view_as_real(tensor) for tensor in listed]
    return listed


def check_gradient(grad: Tensor) -> None:
    """Raise unless DDP's gradients are dense."""
    if grad.layout != torch.strided:
        raise CollectiveError(
            f"thinwire's hooks take dense gradients, got {grad.layout}: "
            "make the layer's gradients dense (Embedding(sparse=False)), or leave this model without a hook"
        )


def check_outputs(tensors: Sequence[Tensor], what: str) -> None:
    """Raise if an output cannot be written element by element."""
    for tensor in tensors:
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise CollectiveError(f"{what}: elements of an expanded tensor share memory: call contiguous() on it first")


def check_step(step: int) -> int:
    """`step` as an int that codecs take."""
    if not 0 <= (number := operator.index(step)) < 1 << 64:
        raise CollectiveError(f"step must be 0 .. 2**64 - 1, got {step}")
    return number


def check_algorithm(algorithm: str, known: Sequence[str]) -> None:
    """Raise unless `algorithm` is one of `known`."""
    if algorithm not in known:
        raise CollectiveError(f"algorithm must be one of {', '.join(known)}, got {algorithm!r}")


def channel_of(group: Group, device: torch.device) -> Channel:
    """The channel of a group for tensors on `device`."""
    return schedule.channel(primitives.resolve(group), device)


class Call:
    """One call of a verb on a channel: numbered, compared with the other ranks' if it is the first of its kind."""

    def __init__(self, channel: Channel, text: str, *, known: bool, details: str = "") -> None:
        self.channel, self.text = channel, text
        with channel.lock:
            channel.check_usable()
            channel.calls += 1
            self.number = channel.calls
        self.answers: list[str] = []  # the ranks' details, where they were compared
        shakes = handshakes(channel)
        self.free_next_time = not shakes[0].every_call
        if not known or not self.free_next_time:
            with _noting_failure(channel):
                self.answers = handshake.check(shakes, self.number, text, details=details)

    def run(self, operation: schedule.Operation) -> Work:
        """Enter the operation into the channel's line; a caller that waits long looks for disagreement."""
        work = self.channel.run(operation)
        work.look = self.look
        return work

    def look(self) -> None:
        """Raise if another rank is held up in a different call."""
        look(self.channel, self.number, self.text)


def look(channel: Channel, number: int, text: str) -> None:
    """Say where this rank waits, and raise if another is held up in a different call."""
    with _noting_failure(channel):
        for shake in handshakes(channel):
            shake.look(number, text)


@contextlib.contextmanager
def _noting_failure(channel: Channel) -> Iterator[None]:
    try:
        yield
    except BrokenError as error:
        channel.disagreed = str(error)
        raise


def world_of(channel: Channel) -> int:
    """Ranks in all, of a group or a mesh."""
    return math.prod(transport.world for transport in channel.transports)


def handshakes(channel: Channel) -> list[Handshake]:
    """One a group of the channel."""
    found = channel.settled.get(Handshake)
    if found is None:
        name = f"{channel.device.type}{len(channel.transports)}"
        found = channel.settled[Handshake] = [Handshake(transport.group, name) for transport in channel.transports]
    return cast(list[Handshake], found)


class Plan(NamedTuple):
    """What was decided for calls of one kind; codec None is torch's own verb."""

    codec: Codec | None
    cut: chunks.Cut = chunks.Cut(0, 1)
    chunk_bytes: int = 0
    scratch_bytes: int = 0

    def setting(self, channel: Channel, step: int) -> steps.Setting:
        """What an operation on `channel` needs to know."""
        assert self.codec is not None
        tags = tuple(transport.draw_tags(steps.TAGS) for transport in channel.transports)
        return steps.Setting(
            channel.transport, self.codec, check_step(step), tags, self.chunk_bytes, self.scratch_bytes
        )


VERB_ALGORITHMS = ("auto", "compressed", "plain")
Trial = Callable[[Codec, str, int], Callable[[], object]]


def named(tensor: Tensor, codec: object, algorithm: str) -> str:
    """The part of a call's text that all verbs have."""
    return f"{str(tensor.dtype).removeprefix('torch.')}, codec={codec}, algorithm={algorithm}"


def plan(
    channel: Channel,
    verb: str,
    whole: Tensor,
    part: int,
    codec: str | Codec,
    algorithm: str,
    trial: Trial,
) -> Plan:
    """Decide how a verb moves `whole`, of which the largest part of a rank has `part` elements.

    `trial(codec, algorithm, numel)` is a call on a message of `numel` elements, for `auto` to time.
    """
    chosen = choose(channel, verb, whole, codec, algorithm, trial)
    if chosen is None:
        return Plan(None)
    dtype, world = whole.dtype, channel.transport.world
    wire = chosen.wire_bytes(part, dtype) * max(1, -(-whole.numel() // max(part, 1)))
    cut = chunks.cut(part, wire, world, world - 1 if verb == "broadcast" else 1)
    span = chunks.Span(0, min(cut.chunk, part))
    if verb == "broadcast":
        chunk_wire = chunk_bytes = chunks.wires_bytes(chosen, chunks.shards(span, world - 1), dtype)
    else:
        chunk_wire = world * chosen.wire_bytes(span.numel, dtype)
        chunk_bytes = 2 * chunk_wire if verb == "reduce_scatter" else chunk_wire
    return Plan(chosen, cut, chunk_bytes, chunks.scratch_limit(wire, chunk_wire, chunk_bytes, cut.num_chunks))


def agree(
    channel: Channel, verb: str, text: str, whole: Tensor, part: int, codec: str | Codec, algorithm: str, trial: Trial
) -> tuple[Call, Plan]:
    """A call and its plan: compared and decided the first time, looked up afterwards."""
    found: Plan | None = channel.settled.get(text)
    call = Call(channel, text, known=found is not None)
    if found is None:
        found = channel.settled[text] = plan(channel, verb, whole, part, codec, algorithm, trial)
    return call, found


def choose(
    channel: Channel, verb: str, whole: Tensor, codec: str | Codec, algorithm: str, trial: Trial
) -> Codec | None:
    """The codec a verb uses, or None for an exact call."""
    check_algorithm(algorithm, VERB_ALGORITHMS)
    if algorithm == "plain":
        return None
    chosen = codec_for(codec, whole.shape)
    chosen.wire_bytes(whole.numel(), whole.dtype)  # says what is wrong with the dtype
    if algorithm == "compressed":
        return chosen
    if isinstance(chosen, Identity) or whole.numel() == 0:
        return None
    prepared = {name: functools.partial(trial, chosen, name) for name in ("plain", "compressed")}
    choice = cost.choose(channel, verb, whole.numel(), whole.dtype, chosen, prepared)
    return None if choice.algorithm == "plain" else chosen
