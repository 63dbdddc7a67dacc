"""A process group that compresses by itself: init_process_group("cpu:thinwire"), "cuda:thinwire" or both.

[Note: Inner group] Inside is a plain group of gloo and NCCL that nobody else uses. Calls for which there is a rule go
to thinwire's verbs on it, all others to torch's own. Every call of torch's is defined here: one that is not, torch
would run on the same backends, but with the GIL held, while gloo's threads may need it to free a tensor. thinwire's
verbs, compress_ddp and compress_fsdp take the inner group of such a group (`groups.resolve`), so nothing is compressed
twice. There is no error feedback: a call does not say whose numbers it has.
"""

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import (
    Work,
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    broadcast,
    reduce_scatter_tensor,
)
from thinwire.collectives.channel import channel_of, close
from thinwire.collectives.groups import backend
from thinwire.collectives.point_to_point import P2PRequest, start_transfers
from thinwire.collectives.sums import flat_algorithm
from thinwire.collectives.work import future_in_thread
from thinwire.errors import CollectiveError
from thinwire.group import torch_internals
from thinwire.group.rules import GroupRules, environment_rules

_UNSET = timedelta()  # or less
_SUM, _AVG, _PREMUL_SUM = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM


class GroupOptions(torch_internals.Options):
    """pg_options of init_process_group, new_group and init_device_mesh: the rules of one group.

    `rules` reads "all_reduce=int8@16384; send[bfloat16]=int8": an operation (all_reduce, reduce_scatter, all_gather,
    all_to_all, broadcast, send), perhaps a dtype, a codec, perhaps the fewest elements. The first that fits decides,
    and what fits none travels as torch sends it. None: those of the default group, of THINWIRE_RULES, or the defaults.
    """

    def __init__(self, rules: str | None = None) -> None:
        super().__init__("thinwire")
        self.rules = None if rules is None else GroupRules(rules)

    def __reduce__(self) -> Any:
        return GroupOptions, (None if self.rules is None else str(self.rules),)

    def __repr__(self) -> str:
        return f"GroupOptions({'' if self.rules is None else repr(str(self.rules))})"


