"""How bytes travel between the ranks of a group.

[Note: Pairs, not collectives] On gloo bytes travel as tagged messages between pairs of ranks. A tagged message has no
place in the group's order of collectives: it cannot be mixed up with what the user's script runs on the same group in
the meantime, whichever thread it comes from, and no second group has to be made. It is also faster: one all_to_all of
12.5 MB per rank took 187 ms on a 1 Gbit link, the same bytes between pairs 107 (ideal: 105).
On NCCL, messages are torch's collectives on the stream of the call (programs.py), so its watchdog
sees them; calls without a program go in grouped messages.

[Note: Checksums] On gloo, THINWIRE_CHECKSUM=1 and THINWIRE_DEBUG=1 send a CRC-32 of every piece after a message: a
bit that flips on the way is an error that names the sender.
"""

import contextlib
import functools
import itertools
import os
import time
import weakref
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from thinwire.collectives.groups import backend, backend_impl, group_all_gather, group_all_to_all, named, timeout_s
from thinwire.errors import CollectiveError, WireError
from thinwire.ranges import range_of

Messages = Sequence[tuple[int, Tensor]]  # the other rank, and the bytes for it or from it
Lengths = Sequence[Sequence[int]]  # of the messages that are sent, and of those that are received

TAGS = 8  # an operation draws as many, whatever it is: ranks may not differ in how many they drew
_TAGS_FROM = 1 << 30  # below are the user's own tags, and from PAIR_TAGS on those of messages between two ranks
PAIR_TAGS = 1 << 29
_SEQUENCES = 1 << 11  # operations in flight that have tags of their own
_FINGERPRINTS = 1 << 16  # values of a fingerprint in an operation's tags
_MIX = 2654435761  # a prime: lengths that differ by less than _FINGERPRINTS - 1 never have the same tags
_LAST_TAG = _TAGS_FROM + _SEQUENCES * _FINGERPRINTS * TAGS - 1  # of no message: no operation uses all of its tags
_MOMENT = timedelta(milliseconds=1)
_PIECE = 1 << 16  # bytes under one checksum
_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")  # the host waits in every call
_SOONER = 0.9  # of the group's timeout, on NCCL: when it is over, torch's watchdog ends the process


class LostRankError(RuntimeError):
    """A message did not come, or could not be sent. The caller knows in which call, and reports it."""

    def __init__(self, rank: int | None, error: BaseException, waited: float = 0.0) -> None:
        text = str(error).split("\n", 1)[0].rsplit("RuntimeError: ", 1)[-1]  # without the callbacks it came through
        text = text.split("] ", 1)[-1] if text.startswith("[") else text  # and gloo's file and line
        super().__init__(text.split(". ", 1)[0])
        self.rank = rank  # at the other end, where that is known
        self.waited = waited  # for so many seconds


def lost_in(error: BaseException) -> LostRankError | None:
    """Return the error as a LostRankError if a transport or NCCL raised it because a rank is lost, else None."""
    if isinstance(error, LostRankError):
        return error
    return LostRankError(None, error) if isinstance(error, dist.DistBackendError) else None


class Moving(list[Any]):
    """Messages under way (torch's works, or Arrivals), and the ranks at their other ends."""

    def __init__(self, works: Iterable[Any] = (), peers: Sequence[int | None] = (), options: Any = None) -> None:
        super().__init__(works)
        self.peers = peers  # None: a message from any source, or several messages
        self._options = options  # of the backend, whose timeout may change: gloo's messages know the first one alone

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for each at most `timeout` or the group's timeout as it is now; raises LostRankError."""
        if not timeout and self._options is not None:
            timeout = self._options._timeout
        at = 0
        began = 0.0
        try:
            for at, work in enumerate(self):  # noqa: B007
                began = time.monotonic()
                work.wait(*[timeout] if timeout else [])
        except RuntimeError as error:
            if isinstance(error, CollectiveError):
                raise
            raise LostRankError(self.peers[at], error, time.monotonic() - began) from None

    def is_completed(self) -> bool:
        """Whether all are known to be done; gloo knows it of a message that was waited for."""
        return all(work.is_completed() for work in self)


Stages = Generator[Moving, None, None]  # work that yields, between its stages, the messages that it waits for


def _tag(sequence: int, fingerprint: int | None) -> int:
    kind = 0 if fingerprint is None else fingerprint % (_FINGERPRINTS - 1) + 1
    return _TAGS_FROM + (sequence * _FINGERPRINTS + kind) * TAGS


