"""Saves and loads the state of a compressed FSDP2 run, also onto another number of ranks.

| key | holds | of |
|---|---|---|
| ranks | what rank k's messages still owe, whole parameters | each rank of the shards' group |
| ranks, with replicas | the same, sharded like the parameters | each replica |
| mean | EF21's sums of means, sharded like the parameters | all ranks together |
| replica | the weights that differences are sent to, sharded like the parameters | all ranks together |

On another number of ranks, what rank k owes goes to rank k % world, so that the sum over ranks is kept.
"""

import functools
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
from thinwire.integrations.fsdp.rows import Gatherer, ShardSync, row_name
from thinwire.integrations.fsdp.torch_internals import ParameterGroup

Parts = Mapping[str, Tensor]


class ShardLayout:
    """Which ranks remember what of one model, and the form in which a state holds it.

    shards: sums over shards. sync: the same or, if there are replicas, sums over these; memories are those of it.
    """

    def __init__(
        self, groups: Sequence[ParameterGroup], shards: ShardSync, sync: ShardSync, gatherers: Sequence[Gatherer]
    ) -> None:
        self._sync = sync
        self._replicated = sync is not shards
        self._syncs = {"shards": shards, "replicas": sync} if self._replicated else {"shards": shards}
        self._gatherers = gatherers
        self._parameters = {p.name: p for group in groups for p in group.parameters()}
        members = [group.replicas if self._replicated else group.shards for group in groups]
        found = {tuple(dist.get_process_group_ranks(member)) for member in members if member is not None}
        if len(found) > 1:
            raise CollectiveError(
                "the state of parameter groups on different meshes cannot be saved together: compress and save the "
                "parts of the model one by one"
            )
        self._shards, self._replicas = groups[0].shards, groups[0].replicas
        ranks = next(iter(found), (dist.get_rank(),))
        self.world = len(ranks)
        self._rank = ranks.index(dist.get_rank())
        # With tensor parallelism, other groups of ranks remember other numbers under the same names.
        self._column = "" if self._replicated or ranks[0] == 0 else f"/{ranks[0]}"
        self._key = f"{self._rank}{self._column}"  # of this rank

    def export(self, world: int | None = None) -> dict[str, Any]:
        """What this rank saves or, if `world` is given, zeros for what it needs of what `world` ranks saved."""
        memories = self._sync.memories
        remembered = self._sync.chooser.policy.remembered(self._sync.chooser.sizes)
        meant = [name for name, (_, kind) in remembered.items() if kind == "ef21"]
        means = {name: torch.zeros(self._parameters[name].numel) for name in meant} | memories.means.read()
        saved = functools.partial(self._saved, remembered)
        return {
            **checkpoint.common_of(self._sync, self._rank, self.world, world, saved, self._column),
            "steps": {name: sync.step for name, sync in self._syncs.items()},
            "replicated": self._replicated,
            "mean": {name: self._parameters[name].shard(part) for name, part in means.items()},
            "replica": {name: shard for gatherer in self._gatherers for name, shard in gatherer.state().items()},
            "sent": [[gatherer.name, gatherer.sent] for gatherer in self._gatherers],
        }

    def _saved(self, remembered: Iterable[str], residuals: Parts) -> dict[str, Tensor]:
        """What is remembered, in the form of a checkpoint, with zeros for what is not but will be."""
        names = [name if self._replicated else name.rpartition(feedback.ROW)[0] for name in residuals]
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys([*remembered, *names]):
            parameter = self._parameters[name]
            if self._replicated:
                values = residuals.get(name, torch.zeros(parameter.numel))
                found[name] = parameter.shard(values.float(), of_replica=True)
            else:
                rows = torch.zeros(self.world, parameter.numel)
                for row, part in enumerate(rows):
                    values = residuals.get(row_name(name, row), part[:0])
                    part[: values.numel()] = values
                found[name] = parameter.whole(rows)
        return found

    def _spread(self, saved: Parts) -> dict[str, Tensor]:
        """What was saved, under this world's names of residuals."""
        found = {}
        for name, values in saved.items():
            parameter = self._parameters[name]
            if self._replicated:
                found[name] = parameter.part(values)[: parameter.held]
            else:
                rows = parameter.rows(values.view(parameter.shape), self.world)
                found |= {row_name(name, row): part[: parameter.held_by(row)] for row, part in enumerate(rows)}
        return found

    def gather(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """One state of all ranks, with whole parameters, on the first rank; an empty one on the others."""
        if any(parameter.in_tensor_parallel for parameter in self._parameters.values()):
            raise CollectiveError(
                "gather=True does not support tensor parallelism: save state_dict() with torch.distributed.checkpoint"
            )
        state = {**own, **{kind: self._whole(own[kind]) for kind in ("mean", "replica")}, "gathered": True}
        if self._replicated:
            residuals = self._whole(own["ranks"][self._key])
            _, lost = checkpoint.gather_parts({}, self._shards, own["errors"][self._key])
            if not lost:
                return {}
            total = Counter[str]()
            for row in lost:
                total.update(dict(row))
            errors = [list(pair) for pair in sorted(total.items())]
            state |= {"ranks": {self._key: residuals}, "errors": {self._key: errors}}
        return checkpoint.gather(state, self._replicas or self._shards, self._column)

    def _whole(self, parts: Parts) -> dict[str, Tensor]:
        """Sharded tensors as whole ones, on the first rank of the shards."""
        own = {name: self._parameters[name].part(shard).cpu() for name, shard in parts.items()}
        rows, _ = checkpoint.gather_parts(own, self._shards)
        names = rows[0] if rows else ()
        return {name: self._parameters[name].whole(torch.stack([row[name] for row in rows])) for name in names}

    def _numbers(self, name: str) -> schema.Rule:
        """The rule of a parameter's numbers in a state: this rank's shard of them, or all."""
        parameter = self._parameters[name]
        whole = schema.numbers(parameter.shape)
        shard = schema.numbers(parameter.source.sharded_size)
        return lambda field, v: shard(field, v.to_local()) if isinstance(v, DTensor) else whole(field, v)

    @schema.reading()
    def load(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load a state on this rank, its own or those of all ranks."""
        states = list(state) if isinstance(state, Sequence) else [state]
        head = schema.head_of(states, checkpoint.VERSION, "steps")
        schema.FLAG("replicated", head["replicated"])
        if head["replicated"] != self._replicated:
            raise CollectiveError(
                "load_state_dict: states with and without replicas of shards remember different things: load it into "
                "a model on a mesh of as many dimensions"
            )
        known = schema.field("a parameter of this model", lambda v: isinstance(v, str) and v in self._parameters)
        sharded = schema.each(known, self._numbers)
        rules = {
            **checkpoint.common_rules(known),
            "ranks": schema.each(schema.TEXT, lambda _: schema.MAPPING),
            "steps": schema.fields(dict.fromkeys(self._syncs, schema.STEPS)),
            "gathered": schema.FLAG,
            "sent": schema.pairs(schema.TEXT, schema.STEPS),
        }
        for saved in states:
            schema.fields(rules)("", saved)
        keys = [key for saved in states for key in saved["ranks"]]
        if len(set(keys)) < len(keys):
            raise CollectiveError(
                "a list of states has a rank twice, or ranks that share a replica, which cannot be told apart in it: "
                "pass this rank's own, or one of state_dict(gather=True)"
            )
        mine = next((saved for saved in states if self._key in saved["ranks"]), head)
        for name in ("mean", "replica"):  # of which every rank has its shard
            sharded(name, mine[name])
        whole = "one of state_dict(gather=True)" if self._replicated else "the states of all ranks as a list"
        advice = f"pass {whole}, or load with torch.distributed.checkpoint into blank_state_dict(world)"
        residuals, errors = checkpoint.inherited(states, self._rank, self.world, advice, self._column, sharded)
        own = {name: lost for name, lost in errors.items() if name in self._sync.chooser.sizes}  # not of frozen ones
        if self._replicated and head.get("gathered") and self._shards is not None and self._shards.rank() > 0:
            own = dict.fromkeys(own, 0.0)  # the first shard has the sum of all
        means = {name: self._parameters[name].part(shard) for name, shard in mine["mean"].items()}
        if self._replicated:  # without the padding, which is there where rows are summed
            means = {name: part[: self._parameters[name].held] for name, part in means.items()}
        spread, sent = self._spread(residuals), dict(head["sent"])
        steps = {sync: int(head["steps"][name]) for name, sync in self._syncs.items()}
        self._sync.load(head, steps[self._sync], spread, means, own)  # from here on nothing fails
        for gatherer in self._gatherers:
            gatherer.load(mine["replica"], sent.get(gatherer.name, 0))
        for sync, step in steps.items():
            sync.continue_from(step)
