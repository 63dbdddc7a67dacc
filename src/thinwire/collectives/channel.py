"""What thinwire keeps about a group of ranks: its transports, its pipeline, what was decided and measured."""

import atexit
import functools
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import kernels
from thinwire.collectives import groups, transport as transports
from thinwire.collectives.checks import check_step
from thinwire.collectives.cost import Measured
from thinwire.collectives.groups import Group
from thinwire.collectives.peers import CallSite, Failures, Handshake, Lengths
from thinwire.collectives.pipeline import Operation, Pipeline, ScratchRing, broken, refuse, serve
from thinwire.collectives.plan import CallPlan
from thinwire.collectives.programs import CallerWorkspace, Program, StreamWorkspace, Workspace, copying, run_on_stream
from thinwire.collectives.transport import Transport
from thinwire.collectives.work import StreamWork, Work, done_future
from thinwire.errors import CollectiveError, PeerError

_GRACE_S = 0.5  # how long the end of the process waits for pipelines to end by themselves
_END_S = 5.0  # and once their connections are closed: kernels end by themselves
MOST_KINDS = 1024  # of calls that are remembered; ranks make the same calls, so they forget alike


@dataclass
class IssuedCall:
    """A call that counts in the group's order of calls."""

    channel: "Channel"
    site: CallSite
    plan: CallPlan
    outputs: Sequence[Tensor] = ()  # the caller's tensors that it fills
    step: int | None = None  # None: the group counts
    async_op: bool = False
    most_sent: int = 0  # elements that one rank sends in an exchange that was compared


