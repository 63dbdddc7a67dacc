"""Messages in rows: the wires of all shards of a tensor, side by side in a matrix, encoded or decoded in one go.

They are defined here, row by row, by the operations of a backend; `triton.row_launch` does the same in one launch each,
if the job is `fused`. Both return callables that are made once and called at every step. `wires` is a uint8 tensor
whose rows start `stride` bytes apart; `mixed` stands for the step (hashing.row_step). If `wires` has no memory (device
"meta"), a call computes nothing, but compiles its kernel, if it has one.

Feedback: x + factor * memory is encoded, and `left` passes data from one of these operations to the next:

| mode | encode writes to left | recode of the own row writes to left | decode updates, if all is finite |
|---|---|---|---|
| "classic" | the encoding error | the error of the sum | memory = share * left |
| "ef21" | the decoded wire | the own part minus the sum | memory += share * left, in the own row left + result |

The own row is the one that this rank adds up. Its share is 1, that of others the decoder's argument. With "ef21",
mean + result is the output and the new mean.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

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

    def part(self, begin: int, end: int) -> "Memory":
        """The memory of the elements from `begin` to `end`."""
        return Memory(self.kept[begin:end], self.left[begin:end], None if self.mean is None else self.mean[begin:end])


class Picked(NamedTuple):
    """Scattered numbers of a tensor, for codecs without blocks. Encoding them leaves zeros in their place."""

    whole: Tensor
    places: Tensor  # of each in the flat tensor
    copy: Tensor | None = None  # receives the numbers, if a recode adds the own part later


class Bad(NamedTuple):
    """Records the calls that meet non-finite numbers."""

    noted: Tensor  # two int32: the last such call, and how many there were
    call: int  # the number of this call


Fine = bool | Tensor  # whether every number is finite; on a GPU a tensor, so that the host does not wait
Watch = Callable[[tuple[int, int], Tensor, Tensor], None]  # (span, what is encoded, what its wire decodes to)
# (x, wires, mixed, memory, watch=None): `watch` is called for every row, if the job is not fused.
Encode = Callable[..., None]
Recode = Callable[[Tensor, Tensor, int, Tensor | None, Memory | None], None]  # (wires, wire, mixed, own x, memory)
# (wires, out, memory, bad, source=None, mixed=None): the skipped row is copied from `source`. If `mixed` is given,
# headers on the CPU must have its key.
Decode = Callable[..., None]
Scan = Callable[[Tensor, Bad], None]  # (wires, bad)


def encoder(
    job: RowJob, *, skip: int = -1, by_row: int = 1, first_row: int = 0, feedback: Feedback | None = None
) -> Encode:
    """Writes the wires of all rows but `skip`. Row r has the key of row r * by_row + first_row."""
    fused = _fused(job)
    if fused is not None:
        made: Encode = fused.encoder(job, skip, by_row, first_row, feedback)
        return ranged("thinwire::encode")(made)

    @ranged("thinwire::encode")
    def encode(
        x: Tensor | Picked, wires: Tensor, mixed: int, memory: Memory | None, watch: Watch | None = None
    ) -> None:
        if wires.is_meta:
            return
        backend = _backend(job)
        x = taken(x) if isinstance(x, Picked) else x.view(-1)
        for row in range(job.rows.short + 1):
            if row == skip:
                continue
            begin, end = job.rows.span(row)
            wire = _row(wires, job, row)[0]
            rotation, dither = job.how.keys(job.seed, hashing.row_step(mixed, row * by_row + first_row), hashing.DITHER)
            part, residual, left = x[begin:end], None, None
            if feedback is not None and memory is not None:
                left = memory.left[begin:end]
                if feedback.mode == "classic" and watch is None:  # one pass encodes the sum and stores what it lost
                    left.copy_(part)
                    part, residual = memory.kept[begin:end].float() * feedback.factor, left
                else:
                    part = message(x, memory, feedback, begin, end)
            backend.encode(job.how, part, wire, residual, rotation=rotation, dither=dither)
            if residual is not None or (left is None and watch is None):
                continue
            read = _decoded(backend, job, wire[None], end - begin, rotation)
            if watch is not None:
                watch((begin, end), part, read)
            if left is not None and feedback is not None:
                left.copy_(part - read if feedback.mode == "classic" else read)

    return encode


def recoder(job: RowJob, row: int, world: int, *, scale: float, own: int, feedback: Feedback | None = None) -> Recode:
    """Writes the wire of scale * the sum of `world` wires of a row.

    With `own` >= 0 that wire did not travel: the last one is added in its place, and the own x (the whole tensor, of
    which the row is a part) is added exactly.
    """
    fused = _fused(job)
    if fused is not None and (own < 0 or fused.adds_own(job)):
        made: Recode = fused.recoder(job, row, world, scale, own, feedback)
        return ranged("thinwire::recode")(made)
    begin, end = job.rows.span(row)
    numel = end - begin

    @ranged("thinwire::recode")
    def recode(wires: Tensor, wire: Tensor, mixed: int, x: Tensor | None, memory: Memory | None) -> None:
        if wires.is_meta:
            return
        backend = _backend(job)
        step = hashing.row_step(mixed, row)
        wires_WN = _row(wires, job, row, world)
        if x is None or own < 0:
            rotation, dither = job.how.keys(job.seed, step, hashing.DITHER_RECODE)
            _check_headers(job, wires_WN, numel, rotation)
            backend.recode(job.how, wires_WN, wire, numel, scale=scale, rotation=rotation, dither=dither)
            return
        rotation, dither = job.how.keys(job.seed, step, hashing.DITHER)
        if own < world - 1:
            wires_WN[own].copy_(wires_WN[world - 1])
        total = _decoded(backend, job, wires_WN[: world - 1], numel, rotation, scale)
        if feedback is None or memory is None:
            total.add_(x.view(-1)[begin:end], alpha=scale)
        else:
            part = message(x.view(-1), memory, feedback, begin, end)
            if feedback.mode == "ef21":
                total.add_(part.mul_(scale))
                part.sub_(total)
            else:
                total.add_(part, alpha=scale)
        backend.encode(job.how, total, wire, None, rotation=rotation, dither=dither)
        if feedback is not None and memory is not None and feedback.mode == "classic":
            memory.left[begin:end] = total.sub_(_decoded(backend, job, wire[None], numel, rotation))

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
    """Writes out = every row's wire decoded, times `scale`; row `skip` is copied from `source`, a tensor like out.

    With `world` > 1 there is one row, the sum of `world` wires. `share` and `own`: see the table above.
    """
    fused = _fused(job)
    if fused is not None:
        made: Decode = fused.decoder(job, world, scale, skip, own, share, feedback)
        return ranged("thinwire::decode")(made)

    @ranged("thinwire::decode")
    def decode(
        wires: Tensor,
        out: Any,
        memory: Memory | None,
        bad: Bad | None,
        source: Tensor | None = None,
        mixed: int | None = None,
    ) -> None:
        if wires.is_meta:
            return
        if isinstance(out, Picked):
            decode(wires, numbers := out.whole.new_empty(len(out.places)), memory, bad)
            out.whole.view(-1).index_copy_(0, out.places, numbers)
            return
        backend = _backend(job)
        out = out.view(-1)
        if feedback is None and bad is not None:
            note(job, wires, bad, world)
        for row in range(job.rows.short + 1):
            begin, end = job.rows.span(row)
            part = out[begin:end]
            if row == skip and source is not None:
                part.copy_(source.view(-1)[begin:end])
                continue
            wires_WN = _row(wires, job, row, world)
            rotation = None
            if mixed is not None:
                rotation, _ = job.how.keys(job.seed, hashing.row_step(mixed, row), hashing.DITHER)
            if feedback is None or memory is None:
                _check_headers(job, wires_WN, end - begin, rotation)
                backend.decode_sum(job.how.format, wires_WN, part, scale=scale, rotation=rotation)
            else:
                result = _decoded(backend, job, wires_WN, end - begin, rotation, scale)
                remember(memory, feedback, begin, end, result, row == own, share, is_fine(bad))
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
    """Count the call, only once, if one of its wires is not finite."""
    if wires.is_meta:
        return
    fine = all_finite(job, wires, world)
    if not fine.is_cpu or not fine:
        new = ~fine & (bad.noted[0] != bad.call)
        bad.noted[1] += new
        bad.noted[0].masked_fill_(new, bad.call)


def all_finite(job: RowJob, wires: Tensor, world: int = 1) -> Tensor:
    """Whether all wires are finite: one per row, or for `world` > 1 those of all ranks for one row."""
    each = [wire_format.all_finite(job.layout(r), _row(wires, job, r, world)) for r in range(job.rows.short + 1)]
    return torch.stack(each).all()


def is_fine(bad: Bad | None) -> Fine:
    """Whether the call has met no number that is not finite."""
    if bad is None:
        return True
    fine = bad.noted[0] != bad.call
    return bool(fine) if fine.is_cpu else fine


def _fused(job: RowJob) -> Any:
    """The module with the backend's fused launches, or None if the job or the backend has none."""
    backend: Any = _backend(job) if job.fused else None
    return backend.fused_rows() if hasattr(backend, "fused_rows") else None


