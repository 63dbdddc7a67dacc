"""Groups of ranks, and the ways bytes travel between them.

[Note: Pairs, not collectives] On gloo bytes travel as tagged messages between pairs of ranks. A tagged message has no
place in the group's order of collectives: it cannot be mixed up with what the user's script runs on the same group in
the meantime, whichever thread it comes from, and no second group has to be made. It is also faster: one all_to_all of
12.5 MB per rank took 187 ms on a 1 Gbit link, the same bytes between pairs 107 (ideal: 105).
On NCCL, messages are torch's collectives on the stream of the call (programs.py), so its watchdog and flight recorder
see them; what has no launches of its own goes in grouped messages, issued inline.
"""

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives import checksums
from thinwire.errors import CollectiveError
from thinwire.kernels import is_ahead
from thinwire.ranges import ranged

Group = dist.ProcessGroup | DeviceMesh | None  # None is the world
Messages = Sequence[tuple[int, Tensor]]  # the other rank, and the bytes for it or from it
Lengths = Sequence[Sequence[int]]  # of the messages that are sent, and of those that are received

TAGS = 8  # an operation draws as many, whatever it is: ranks may not differ in how many they drew
_TAGS_FROM = 1 << 30  # below are the user's own tags
_TURNS = 1 << 11  # operations in flight that have tags of their own
_MARKS = 1 << 16  # what an operation's tags tell of it
_MIX = 2654435761  # a prime: lengths that differ by less than _MARKS - 1 never have the same tags
_LAST_TAG = _TAGS_FROM + _TURNS * _MARKS * TAGS - 1  # of no message: no operation uses all of its tags
_MOMENT = timedelta(milliseconds=1)
_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")  # the host waits in every call
_SOONER = 0.9  # of the group's timeout, on NCCL: when it is over, torch's watchdog ends the process


class Waitable(Protocol):
    """Something under way."""

    def wait(self) -> object:
        """Return when it is done (on a stream: make the current stream wait)."""


Stages = Generator[Sequence[Waitable], None, None]  # work that yields, between its stages, what it waits for


class LostRankError(RuntimeError):
    """A message did not come, or could not be sent: whoever waits for it says in which call."""

    def __init__(self, rank: int | None, error: BaseException, waited: float = 0.0) -> None:
        text = str(error).split("\n", 1)[0].rsplit("RuntimeError: ", 1)[-1]  # without the callbacks it came through
        text = text.split("] ", 1)[-1] if text.startswith("[") else text  # and gloo's file and line
        super().__init__(text.split(". ", 1)[0])
        self.rank = rank  # at the other end, where that is known
        self.waited = waited  # for so many seconds


def lost_in(error: BaseException) -> LostRankError | None:
    """What a transport, or torch's own verb on NCCL, raises when a rank is lost; None for other errors."""
    if isinstance(error, LostRankError):
        return error
    return LostRankError(None, error) if isinstance(error, dist.DistBackendError) else None


class Moving(list[Waitable]):
    """Messages under way, and the ranks at their other ends."""

    def __init__(self, works: Iterable[Waitable], peers: Sequence[int]) -> None:
        super().__init__(works)
        self.peers = peers


def wait_for(moving: Sequence[Waitable]) -> None:
    """Wait for messages; raises LostRankError."""
    at = 0
    began = 0.0
    try:
        for at, waitable in enumerate(moving):  # noqa: B007
            began = time.monotonic()
            waitable.wait()
    except RuntimeError as error:
        if isinstance(error, CollectiveError):
            raise
        peer = moving.peers[at] if isinstance(moving, Moving) else None
        raise LostRankError(peer, error, time.monotonic() - began) from None


class Tags:
    """The tags of a group, drawn in program order, whatever the device: its messages share one space."""

    def __init__(self) -> None:
        self._next = 0
        self._lock = threading.Lock()

    def draw(self, mark: int | None = None) -> int:
        """The first of TAGS consecutive tags that no other operation in flight uses.

        `mark` is a number made of all that ranks have to agree on: messages of calls that differ have other tags, so
        they never meet. None is for messages that compare calls.
        """
        with self._lock:
            turn = self._next
            self._next = (turn + 1) % _TURNS
        return _TAGS_FROM + (turn * _MARKS + (0 if mark is None else mark % (_MARKS - 1) + 1)) * TAGS