class Channel:
    """Everything about one group, or one mesh of nodes, and one device."""

    def __init__(self, links: tuple[Transport, ...], device: torch.device) -> None:
        kernels.select(device)  # so that a slow backend is announced in the caller's thread
        self.transports = links  # one; two for a mesh: across nodes, inside a node
        self.transport = links[0]
        self.device = device
        self.world = math.prod(link.world for link in links)
        self.plans: dict[str, CallPlan | None] = {}  # by the descriptions that ranks have compared
        self.known: dict[Hashable, CallPlan] = {}  # by raw arguments of calls, and by what fixes a message
        self.measured = Measured()
        self.failures = Failures(links)
        self.handshake = Handshake(links, self.failures)
        self.calls = 0
        self.next_p2p_call = itertools.count(1).__next__  # other ranks count others
        self._failed: str | None = None  # what made the group unusable
        self.lock = threading.RLock()
        self.measuring = threading.RLock()  # not `lock`: callbacks start calls meanwhile
        on_stream = self.transport.on_stream
        has_streams = on_stream and device.type == "cuda"
        # Of blocking programs, which FSDP2 calls from two streams: the one that was used last comes first.
        self.caller_spaces = [CallerWorkspace(device), CallerWorkspace(device)] if on_stream else []
        self._async_spaces = (StreamWorkspace(device), StreamWorkspace(device)) if has_streams else ()
        self._async_index = 0  # the one in use
        self.stream = torch.cuda.Stream(device) if has_streams else None
        self.scratch = ScratchRing(device)
        self.next_step = itertools.count().__next__  # of calls that name none: alike on all ranks
        self._pipeline = Pipeline(self.scratch, self.failures)
        self._inbox: SimpleQueue[Operation | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._registered = all(link.is_registered for link in links)  # False if torch does not list the group

    @property
    def failure(self) -> str | None:
        return self._failed or self._pipeline.failure or self.failures.over

    def issue(
        self,
        planned: CallPlan | str,
        *,
        outputs: Sequence[Tensor] = (),
        step: int | None = None,
        async_op: bool = False,
        lengths: Lengths | None = None,
        anew: bool = False,
    ) -> IssuedCall:
        """Count a call, given by its plan or its description. Compare the first of its kind with the other ranks'.

        `anew`: compare it in any case. If there have been very many kinds of calls, all are forgotten, and compared
        again. All ranks forget at the same call: they count descriptions, however each spells its calls.
        """
        plan = CallPlan(planned) if isinstance(planned, str) else planned
        with self.lock:
            if self.failure is not None:
                raise broken(self.failure)
            known = plan.text in self.plans and not anew
            self.calls += 1  # all ranks make their calls in the same order
            site = CallSite(self.calls, plan.text, known)
        most_sent = 0
        if not known or self.handshake.every_call:
            most_sent = self.handshake.check(site, lengths)
            if len(self.plans) >= MOST_KINDS:
                self.plans.clear()
                self.known.clear()
            self.plans.setdefault(plan.text, None)
        return IssuedCall(self, site, plan, outputs, step, async_op, most_sent)

    def submit(self, operation: Operation, call: IssuedCall) -> Work | None:
        """Queue the operation of a call in the group's pipeline; return its work, or wait for it.

        On a GPU's stream the operation runs as a program: the stream waits, the host does not.
        """
        if self.caller_spaces:
            return self.launch(functools.partial(run_on_stream, operation), operation.memory(), call, in_order=True)
        operation.work = work = Work(list(call.outputs), self._pipeline)
        operation.site = call.site
        operation.groups = tuple(link.group for link in self.transports)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # gloo's thread has no stream of the caller's
            for tensor in operation.memory():  # whose owner may free it before the thread is done with it
                tensor.record_stream(torch.cuda.default_stream(self.device))
        with self.lock:
            if self._thread is None:
                self._start_thread()
            self._inbox.put(operation)
        if self._pipeline.failure is not None:  # the thread has ended, or will
            refuse(self._inbox, self._pipeline.failure)
        if call.async_op:
            return work
        work.wait()
        return None

    def launch(
        self,
        program: Program,
        tensors: Sequence[Tensor],
        call: IssuedCall,
        *,
        written: int = 1,
        in_order: bool = False,
        result: Tensor | None = None,
    ) -> Work | None:
        """Launch the program of a call on the caller's stream or, if asynchronous, on one of the group's.

        The host does not wait, unless torch was told to block in NCCL's calls. The program writes the first `written`
        tensors, the call's outputs or views of them, or copies of those that are not contiguous. Before the first run
        (`is_new`, or the first call of its kind) its kernels are compiled. `in_order` is for operations: they are not
        compiled beforehand, and asynchronous ones share one stream, since they add to the same feedback and statistics.
        Returns an asynchronous call's work (with `result`, a future of it).
        """
        site, outputs, async_op = call.site, call.outputs, call.async_op
        number = 0 if in_order else self.next_step() if call.step is None else check_step(call.step)
        if not in_order and not all(map(Tensor.is_contiguous, tensors)):
            program = functools.partial(copying, program, written)
        if not in_order and getattr(program, "is_new", not site.known):
            program(Workspace(torch.device("meta")), tensors, number)  # a dry run
            kernels.compiled()
        if async_op:
            self._async_index = 0 if in_order else self._async_index ^ 1
        space = self._async_spaces[self._async_index] if async_op and self._async_spaces else None
        lost = None
        work: Any = None
        with self.lock:
            try:
                if space is None:
                    program(self._caller_space() if self.stream else self.caller_spaces[0], tensors, number)
                    if self.transport.blocking:
                        self.settle(site)
                else:
                    with space.entered((*tensors, *outputs)) as stream:
                        program(space, tensors, number)
                        work = StreamWork(list(outputs), stream) if result is None else done_future(result, self.device)
                        if self.transport.blocking:
                            self.settle(site)
            except BaseException as error:
                # It has sent what others wait to go on with: no other call may follow it.
                self._failed = f"{type(error).__name__}: {error}"
                lost = transports.lost_in(error)
                if lost is None:
                    raise
        if lost is not None:  # not above: the other error holds tensors and groups
            raise self.failures.ended(lost.with_traceback(None), site)
        for tensor in outputs:
            if not tensor.is_inference():  # autograd cannot see what a kernel writes through a pointer
                torch.autograd.graph.increment_version(tensor)
        if space is None and async_op:
            work = Work(list(outputs)).finished() if result is None else done_future(result, self.device)
        return work if async_op else None

    def _caller_space(self) -> CallerWorkspace:
        """The workspace that the current stream used before, or the one that was used longest ago."""
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        first, other = self.caller_spaces
        if handle != first.handle and (handle == other.handle or not torch.cuda.is_current_stream_capturing()):
            self.caller_spaces.reverse()
        return self.caller_spaces[0]

    def settle(self, site: CallSite) -> None:
        """Wait for what the current stream was given by a call; raises PeerError."""
        self.failures.guard(site, self.transport.settle)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch held."""
        spaces: list[Workspace] = [*self.caller_spaces, *self._async_spaces]
        return self.scratch.nbytes + sum(space.buffer.numel() for space in spaces)

    def _is_over(self) -> bool:
        """In the pipeline's thread, which is idle: whether it ends, since the group was destroyed."""
        with self.lock:
            if self._thread is not threading.current_thread() or not self._inbox.empty():
                return False
            if not self._registered or all(link.is_registered for link in self.transports):
                return False
            self._thread = None
            self.handshake.close()
            return True

    def close(self, *, wait: bool = True) -> None:
        """End the threads once they have nothing more to do; another operation would start new ones.

        If `wait`, idle ones have ended now; the process's end waits for the others ([Note: Threads end first]).
        """
        self.handshake.close(wait=wait)
        with self.lock:
            thread, self._thread = self._thread, None
            self._inbox.put(None)
            self._inbox = SimpleQueue()
        if wait and thread is not None and thread is not threading.current_thread() and self._pipeline.idle:
            thread.join(_GRACE_S)

    def _start_thread(self) -> None:
        name = f"thinwire-{self.transport.group.group_name}"
        how = self._inbox, self._pipeline, self._is_over
        thread = threading.Thread(target=serve, args=how, name=name, daemon=True)
        _threads[thread] = self._inbox, weakref.WeakSet(self.transports)
        thread.start()
        self._thread = thread


def bounded(kept: dict[Any, Any]) -> dict[Any, Any]:
    """Return `kept`, about to get another entry; if it has MOST_KINDS, it is cleared first."""
    if len(kept) >= MOST_KINDS:
        kept.clear()
    return kept


@dataclass
class _GroupState:
    sequences: Iterator[int] = field(default_factory=itertools.count)  # of the tags of all devices
    transports: dict[torch.device, Transport] = field(default_factory=dict)
    channels: dict[tuple[torch.device, str | None], Channel] = field(default_factory=dict)  # by device and inner group


# What is kept about a group is dropped with it: channels and transports refer to their groups weakly.
_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupState]" = weakref.WeakKeyDictionary()
# What ends a pipeline's thread, even if its channel and group are gone: None in its inbox, or closing its transports.
_Ends = tuple["SimpleQueue[Operation | None]", "weakref.WeakSet[Transport]"]
_threads: "weakref.WeakKeyDictionary[threading.Thread, _Ends]" = weakref.WeakKeyDictionary()
_of_parent: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()  # groups of the process that forked this one
_lock = threading.Lock()


