"""Messages in rows: the wires of all shards of a tensor, side by side in a matrix, encoded or decoded in one go.

Here they are defined, row by row, by the operations of a backend; `triton.row_launch` does the same in one launch each.
Both give callables that are made once and called at every step. `wires` is a uint8 tensor whose rows start `stride`
bytes apart, and `mixed` stands for the step (hashing.row_step). Where it has no memory (device "meta"), a call computes
nothing: its kernel is compiled, if it has one.

Feedback: x + factor * memory is encoded, and `left` passes data from one of these operations to the next:

| mode | encode writes to left | recode of the own row writes to left | decode updates, if all is finite |
|---|---|---|---|
| "classic" | the encoding error | the error of the sum | memory = share * left |
| "ef21" | the decoded wire | the own part less the sum | memory += share * left, of the own row left + result |

share is 1 for the own row and `scale` for others. With "ef21" the result is added to `mean`, which is remembered too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thinwire import wire as wire_format
from thinwire.kernels import dispatch, hashing
from thinwire.kernels.schema import RowJob
from thinwire.ranges import ranged


class Feedback(NamedTuple):
    mode: str  # "classic" or "ef21"
    factor: float  # of the memory


class Memory(NamedTuple):
    """The tensors of feedback, as long as the message: what is remembered, what is left, and the mean of "ef21"."""

    kept: Tensor
    left: Tensor
    mean: Tensor | None = None


class Picked(NamedTuple):
    """Numbers here and there in a tensor, in codecs without blocks. To encode them leaves zeros in their place."""

    whole: Tensor
    places: Tensor  # of each in the flat tensor
    copy: Tensor | None = None  # gets what is encoded, where a recode adds the own part


class Bad(NamedTuple):
    """Records calls that met non-finite numbers: (the last such call, how many there were)."""

    noted: Tensor  # two int32
    call: int  # the number of this one


Encode = Callable[[Tensor | Picked, Tensor, int, Memory | None], None]  # (x, wires, mixed, memory)
Recode = Callable[[Tensor, Tensor, int, Tensor | None, Memory | None], None]  # (wires, wire, mixed, own x, memory)


class Decode(Protocol):
    """`source`: where the row that was left out is copied from."""

    def __call__(
        self, wires: Tensor, out: Tensor | Picked, memory: Memory | None, bad: Bad | None, source: Tensor | None = None
    ) -> None: ...


Scan = Callable[[Tensor, Bad], None]  # (wires, bad)


def encoder(
    job: RowJob, *, skip: int = -1, by_row: int = 1, first_row: int = 0, feedback: Feedback | None = None
) -> Encode:
    """Writes the wires of all rows but `skip`. Row r has the key of row r * by_row + first_row."""
    fused = _fused(job)
    if fused is not None:
        made: Encode = fused.encoder(job, skip, by_row, first_row, feedback)
        return ranged("thinwire::encode")(made)
    backend = dispatch.select(job.device, job.how.format)

    def encode(x: Tensor | Picked, wires: Tensor, mixed: int, memory: Memory | None) -> None:
        if wires.is_meta:
            return
        x = taken(x) if isinstance(x, Picked) else x.view(-1)
        for row in range(job.rows.short + 1):
            if row == skip:
                continue
            begin, end = job.rows.span(row)
            part = x[begin:end] if feedback is None else _message(x, memory, feedback, begin, end)
            wire = _row(wires, job, row)[0]
            step = hashing.row_step(mixed, row * by_row + first_row)
            rotation, dither = job.how.keys(job.seed, step, hashing.DITHER)
            backend.encode(job.how, part, wire, None, rotation=rotation, dither=dither)
            if feedback is not None and memory is not None:
                read = _decoded(backend, job, wire[None], end - begin, rotation)
                memory.left[begin:end] = part - read if feedback.mode == "classic" else read

    return encode


def recoder(job: RowJob, row: int, world: int, *, scale: float, own: int, feedback: Feedback | None = None) -> Recode:
    """Writes the wire of scale * the sum of `world` wires of a row.

    With `own` >= 0 the wire of that number is left out, the one after all others stands in its place, and the own x
    (all of it, of which the row is a part) is added, exactly.
    """
    fused = _fused(job)
    if fused is not None and (own < 0 or fused.adds_own(job)):
        made: Recode = fused.recoder(job, row, world, scale, own, feedback)
        return ranged("thinwire::recode")(made)
    backend = dispatch.select(job.device, job.how.format)
    begin, end = job.rows.span(row)
    numel = end - begin

    def recode(wires: Tensor, wire: Tensor, mixed: int, x: Tensor | None, memory: Memory | None) -> None:
        if wires.is_meta:
            return
        step = hashing.row_step(mixed, row)
        wires_WN = _row(wires, job, row, world)
        if x is None or own < 0:
            rotation, dither = job.how.keys(job.seed, step, hashing.DITHER_RECODE)
            backend.recode(job.how, wires_WN, wire, numel, scale=scale, rotation=rotation, dither=dither)
            return
        rotation, dither = job.how.keys(job.seed, step, hashing.DITHER)
        if own < world - 1:
            wires_WN[own].copy_(wires_WN[world - 1])
        total = _decoded(backend, job, wires_WN[: world - 1], numel, rotation, scale)
        if feedback is None or memory is None:
            total.add_(x.view(-1)[begin:end], alpha=scale)
        else:
            part = _message(x.view(-1), memory, feedback, begin, end)
            if feedback.mode == "ef21":
                total.add_(part.mul_(scale))
                memory.left[begin:end] = part - total
            else:
                total.add_(part, alpha=scale)
        backend.encode(job.how, total, wire, None, rotation=rotation, dither=dither)
        if feedback is not None and memory is not None and feedback.mode == "classic":
            memory.left[begin:end] = total - _decoded(backend, job, wire[None], numel, rotation)

    return recode


def decoder(
    job: RowJob,
    *,
    world: int = 1,
    scale: float = 1.0,
    skip: int = -1,
    own: int = -1,
    share: float = 1.0,
    feedback: Feedback | None = None,
) -> Decode:
    """Writes out = every row's wire decoded, times `scale`; row `skip` is copied from a tensor that is like out.

    With `world` > 1 there is one row, the sum of so many wires. `share` and `own`: see the table above.
    """
    fused = _fused(job)
    if fused is not None:
        made: Decode = fused.decoder(job, world, scale, skip, own, share, feedback)
        return ranged("thinwire::decode")(made)
    backend = dispatch.select(job.device, job.how.format)

    def decode(wires: Tensor, out: Any, memory: Memory | None, bad: Bad | None, source: Tensor | None = None) -> None:
        if wires.is_meta:
            return
        if isinstance(out, Picked):
            decode(wires, numbers := out.whole.new_empty(len(out.places)), memory, bad)
            out.whole.view(-1).index_copy_(0, out.places, numbers)
            return
        out = out.view(-1)
        if feedback is None and bad is not None:
            note(job, wires, bad, world)
        fine = bad is None or int(bad.noted[0]) != bad.call
        for row in range(job.rows.short + 1):
            begin, end = job.rows.span(row)
            part = out[begin:end]
            if row == skip and source is not None:
                part.copy_(source.view(-1)[begin:end])
                continue
            wires_WN = _row(wires, job, row, world)
            if feedback is None or memory is None:
                backend.decode_sum(job.how.format, wires_WN, part, scale=scale, rotation=None)
            else:
                result = _decoded(backend, job, wires_WN, end - begin, None, scale)
                _remember(memory, feedback, begin, end, result, row == own, share, fine)
                part.copy_(result)

    return decode


def scanner(job: RowJob, world: int = 1) -> Scan:
    """Notes the call if a wire is not finite."""
    fused = _fused(job)
    if fused is not None:
        made: Scan = fused.scanner(job, world)
        return made
    return lambda wires, bad: note(job, wires, bad, world)


def note(job: RowJob, wires: Tensor, bad: Bad, world: int) -> None:
    """Count the call once, if a wire of it is not finite."""
    if wires.is_meta:
        return
    fine = all(
        bool(wire_format.all_finite(job.layout(row), _row(wires, job, row, world))) for row in range(job.rows.short + 1)
    )
    if not fine and int(bad.noted[0]) != bad.call:
        bad.noted[0] = bad.call
        bad.noted[1] += 1


def _fused(job: RowJob) -> Any:
    """The launches of a backend that has them for this format."""
    backend: Any = dispatch.select(job.device, job.how.format)
    return backend.fused_rows() if hasattr(backend, "fused_rows") else None


def _row(wires: Tensor, job: RowJob, row: int, world: int = 1) -> Tensor:
    """The wires of a row, as a matrix: one, or where several are added those of all ranks."""
    nbytes = job.layout(row).nbytes
    start = 0 if world > 1 else row * job.stride
    return wires.as_strided((world, nbytes), (job.stride, 1), wires.storage_offset() + start)


def taken(x: Picked) -> Tensor:
    """The numbers, with zeros left in their place."""
    whole = x.whole.view(-1)
    found = torch.index_select(whole, 0, x.places, out=x.copy)
    whole.index_fill_(0, x.places, 0)
    return found


def _message(x: Tensor, memory: Memory | None, feedback: Feedback, begin: int, end: int) -> Tensor:
    """x + factor * memory, in fp32."""
    assert memory is not None
    kept = memory.kept[begin:end].float()
    part = x[begin:end].float()
    if feedback.mode == "ef21":
        return torch.add(part, kept, alpha=feedback.factor)
    return part + kept * feedback.factor


def _decoded(
    backend: Any, job: RowJob, wires_WN: Tensor, numel: int, rotation: int | None, scale: float = 1.0
) -> Tensor:
    out = torch.empty(numel, device=wires_WN.device)
    backend.decode_sum(job.how.format, wires_WN, out, scale=scale, rotation=rotation)
    return out


def _remember(
    memory: Memory, feedback: Feedback, begin: int, end: int, result: Tensor, own: bool, share: float, fine: bool
) -> None:
    """What the table above says; with "ef21" the result becomes that added to the mean."""
    kept = memory.kept[begin:end]
    left = memory.left[begin:end]
    if feedback.mode == "classic":
        if fine:
            kept.copy_(left if own else left * share)
        return
    assert memory.mean is not None
    mean = memory.mean[begin:end]
    if fine:
        kept.add_(left + result if own else left * share)
    result.add_(mean)
    if fine:
        mean.copy_(result)
