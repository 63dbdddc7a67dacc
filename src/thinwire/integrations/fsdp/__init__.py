"""FSDP2 and HSDP: compresses the communication of gradients and weights.

handle = thinwire.compress_fsdp(model, gradients="lloyd4", weights="int8")    # after fully_shard; the rest stays

torch_internals (torch's private names) calls this file (the handle), which calls rows (a flat buffer, cut into lanes).
"""

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from thinwire.codecs import Cast, Codec, Identity, registry
from thinwire.collectives import checks
from thinwire.collectives.channel import channel_of, wait_in
from thinwire.errors import CollectiveError
from thinwire.integrations.choice import Chooser, bits_of, leaves
from thinwire.integrations.choice.options import (
    EXACT,
    CodecChoice,
    CodecLike,
    DDPOptions,
    Rules,
    SharedKeywords,
    Weights,
    check_known,
    codec_of_weights,
    spelled_out,
)
from thinwire.integrations.ddp import DDPState, compress_ddp
from thinwire.integrations.fsdp import checkpoint
from thinwire.integrations.fsdp.rows import DTYPES, Gatherer, ShardSync, announce_plain
from thinwire.integrations.fsdp.torch_internals import (
    CompressedComm,
    ParameterGroup,
    ReduceCall,
    ShardedParameter,
    check_whole,
    groups_of,
    watch_reductions,
)
from thinwire.integrations.models import PADDING, ParameterNames, ParameterSize, describe, modules_in
from thinwire.integrations.stats import Handle, Stats, Tally
from thinwire.integrations.sync import GradientSet, NonfiniteGuard, after_backward, sum_bytes, which_are_finite

_NARROW = 8  # with fewer bits, rounding weights at every step costs accuracy


