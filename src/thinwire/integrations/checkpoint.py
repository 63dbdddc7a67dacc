"""Saves and loads the state of a compressed run, also onto another number of ranks.

[Note: Layout] DDP rebuilds its buckets after the first iteration (with a static graph after the second), and how a
number is rounded depends on the block it falls into. A resumed run starts with DDP's first buckets again, whereas the
run it continues had the rebuilt ones. So a checkpoint holds the layout. Until DDP has rebuilt its buckets, a resumed
run collects the gradients of each bucket of *that* layout from whatever buckets DDP passes: the same bits. Where other
parameters are frozen than before, the bits cannot be the same, and the rest travels in DDP's own buckets.
"""

import contextlib
import functools
import json
import os
import reprlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import feedback, schema
from thinwire.codecs.checks import is_int
from thinwire.collectives import torch_verbs
from thinwire.collectives.groups import on_nccl
from thinwire.collectives.work import fail_future, new_future
from thinwire.errors import CollectiveError
from thinwire.integrations.choice.options import FAMILIES
from thinwire.integrations.models import Names, ParameterNames
from thinwire.integrations.sync import ByName, Future, GradientSet, GradientSync

VERSION = 1
State = dict[str, Any]
Layout = Sequence[Names]  # the parameters of every bucket, in order
_RESTORED_STEPS = 3  # after which DDP has its final buckets; a static graph takes two
Loaded = tuple[int, Layout | None]  # the step, and what `Restorer.restore` takes


def export(sync: GradientSync, layout: Layout, step: int, group: dist.ProcessGroup, world: int | None = None) -> State:
    """What this rank saves or, if `world` is given, zeros for what it needs of what `world` ranks saved."""
    memories = sync.memories
    remembered = sync.chooser.policy.remembered(sync.chooser.sizes)
    meant = {name: size for name, size in remembered.items() if size[1] == "ef21"}
    dtype = memories.residuals.dtype
    common = common_of(sync, group.rank(), group.size(), world, lambda held: _complete(held, remembered, dtype))
    mean = _complete(memories.means.read() if world is None else {}, meant, torch.float32)
    return {**common, "step": step, "layout": [list(names) for names in layout], "mean": mean}


def common_of(
    sync: GradientSync,
    rank: int,
    ranks: int,
    world: int | None,
    saved: Callable[[ByName], ByName],
    column: str = "",
) -> State:
    """The fields of all states. `saved`: what a state holds of what this rank remembers; `column`: ends ranks' keys."""
    wanted = [rank] if world is None else range(rank, world, ranks)
    residuals = sync.memories.residuals.read() if world is None else {}
    errors = sorted(sync.tally.errors_by_name().items()) if world is None else []
    return {
        "version": VERSION,
        "world": ranks if world is None else world,
        "feedback": [[name, kind] for name, kind in sync.memories.kinds.items()],
        "decisions": sync.chooser.state_dict(),
        "errors": {f"{k}{column}": [list(pair) for pair in errors] for k in wanted},
        "ranks": {f"{k}{column}": saved(residuals) for k in wanted},
    }


def _complete(values: ByName, remembered: Mapping[str, tuple[int, str]], dtype: torch.dtype) -> dict[str, Tensor]:
    """`values`, with zeros for parameters that remember nothing yet: a checkpoint always has the same keys."""
    zeros = {name: torch.zeros(numel, dtype=dtype) for name, (numel, _) in remembered.items() if name not in values}
    return {**zeros, **{name: value.to("cpu", dtype) for name, value in values.items()}}


def gather(own: State, group: dist.ProcessGroup | None, column: str = "") -> State:
    """One state of all ranks, on the first rank; an empty one on the others."""
    (residuals,), (lost,) = own["ranks"].values(), own["errors"].values()
    found, errors = gather_parts(residuals, group, lost)
    ranks = {f"{rank}{column}": part for rank, part in enumerate(found)}
    return {**own, "ranks": ranks, "errors": dict(zip(ranks, errors, strict=True))} if found else {}


def gather_parts(
    local: ByName, group: dist.ProcessGroup | None, note: Any = None
) -> tuple[list[dict[str, Tensor]], list[Any]]:
    """Every rank's tensors by name, and every rank's note, on the first rank of the group; empty lists on the others.

    Every rank calls it. What a rank does not have is zeros. Tensors travel one by one, so that only the first rank
    holds more than its own. None is a group of this rank alone.
    """
    if group is None or group.size() == 1:
        return [dict(local)], [note]
    device = device_of(group)
    sizes = {name: (value.shape, str(value.dtype).removeprefix("torch.")) for name, value in local.items()}
    code = float(zlib.crc32(json.dumps(sizes, sort_keys=True).encode()))
    most, less = torch_verbs.agree("state_dict", (group,), device, [code, -code], dist.ReduceOp.MAX)
    all_ranks = _exchange((sizes if most > -less else {}, note), group, device)  # what all have is not sent
    found: list[dict[str, Tensor]] = [{} for _ in all_ranks] if group.rank() == 0 else []
    for has, _ in all_ranks:
        sizes |= {name: size for name, size in has.items() if name not in sizes}
    for name, (shape, dtype) in sorted(sizes.items()):
        value = local[name] if name in local else torch.zeros(shape, dtype=getattr(torch, dtype))
        parts = [torch.empty_like(value, device=device) for _ in found]
        torch_verbs.gather("state_dict", value.to(device), parts, group)
        for named, part in zip(found, parts, strict=True):
            named[name] = part.cpu()
    return found, [note for _, note in all_ranks] if found else []