class Transport:
    """Moves bytes between the ranks of one group. Ranks are numbered as in the group."""

    on_stream: ClassVar[bool] = False  # messages are ordered by a stream of the GPU; the host never waits for them
    has_all_ops: ClassVar[bool] = False  # the backend itself averages, and multiplies before it sums
    checked: bool = False  # checksums follow messages
    blocking: bool = False  # on a stream, but the host was asked to wait: see `settle`

    def __init__(self, group: dist.ProcessGroup, tags: Tags) -> None:
        self._group = weakref.ref(group)  # a group ends when its user lets go of it
        self.rank = group.rank()
        self.world = group.size()
        self.sent = 0  # bytes of payload since the group was first used
        self.received = 0
        self.draw_tags = tags.draw

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise CollectiveError("the process group of this operation was destroyed")
        return group

    @property
    def is_registered(self) -> bool:
        """Whether torch knows the group; one that was destroyed it does not, though it may keep the object."""
        group = self._group()
        return group is not None and group in dist.distributed_c10d._world.pg_map

    def exchange(self, sends: Messages, receives: Messages, tag: int, lengths: Lengths = ()) -> list[Waitable]:
        """Start sending and receiving. Buffers belong to the transport until what is returned was waited for.

        `lengths`: what ranks have to agree on pair by pair, of the sends and of the receives, where calls that differ
        in it have to be kept apart; see `Tags.draw`.
        """
        raise NotImplementedError

    def gather(self, rows: Sequence[Tensor], tag: int) -> list[Waitable]:
        """Start sending this rank's row to all others and receiving theirs; empty rows do not travel."""
        others = [(self.rank + i) % self.world for i in range(1, self.world)]
        sends = [(rank, rows[self.rank]) for rank in others if rows[self.rank].numel()]
        return self.exchange(sends, [(rank, rows[rank]) for rank in others if rows[rank].numel()], tag)

    def agree(self, values: Sequence[int]) -> list[int]:
        """The largest of each of these numbers over the ranks; the host waits for it. Raises LostRankError."""
        raise NotImplementedError

    def share(self, row: bytes) -> list[bytes]:
        """The rows of all ranks, which are equally long; the host waits for them. Raises LostRankError."""
        raise NotImplementedError

    def close(self) -> None:
        """End the connections of the group: whoever waits for a message gets an error."""
        raise NotImplementedError

    def settle(self) -> None:
        """Make the host wait for the messages that the current stream has. Raises LostRankError."""

    def synchronize(self, device: torch.device) -> None:
        """Make the host wait for what the transport was given, where waiting for a message does not."""

    def _count(self, sends: Messages, receives: Messages) -> None:
        self.sent += sum(part.numel() for _, part in sends)
        self.received += sum(part.numel() for _, part in receives)


class PairTransport(Transport):
    """gloo: tagged messages between pairs. See [Note: Pairs, not collectives]."""

    def __init__(self, group: dist.ProcessGroup, tags: Tags) -> None:
        super().__init__(group, tags)
        self.checked = checksums.wanted()

    def exchange(self, sends: Messages, receives: Messages, tag: int, lengths: Lengths = ()) -> Moving:
        """Receives come first in what is returned."""
        self._count(sends, receives)
        move = self._exchange_checked if self.checked else self._exchange
        return move(sends, receives, tag, lengths)

    def _exchange(self, sends: Messages, receives: Messages, tag: int, lengths: Lengths = ()) -> Moving:
        tags_out, tags_in = _tags(tag, lengths)
        group = self.group
        works = [_start(group.recv, *message, own) for message, own in zip(receives, tags_in, strict=False)]
        works += [_start(group.send, *message, own) for message, own in zip(sends, tags_out, strict=False)]
        return Moving(works, [rank for rank, _ in (*receives, *sends)])

    def _exchange_checked(self, sends: Messages, receives: Messages, tag: int, lengths: Lengths) -> Moving:
        """Every message is followed by its checksums."""
        sums_out = [(rank, checksums.sums_of(part)) for rank, part in sends]
        sums_in = [(rank, checksums.room_for(part)) for rank, part in receives]
        twice = [[*own, *own] for own in lengths]
        moving = self._exchange([*sends, *sums_out], [*receives, *sums_in], tag, twice)
        count = len(receives)
        pairs = zip(moving[:count], moving[count : 2 * count], receives, sums_in, strict=True)
        works = [checksums.Checked((work, after), part, sums, rank) for work, after, (rank, part), (_, sums) in pairs]
        return Moving([*works, *moving[2 * count :]], moving.peers[count:])

    def agree(self, values: Sequence[int]) -> list[int]:
        """In about log2(world) rounds of one message each: what a rank knows reaches twice as many in every round."""
        tag = self.draw_tags()
        most = torch.tensor(values)
        for hop in hops(self.world):
            came = torch.empty_like(most)
            to = (self.rank + hop) % self.world
            wait_for(self._exchange([(to, most)], [((self.rank - hop) % self.world, came)], tag))
            most = torch.maximum(most, came)
        found: list[int] = most.tolist()
        return found

    def share(self, row: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        rows = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.world)]
        others = [rank for rank in range(self.world) if rank != self.rank]
        wait_for(self._exchange([(r, own) for r in others], [(r, rows[r]) for r in others], self.draw_tags()))
        return [bytes(found.tolist()) for found in rows]

    def close(self) -> None:
        """A message that is given up on closes all connections of gloo's, at both ends; some may be closed already."""
        for rank in range(self.world):
            if rank != self.rank:
                with contextlib.suppress(RuntimeError, CollectiveError):
                    self.group.recv([torch.empty(1)], rank, _LAST_TAG).wait(_MOMENT)


