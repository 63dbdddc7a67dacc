"""Messages between two ranks: send, recv, isend, irecv, batch_isend_irecv.

[Note: Between two] No third rank knows of such a message. So nothing is compared before it, and it stays out of the
group's pipeline, where it could hold up a sum that its sender waits for. Both ends compute the wire's length from the
tensor's length and dtype and the codec. On gloo these, the step and the caller's own tag make the message's tag: ends
that disagree never read each other's bytes, and the one that receives raises at the group's timeout. NCCL has no tags:
there both ends have to call alike, as with torch's own verbs.
"""

import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives import checks, groups
from thinwire.collectives.channel import Channel, channel_of
from thinwire.collectives.chunks import Key
from thinwire.collectives.peers import CallSite
from thinwire.collectives.pipeline import broken
from thinwire.collectives.transport import PAIR_TAGS, LostRankError, Messages, Moving
from thinwire.collectives.work import MessageWork, Work
from thinwire.errors import CollectiveError


class P2PRequest(NamedTuple):
    """One message as its caller describes it. Without a codec the numbers travel as they are, under that tag."""

    sent: bool  # else received
    tensor: Tensor
    peer: int | None  # in the group; None: any source
    tag: int = 0
    codec: str | Codec | None = "int8"
    step: int | None = None


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: groups.Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    codec: str | Codec = "int8",
    step: int | None = None,
) -> Work:
    """Start sending `tensor` in `codec` to a rank that calls thinwire.irecv or recv with the same codec, tag and step.

    `dst` is the receiver's rank in the world, `group_dst` its rank in the group. `tensor` may be changed at once. Keep
    the work until it was waited for. `step` varies rotation and stochastic rounding; None is 0.
    Example: thinwire.isend(activations, dst=1).wait()
    """
    members = groups.resolve(group)
    peer = groups.rank_in(members, "isend", dst, group_dst)
    if peer is None:
        raise CollectiveError("isend: expected dst or group_dst, got neither")
    return start_transfers([P2PRequest(True, tensor, peer, tag, codec, step)], members)[0]


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: groups.Group = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    codec: str | Codec = "int8",
    step: int | None = None,
) -> Work:
    """Start receiving `tensor` from a rank that calls thinwire.isend or send. Without a source: from any, on gloo.

    The tensor may be read once the work was waited for; `source_rank()` of the work is the sender's rank in the group.
    Example: thinwire.irecv(activations, src=0).wait()
    """
    members = groups.resolve(group)
    peer = groups.rank_in(members, "irecv", src, group_src)
    return start_transfers([P2PRequest(False, tensor, peer, tag, codec, step)], members)[0]


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: groups.Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    codec: str | Codec = "int8",
    step: int | None = None,
) -> None:
    """Send `tensor` in `codec`; the same as `isend`, waited for: thinwire.send(activations, dst=1, codec="int8")."""
    isend(tensor, dst, group, tag, group_dst, codec=codec, step=step).wait()


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: groups.Group = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    codec: str | Codec = "int8",
    step: int | None = None,
) -> int:
    """Receive `tensor`; the same as `irecv`, waited for. Returns the sender's rank in the world.

    Example: thinwire.recv(activations, src=0, codec="int8")
    """
    work = irecv(tensor, src, group, tag, group_src, codec=codec, step=step)
    assert isinstance(work, MessageWork)
    return dist.get_global_rank(groups.resolve(group), work.source_rank())


def batch_isend_irecv(
    p2p_op_list: Sequence[dist.P2POp], *, codec: str | Codec = "int8", step: int | None = None
) -> list[Work]:
    """Start the messages of a list of torch.distributed.P2POp, all of one group, in `codec`.

    No message waits for another of the batch. On gloo there is a work per message, on NCCL one for all. Example::

        ops = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
        for work in thinwire.batch_isend_irecv(ops):
            work.wait()
    """
    ops = list(p2p_op_list)
    if not ops or not all(isinstance(op, dist.P2POp) for op in ops):
        raise CollectiveError(f"batch_isend_irecv: expected torch.distributed.P2POp, at least one, got {p2p_op_list!r}")
    if any(op.group != ops[0].group for op in ops):
        raise CollectiveError("batch_isend_irecv: expected messages of one group, got several: make a batch for each")
    requests = [P2PRequest(op.op is dist.isend, op.tensor, op.group_peer, op.tag, codec, step) for op in ops]
    return start_transfers(requests, groups.resolve(ops[0].group))