class Transport:
    """Moves bytes between the ranks of one group. Ranks are numbered as in the group.

    `sequences` counts the operations of the group in program order, whatever the device: its messages share their tags.
    """

    on_stream: ClassVar[bool] = False  # messages are ordered by a stream of the GPU; the host never waits for them
    has_checksums: bool = False  # checksums follow messages
    _options: Any = None  # of the backend
    blocking: bool = False  # on a stream, but the host was asked to wait: see `settle`
    agree: Callable[[Sequence[int]], list[int]]  # the largest of each number over the ranks; raises LostRankError
    share: Callable[[bytes], list[bytes]]  # the rows of all ranks, which are equally long; raises LostRankError
    close: Callable[[], None]  # closes the connections of the group: all who wait for a message get an error
    # Matrices of wires, one row per rank. On a stream: as collectives on the current stream, which waits for them.
    # Elsewhere so many bytes of each rank's row travel (used_R), under a tag, and what moves is returned.
    # (received, sent, used_R, tag): row r of what is received = this rank's row of what rank r sent
    all_to_all: Callable[..., Moving | None]
    all_gather: Callable[..., Moving | None]  # (whole, own, used_R, tag): row r = rank r's own, perhaps in place
    broadcast: Callable[..., None]  # on a stream only, (whole, whole, source): all = the source's
    exchange_rows: Callable[..., None]  # on a stream only: all_to_all of rows of any lengths, in bytes
    settle: Callable[[], None]  # on a stream only: the host waits for the current one's messages; raises LostRankError

    def __init__(self, group: dist.ProcessGroup, sequences: Iterator[int], device: torch.device) -> None:
        self._group = weakref.ref(group)  # a group ends when its user lets go of it
        self.device = device  # of the tensors
        self.rank = group.rank()
        self.world = group.size()
        self.others = [(self.rank + i) % self.world for i in range(1, self.world)]  # no two ranks begin with the same
        self.sent = 0  # bytes of payload since the group was first used
        self.received = 0
        self._sequences = sequences
        known = dist.distributed_c10d._world.pg_group_ranks.get(group, {})  # empty if torch does not list the group
        self.named = functools.partial(named, {group_rank: rank for rank, group_rank in known.items()})

    def draw_tags(self, fingerprint: int | None = None) -> int:
        """The first of TAGS consecutive tags that no other operation in flight uses.

        `fingerprint` is a number made of all that ranks have to agree on: messages of calls that differ have other
        tags, so they never meet. None is for messages that compare calls.
        """
        return _tag(next(self._sequences) % _SEQUENCES, fingerprint)

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise CollectiveError("the process group of this operation was destroyed")
        return group

    @property
    def is_registered(self) -> bool:
        """Whether torch has the group registered; a destroyed group is not, even if its object lives on."""
        group = self._group()
        return group is not None and group in dist.distributed_c10d._world.pg_map

    def exchange(self, sends: Messages, receives: Messages, tag: int, lengths: Lengths = ()) -> Moving:
        """Start sending and receiving. Buffers belong to the transport until the messages have been waited for.

        `lengths`: what ranks have to agree on pair by pair, of the sends and of the receives, where calls that differ
        in it have to be kept apart; see `draw_tags`.
        """
        raise NotImplementedError

    def send_recv(self, sends: Messages, receives: Messages, tag: int) -> Moving:
        """Start messages that no third rank knows of: one, or the batch of a caller, under tags from PAIR_TAGS on."""
        return self.exchange(sends, receives, tag)

    def recv_any_source(self, part: Tensor, tag: int) -> Moving:
        """Start receiving a message from whichever rank sends one with this tag."""
        raise CollectiveError("only gloo on the CPU can receive from any source: pass src or group_src")

    def all_gather_rows(self, rows: Sequence[Tensor], tag: int) -> Moving:
        """Start sending this rank's row to all others and receiving theirs; empty rows do not travel."""
        return self.exchange(*self.messages_of(rows), tag)

    def messages_of(self, rows: Sequence[Tensor]) -> tuple[Messages, Messages]:
        """The messages that bring every rank's row to all."""
        sends = [(rank, rows[self.rank]) for rank in self.others if rows[self.rank].numel()]
        return sends, [(rank, rows[rank]) for rank in self.others if rows[rank].numel()]

    def count(self, sends: Messages, receives: Messages) -> None:
        """Add wires to what this rank has sent and received."""
        self.sent += sum(part.numel() for _, part in sends)
        self.received += sum(part.numel() for _, part in receives)


