"""Saves and loads the state of a compressed FSDP2 run, also onto another number of ranks.

| key | holds | of |
|---|---|---|
| ranks | what rank k's messages still owe, whole parameters | each rank of the shards' group |
| ranks, with replicas | the same, sharded like the parameters | each replica |
| mean | EF21's sums of means, sharded like the parameters | all ranks together |
| replica | the weights that differences are sent to, sharded like the parameters | all ranks together |

On another number of ranks, what rank k owes goes to rank k % world, so that the sum over ranks is kept.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from thinwire import feedback, schema
from thinwire.errors import CollectiveError
from thinwire.integrations import checkpoint
from thinwire.integrations.fsdp.rows import Gatherer, row_name
from thinwire.integrations.fsdp.torch_internals import ParameterGroup
from thinwire.integrations.sync import GradientSync

Parts = Mapping[str, Tensor]
Steps = Mapping[str, int]  # of sums over shards and, if there are any, over replicas


class ShardLayout:
    """Which ranks remember what of one model's parameters."""

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        self.parameters = {p.name: p for group in groups for p in group.parameters()}
        self.replicated = any(group.is_replicated for group in groups)
        members = [group.replicas if self.replicated else group.shards for group in groups]
        found = {tuple(dist.get_process_group_ranks(member)) for member in members if member is not None}
        if len(found) > 1:
            raise CollectiveError(
                "the state of parameter groups on different meshes cannot be saved together: compress and save the "
                "parts of the model one by one"
            )
        self.groups = (groups[0].shards, groups[0].replicas)
        ranks = next(iter(found), (dist.get_rank(),))
        self.world = len(ranks)
        self.rank = ranks.index(dist.get_rank())
        # With tensor parallelism, other groups of ranks remember other numbers under the same names.
        self.column = "" if self.replicated or ranks[0] == 0 else f"/{ranks[0]}"

    def key(self, rank: int) -> str:
        return f"{rank}{self.column}"

    def saved(self, names: Iterable[str], residuals: Parts) -> dict[str, Tensor]:
        """What is remembered of these parameters, in the form of a checkpoint: zeros where that is nothing."""
        found: dict[str, Tensor] = {}
        for name in names:
            parameter = self.parameters[name]
            if self.replicated:
                values = residuals.get(name, torch.zeros(parameter.numel))
                found[name] = parameter.shard(values.float(), of_replica=True)
            else:
                rows = torch.zeros(self.world, parameter.numel)
                for row, part in enumerate(rows):
                    values = residuals.get(row_name(name, row), part[:0])
                    part[: values.numel()] = values
                found[name] = parameter.whole(rows)
        return found

    def spread(self, saved: Parts) -> dict[str, Tensor]:
        """What was saved, under this world's names of residuals."""
        found = {}
        for name, values in saved.items():
            parameter = self.parameters[name]
            if self.replicated:
                found[name] = parameter.part(values)[: parameter.held]
            else:
                rows = parameter.rows(values.view(parameter.shape), self.world)
                found |= {row_name(name, row): part[: parameter.held_by(row)] for row, part in enumerate(rows)}
        return found

    def numbers(self, name: str) -> schema.Rule:
        """The rule of a parameter's numbers in a state: this rank's shard of them, or all."""
        parameter = self.parameters[name]
        whole = schema.numbers(parameter.shape)
        shard = schema.numbers(parameter.source.sharded_size)
        return lambda field, v: shard(field, v.to_local()) if isinstance(v, DTensor) else whole(field, v)


def export(
    layout: ShardLayout, sync: GradientSync, gatherers: Sequence[Gatherer], steps: Steps, world: int | None = None
) -> dict[str, Any]:
    """What this rank saves or, if `world` is given, zeros for what it needs of what `world` ranks saved."""
    memories = sync.memories
    remembered = sync.chooser.remembered()
    meant = [name for name, (_, kind) in remembered.items() if kind == "ef21"]
    means = {name: torch.zeros(layout.parameters[name].numel) for name in meant} | memories.means.read()

    def saved(residuals: Parts) -> Parts:
        names = [name if layout.replicated else name.rpartition(feedback.ROW)[0] for name in residuals]
        return layout.saved(dict.fromkeys([*remembered, *names]), residuals)

    return {
        **checkpoint.common_of(sync, layout.rank, layout.world, world, saved, layout.key),
        "steps": dict(steps),
        "replicated": layout.replicated,
        "mean": {name: layout.parameters[name].shard(part) for name, part in means.items()},
        "replica": {name: shard for gatherer in gatherers for name, shard in gatherer.state().items()},
        "sent": [[gatherer.name, gatherer.sent] for gatherer in gatherers],
    }