def _backend(job: RowJob) -> Any:
    return dispatch.select(job.device, job.how.format)


def _check_headers(job: RowJob, wires_WN: Tensor, numel: int, rotation: int | None) -> None:
    """Check headers on the CPU, where reading them costs nothing: a bit may have flipped on the way."""
    if rotation is not None and wires_WN.is_cpu:
        wire_format.read_key(job.how.format.layout(numel), wires_WN, rotation)


def _row(wires: Tensor, job: RowJob, row: int, world: int = 1) -> Tensor:
    """The wires of a row, as a matrix: one, or for `world` > 1 those of all ranks."""
    nbytes = job.layout(row).nbytes
    start = 0 if world > 1 else row * job.stride
    return wires.as_strided((world, nbytes), (job.stride, 1), wires.storage_offset() + start)


def taken(x: Picked) -> Tensor:
    """Take the numbers out, leaving zeros in their place."""
    whole = x.whole.view(-1)
    found = torch.index_select(whole, 0, x.places, out=x.copy)
    whole.index_fill_(0, x.places, 0)
    return found


def message(x: Tensor, memory: Memory, feedback: Feedback, begin: int, end: int) -> Tensor:
    """left = x + factor * memory, in fp32."""
    left, kept = memory.left[begin:end], memory.kept[begin:end]
    if feedback.mode == "ef21":
        return torch.add(x[begin:end], kept, alpha=feedback.factor, out=left)
    return torch.add(x[begin:end], kept.float() * feedback.factor, out=left)