def checksums_of(part: Tensor) -> Tensor:
    """The checksums of a message's pieces."""
    pieces = part.detach().contiguous().view(-1).view(torch.uint8).split(_PIECE)
    return torch.tensor([zlib.crc32(memoryview(piece.numpy())) for piece in pieces])


def _compare_checksums(part: Tensor, sums: Tensor, sender: str) -> None:
    """Raise unless a message has the checksums that came with it."""
    wrong = (checksums_of(part) != sums).nonzero()
    if wrong.numel():
        begin = int(wrong[0]) * _PIECE
        raise WireError(
            f"a message of {part.nbytes} bytes from {sender} was damaged in transit: bytes {begin} to "
            f"{min(begin + _PIECE, part.nbytes)} do not have their checksum; check that rank's memory and network"
        )


@dataclass(frozen=True)
class Arrival:
    """A message that is checked or copied (`then`) once it has arrived."""

    works: Sequence[Any]
    then: Callable[[], object]

    def wait(self, *timeout: timedelta) -> None:
        for work in self.works:
            work.wait(*timeout)
        self.then()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


class PairTransport(Transport):
    """gloo: tagged messages between pairs. See [Note: Pairs, not collectives]."""

    def __init__(self, group: dist.ProcessGroup, sequences: Iterator[int], device: torch.device) -> None:
        super().__init__(group, sequences, device)
        asked = (os.environ.get(name, "0") for name in ("THINWIRE_CHECKSUM", "THINWIRE_DEBUG"))
        self.has_checksums = any(value not in ("", "0") for value in asked)
        gloo = [backend_impl(group, device) for device in group._device_types if backend(group, device) == "gloo"]
        self._options = getattr(gloo[0], "options", None) if gloo else None

    def exchange(self, sends: Messages, receives: Messages, tag: int, lengths: Lengths = ()) -> Moving:
        """Receives come first in what is returned."""
        self.count(sends, receives)
        if not self.has_checksums:
            return self._start(sends, receives, tag, lengths)
        sums_out = [(rank, checksums_of(part)) for rank, part in sends]  # they follow their messages
        sums_in = [(rank, torch.empty(max(1, -(-part.nbytes // _PIECE)), dtype=torch.int64)) for rank, part in receives]
        twice = [[*side, *side] for side in lengths]
        moving = self._start([*sends, *sums_out], [*receives, *sums_in], tag, twice)
        count = len(receives)
        pairs = zip(moving[:count], moving[count : 2 * count], receives, sums_in, strict=True)
        works = [
            Arrival((work, after), functools.partial(_compare_checksums, part, sums, self.named(rank)))
            for work, after, (rank, part), (_, sums) in pairs
        ]
        return Moving([*works, *moving[2 * count :]], moving.peers[count:], self._options)

    def _start(self, sends: Messages, receives: Messages, tag: int, lengths: Lengths = ()) -> Moving:
        """Start messages; raises LostRankError if a connection is known to be closed."""
        tags_out, tags_in = _tags(tag, lengths)
        group = self.group
        works: list[Any] = []
        rank = 0
        try:
            for (rank, part), tag in zip(receives, tags_in, strict=False):
                works.append(group.recv([part], rank, tag))
            for (rank, part), tag in zip(sends, tags_out, strict=False):
                works.append(group.send([part], rank, tag))
        except RuntimeError as error:
            raise LostRankError(rank, error) from None
        return Moving(works, [rank for rank, _ in (*receives, *sends)], self._options)

    def all_to_all(self, received: Tensor, sent: Tensor, used_R: Sequence[int], tag: int) -> Moving:
        came, rows, own = received.view(self.world, -1), sent.view(self.world, -1), used_R[self.rank]
        came[self.rank].copy_(rows[self.rank])
        sends = [(rank, rows[rank][: used_R[rank]]) for rank in self.others if used_R[rank]]
        return self.exchange(sends, [(rank, came[rank][:own]) for rank in sorted(self.others) if own], tag)

    def all_gather(self, whole: Tensor, _: Tensor, used_R: Sequence[int], tag: int) -> Moving:
        rows = [row[:used] for row, used in zip(whole.view(self.world, -1), used_R, strict=True)]
        return self.exchange(*self.messages_of(rows), tag)

    def recv_any_source(self, part: Tensor, tag: int) -> Moving:
        if self.has_checksums:
            raise CollectiveError("checksums need a sender: pass src, or unset THINWIRE_CHECKSUM and THINWIRE_DEBUG")
        self.count((), [(0, part)])
        return Moving([self.group.recv_anysource([part], tag)], [None], self._options)

    def agree(self, values: Sequence[int]) -> list[int]:
        """In about log2(world) rounds of one message: in every round a rank's values reach twice as many ranks."""
        tag = self.draw_tags()
        most = torch.tensor(values)
        for hop in hops(self.world):
            received = torch.empty_like(most)
            to = (self.rank + hop) % self.world
            self._start([(to, most)], [((self.rank - hop) % self.world, received)], tag).wait()
            most = torch.maximum(most, received)
        return most.tolist()

    def share(self, row: bytes) -> list[bytes]:
        local = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        rows = [local if rank == self.rank else torch.empty_like(local) for rank in range(self.world)]
        self._start(*self.messages_of(rows), self.draw_tags()).wait()
        return [bytes(found.tolist()) for found in rows]

    def close(self) -> None:
        """A receive that times out makes gloo close all connections, at both ends; some may be closed already."""
        for rank in self.others:
            with contextlib.suppress(RuntimeError, CollectiveError):
                self.group.recv([torch.empty(1)], rank, _LAST_TAG).wait(_MOMENT)


def _tags(tag: int, lengths: Lengths) -> tuple[Iterable[int], Iterable[int]]:
    """The tags of messages to send and to receive; they depend on the lengths."""
    if not lengths:
        return itertools.repeat(tag), itertools.repeat(tag)
    sequence, fingerprint = divmod((tag - _TAGS_FROM) // TAGS, _FINGERPRINTS)
    sent, received = ([_tag(sequence, fingerprint + length * _MIX) + tag % TAGS for length in side] for side in lengths)
    return sent, received


class StagedTransport(PairTransport):
    """gloo between GPUs: wires are copied through the host."""

    def exchange(self, sends: Messages, receives: Messages, tag: int, lengths: Lengths = ()) -> Moving:
        landing = [(rank, torch.empty(part.shape, dtype=part.dtype)) for rank, part in receives]
        works = super().exchange([(rank, part.cpu()) for rank, part in sends], landing, tag, lengths)
        for at, ((_, host), (_, part)) in enumerate(zip(landing, receives, strict=True)):
            works[at] = Arrival((works[at],), functools.partial(part.copy_, host))
        return works

    recv_any_source = Transport.recv_any_source  # refused


def hops(world: int) -> list[int]:
    """The distance of the receiver in each round, until values of all ranks have reached all."""
    return [1 << k for k in range((world - 1).bit_length())]


class StreamTransport(Transport):
    """NCCL: collectives on the current stream, grouped messages elsewhere; the stream waits, never the host."""

    on_stream = True

    def __init__(self, group: dist.ProcessGroup, sequences: Iterator[int], device: torch.device) -> None:
        super().__init__(group, sequences, device)
        self.blocking = any(os.environ.get(name, "") not in ("", "0") for name in _BLOCKING_WAIT)
        self._closed = False

    def all_to_all(self, received: Tensor, sent: Tensor, *_: Any) -> None:
        self._moved(sent.numel() - sent.numel() // self.world)
        with range_of("thinwire::wire"):
            if self.world == 2:  # a gather of what the other gets: as many bytes, faster over TCP than NCCL's pairs
                half = sent.numel() // 2
                kept, other = (sent[:half], sent[half:]) if self.rank == 0 else (sent[half:], sent[:half])
                _finish(group_all_gather(self.group, received, other, _GATHER))
                (received[half:] if self.rank else received[:half]).copy_(kept)
            else:
                _finish(group_all_to_all(self.group, received, sent, (), (), _TO_ALL))

    def all_gather(self, whole: Tensor, own: Tensor, *_: Any) -> None:
        self._moved(whole.numel() - own.numel())
        with range_of("thinwire::wire"):
            _finish(group_all_gather(self.group, whole, own, _GATHER))

    def broadcast(self, whole: Tensor, _: Tensor, source: int) -> None:
        sent = whole.numel() if self.rank == source else 0
        self._moved(sent, whole.numel() - sent)
        options = c10d.BroadcastOptions()
        options.rootRank = source
        options.asyncOp = False
        with range_of("thinwire::wire"):
            _finish(self.group.broadcast([whole], options))

    def exchange_rows(self, received: Tensor, sent: Tensor, received_R: Sequence[int], sent_R: Sequence[int]) -> None:
        self._moved(sum(sent_R) - sent_R[self.rank], sum(received_R) - received_R[self.rank])
        _finish(group_all_to_all(self.group, received, sent, received_R, sent_R, _TO_ALL))

    def _moved(self, sent: int, received: int | None = None) -> None:
        self.sent += sent
        self.received += sent if received is None else received

    def exchange(self, sends: Messages, receives: Messages, tag: int, lengths: Lengths = ()) -> Moving:
        """One group of sends and receives; NCCL has no tags."""
        self.count(sends, receives)
        return self._together(sends, receives) if sends or receives else Moving()

    def _together(self, sends: Messages, receives: Messages) -> Moving:
        """What torch's batch_isend_irecv does, also for a group that torch does not list: thinwire.group's inner."""
        group: Any = self.group
        group._start_coalescing(self.device)
        self._start(sends, receives)
        return Moving([group._end_coalescing(self.device)], [None])

    def send_recv(self, sends: Messages, receives: Messages, tag: int) -> Moving:
        """One alone goes as torch's own does: it waits for its pair of ranks only. The caller counts wires."""
        return (self._together if len(sends) + len(receives) > 1 else self._start)(sends, receives)

    def _start(self, sends: Messages, receives: Messages) -> Moving:
        works = [self.group.recv([part], rank, 0) for rank, part in receives]
        works += [self.group.send([part], rank, 0) for rank, part in sends]
        return Moving(works, [rank for rank, _ in (*receives, *sends)])

    def all_gather_rows(self, rows: Sequence[Tensor], tag: int) -> Moving:
        """NCCL's own all-gather, if all rows have one length and lie side by side."""
        nbytes = rows[0].numel()
        start = rows[0].data_ptr()
        if not nbytes or any(
            row.numel() != nbytes or row.data_ptr() != start + i * nbytes for i, row in enumerate(rows)
        ):
            return super().all_gather_rows(rows, tag)
        self._moved(nbytes * (self.world - 1))
        whole = rows[0].as_strided((self.world * nbytes,), (1,))
        return Moving([group_all_gather(self.group, whole, rows[self.rank], c10d.AllgatherOptions())], [None])

    def agree(self, values: Sequence[int]) -> list[int]:
        most = torch.tensor(values, device=self.device)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._await(self.group.allreduce([most], options))
        return most.tolist()

    def share(self, row: bytes) -> list[bytes]:
        local = torch.tensor(list(row), dtype=torch.uint8, device=self.device)
        whole = local.new_empty(self.world * len(row))
        self._await(group_all_gather(self.group, whole, local, c10d.AllgatherOptions()))
        return [bytes(found) for found in whole.view(self.world, -1).tolist()]

    def settle(self) -> None:
        if not torch.cuda.is_current_stream_capturing():
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self.device))
            self._poll(done.query)

    def _await(self, work: Any) -> None:
        self._poll(work.is_completed)
        work.wait()

    def _poll(self, is_done: Callable[[], bool]) -> None:
        """Wait for messages that other ranks may never send, for nearly the group's timeout at most."""
        deadline = time.monotonic() + _SOONER * timeout_s(self.group)
        pause = 1e-5
        while not self._closed and not is_done():
            if time.monotonic() > deadline:
                raise LostRankError(None, TimeoutError("the messages did not come"), timeout_s(self.group))
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        if self._closed:
            raise LostRankError(None, RuntimeError("the group was closed"))

    def close(self) -> None:
        """Abort NCCL, so that kernels that wait for a lost rank end and the streams continue."""
        self._closed = True
        with contextlib.suppress(RuntimeError, CollectiveError):
            backend_impl(self.group, self.device).abort()


def _finish(work: Any) -> None:
    """Wait for a collective on the current stream; newer versions of torch return no work for it."""
    if work is not None:
        work.wait()


# asyncOp=False: on the current stream.
_TO_ALL: Any = c10d.AllToAllOptions()
_GATHER: Any = c10d.AllgatherOptions()
_TO_ALL.asyncOp = False
_GATHER.asyncOp = False


def transport(group: dist.ProcessGroup, sequences: Iterator[int], device: torch.device) -> Transport:
    """The transport of a group for tensors on a device. All ranks call it together: NCCL connects in it."""
    name = backend(group, device)
    if name == "nccl":
        # NCCL connects in a group's first call, which all ranks have to make.
        group.allreduce([torch.zeros(1, device=device)]).wait()
        return StreamTransport(group, sequences, device)
    if name == "gloo":
        made = PairTransport if device.type == "cpu" else StagedTransport
        return made(group, sequences, device)
    raise CollectiveError(
        f"thinwire's collectives run on gloo and nccl, this group runs {device.type} on {name!r}: make a group with "
        "backend='gloo' or 'nccl' (torch.distributed.new_group) and pass it as group="
    )
