"""Groups of ranks, and the ways bytes travel between them.

[Note: Pairs, not collectives] On gloo bytes travel as tagged messages between pairs of ranks. A tagged message has no
place in the group's order of collectives: it cannot be mixed up with what the user's script runs on the same group in
the meantime, whichever thread it comes from, and no second group has to be made. It is also faster: one all_to_all of
12.5 MB per rank took 187 ms on a 1 Gbit link, the same bytes between pairs 107 (ideal: 105).
On NCCL, messages are collectives on the stream of the call (programs.py); what has no launches of its own goes in
grouped messages, issued inline.
"""

import threading
import weakref
from collections.abc import Generator, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from thinwire.errors import CollectiveError
from thinwire.kernels import is_ahead
from thinwire.ranges import ranged

Group = dist.ProcessGroup | DeviceMesh | None  # None is the world
Message = tuple[int, Tensor]  # the other rank, and the bytes for it or from it

_TAGS_FROM = 1 << 30  # below are the user's own tags
_NUM_TAGS = 1 << 30


class Waitable(Protocol):
    """Something under way."""

    def wait(self) -> object:
        """Return when it is done (on a stream: make the current stream wait)."""


Stages = Generator[Sequence[Waitable], None, None]  # work that yields, between its stages, what it waits for


class Tags:
    """The tags of a group, drawn in program order, whatever the device: its messages share one space."""

    def __init__(self) -> None:
        self._next = 0
        self._lock = threading.Lock()

    def draw(self, count: int) -> int:
        """The first of `count` consecutive tags that no other operation in flight uses."""
        with self._lock:
            first = self._next if self._next + count <= _NUM_TAGS else 0
            self._next = first + count
        return _TAGS_FROM + first


class Transport:
    """Moves bytes between the ranks of one group. Ranks are numbered as in the group."""

    on_stream: ClassVar[bool] = False  # messages are ordered by a stream of the GPU; the host never waits for them
    has_all_ops: ClassVar[bool] = False  # the backend itself averages, and multiplies before it sums

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

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> list[Waitable]:
        """Start sending and receiving. Buffers belong to the transport until what is returned was waited for."""
        raise NotImplementedError

    def gather(self, rows: Sequence[Tensor], tag: int) -> list[Waitable]:
        """Start sending this rank's row to all others and receiving theirs; empty rows do not travel."""
        others = [(self.rank + i) % self.world for i in range(1, self.world)]
        sends = [(rank, rows[self.rank]) for rank in others if rows[self.rank].numel()]
        return self.exchange(sends, [(rank, rows[rank]) for rank in others if rows[rank].numel()], tag)

    def synchronize(self, device: torch.device) -> None:
        """Make the host wait for what the transport was given, where waiting for a message does not."""

    def _count(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.sent += sum(part.numel() for _, part in sends)
        self.received += sum(part.numel() for _, part in receives)


class PairTransport(Transport):
    """gloo: tagged messages between pairs. See [Note: Pairs, not collectives]."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> list[Waitable]:
        """Receives come first in what is returned."""
        self._count(sends, receives)
        group = self.group
        works: list[Waitable] = [group.recv([part], rank, tag) for rank, part in receives]
        works += [group.send([part], rank, tag) for rank, part in sends]
        return works


class StagedTransport(PairTransport):
    """gloo between GPUs: wires are copied through the host."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> list[Waitable]:
        landing = [(rank, torch.empty(part.shape, dtype=part.dtype)) for rank, part in receives]
        works = super().exchange([(rank, part.cpu()) for rank, part in sends], landing, tag)
        arrivals = [_Arrival(work, host, part) for work, (_, host), (_, part) in zip(works, landing, receives)]  # noqa: B905
        return [*arrivals, *works[len(receives) :]]


class _Arrival:
    """A message that goes on to the device once it has come."""

    def __init__(self, work: Waitable, host: Tensor, target: Tensor) -> None:
        self._work = work
        self._host = host
        self._target = target

    def wait(self) -> None:
        self._work.wait()
        self._target.copy_(self._host)


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

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> list[Waitable]:
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
        self.sent += nbytes * (self.world - 1)
        self.received += nbytes * (self.world - 1)
        whole = rows[0].as_strided((self.world * nbytes,), (1,))
        return [all_gather_single(whole, rows[self.rank], group=self.group, async_op=True)]

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
    """How long the ranks of a group wait for each other: what init_process_group or new_group was given."""
    limits = [
        options._timeout.total_seconds()
        for device in group._device_types
        if (options := getattr(group._get_backend(device), "options", None)) is not None
    ]
    return min(limits, default=dist.default_pg_timeout.total_seconds())


def mesh_of_nodes(group: Group) -> DeviceMesh | None:
    """`group` itself if it is a mesh of two dimensions: nodes, and the ranks inside each."""
    # The compiler lets nobody ask a ProcessGroup whether it is a mesh, so that is ruled out first.
    if group is None or isinstance(group, dist.ProcessGroup) or not isinstance(group, DeviceMesh):
        return None
    return group if group.ndim == 2 else None


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
        return PairTransport(group, tags) if device.type == "cpu" else StagedTransport(group, tags)
    raise CollectiveError(f"thinwire's collectives run on gloo and nccl, this group runs {device.type} on {name!r}")


def backend(group: dist.ProcessGroup, device: torch.device) -> str:
    try:
        name: str = group._get_backend(device).name()
    except RuntimeError:
        raise CollectiveError(
            f"this group has no backend for {device.type} tensors; initialise it with one, e.g. backend='gloo'"
        ) from None
    return name


def barrier(group: dist.ProcessGroup, device: torch.device) -> None:
    """torch's barrier; NCCL is told the device, which it would have to guess."""
    dist.barrier(group=group, device_ids=[device.index] if device.index is not None else None)