class Together(Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        dist.Work.__init__(self)
        self._works = [work for work in works if work is not None]

    def wait(self, *timeout: Any) -> bool:
        for work in self._works:
            work.wait(*timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        self.wait()
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda _: [tensor for one in futures for tensor in one.value()])


class GroupWork(Together):
    """A compressed call on the CPU, under way.

    Its future completes in a thread of its own: callbacks may wait for other calls of the group, as PowerSGD's do,
    while the group's thread serves those. `then` makes its error one that C++ sees, which DDP's reducer is in.
    """

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        return future_in_thread(self.result).then(lambda done: done.value())


_DONE = Work([]).finished()  # of a blocking call, which torch waits for once more


class ThinwireGroup(torch_internals.PythonGroup):  # type: ignore[misc]
    """A group whose calls travel in the codecs of its rules. See [Note: Inner group]."""

    def __init__(self, inner: dist.ProcessGroup, rules: GroupRules, world_ranks: list[int]) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner
        self.rules = rules
        self._how = functools.lru_cache(maxsize=1024)(functools.partial(_how, rules, inner.size()))
        self._window: _Window | None = None
        torch_internals.adopt(self, inner)
        torch_internals.enter_ranks(inner, world_ranks)
        try:  # before any data moves
            channel_of(inner, torch.device("cpu")).issue(f"a group with the rules {rules}", anew=True)
        except BaseException:
            torch_internals.leave_ranks(inner)
            raise

    def getBackendName(self) -> str:  # noqa: N802
        return "thinwire"

    def get_group_store(self) -> Any:
        return self.inner.get_group_store()

    # --- sums ---

    def allreduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        how = self._found("all_reduce", tensors)
        op = None if how is None or more or named else _sum(opts)
        if op is None:
            return self._plain("allreduce", tensors, opts, *more, **named)
        return self._run(how, opts, all_reduce, tensors[0], op)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        how = self._found("all_reduce", tensors, several=True)
        op = None if how is None else _sum(opts)
        if op is None:
            return self._plain("allreduce_coalesced", tensors, opts)
        return self._run(how, opts, all_reduce_coalesced, tensors, op)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        how = self._found("reduce_scatter", [input])
        op = None if how is None else _sum(opts)
        if op is None:
            return self._plain("reduce_scatter_single", output, input, opts)
        return self._run(how, opts, reduce_scatter_tensor, output, input, op)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if _sum(opts) is not None and all(self._found("reduce_scatter", [input]) for input in inputs):
            return self._each(self.reduce_scatter_single, outputs, inputs, opts)
        return self._plain("reduce_scatter_single_coalesced", outputs, inputs, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> Any:
        parts = inputs[0] if len(outputs) == 1 and isinstance(inputs[0], list) and not named else []
        even = {part.numel() for part in parts} == {outputs[0].numel()} if parts else False
        if not even or _sum(opts) is None or self._found("reduce_scatter", parts, several=True) is None:
            return self._plain("reduce_scatter", outputs, inputs, opts, **named)
        whole = torch.cat([part.reshape(-1) for part in parts])
        return self.reduce_scatter_single(outputs[0], whole, opts)

    # --- moves ---

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        how = self._found("all_gather", [output])
        if how is None:
            return self._plain("all_gather_single", output, input, opts)
        return self._run(how, opts, all_gather_into_tensor, output, input)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if all(self._found("all_gather", [output]) for output in outputs):
            return self._each(self.all_gather_single, outputs, inputs, opts)
        return self._plain("all_gather_single_coalesced", outputs, inputs, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> Any:
        known = len(inputs) == 1 and isinstance(outputs[0], list) and not named
        how = self._found("all_gather", outputs[0], several=True) if known else None
        if how is None:
            return self._plain("allgather", outputs, inputs, opts, **named)
        return self._run(how, opts, all_gather, outputs[0], inputs[0])

    def broadcast(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        source = getattr(opts, "rootRank", None)
        how = self._found("broadcast", tensors) if source is not None and not more and not named else None
        if how is None:
            return self._plain("broadcast", tensors, opts, *more, **named)
        return self._run(how, opts, broadcast, tensors[0], group_src=source)

    def all_to_all_single(self, output: Tensor, input: Tensor, out: Any, sent: Any, opts: Any = None) -> Any:
        uneven = bool(out) or bool(sent)
        how = self._found("all_to_all", [input], sized=not uneven)
        if how is None:
            return self._plain("all_to_all_single", output, input, out, sent, opts)
        return self._run(how, opts, all_to_all_single, output, input, list(out) or None, list(sent) or None)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        how = self._found("all_to_all", inputs, several=True, sized=False)
        if how is None:
            return self._plain("alltoall", outputs, inputs, opts)
        return self._run(how, opts, all_to_all, outputs, inputs)

    # --- messages between two ranks ---

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        return self._send_recv(True, tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        return self._send_recv(False, tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._send_recv(False, tensors, None, tag)

    def _send_recv(self, sent: bool, tensors: Any, peer: int | None, tag: int) -> Any:
        how = self._found("send", tensors)
        request = P2PRequest(sent, tensors[0], peer, tag, how["codec"] if how else None)
        if self._window is not None and self._window.gathers:
            self._window.requests.append(request)
            return None
        if request.codec is not None:
            return self._noted(start_transfers([request], self.inner)[0])
        if request.peer is None:
            return self._plain("recv_anysource", tensors, request.tag)
        return self._plain("send" if sent else "recv", tensors, request.peer, request.tag)

    # --- coalescing: calls start at once; NCCL's messages between two ranks wait for the end, and then go as one ---

    def _start_coalescing(self, device: torch.device) -> None:
        if self._window is not None:
            raise CollectiveError("this group is coalescing calls already: end that before another begins")
        self._window = _Window(backend(self.inner, device) == "nccl", [], [])

    def _end_coalescing(self, device: torch.device) -> Any:
        window, self._window = self._window, None
        if window is None:
            raise CollectiveError("this group is not coalescing calls: begin with _start_coalescing")
        return Together([*window.works, *(start_transfers(window.requests, self.inner) if window.requests else [])])

    # --- the group itself ---

    def split_group(
        self, ranks: list[int], timeout: Any = None, opts: Any = None, group_name: Any = None, *more: Any, **named: Any
    ) -> Any:
        is_ours = isinstance(opts, GroupOptions)
        inner: Any = self.inner
        plain = inner.split_group(ranks, timeout, None if is_ours else opts, group_name, *more, **named)
        if plain is None:
            return None
        rules = (opts.rules if is_ours else None) or self.rules
        world_ranks = dist.get_process_group_ranks(self.inner)
        return ThinwireGroup(plain, rules, [world_ranks[rank] for rank in ranks])

    def shutdown(self) -> None:
        self._leave()
        self.inner.shutdown()

    def abort(self) -> None:
        self._leave()
        self.inner.abort()

    def _leave(self) -> None:
        close(self.inner)
        torch_internals.leave_ranks(self.inner)

    # --- what the calls share ---

    def _found(self, op: str, tensors: Any, *, several: bool = False, sized: bool = True) -> dict[str, Any] | None:
        """How a call on these tensors travels; None leaves it to torch. `sized`: all ranks know how many elements."""
        if not isinstance(tensors, list) or not tensors or (len(tensors) > 1 and not several):
            return None
        first = tensors[0]
        numel = first.numel() if len(tensors) == 1 else sum(tensor.numel() for tensor in tensors)
        how: dict[str, Any] | None = self._how(op, first.dtype, numel if sized else None)
        alike = (t.layout == first.layout and t.dtype == first.dtype and t.device == first.device for t in tensors)
        return how if how and first.layout == torch.strided and (len(tensors) == 1 or all(alike)) else None

    def _plain(self, name: str, *args: Any, **named: Any) -> Any:
        """torch's own call, of which options that were not given are left out."""
        return self._noted(torch_internals.method(name)(self.inner, *args[: -1 if args[-1] is None else None], **named))

    def _run(self, how: Any, opts: Any, verb: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """A verb of thinwire. One with a timeout of its own is started here, and waited for by torch."""
        is_async, limit = opts is None or opts.asyncOp, None
        first = args[0][0] if isinstance(args[0], list) else args[0]
        if opts is not None and opts.timeout > _UNSET:
            is_async, limit = True, opts.timeout
            if backend(self.inner, first.device) == "nccl":
                raise CollectiveError(f"a compressed call on NCCL has the group's timeout alone, got its own: {limit}")
        work = verb(*args, group=self.inner, async_op=is_async, **more, **how)
        if limit is not None:
            work.limit = limit
        if type(work) is Work and first.device.type == "cpu":
            work = GroupWork([work])
        return self._noted(_DONE if work is None else work)

    def _noted(self, work: Any) -> Any:
        if self._window is not None:
            self._window.works.append(work)
        return work

    def _each(self, call: Callable[..., Any], outputs: Any, inputs: Any, opts: Any) -> Any:
        return Together([call(output, input, opts) for output, input in zip(outputs, inputs, strict=True)])


def _forwarded(name: str) -> Callable[..., Any]:
    return lambda self, *args, **named: self._noted(getattr(self.inner, name)(*args, **named))


for _name in ("allgather_coalesced", "barrier", "gather", "gather_into_tensor", "gather_single", "reduce", "scatter"):
    setattr(ThinwireGroup, _name, _forwarded(_name))  # never compressed
for _new, _old in torch_internals.OLDER.items():
    setattr(ThinwireGroup, _old, getattr(ThinwireGroup, _new))


class _Window(NamedTuple):
    """Calls that are being coalesced."""

    gathers: bool  # messages between two ranks
    works: list[Any]
    requests: list[P2PRequest]


def create(options: Any, backend_options: Any) -> ThinwireGroup:
    """What torch calls for the backend "thinwire"."""
    if backend_options is not None and not isinstance(backend_options, GroupOptions):
        raise CollectiveError(
            f"pg_options of a thinwire group must be thinwire.GroupOptions, got {type(backend_options).__name__}"
        )
    world = dist.group.WORLD
    rules = None if backend_options is None else backend_options.rules
    if rules is None:
        rules = world.rules if isinstance(world, ThinwireGroup) else environment_rules()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return ThinwireGroup(torch_internals.plain_group(options), rules, ranks)


def _how(rules: GroupRules, world: int, operation: str, dtype: torch.dtype, numel: int | None) -> Any:
    """The codec and algorithm of a call of some size, as verbs take them; None leaves it to torch."""
    codec = rules.find(operation, dtype, numel) if world > 1 else None
    if codec is None:
        return None
    algorithm = flat_algorithm("auto", [codec], world) if operation == "all_reduce" else "compressed"
    return {"codec": str(codec), "algorithm": algorithm}  # a string is found faster in a table


def _sum(opts: Any) -> Any:
    """The op of a sum, None of another call. One without a factor is torch's constant: known calls are found by it."""
    op = _SUM if opts is None else opts.reduceOp
    for name in (_SUM, _AVG):  # each look at an op of torch's takes a microsecond
        if op == name:
            return name
    return op if op == _PREMUL_SUM else None