class FSDPState(Handle):
    """Compression of one FSDP2 model: the result of `compress_fsdp`."""

    def __init__(self, groups: Sequence[ParameterGroup], options: DDPOptions, inside: Codec, weights: Weights) -> None:
        super().__init__()
        self.weights = weights
        self._groups = list(groups)
        self._parameters = [parameter for group in groups for parameter in group.parameters()]
        names = _names_of(self._parameters)
        options.rules.check_names([parameter.name for parameter in self._parameters])
        self._chooser = Chooser(options, names)
        replicated = any(group.replicas is not None for group in groups)
        self._sync = self._shards = ShardSync(self._chooser, timed=replicated)  # over replicas, if there are any
        if replicated:
            self._sync.peers = [group.shards for group in groups if group.shards is not None][:1]
            self._sync.elsewhere = self._chooser.sizes
            # A rule that compresses nothing between nodes holds inside them, too.
            across = {pattern: registry.codec(codec) for pattern, codec in (options.policy or {}).items()}
            policy = {pattern: codec if isinstance(codec, Identity) else inside for pattern, codec in across.items()}
            fixed = DDPOptions(inside, feedback="none", exempt=options.exempt, policy=policy, measure_every=0)
            self._shards = ShardSync(Chooser(fixed, ParameterNames()))
        self._model: nn.Module | None = None  # until a step has shown that all of it is compressed
        self._expected: list[ShardedParameter] = []  # whose gradients are reduced next
        self._gatherers: list[Gatherer] = []
        self._guard = None
        if options.on_nonfinite == "raise":
            self._guard = NonfiniteGuard()
            self._check_meshes()

    @property
    def step(self) -> int:
        """Number of steps: sums of all gradients over all ranks."""
        return self._sync.step

    def _install(self, rules: Rules, replica: bool | None, *, narrow: bool) -> None:
        for group in self._groups:  # check all before changing any
            group.check(gathers=not isinstance(self.weights, Identity))
        watch_reductions()
        for group in self._groups:
            kept = replica if replica is not None else narrow and group.keeps_weights
            gatherer = Gatherer(group, self.weights, rules, self._sync.tally, differences=kept)
            if not isinstance(self.weights, Identity):
                self._gatherers.append(gatherer)
            reduce = CompressedComm(self._reduce, functools.partial(self._expect, group))
            group.install(reduce, CompressedComm(gatherer.gather))

    def _expect(self, group: ParameterGroup, call: ReduceCall) -> None:
        """Prepare for a call that reduces gradients of `group`."""
        if self._model is not None:
            check_whole(self._model)
            self._model = None
        given = {id(source) for source in call.fsdp_params}
        begins = self._shards.expect(given)
        if self._sync is not self._shards:
            begins = group.replicas is not None and self._sync.expect(given, now=call.sums_replicas)
        if begins:  # log the steps before it, on the rank that is first among its shards and its replicas
            self._write_logs(self.step - 1, max(member.rank() for member in self._groups[0].members))
        self._expected = group.parameters(call.fsdp_params)
        if call.dtype not in DTYPES:
            announce_plain(f"gradients of {call.dtype}")
        if self._guard is not None:
            names = [parameter.name for parameter in self._expected]
            self._guard.look(names[::-1], call.unsharded_grads[::-1])  # in the order of the backward pass
            after_backward(functools.partial(self._check_finite, self._guard))
        if self._sync is not self._shards and group.replicas is not None:
            # The choice for replicas also holds inside a node: make it before the first sum there.
            self._sync.begin(group.replicas, call.unsharded_grads[0].device)
            if call.sums_replicas and self._chooser.policy.compresses and call.dtype in DTYPES:
                call.sum_replicas(functools.partial(self._average_replicas, self._expected))
            elif call.sums_replicas:
                numel = sum(parameter.numel for parameter in self._expected)
                self._sync.tally.sent(sum_bytes(numel, call.dtype, group.replicas.size()))

    def _check_meshes(self) -> None:
        """Raise unless all ranks look at the same parameters."""
        meshes = {(group.shards, group.replicas) for group in self._groups}
        sharing = any(parameter.in_tensor_parallel for parameter in self._parameters)
        if len(meshes) > 1 or sharing:
            why = "tensor parallelism" if sharing else "parameter groups on different meshes"
            raise CollectiveError(
                f"on_nonfinite='raise' needs all ranks to look at the same parameters, and this model has {why}: "
                "use 'propagate', and skip steps whose gradient norm is not finite"
            )

    def _check_finite(self, guard: NonfiniteGuard) -> None:
        """Raise on all ranks if this backward pass gave any of them NaN or Inf; once per pass."""
        if not guard.names:
            return
        means = [p.gradient for p in self._parameters if p.gradient is not None and p.gradient.numel()]
        device = self._groups[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # FSDP2 reduces on its own streams, and may not have waited for them
        spoiled = bool(means) and not bool(torch.cat([which_are_finite([mean]) for mean in means]).all())
        guard.compare(self.step - 1, self._groups[0].members, spoiled, device)

    def _reduce(self, output: Tensor, input: Tensor, group: dist.ProcessGroup, op: Any) -> bool:
        """Reduce over shards; False if torch has to do it."""
        scale = checks.reduction(op).scale(group.size())
        self._shards.begin(group, input.device)
        if input.dtype not in DTYPES or (self._sync is not self._shards and not self._chooser.policy.compresses):
            self._shards.tally.sent((group.size() - 1) * output.nbytes)
            return False
        return self._shards.scatter(output, input, self._expected, group, scale)

    def _average_replicas(
        self, parameters: Sequence[ShardedParameter], gradients: Tensor, group: dist.ProcessGroup
    ) -> None:
        """Average this rank's parts, each followed by its padding."""
        parts = [[(p.name, p.shape, p.held), (PADDING + p.name, p.shape, p.numel - p.held)] for p in parameters]
        names, shapes, numels = zip(*[one for both in parts for one in both if one[2]], strict=True)
        padded = GradientSet(names, shapes, gradients, numels=numels)
        wait_in(group, self._sync.average(padded, gradients, group), gradients)

    def stats(self) -> Stats:
        """What compression has done on this rank, for gradients and weights; `print` shows a table."""
        own = self._sync.stats(self.step)
        shards = Tally() if self._shards is self._sync else self._shards.tally
        replicas = sum(0 if g.copy.tensor is None else g.copy.tensor.nbytes for g in self._gatherers)
        return replace(
            own,
            codec=own.codec if isinstance(self.weights, Identity) else f"{own.codec}, weights {self.weights}",
            bytes_sent=own.bytes_sent + shards.bytes_sent,
            bytes_plain=own.bytes_plain + shards.bytes_plain,
            replica_bytes=replicas,
            plain_weights=self._sync.tally.plain_weights,
        )

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """What a checkpoint needs to resume bit-exactly, sharded like the model: every rank saves its own.

        gather: the first rank gets one state of all ranks, which all ranks can load, and the others an empty one.
            Call it on every rank.
        """
        layout = self._layout()
        own = layout.export()
        return layout.gather(own) if gather else own

    def blank_state_dict(self, world: int | None = None) -> dict[str, Any]:
        """A state of zeros for torch.distributed.checkpoint to fill in place.

        It has room for what this rank needs from `world` ranks: those of the shards or, with replicas, of the replicas.
        """
        self._chooser.check_family("compress_fsdp")
        layout = self._layout()
        return layout.export(layout.world if world is None else world)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load a saved state: this rank's own, a gathered one, all ranks' in a list, or a filled blank one.

        A list does not tell apart ranks that share a replica: with replicas, use one of the others.

        In another world, what rank k remembered goes to rank k % world, so that the sum over ranks is kept.
        """
        self._layout().load(state)

    def _layout(self) -> checkpoint.ShardLayout:
        return checkpoint.ShardLayout(self._groups, self._shards, self._sync, self._gatherers)

    def close(self) -> None:
        """Return to plain FSDP2 and drop all residuals. `compress_fsdp` may be called again."""
        self.closed = True
        self._chooser.moments.stop()
        for group in self._groups:
            group.restore()
        self._sync.clear()
        self._gatherers.clear()


def _names_of(parameters: Sequence[ShardedParameter]) -> ParameterNames:
    """The names of parameters, also after their tensors are replaced, as those on the meta device are."""
    names = ParameterNames(lambda tensor: next((p.name for p in parameters if p.source.sharded_param is tensor), None))
    for parameter in parameters:
        held = parameter.source.sharded_param
        if held.requires_grad:
            names.sizes[parameter.name] = ParameterSize(parameter.shape, parameter.shape.numel(), held.dtype)
    return names


@spelled_out
def compress_fsdp(
    model: nn.Module,
    gradients: CodecChoice = "int8",
    weights: CodecLike = "none",
    *,
    replica: bool | None = None,
    **options: Unpack[SharedKeywords],
) -> FSDPState:
    """Compress an FSDP2 model's gradient communication and, if asked, the gathering of its weights.

        handle = thinwire.compress_fsdp(model, gradients="lloyd4", weights="int8")  # after fully_shard

    Call it after `fully_shard`, before or after the first step. The result has `stats()`, `state_dict()`,
    `load_state_dict()` and `close()`.

    gradients: a codec ("int8", "lloyd4", ...), a schedule of codecs, "auto" or "auto:2.5", as for compress_ddp. With
        replicas of shards (HSDP) it is the codec between replicas.
    weights: the codec of the all-gather, usually "none" or "int8". Fewer than 8 bits cost accuracy, unless ranks keep a
        copy of all weights and receive differences (`replica`). "exact": ranks keep a copy and receive lossless
        differences, so weights have the bits of plain FSDP2; on a GPU every gather makes the host wait for the lengths
        of messages.
    feedback: "auto" (none), "none", "classic" or "ef21". A rank then remembers as many numbers as the unsharded model
        has, in `residual_dtype`. Between replicas (HSDP) it remembers as many as its shards have, and "auto" chooses by
        codec and optimizer, as for compress_ddp.
    exempt: the parameters that travel in 16 bits, in the same message: "auto" (those of one dimension or under 1024
        elements), "none", name patterns, or a function of name and shape.
    policy: codecs of gradients by name pattern, {"*.embed*": "int8"}; the first match wins, before exemptions.
    inside: with replicas, the codec of the sum over shards inside a node. A step or a parameter that is not compressed
        between replicas is not compressed inside a node either.
    replica: True keeps a copy of all weights on every rank, and sends differences to it. None does so where FSDP keeps
        gathered weights for the backward pass anyway (reshard_after_forward=False), if `weights` has fewer than 8 bits.
    on_nonfinite: as for compress_ddp. "raise" needs one mesh for all parameters, and costs one small all_reduce
        per backward pass.
    warmup_steps, optimizer, residual_dtype, error_budget, replan_every, measure_every: as for compress_ddp.
    """
    check_known("compress_fsdp", SharedKeywords, options)
    groups = groups_of(model) if isinstance(model, nn.Module) else []
    if not groups:
        raise CollectiveError(f"expected a model that fully_shard was called on, got {describe(model)}")
    replicated = any(group.replicas is not None for group in groups)
    within = registry.codec(options.pop("inside", "bf16"))
    asked = DDPOptions(gradients, **options)
    if asked.feedback == "auto" and not replicated:
        asked = replace(asked, feedback="none")
    if not replicated and within != Cast("bf16"):
        raise CollectiveError(f"inside={str(within)!r} requires replicas of shards: pass fully_shard a 2-D mesh")
    gathered = codec_of_weights(weights)
    if not isinstance(replica, bool | None):
        raise CollectiveError(f"replica must be True, False or None, got {replica!r}")
    if gathered == EXACT and replica is False:
        raise CollectiveError("weights='exact' sends differences to copies on all ranks: leave out replica=False")
    if gathered != EXACT:
        checks.check_recodes(leaves(gathered), "weights=")
    if replica and isinstance(gathered, Identity):
        raise CollectiveError("replica=True keeps copies to send weights as differences: pass weights= their codec")
    state = FSDPState(groups, asked, within, gathered)
    agreed = f"{asked.agreed}, inside={within}, weights={gathered}, replica={replica}"
    for channel in dict.fromkeys(channel_of(group.ranks, group.device) for group in groups):
        channel.issue(f"compress_fsdp({agreed})", anew=True)  # raises on all ranks unless they agree
    narrow = gathered != EXACT and bits_of(gathered) < _NARROW
    state._install(Rules(asked.exempt, None), replica, narrow=narrow)
    state._model = model
    if narrow and not all(g.differences for g in state._gatherers):
        warnings.warn(
            f"weights={str(gathered)!r} rounds the weights themselves at every step, which costs accuracy: "
            "take 'int8', or replica=True, which sends differences to a copy of all weights on every rank",
            stacklevel=2,
        )
    return state


def compress_wrapped(
    model: Any, codec: CodecChoice, options: Mapping[str, Any], found: str, *, ddp: str, fsdp: str
) -> DDPState | FSDPState | None:
    """Compress a model that a framework has wrapped or sharded; None if it has done neither.

    For errors about options of the other function: what was `found`, and how to get a model in `ddp` or `fsdp`.
    """
    for compress, kind, others, wanted in (
        (compress_ddp, DistributedDataParallel, ("weights", "replica"), fsdp),
        (compress_fsdp, FSDPModule, ("weigh", "algorithm", "mesh"), ddp),
    ):
        if modules_in(model, kind):
            if named := " and ".join(f"{name}=" for name in others if name in options):
                raise CollectiveError(f"{named} requires {wanted}; got {found}: leave {named} out")
            handle: DDPState | FSDPState = compress(model, codec, **options)
            return handle
    return None