def _tags(tag: int, lengths: Lengths) -> tuple[Iterable[int], Iterable[int]]:
    """The tags of messages that are sent and of those that are received: with other lengths others."""
    if not lengths:
        return itertools.repeat(tag), itertools.repeat(tag)
    turn, mark = divmod((tag - _TAGS_FROM) // TAGS, _MARKS)
    at = tag % TAGS
    sent, received = (
        [_TAGS_FROM + (turn * _MARKS + (mark + length * _MIX) % (_MARKS - 1) + 1) * TAGS + at for length in own]
        for own in lengths
    )
    return sent, received


def _start(verb: Callable[..., Waitable], rank: int, part: Tensor, tag: int) -> Waitable:
    """Start a message; over a connection that is known to be closed that raises at once."""
    try:
        return verb([part], rank, tag)
    except RuntimeError as error:
        raise LostRankError(rank, error) from None


class StagedTransport(PairTransport):
    """gloo between GPUs: wires are copied through the host."""

    def exchange(self, sends: Messages, receives: Messages, tag: int, lengths: Lengths = ()) -> Moving:
        landing = [(rank, torch.empty(part.shape, dtype=part.dtype)) for rank, part in receives]
        works = super().exchange([(rank, part.cpu()) for rank, part in sends], landing, tag, lengths)
        for at, ((_, host), (_, part)) in enumerate(zip(landing, receives, strict=True)):
            works[at] = _Arrival(works[at], host, part)
        return works


@dataclass(frozen=True)
class _Arrival:
    """A message that goes on to the device once it has come."""

    work: Waitable
    host: Tensor
    target: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.target.copy_(self.host)


def hops(world: int) -> list[int]:
    """How far messages go in each round until every rank has heard of all."""
    return [1 << k for k in range((world - 1).bit_length())]


class Place(Protocol):
    """Which of how many ranks, and where its tensors are."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


@runtime_checkable
class RowTransport(Place, Protocol):
    """Moves matrices of wires, one row per rank, all of one length, as collectives on the current stream."""

    def all_to_all(self, came: Tensor, sent: Tensor) -> None:
        """Row r of what came = this rank's row of what rank r sent."""

    def all_gather(self, whole: Tensor, own: Tensor) -> None:
        """Row r = rank r's own row, which may be its place in the whole."""

    def broadcast(self, whole: Tensor, source: int) -> None:
        """whole = the source's."""

    def exchange_rows(self, came: Tensor, sent: Tensor, came_R: Sequence[int], sent_R: Sequence[int]) -> None:
        """all_to_all of rows of any lengths, in bytes."""


class StreamTransport(Transport):
    """NCCL: grouped messages, ordered by streams; waiting makes the current stream wait, never the host."""

    on_stream = True
    has_all_ops = True

    def __init__(self, group: dist.ProcessGroup, tags: Tags, device: torch.device) -> None:
        super().__init__(group, tags)
        self.device = device
        self.blocking = any(os.environ.get(name, "") not in ("", "0") for name in _BLOCKING_WAIT)
        self._closed = False

    @ranged("thinwire::wire")
    def all_to_all(self, came: Tensor, sent: Tensor) -> None:
        if is_ahead():
            return
        self._moved(sent.numel() - sent.numel() // self.world)
        _finish(_all_to_all(self.group, came, sent, (), (), _TO_ALL))

    @ranged("thinwire::wire")
    def all_gather(self, whole: Tensor, own: Tensor) -> None:
        if is_ahead():
            return
        self._moved(whole.numel() - own.numel())
        _finish(_all_gather(self.group, whole, own, _GATHER))

    @ranged("thinwire::wire")
    def broadcast(self, whole: Tensor, source: int) -> None:
        if is_ahead():
            return
        if self.rank == source:
            self.sent += whole.numel()
        else:
            self.received += whole.numel()
        options = c10d.BroadcastOptions()
        options.rootRank = source
        options.asyncOp = False
        _finish(self.group.broadcast([whole], options))

    def exchange_rows(self, came: Tensor, sent: Tensor, came_R: Sequence[int], sent_R: Sequence[int]) -> None:
        if is_ahead():
            return
        self.sent += sum(sent_R) - sent_R[self.rank]
        self.received += sum(came_R) - came_R[self.rank]
        _finish(_all_to_all(self.group, came, sent, came_R, sent_R, _TO_ALL))

    def _moved(self, nbytes: int) -> None:
        self.sent += nbytes
        self.received += nbytes

    def exchange(self, sends: Messages, receives: Messages, tag: int, lengths: Lengths = ()) -> list[Waitable]:
        """One group of sends and receives; NCCL has no tags."""
        self._count(sends, receives)
        group = self.group
        ops = [dist.P2POp(dist.isend, part, group=group, group_peer=rank) for rank, part in sends]
        ops += [dist.P2POp(dist.irecv, part, group=group, group_peer=rank) for rank, part in receives]
        return list(dist.batch_isend_irecv(ops)) if ops else []

    def gather(self, rows: Sequence[Tensor], tag: int) -> list[Waitable]:
        """A ring or tree of NCCL's own where all rows have one length and lie side by side."""
        nbytes = rows[0].numel()
        start = rows[0].data_ptr()
        if not nbytes or any(
            row.numel() != nbytes or row.data_ptr() != start + i * nbytes for i, row in enumerate(rows)
        ):
            return super().gather(rows, tag)
        self._moved(nbytes * (self.world - 1))
        whole = rows[0].as_strided((self.world * nbytes,), (1,))
        return [all_gather_single(whole, rows[self.rank], group=self.group, async_op=True)]

    def agree(self, values: Sequence[int]) -> list[int]:
        most = torch.tensor(values, device=self.device)
        work: Any = dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._await(work.is_completed)
        work.wait()
        found: list[int] = most.tolist()
        return found

    def share(self, row: bytes) -> list[bytes]:
        own = torch.tensor(list(row), dtype=torch.uint8, device=self.device)
        whole = own.new_empty(self.world * len(row))
        work = all_gather_single(whole, own, group=self.group, async_op=True)
        self._await(work.is_completed)
        work.wait()
        return [bytes(found) for found in whole.view(self.world, -1).tolist()]

    def settle(self) -> None:
        if not torch.cuda.is_current_stream_capturing():
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self.device))
            self._await(done.query)

    def _await(self, is_done: Callable[[], bool]) -> None:
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
        """A kernel that waits for a lost rank ends, which lets the streams go on."""
        self._closed = True
        with contextlib.suppress(RuntimeError, CollectiveError):
            backend_impl(self.group, self.device).abort()

    def synchronize(self, device: torch.device) -> None:
        """Wait for the current stream alone: other streams may be busy with the user's own work."""
        torch.cuda.current_stream(device).synchronize()