@atexit.register
def _end_threads() -> None:
    """[Note: Threads end first] No thread of ours may run when the interpreter ends.

    A daemon thread that returns from C++ then, or frees the last reference to a group, aborts the process. So every
    thread is joined here: operations under way have a moment to end, then their connections are closed. What a thread
    holds is freed before its function returns: later, nothing would wait for it.
    """
    left = {thread: ends for thread, ends in _threads.items() if thread.is_alive()}
    for inbox, _ in left.values():
        inbox.put(None)
    deadline = time.monotonic() + _GRACE_S
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    for thread, (_, links) in left.items():
        if thread.is_alive():
            for link in links:
                link.close()
    for thread in left:
        thread.join(_END_S)


def _forked() -> None:
    """A child has none of the threads, and may not send on its parent's connections."""
    _of_parent.update(dist.distributed_c10d._world.pg_map if dist.is_initialized() else ())
    _of_parent.update(_groups)  # with those that torch's list does not have
    _threads.clear()
    _groups.clear()


os.register_at_fork(after_in_child=_forked)


def channel_of(group: Group, device: torch.device) -> Channel:
    """The channel of a group for tensors on `device`, or of a mesh: nodes along dimension 0, their ranks along 1."""
    mesh = groups.mesh_of_nodes(group)
    members = [groups.resolve(group)] if mesh is None else [groups.inner(one) for one in mesh.get_all_groups()]
    key = device, None if mesh is None else str(members[1].group_name)
    state = _groups.get(members[0])
    found = None if state is None else state.channels.get(key)
    return found or _new_channel(members, device, key)


def _new_channel(
    members: Sequence[dist.ProcessGroup], device: torch.device, key: tuple[torch.device, str | None]
) -> Channel:
    if any(member in _of_parent for member in members):
        raise CollectiveError(
            "this process was forked from one that has the group: make a group in the child itself, or start processes "
            "with the method 'spawn' or 'forkserver'"
        )
    with _lock:
        state = _groups.setdefault(members[0], _GroupState())
        if key not in state.channels:
            made = Channel(tuple(_transport(member, device) for member in members), device)
            # It may run while any thread starts, and then Python cannot join another: so it does not wait.
            weakref.finalize(members[0], made.close, wait=False)
            state.channels[key] = made
        return state.channels[key]


def _transport(group: dist.ProcessGroup, device: torch.device) -> Transport:
    state = _groups.setdefault(group, _GroupState())
    if device not in state.transports:
        state.transports[device] = transports.transport(group, state.sequences, device)
    return state.transports[device]


def known_channel(group: dist.ProcessGroup, device: torch.device) -> Channel | None:
    """Return the channel of a group; None if the group was not used before."""
    state = _groups.get(groups.inner(group))
    return None if state is None else state.channels.get((device, None))


def close(group: dist.ProcessGroup) -> None:
    """End the threads of a group that is about to be shut down."""
    state = _groups.pop(group, None)
    for channel in [] if state is None else list(state.channels.values()):
        channel.close()


def wait_in(group: dist.ProcessGroup, future: "torch.futures.Future[Tensor]", tensor: Tensor) -> None:
    """Wait for the average of a tensor over a group: torch makes RuntimeErrors of what a future's callbacks raise."""
    try:
        future.wait()
        return
    except RuntimeError:
        channel = known_channel(group, tensor.device)
        if channel is None or channel.failures.over is None:
            raise
    raise PeerError(channel.failures.over)


class Traffic(NamedTuple):
    """Bytes of wires that this rank handed to the transport and took from it."""

    sent: int
    received: int


def traffic(group: Group = None) -> Traffic:
    """What thinwire's compressed collectives have moved in a group. Calls that torch itself serves are not counted."""
    state = _groups.get(groups.resolve(group))
    links = [] if state is None else list(state.transports.values())
    return Traffic(sum(link.sent for link in links), sum(link.received for link in links))
