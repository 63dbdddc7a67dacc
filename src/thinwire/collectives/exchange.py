"""From every rank to every rank: all_to_all_single, all_to_all."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives import checks, measuring, operations, programs, torch_verbs, transport
from thinwire.collectives.call import Call, planned
from thinwire.collectives.channel import Channel, channel_of
from thinwire.collectives.chunks import Flat
from thinwire.collectives.plan import CallPlan, PlanKey, VerbAlgorithm, plan_exchange, sized
from thinwire.collectives.quick import UNKNOWN, quick, remember
from thinwire.collectives.work import Work
from thinwire.errors import CollectiveError


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: transport.Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec = "int8",
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
) -> Work | None:
    """Send a part of `input`, cut along dimension 0, to every rank. `output` holds their parts, in rank order.

    Without sizes the parts are equal; sizes may differ and be zero. What a rank keeps for itself is copied exactly.
    Algorithms: "compressed", "plain" (torch's own, exact), "auto" (the one predicted to be faster; see `all_to_all`).
    """
    even = output_split_sizes is None and input_split_sizes is None
    if even:
        done = quick("all_to_all", (output, input), group, codec, algorithm, step=step, async_op=async_op)
        if done is not UNKNOWN:
            return done
    target, source = checks.check_tensors((output, input), "all_to_all_single", outputs=1, step=step)
    channel = channel_of(transport.resolve(group), target.device)
    splits = [
        _splits(sizes, tensor, channel.transport.world, name)
        for name, sizes, tensor in (("output", output_split_sizes, target), ("input", input_split_sizes, source))
    ]
    codecs = checks.codecs_for(codec)
    whole = target.detach().contiguous()
    parts_out = whole.split(splits[0])
    parts_in = source.detach().contiguous().split(splits[1])
    key = PlanKey("all_to_all_single", (), source.dtype, codecs, algorithm, row=tuple(source.shape[1:]))
    call, plan = _planned(channel, key, parts_out, parts_in)
    even = even and target.numel() == source.numel()
    if even and plan.program is not None and plan.codec is not None and source.numel():
        numel = source.numel() // channel.world
        program = _even(channel, plan.codec, source.dtype, numel)
        remember(call, program, "all_to_all", (output, input), codec, algorithm)
        return call.start(program, (target, source), [output], step, async_op)
    if plan.codec is None:
        if even:
            remember(call, None, "all_to_all", (output, input), codec, algorithm)
        return torch_verbs.all_to_all(call, [target], [source], _lengths(parts_out, parts_in), [output], async_op)
    if splits[0] != splits[1] or source.data_ptr() != whole.data_ptr():  # else a part goes where one as long was
        parts_in = torch_verbs.apart(whole, source.detach().contiguous()).split(splits[1])
    copies = () if target.is_contiguous() else ((target, whole),)
    return _run(call, plan, parts_out, parts_in, step, [output], copies, async_op)


def _even(channel: Channel, codec: Codec, dtype: torch.dtype, numel: int) -> programs.Program:
    """The program of an exchange of equal parts of `numel` elements."""
    link = channel.transport
    assert isinstance(link, transport.RowTransport)
    return channel.once(("exchange", codec, dtype, numel), lambda: programs.Exchange(link, codec, dtype, numel))


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: transport.Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec = "int8",
    algorithm: VerbAlgorithm = "auto",
    step: int | None = None,
) -> Work | None:
    """output_tensor_list[r] = what rank r's input_tensor_list holds for this rank. Lengths may differ and be zero.

    Algorithms: "compressed", "plain" (exact), "auto". "auto" decides at the first call of a dtype, codec and group,
    from the sizes of that call, and keeps the decision: no rank knows the later sizes of the others.
    """
    world = len(output_tensor_list)
    given = (*output_tensor_list, *input_tensor_list)
    tensors = checks.check_tensors(given, "all_to_all", outputs=world, step=step)
    outputs = tensors[:world]
    inputs = tensors[world:]
    channel = channel_of(transport.resolve(group), tensors[0].device)
    if len(outputs) != channel.transport.world or len(inputs) != channel.transport.world:
        raise CollectiveError(
            f"all_to_all: expected one tensor per rank in both lists, {channel.transport.world} in all, "
            f"got {len(outputs)} outputs and {len(inputs)} inputs"
        )
    key = PlanKey("all_to_all", (), tensors[0].dtype, checks.codecs_for(codec), algorithm)
    call, plan = _planned(channel, key, outputs, inputs)
    if plan.codec is None:
        lengths = _lengths(outputs, inputs)
        return torch_verbs.all_to_all(call, outputs, inputs, lengths, list(output_tensor_list), async_op)
    return _run(call, plan, outputs, inputs, step, output_tensor_list, (), async_op)


def _splits(sizes: Sequence[int] | None, tensor: Tensor, world: int, name: str) -> list[int]:
    if tensor.dim() == 0:
        raise CollectiveError(f"all_to_all_single: {name} must have a dimension to cut, got a scalar")
    rows = tensor.shape[0]
    if sizes is None or len(sizes) == 0:
        if rows % world:
            raise CollectiveError(
                f"all_to_all_single: {rows} rows of {name} do not divide among {world} ranks: pass {name}_split_sizes"
            )
        return [rows // world] * world
    listed = [int(size) for size in sizes]
    if len(listed) != world or min(listed) < 0 or sum(listed) != rows:
        raise CollectiveError(
            f"all_to_all_single: {name}_split_sizes must be {world} sizes that add up to {rows} rows, got {listed}"
        )
    return listed


def _planned(
    channel: Channel, key: PlanKey, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Call, CallPlan]:
    """The call and its plan. Lengths are compared when ranks shake hands; they change from call to call."""
    received, sent = _lengths(outputs, inputs)
    link = channel.transport
    own = sent[link.rank], received[link.rank]
    if own[0] != own[1] and str(key) in channel.kinds and not channel.handshake.every_call:  # else ranks compare it
        raise CollectiveError(f"rank {link.rank} would send itself {own[0]} elements and expects {own[1]}")

    def decide() -> CallPlan:
        trial = functools.partial(all_to_all_single, group=link.group)
        numel = channel.kinds[str(key)]  # the most that a rank sends
        choose = measuring.fastest(channel, "all_to_all", key.dtype, numel, trial, (channel.world, channel.world))
        return plan_exchange(key, numel, link, choose)

    return planned(channel, key, decide, (sent, received))


def _lengths(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    return [part.numel() for part in outputs], [part.numel() for part in inputs]


def _run(
    call: Call,
    plan: CallPlan,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    step: int | None,
    results: Sequence[Tensor],
    copies: Sequence[tuple[Tensor, Tensor]],
    async_op: bool,
) -> Work | None:
    if plan.program is not None:
        tensors = [*outputs, *(part.contiguous() for part in inputs)]
        program = programs.Returning(plan.program, copies) if copies else plan.program
        return call.start(program, tensors, results, step, async_op, written=len(outputs))
    link = call.channel.transport
    flats_out = [Flat([part]) for part in outputs]
    flats_in = [Flat([part]) for part in inputs]
    others = [rank for rank in range(link.world) if rank != link.rank]
    lengths = [flats[rank].numel for flats in (flats_out, flats_in) for rank in others]
    setting = call.setting(sized(plan, lengths, inputs[0].dtype), step)
    operation = operations.Exchange(setting, flats_out, flats_in, plan.cut.chunk)
    return call.run(operation, results, async_op, copies)
