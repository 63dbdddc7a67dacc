"""The Triton kernels of messages in rows under Triton's interpreter, against kernels/rows.py: a script of its own.

`TRITON_INTERPRET=1 python tests/interpreted_rows.py [everything]`, as tests/interpreted.py for single wires. Every case
is a sum of all ranks' numbers, in two phases and in one, of which one rank's part is tried; all that is written is
compared. Prints a line for every case that differs, and ends with their number.
"""

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import cases
import interpreted
from thinwire import codec as make, use_backend
from thinwire.kernels import hashing, rows
from thinwire.kernels.rows import Bad, Feedback, Memory
from thinwire.kernels.schema import RowJob, Rows

Results = dict[str, Tensor]
F32 = torch.float32
BF16 = torch.bfloat16
MIXED = hashing.mix64(7) ^ (1 << 48 | 2 << 16)
CALL = 5  # the number by which calls are noted that are not finite


class Case(NamedTuple):
    """A codec, and how the numbers of a message are dealt to rows."""

    codec: str
    rows: Rows
    mode: str = ""  # of feedback, or "own": the own part is exact
    dtype: torch.dtype = F32
    kept: torch.dtype = F32  # of the memory
    broken: bool = False  # rank 1 has a NaN
    rank: int = 1  # whose kernels are tried


SHORT = Rows(150, 64, 3)  # the last row is short
EMPTY = Rows(100, 64, 3)  # and here the last one has nothing
CASES = [
    Case("int8:block=32", SHORT, rank=2),
    Case("int8:block=32", EMPTY, "classic", broken=True),
    Case("lloyd4:block=32", EMPTY, "", BF16),
    Case("lloyd2:block=32", SHORT, "ef21", broken=True),
    Case("trellis2:block=32", Rows(67, 67, 1), "own", rank=0),
    Case("int5:block=64,rounding=stochastic", EMPTY, "own"),
    Case("int3:block=40,mode=affine,rounding=stochastic", SHORT, "own", broken=True),  # has no launch that adds it
    Case("bf16", SHORT, "own", broken=True),
    Case("bf16", EMPTY, "", BF16),
    Case("none", Rows(75, 25, 3), "", BF16, broken=True),
]
MORE = [
    Case("lloyd2:block=64", Rows(67, 67, 1), "own", rank=0),
    Case("trellis2:block=32", SHORT, "ef21", broken=True),
    Case("int8:block=32", Rows(96, 48, 2), "ef21", BF16),
    Case("int4:block=64", SHORT, "own", rank=2),
    Case("lloyd4:block=64", SHORT, "classic", kept=BF16),
    Case("trellis3:block=32", EMPTY, "own", BF16),
    Case("none", SHORT, "own", rank=2),
]


def job_of(case: Case, shape: Rows) -> RowJob:
    codec = make(case.codec)
    how = codec.encoding(case.dtype if case.mode in ("", "own") else F32)
    return RowJob(how, codec.seed, shape, case.dtype, cases.CPU, how.format.layout(shape.each).nbytes + 3 * 16)


def garbage(nbytes: int) -> Tensor:
    return torch.full((nbytes,), cases.GARBAGE, dtype=torch.uint8)


class Ranks:
    """What the ranks of a case start from, the same for every backend."""

    def __init__(self, case: Case) -> None:
        numel = case.rows.numel
        self.world = max(case.rows.count, 2)
        self.feedback: Feedback | None = None
        self.memories: list[Memory | None] = [None] * self.world
        self.xs = [torch.randn(numel, generator=cases.seeded(numel, rank)).to(case.dtype) for rank in range(self.world)]
        if case.broken:
            self.xs[1][case.rows.each - 1] = torch.nan  # in the last block of the first row
        if case.mode in ("classic", "ef21"):
            self.feedback = Feedback(case.mode, self.world if case.mode == "classic" else -self.world)
            self.memories = [self._memory(rank, x, case.kept) for rank, x in enumerate(self.xs)]

    def _memory(self, rank: int, x: Tensor, dtype: torch.dtype) -> Memory:
        """What is left has the place of x, where that has the bits."""
        kept = torch.randn(x.numel(), generator=cases.seeded(rank, 1)).to(dtype)
        left = x if x.dtype == F32 else torch.zeros(x.numel())
        return Memory(kept, left, torch.randn(x.numel(), generator=cases.seeded(rank, 2)))

    def told(self) -> Results:
        """All that they hold now."""
        found = {f"x of {rank}": x for rank, x in enumerate(self.xs)}
        for rank, memory in enumerate(self.memories):
            found |= {f"memory {i} of {rank}": t for i, t in enumerate(memory or ())}
        return found