def gather(layout: ShardLayout, own: Mapping[str, Any]) -> dict[str, Any]:
    """One state of all ranks, with whole parameters, on the first rank; an empty one on the others."""
    if any(parameter.in_tensor_parallel for parameter in layout.parameters.values()):
        raise CollectiveError(
            "gather=True does not support tensor parallelism: save state_dict() with torch.distributed.checkpoint"
        )
    shards, replicas = layout.groups
    key = layout.key(layout.rank)
    residuals, errors = own["ranks"][key], own["errors"][key]
    whole = {kind: _whole(layout, own[kind], shards) for kind in ("mean", "replica")}
    if layout.replicated:
        residuals = _whole(layout, residuals, shards)
        _, lost = checkpoint.gather_parts({}, shards, errors)
        if not lost:
            return {}
        total = Counter[str]()
        for row in lost:
            total.update(dict(row))
        errors = [list(pair) for pair in sorted(total.items())]
    found, lost = checkpoint.gather_parts(residuals, replicas or shards, errors)
    if not found:
        return {}
    ranks, errors = checkpoint.by_rank(found, layout.key), checkpoint.by_rank(lost, layout.key)
    return {**own, **whole, "gathered": True, "ranks": ranks, "errors": errors}


def _whole(layout: ShardLayout, parts: Parts, shards: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Sharded tensors as whole ones, on the first rank of the shards."""
    own = {name: layout.parameters[name].part(shard).cpu() for name, shard in parts.items()}
    rows, _ = checkpoint.gather_parts(own, shards)
    names = rows[0] if rows else ()
    return {name: layout.parameters[name].whole(torch.stack([row[name] for row in rows])) for name in names}


@schema.reading()
def load(
    state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    layout: ShardLayout,
    sync: GradientSync,
    gatherers: Sequence[Gatherer],
) -> dict[str, int]:
    """Load a state on this rank, its own or those of all ranks. Returns the steps to continue with."""
    states = list(state) if isinstance(state, Sequence) else [state]
    head = schema.head_of(states, checkpoint.VERSION, "steps")
    schema.FLAG("replicated", head["replicated"])
    if head["replicated"] != layout.replicated:
        raise CollectiveError(
            "load_state_dict: states with and without replicas of shards remember different things: load it into "
            "a model on a mesh of as many dimensions"
        )
    step = "replicas" if layout.replicated else "shards"
    known = schema.field("a parameter of this model", lambda v: isinstance(v, str) and v in layout.parameters)
    sharded = schema.each(known, layout.numbers)
    remembered = {
        "ranks": schema.each(schema.TEXT, lambda _: schema.MAPPING),
        "errors": checkpoint.errors_of(known),
    }
    rules = {
        **remembered,
        **checkpoint.COMMON,
        "steps": schema.fields(dict.fromkeys(("shards", step), schema.STEPS)),
        "gathered": schema.FLAG,
        "sent": schema.pairs(schema.TEXT, schema.STEPS),
    }
    for saved in states:
        schema.fields(rules if saved is head else remembered)("", saved)
    keys = [key for saved in states for key in saved["ranks"]]
    if len(set(keys)) < len(keys):
        raise CollectiveError(
            "a list of states has a rank twice, or ranks that share a replica, which cannot be told apart in it: pass "
            "this rank's own, or one of state_dict(gather=True)"
        )
    mine = next((saved for saved in states if layout.key(layout.rank) in saved["ranks"]), head)
    for name in ("mean", "replica"):  # of which every rank has its shard
        sharded(name, mine[name])
    whole = "one of state_dict(gather=True)" if layout.replicated else "the states of all ranks as a list"
    advice = f"pass {whole}, or load with torch.distributed.checkpoint into blank_state_dict(world)"
    whole_residuals, errors = checkpoint.inherited(states, layout.rank, layout.world, advice, layout.key, sharded)
    own = {name: lost for name, lost in errors.items() if name in sync.chooser.sizes}  # not of frozen ones
    if layout.replicated and head.get("gathered") and layout.groups[0] is not None and layout.groups[0].rank() > 0:
        own = dict.fromkeys(own, 0.0)  # the first shard has the sum of all
    means = {name: layout.parameters[name].part(shard) for name, shard in mine["mean"].items()}
    if layout.replicated:  # without the padding, which is there where rows are summed
        means = {name: part[: layout.parameters[name].held] for name, part in means.items()}
    residuals = layout.spread(whole_residuals)
    sent, steps = dict(head["sent"]), dict(head["steps"])
    sync.load(head, steps[step], residuals, means, own)  # from here on nothing fails
    for gatherer in gatherers:
        gatherer.load(mine["replica"], sent.get(gatherer.name, 0))
    return steps
