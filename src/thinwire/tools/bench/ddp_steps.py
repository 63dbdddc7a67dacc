"""Steps of DDP on a small network and of FSDP2 on a large one, beside torch's own.

Forward pass, backward pass and SGD, at a rate of zero, all schemes by turns. DDP's network has 1.1 million parameters
in two buckets: it shows what compression costs where messages are short. Codecs below four bits run with classic
feedback and with EF21. FSDP2's is that of `bench train --task mlp`, one parameter group per layer.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from thinwire.codecs import codec
from thinwire.collectives.hierarchical import fewest_roundings
from thinwire.integrations import choice
from thinwire.tools.bench import launch, schemes, turns
from thinwire.tools.bench.launch import NcclRanks, World
from thinwire.tools.bench.link import ShapedLink
from thinwire.tools.bench.record import Row
from thinwire.tools.bench.schemes import BF16, MIXED, NONE, StepSample, TrainScheme
from thinwire.tools.bench.tasks import TASKS, Digits
from thinwire.tools.bench.timing import Call, Effort
from thinwire.tools.bench.turns import CPU, NOTHING

VERB = "ddp_step"
SHARDED = "fsdp_step"
TASK = Digits(VERB, 1, 1, (("sgd", 0.0),), sizes=(64, 512, 1024, 512, 10))
SHARDED_TASK = cast(Digits, TASKS["mlp"])
WEIGHTS = "int8"  # in which weights travel in steps of FSDP2
NARROW = 4  # bits; below, codecs need feedback
_PLAIN = 16  # bits of codecs that steps of FSDP2 leave to torch's own


@dataclass(frozen=True)
class StepCase:
    world: int
    schemes: tuple[TrainScheme, ...]  # torch's own two first
    cards: NcclRanks | None = None  # None => gloo, on the CPU
    verb: str = VERB
    task: Digits = TASK
    link: ShapedLink | None = field(default=None, init=False)
    nodes: int | None = field(default=None, init=False)

    def rows(self, world: World, effort: Effort) -> Iterator[Row]:
        return rows_of(self, world.run(measure, self, effort))

    def __str__(self) -> str:
        return f"{self.verb}, world {self.world}, {self.cards.link if self.cards else 'loopback'}"


def lineup(codecs: Sequence[str]) -> tuple[TrainScheme, ...]:
    """The schemes of codecs, after torch's own in fp32 and bf16."""
    found = [schemes.parse(name) for name in (NONE, BF16)]
    for name in codecs:
        fed = choice.bits_of(codec(name)) < NARROW
        found += [schemes.parse(f"{name}@{kind}") for kind in ("classic", "ef21")] if fed else [schemes.parse(name)]
    return tuple(dict.fromkeys(found))


def sharded_lineup(codecs: Sequence[str]) -> tuple[TrainScheme, ...]:
    """The same of FSDP2, after torch's own in fp32 and with parameters and reduction in bf16; no feedback."""
    found = [schemes.parse_sharded(name) for name in (NONE, MIXED)]
    found += [schemes.parse_sharded(f"{name}/{WEIGHTS}") for name in codecs if choice.bits_of(codec(name)) < _PLAIN]
    return tuple(dict.fromkeys(found))


def rows_of(case: StepCase, parts: Sequence[dict[str, StepSample]]) -> Iterator[Row]:
    bf16, algorithm = (BF16, fewest_roundings(case.world)) if case.verb == VERB else (MIXED, "compressed")
    for scheme in case.schemes:
        samples = [part[scheme.name] for part in parts]
        yield {
            "verb": case.verb,
            "codec": scheme.name,
            "algorithm": "plain" if scheme.codec is None else algorithm,
            "feedback": samples[0].feedback,
            "world": case.world,
            "nodes": case.cards.nodes if case.cards else None,
            "link": case.cards.link if case.cards else "loopback",
            "numel": samples[0].params,
            "bytes_per_rank": turns.sent(parts, scheme.name, "transport_bytes"),
            **dict.fromkeys(("bytes_formula", "wire_limit_share", "rel_error")),
            "identical": len({sample.digest for sample in samples}) == 1,
            **time_columns(parts, scheme.name, NONE, bf16, case.cards),
        }


def time_columns(parts: turns.Samples, name: str, plain: str, bf16: str, cards: NcclRanks | None) -> Row:
    """What a call takes beside torch's own in fp32 and bf16, and where it ran."""
    samples = [part[name] for part in parts]
    return {
        **turns.beside(parts, name, plain, bf16),
        "cpu_ms_per_rank": turns.cpu_ms(samples),
        "rounds": len(samples[0].ms),
        "threads": launch.THREADS,
        "cores": os.cpu_count(),
        "backend": "gloo" if cards is None else "nccl",
        **turns.on_gpu(parts, name, plain),
        **(launch.nccl_columns(cards) if cards else {}),
    }


# The ranks' side.


def measure(case: StepCase, effort: Effort) -> dict[str, StepSample]:
    """This rank's times; all ranks run it together."""
    rank = dist.get_rank()
    device = CPU if case.cards is None else case.cards.card(rank)
    generator = torch.Generator().manual_seed(rank)
    task = case.task
    images = torch.randn(task.rows, task.sizes[0], generator=generator)
    batch = (images.to(device), torch.randint(task.sizes[-1], (task.rows,), generator=generator).to(device))
    # A network each: where several wrap one, each is called for the gradients of all.
    networks = {scheme: task.model(0).to(device) for scheme in case.schemes}
    replicas = {scheme.name: schemes.replica_of(task, scheme, own, "sgd") for scheme, own in networks.items()}
    calls: dict[str, Call] = {name: partial(replica.step, task, batch, 0.0) for name, replica in replicas.items()}
    samples = {NOTHING: StepSample()}
    for name, replica in replicas.items():
        for _ in range(replica.scheme.settled):
            calls[name]()
        parameters = list(replica.model.parameters())
        params = sum(parameter.numel() for parameter in parameters)
        shared = [p.grad for p in parameters if p.grad is not None]  # what has to be the same on all ranks
        if case.verb == SHARDED:
            shared = list(replica.weights().values())
        samples[name] = StepSample(params=params, digest=turns.digest(shared), feedback=replica.feedback)
    schemes.time_steps(replicas, calls, samples, effort, shaped=False, device=device)
    return samples