def start_transfers(requests: Sequence[P2PRequest], members: dist.ProcessGroup) -> list[Work]:
    """Start messages of one group that wait for none of each other: a work for each, on NCCL one for all."""
    for request in requests:
        if request.peer is not None and (not 0 <= request.peer < members.size() or request.peer == members.rank()):
            verb = "isend" if request.sent else "irecv"
            raise CollectiveError(
                f"{verb}: expected another one of the group's {members.size()} ranks, got rank {request.peer}; this is "
                f"rank {members.rank()}"
            )
        if not isinstance(request.tag, int) or not 0 <= request.tag < PAIR_TAGS:
            raise CollectiveError(f"a message's tag must be 0..2**29 - 1, got {request.tag!r}")
    channel = channel_of(members, requests[0].tensor.device)
    if channel.failure is not None:
        raise broken(channel.failure)
    transfers = [_Transfer(channel, request) for request in requests]
    batches = [transfers] if channel.transport.on_stream else [[transfer] for transfer in transfers]
    return [_start(channel, batch) for batch in batches]


@functools.lru_cache(maxsize=1024)
def _described(named: Any, numel: int, dtype: torch.dtype, coder: Codec | None, how: Any) -> tuple[int, str]:
    """The tag of messages of one kind, and their text in errors."""
    sent, peer, tag, step = how
    kind = "as it is" if coder is None else f"codec={coder}"
    end = f"{kind}, {'to' if sent else 'from'} {'any rank' if peer is None else named(peer)}"
    text = f"{'send' if sent else 'recv'}(numel={numel}, {str(dtype).removeprefix('torch.')}, {end})"
    agreed = zlib.crc32(f"{tag} {step} {numel} {dtype} {kind}".encode())
    return tag if coder is None else PAIR_TAGS + agreed % PAIR_TAGS, text


class _Transfer:
    """A request under way: what travels, under which tag, and what is left to do when it has come."""

    def __init__(self, channel: Channel, request: P2PRequest) -> None:
        self.request = request
        sent, _, peer, tag, codec, _ = request
        self.step = step = checks.check_step(request.step or 0)
        (self.part,) = checks.check_tensors((request.tensor,), "send" if sent else "recv", outputs=int(not sent))
        self._whole = part = self.part.contiguous()
        numel, dtype = part.numel(), part.dtype
        self.coder = coder = None if codec is None else checks.codec_for(codec, (numel,))
        self.tag, self.text = _described(channel.transport.named, numel, dtype, coder, (sent, peer, tag, step))
        self.wire = part  # unless in a codec
        if coder is not None:
            self.wire = torch.empty(coder.wire_bytes(numel, dtype), dtype=torch.uint8, device=part.device)
            if part.is_cuda:
                _load_kernels(coder, numel, dtype, part.device)
            if sent:
                with torch.inference_mode():
                    coder.encode(part.view(-1), self.wire, step=Key(step, 0).of(channel.transport.rank))

    def finish(self, moving: Moving) -> None:
        """Decode what has come. The wire of a message that is sent is referenced until then."""
        if self.request.sent:
            return
        if self.coder is not None:
            peer = self.request.peer
            source: int = moving[0]._source_rank() if peer is None else peer
            self.coder.decode(self.wire, self._whole.view(-1), step=Key(self.step, 0).of(source))
        if self._whole.data_ptr() != self.part.data_ptr():
            self.part.copy_(self._whole)


@functools.lru_cache(maxsize=1024)
def _load_kernels(coder: Codec, numel: int, dtype: torch.dtype, device: torch.device) -> None:
    """Encode and decode once, before the first message of a kind: [Note: Loaded without the lock] in compiling.py.

    A rank that waits in NCCL for another's message could not load the kernel of the message that the other waits for.
    """
    x = torch.zeros(numel, dtype=dtype, device=device)
    wire = torch.empty(coder.wire_bytes(numel, dtype), dtype=torch.uint8, device=device)
    with torch.inference_mode():
        coder.encode(x, wire, step=0)
        coder.decode(wire, x, step=0)


def _start(channel: Channel, transfers: Sequence[_Transfer]) -> Work:
    """Start messages: one, or on NCCL several as one group."""
    link = channel.transport
    site = CallSite(channel.next_p2p_call(), " and ".join(transfer.text for transfer in transfers))
    lost = None
    try:
        if any(transfer.request.peer is None for transfer in transfers):
            moving = link.recv_any_source(transfers[0].wire, transfers[0].tag)  # which NCCL refuses
        else:
            moving = link.send_recv(*_sorted(transfers), transfers[0].tag)
    except LostRankError as error:
        lost = error.with_traceback(None)
    if lost is not None:  # not above: the new error would hold the old one, whose frames hold tensors
        raise channel.failures.ended(lost, site)
    if link.on_stream:
        link.count(*_sorted([transfer for transfer in transfers if transfer.coder is not None]))

    def finish() -> None:
        for transfer in transfers:
            transfer.finish(moving)

    return MessageWork(moving, [transfer.request.tensor for transfer in transfers], finish, channel.failures.at(site))


def _sorted(transfers: Sequence[_Transfer]) -> tuple[Messages, Messages]:
    ends = [(transfer.request.sent, (transfer.request.peer or 0, transfer.wire)) for transfer in transfers]
    return [end for sent, end in ends if sent], [end for sent, end in ends if not sent]