def _finish(work: Any) -> None:
    """A collective that torch ran on the current stream gives no work; an older torch does."""
    if work is not None:
        work.wait()


# The verbs of a group itself, without the checks of torch's Python side. asyncOp=False: on the current stream.
_all_to_all: Any = getattr(dist.ProcessGroup, "all_to_all_single", None) or dist.ProcessGroup.alltoall_base
_all_gather: Any = getattr(dist.ProcessGroup, "all_gather_single", None) or dist.ProcessGroup._allgather_base
_TO_ALL: Any = c10d.AllToAllOptions()
_GATHER: Any = c10d.AllgatherOptions()
_TO_ALL.asyncOp = False
_GATHER.asyncOp = False
# torch 2.13 warns on the older names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def timeout_s(group: dist.ProcessGroup) -> float:
    """How long the ranks of a group wait for each other: the shortest timeout of its backends, as it is now."""
    found = [getattr(backend_impl(group, device), "options", None) for device in group._device_types]
    limits = [options._timeout.total_seconds() for options in found if options is not None]
    return min(limits, default=dist.default_pg_timeout.total_seconds())


def mesh_of_nodes(group: Group) -> DeviceMesh | None:
    """`group` itself if it is a mesh of two dimensions: nodes, and the ranks inside each."""
    # The compiler lets nobody ask a ProcessGroup whether it is a mesh, so that is ruled out first.
    if group is None or isinstance(group, dist.ProcessGroup) or not isinstance(group, DeviceMesh):
        return None
    return group if group.ndim == 2 else None