def _exchange(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Every rank's value, which travels as JSON, on all ranks."""
    text = json.dumps(value).encode()
    (longest,) = torch_verbs.agree("state_dict", (group,), device, [len(text)], dist.ReduceOp.MAX)
    texts = torch.zeros(group.size(), int(longest), dtype=torch.uint8)
    texts[group.rank(), : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = texts.to(device)
    torch_verbs.combine("state_dict", texts, dist.ReduceOp.SUM, group)
    return [json.loads(row.numpy().tobytes().rstrip(b"\0")) for row in texts.cpu()]


def write(path: Path, state: State) -> None:
    """Write a state to a file in one move: a process that is killed leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        torch.save(state, file)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which replaces `path` as a whole at the end; after an error nothing is left of it."""
    new = path.with_name(f".{path.name}.new")  # what a killed process left of it is overwritten
    try:
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device of a group's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if on_nccl(group) else torch.device("cpu")


_LOST = schema.field("a squared error", lambda v: (is_int(v) or isinstance(v, float)) and not v < 0)
_DECISIONS = {
    "optimizer": schema.one_of("", *FAMILIES),
    "moments": schema.FLAG,
    "chosen": schema.field('"" or a codec', lambda value: value == "" or schema.is_codec(value)),
    "why": schema.TEXT,
    "widths": schema.pairs(schema.TEXT, schema.CODEC),
}


def common_rules(known: schema.Rule) -> dict[str, schema.Rule]:
    """The rules of the fields that all states have; `known` is that of a parameter's name."""
    return {
        "world": schema.RANKS,
        "feedback": schema.pairs(schema.TEXT, schema.one_of(*feedback.KINDS)),
        "decisions": schema.fields(_DECISIONS),
        "errors": schema.each(schema.TEXT, lambda _: schema.pairs(known, _LOST)),  # which need not be finite
    }


def inherited(
    states: Sequence[Mapping[str, Any]],
    rank: int,
    world: int,
    advice: str,
    column: str = "",
    check: schema.Rule = lambda *_: None,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What a rank remembers of these states (`feedback.deal`), and its errors if the world is as large as theirs."""
    old = states[0]["world"]
    keyed = {key: part for state in states for key, part in state["ranks"].items()}
    parts = {k: keyed[key] for k in range(old) if (key := f"{k}{column}") in keyed}
    wanted = range(rank, old, world)
    if not set(wanted) <= parts.keys():
        raise CollectiveError(
            f"load_state_dict: rank {rank} of {world} needs what ranks {reprlib.repr(list(wanted))} of {old} saved, "
            f"got that of {reprlib.repr(list(parts))}: {advice}"
        )
    for k in wanted:
        check(f"ranks[{k}{column}]", parts[k])
    residuals = feedback.deal({k: parts[k] for k in wanted}, old, rank, world)
    errors = {k: dict(found) for state in states for k, found in state["errors"].items()}
    return residuals, errors.get(f"{rank}{column}", {}) if old == world else {}


@schema.reading()
def read(
    states: Sequence[Mapping[str, Any]],
    group: dist.ProcessGroup,
    names: ParameterNames,
    sync: GradientSync,
    advice: str = "load_state_dict([torch.load(f) for f in files]) with the files of all ranks",
    at: str = "",
) -> Callable[[], Loaded]:
    """Check these states and return a function that loads them on this rank and cannot fail.

    What rank k remembered goes to rank k % world. at: the field of a larger state that holds them.
    """

    def is_known(name: Any) -> bool:
        return isinstance(name, str) and (not names.from_model or names.size(name) is not None)

    def remembered(name: str) -> schema.Rule:
        size = names.size(name)
        return schema.numbers(None if size is None else (size.numel,))

    rank, world = group.rank(), group.size()
    known = schema.field("a parameter of this model", is_known)
    rules = {
        **common_rules(known),
        "step": schema.STEPS,
        "layout": schema.parts(known),
        "mean": schema.each(known, remembered),
        "ranks": schema.each(schema.RANK, lambda _: schema.each(known, remembered)),
    }
    head = schema.head_of(states, VERSION, "step", at)
    for state in states:
        schema.fields(rules)(at, state)
    layout = [tuple(found) for found in head["layout"]] if head["world"] == world and head["layout"] else None
    residuals, errors = inherited(states, rank, world, advice)
    remembered_of = {name for state in states for part in state["ranks"].values() for name in part}

    def load() -> Loaded:
        resting = {} if names.frozen_travel else names.frozen
        lost = {name: error for name, error in errors.items() if name not in resting}
        sync.load(head, head["step"], residuals, head["mean"], lost)
        loaded = {*errors, *remembered_of} - {*resting}
        names.sizes |= {name: size for name, size in names.frozen.items() if name in loaded}  # DDP may pass them
        return int(head["step"]), layout

    return load


class Restorer:
    """Averages gradients in the buckets of a checkpoint until DDP has the same. See [Note: Layout]."""

    def __init__(self, average: Callable[[GradientSet, Tensor], "Future[Tensor]"]) -> None:
        self._average = average
        self._last: list[Names] = []  # buckets of the last step
        self.restore(None)

    @property
    def layout(self) -> list[Names]:
        """For a checkpoint: the buckets of the last step, or those that the next one has to restore."""
        return self._last if self._wanted is None else self._wanted

    def restore(self, layout: Layout | None, *, named: bool = False) -> None:
        """Start over, with these buckets or, if there are none, with DDP's own; `named`: by a model's own names."""
        self._wanted = None if layout is None else list(layout)
        self._named = named
        self._passed: list[Names] = []  # DDP's own buckets of this step
        self._earlier: list[list[Names]] = []  # those of the steps before, while restoring
        self._held: dict[str, tuple[torch.Size, Tensor]] = {}
        self._awaiting: list[tuple[Tensor, Future[Tensor], Any]] = []  # DDP's buckets of what is held

    def hold(self, gradients: GradientSet, output: Tensor) -> "Future[Tensor] | None":
        """Hold a DDP bucket's gradients until the end of the step; None: average it as it is."""
        self._passed.append(gradients.names)
        if self._wanted is None or gradients.names in self._wanted:
            return None
        future = new_future(output.device)
        self._awaiting.append((output, future, gradients.weigh and gradients.weigh()))
        for name, shape, view in zip(gradients.names, gradients.shapes, gradients.views, strict=True):
            self._held[name] = shape, view
        return future.then(Future.value)  # DDP, in C++, sees an error only of a callback

    def end_step(self) -> None:
        """Note the step's buckets for a checkpoint; average what was held."""
        passed, self._passed = self._passed, []
        if not passed:
            return
        self._last = passed if self._wanted is None else self._send(self._wanted, passed)
        if self._wanted is not None:
            # Stop restoring once DDP has the restored buckets itself, or has settled on others.
            settled = set(passed) == set(self._wanted) or any(before != passed for before in self._earlier)
            if settled or len(self._earlier) == _RESTORED_STEPS:
                self.restore(None)
            self._earlier.append(passed)

    def _send(self, wanted: Sequence[Names], passed: Sequence[Names]) -> list[Names]:
        """Average what is held in the buckets of the checkpoint, and what these lack in DDP's own; all of them."""
        held, self._held = self._held, {}
        awaiting, self._awaiting = self._awaiting, []
        sent = [names for names in wanted if held.keys() >= set(names)]
        if left := held.keys() - {name for names in sent for name in names}:
            if not self._named:
                some = ", ".join(sorted(left)[:3])
                raise CollectiveError(f"the loaded state is of another model: its buckets do not hold {some}")
            sent += [rest for names in passed if (rest := tuple(name for name in names if name in left))]
            self._wanted = None
        under_way = []
        for names in sent:
            shapes, views = zip(*(held[name] for name in names), strict=True)
            buffer = torch.cat(views)
            mean = self._average(GradientSet(names, shapes, buffer), buffer)
            under_way.append(mean.then(functools.partial(put_back, views)))
        arrived = torch.futures.collect_all(under_way)  # `wait` below: on a GPU this stream waits for theirs
        arrived.add_done_callback(lambda done: settle(awaiting, lambda: [message.wait() for message in done.value()]))
        return [*(names for names in passed if names in wanted), *sent]


def put_back(views: tuple[Tensor, ...] | list[Tensor], done: "Future[Tensor]") -> Tensor:
    """The mean goes back to where the gradients came from. A GPU's future waits for what it returns."""
    mean = done.value()
    torch._foreach_copy_(views, mean.split([view.numel() for view in views]))
    return mean


def settle(awaiting: Sequence[tuple[Tensor, "Future[Tensor]", Any]], finish: Callable[[], object]) -> None:
    """Finish buckets that DDP waits for; if that fails, whoever waits for them gets the error."""
    try:
        finish()
        for _, _, undo in awaiting:
            if undo is not None:
                undo()
    except Exception as error:
        for _, future, _ in awaiting:
            fail_future(future, error)
    else:
        for buffer, future, _ in awaiting:
            future.set_result(buffer)