def _decoded(
    backend: Any, job: RowJob, wires_WN: Tensor, numel: int, rotation: int | None, scale: float = 1.0
) -> Tensor:
    dtype = torch.float64 if job.how.format.bits == 64 else torch.float32
    out = torch.empty(numel, dtype=dtype, device=wires_WN.device)
    _check_headers(job, wires_WN, numel, rotation)
    backend.decode_sum(job.how.format, wires_WN, out, scale=scale, rotation=rotation)
    return out


def remember(
    memory: Memory, feedback: Feedback, begin: int, end: int, result: Tensor, own: bool, share: float, fine: Fine
) -> None:
    """Update the memory as the table above says; with "ef21" also add the mean to `result`."""
    kept = memory.kept[begin:end]
    left = memory.left[begin:end]
    if feedback.mode == "classic":
        _put(kept, left if own else left * share, fine)
        return
    _put(kept, kept + (left + result if own else left * share), fine)
    if memory.mean is not None:
        mean = memory.mean[begin:end]
        result.add_(mean)
        _put(mean, result, fine)


def _put(kept: Tensor, values: Tensor, fine: Fine) -> None:
    """kept = values, if fine."""
    if isinstance(fine, Tensor):
        kept.copy_(torch.where(fine, values, kept))
    elif fine:
        kept.copy_(values)