@contextlib.contextmanager
def at_once(group: dist.ProcessGroup) -> Iterator[None]:
    """Let torch's verbs inside run now: under its _coalescing_manager they wait for its end, and nobody for them."""
    coalesced = dist.distributed_c10d._world.pg_coalesce_state
    put_off = coalesced.pop(group, None)
    try:
        yield
    finally:
        if put_off is not None:
            coalesced[group] = put_off


def is_coalescing(group: dist.ProcessGroup) -> bool:
    """Whether torch's verbs on the group are put off; see `at_once`."""
    return group in dist.distributed_c10d._world.pg_coalesce_state


def resolve(group: object) -> dist.ProcessGroup:
    """The process group meant by None (the world), a ProcessGroup or a DeviceMesh of one dimension."""
    if group is None:
        if not dist.is_initialized():
            raise CollectiveError("there is no process group yet: call torch.distributed.init_process_group first")
        world = dist.group.WORLD
        assert world is not None
        return world
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise CollectiveError(
                f"expected a DeviceMesh of one dimension, got {group.ndim}: "
                "slice it (mesh['dp']), or all_reduce with algorithm='hierarchical' on a mesh of two"
            )
        return group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise CollectiveError("this rank is not a member of the group; only its members may call")
    raise CollectiveError(f"expected a ProcessGroup, a DeviceMesh or None, got {group!r}")


def transport(group: dist.ProcessGroup, device: torch.device, tags: Tags) -> Transport:
    name = backend(group, device)
    if name == "nccl":
        # NCCL connects in a group's first call, which all ranks have to make.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        return StreamTransport(group, tags, device)
    if name == "gloo":
        made = PairTransport if device.type == "cpu" else StagedTransport
        return made(group, tags)
    raise CollectiveError(
        f"thinwire's collectives run on gloo and nccl, this group runs {device.type} on {name!r}: make a group with "
        "backend='gloo' or 'nccl' (torch.distributed.new_group) and pass it as group="
    )


# What torch 2.11 to 2.15 call the backends that they build on NCCL.
_NCCL_NAMES = frozenset({"nccl", "nccl-legacy", "nccl2", "nccl-lazy"})


def backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Which backend serves tensors on `device`: "gloo", "nccl" for every kind of NCCL group, or torch's name for it."""
    try:
        name: str = backend_impl(group, device).name()
    except RuntimeError:
        raise CollectiveError(
            f"this group has no backend for {device.type} tensors; initialize it with one, e.g. backend='gloo'"
        ) from None
    return "nccl" if name in _NCCL_NAMES else name


def on_nccl(group: dist.ProcessGroup) -> bool:
    """Whether NCCL serves any of the group's devices."""
    return any(backend(group, device) == "nccl" for device in group._device_types)


def backend_impl(group: dist.ProcessGroup, device: torch.device) -> Any:
    """torch's object behind `group` for tensors on `device`; raises RuntimeError where there is none."""
    public = getattr(dist, "get_backend_impl", None)  # since torch 2.14
    return group._get_backend(device) if public is None else public(group, device)


def barrier(group: dist.ProcessGroup, device: torch.device) -> None:
    """torch's barrier; NCCL gets the device, which it would have to guess."""
    dist.barrier(group=group, device_ids=[device.index] if device.index is not None else None)