def by(case: Case, rank: int) -> AbstractContextManager[None]:
    """Only one rank's kernels are tried: the interpreter is slow."""
    return nullcontext() if rank == case.rank else use_backend("reference")


def noted(case: Case, bad: Bad) -> Tensor:
    """What was noted, which is right."""
    assert bad.noted.tolist() == ([CALL, 1] if case.broken else [0, 0]), f"noted {bad.noted.tolist()}"
    return bad.noted


def in_two_phases(case: Case) -> Results:
    """Encode all rows, recode the own one, decode all."""
    ranks, job = Ranks(case), job_of(case, case.rows)
    sent = [garbage(ranks.world * job.stride) for _ in range(ranks.world)]
    owns = [rank if case.mode else -1 for rank in range(ranks.world)]
    for rank, (x, memory) in enumerate(zip(ranks.xs, ranks.memories, strict=True)):
        with by(case, rank):
            rows.encoder(job, skip=owns[rank], feedback=ranks.feedback)(x, sent[rank], MIXED, memory)
    found = {"wires": sent[case.rank].clone()}
    gathered = garbage(ranks.world * job.stride)
    share = 1 / ranks.world
    for row in range(job.rows.short + 1):
        came = torch.cat([wires.view(-1, job.stride)[row] for wires in sent])
        wire = gathered[row * job.stride :][: job.layout(row).nbytes]
        with by(case, row):
            recode = rows.recoder(job, row, ranks.world, scale=share, own=owns[row], feedback=ranks.feedback)
            recode(came, wire, MIXED, ranks.xs[row] if case.mode else None, ranks.memories[row])
    bad = Bad(torch.zeros(2, dtype=torch.int32), CALL)
    memory = ranks.memories[case.rank]
    if memory is not None:
        rows.scanner(job)(gathered, bad)
    decode = rows.decoder(job, own=owns[case.rank], share=share, feedback=ranks.feedback)
    decode(gathered, ranks.xs[case.rank], memory, bad)
    return found | {"sums": gathered, "noted": noted(case, bad), **ranks.told()}


def in_one(case: Case) -> Results:
    """Encode everything as one row, add the wires of all ranks."""
    ranks = Ranks(case)
    job = job_of(case, Rows(case.rows.numel, case.rows.numel, 1))
    wires = garbage(ranks.world * job.stride)
    for rank, (x, memory) in enumerate(zip(ranks.xs, ranks.memories, strict=True)):
        with by(case, rank):
            encode = rows.encoder(job, by_row=0, first_row=3, feedback=ranks.feedback)
            encode(x, wires[rank * job.stride :], MIXED, memory)
    bad = Bad(torch.zeros(2, dtype=torch.int32), CALL)
    if ranks.feedback is not None:
        rows.scanner(job, ranks.world)(wires, bad)
    decode = rows.decoder(job, world=ranks.world, scale=-0.5, share=-0.5, feedback=ranks.feedback)
    decode(wires, ranks.xs[case.rank], ranks.memories[case.rank], bad)
    return {"wires": wires, "noted": noted(case, bad), **ranks.told()}


def exchanged(case: Case) -> Results:
    """A rank's rows, of which the own one does not travel but is copied; nothing is noted."""
    ranks, job = Ranks(case), job_of(case, case.rows)
    wires = garbage(ranks.world * job.stride)
    out = torch.full_like(ranks.xs[0], torch.nan)
    kept = job.rows.short
    rows.encoder(job, skip=kept, by_row=0, first_row=2)(ranks.xs[0], wires, MIXED, None)
    rows.decoder(job, skip=kept)(wires, out, None, None, ranks.xs[0])
    return {"wires": wires, "out": out}


def main() -> int:
    """Run all cases; how many differ."""
    interpreted.mend()
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    bad = 0
    tried = [*CASES, *(MORE if interpreted.everything() else ())]
    for case in tried:
        start = time.perf_counter()
        for run in (in_two_phases, in_one, *([exchanged] if not case.mode else [])):
            if found := interpreted.difference(lambda run=run, case=case: run(case)):
                bad += 1
                print(f"{case}, {run.__name__}: {found}", flush=True)
        print(f"# {case}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    for dtype in (F32, BF16):
        try:
            cases.check_picked("triton", cases.CPU, dtype)
        except AssertionError as error:
            bad += 1
            print(f"picked numbers, {dtype}: {error}")
    print(f"{bad} of {len(tried) + 2} differ")
    return bad


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
