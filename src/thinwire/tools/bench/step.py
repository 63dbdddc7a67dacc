"""A training step with each codec, beside plain torch and torch's bf16, interleaved: DDP or FSDP2.

A step is a forward pass, a backward pass and SGD at a rate of zero, all schemes by turns, each after a barrier; it
takes as long as on its slowest rank. A scheme is named by its codec: int8, auto; for FSDP2 by the codecs of gradients
and weights, lloyd4/int8, lloyd4/lloyd4@replica.
"""

import gc
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.codecs import codec
from thinwire.errors import CodecError
from thinwire.integrations.ddp import compress_ddp
from thinwire.tools.bench import models, timing
from thinwire.tools.bench.models import MODELS, Batch, StepModel
from thinwire.tools.bench.record import Progress, Record, Row, collect
from thinwire.tools.bench.timing import NOTHING, Call, Effort, Sample
from thinwire.tools.local import launch
from thinwire.tools.local.launch import RankSetup

DDP, FSDP2 = "ddp", "fsdp2"
VERBS = {DDP: "ddp_step", FSDP2: "fsdp_step"}
COMPUTE = "compute alone"  # DDP without a sum
NONE, BF16 = "none", "bf16"  # torch's own; of FSDP2 bf16 is MixedPrecisionPolicy(bf16, bf16)
CODECS = {DDP: ("int8", "lloyd4", "lloyd2"), FSDP2: ("int8/int8", "lloyd4/int8")}
MODEL = {"cpu": "mlp-25m", "cuda": "gpt-124m"}
FULL = Effort(rounds=5, most=50, seconds=2.0)
QUICK = Effort(rounds=3, most=10, seconds=0.2)
_SETTLED = 6  # steps: buckets were rebuilt, ranks agreed
_AUTO_SETTLED = 30  # steps until "auto" has timed its candidates and chosen


@dataclass(frozen=True)
class StepScheme:
    """How gradients, and weights in FSDP2, travel."""

    name: str
    codec: str | None = None  # None: torch's own
    weights: str = "none"
    replica: bool = False

    @property
    def settled(self) -> int:
        """Steps after which one takes as long as the next."""
        return _AUTO_SETTLED if self.codec == "auto" else _SETTLED


def parse(text: str, parallel: str = DDP) -> StepScheme:
    """CodecError where the name is not understood."""
    text = text.strip()
    if text in (NONE, BF16):
        return StepScheme(text)
    gradients, paired, rest = text.partition("/")
    weights, _, how = rest.partition("@")
    if paired and parallel == DDP:
        raise CodecError(f"{text!r}: gradients/weights goes with --parallel fsdp2")
    if how not in ("", "replica"):
        raise CodecError(f"{text!r}: expected @replica after the codec of weights, got @{how}")
    spelled = gradients if gradients == "auto" and parallel == DDP else str(codec(gradients))
    if not paired:
        return StepScheme(spelled, spelled)
    kept = str(codec(weights))
    return StepScheme(f"{spelled}/{kept}{'@replica' if how else ''}", spelled, kept, bool(how))


def lineup(names: Sequence[str], parallel: str = DDP) -> tuple[StepScheme, ...]:
    """The schemes asked for, after torch's own."""
    return tuple(dict.fromkeys(parse(name, parallel) for name in (NONE, BF16, *names)))


class Replica:
    """A network on this rank whose gradients travel in a scheme's way, and its optimizer."""

    handle: Any = None  # of compress_ddp or compress_fsdp
    model: Any

    def __init__(self, scheme: StepScheme, network: nn.Module, optimizer: Optimizer) -> None:
        self.scheme = scheme
        self.optimizer = optimizer
        self.model = DistributedDataParallel(network, init_sync=False)  # a seed made them alike
        if scheme.codec is not None:
            self.handle = compress_ddp(self.model, scheme.codec, optimizer=optimizer)
        elif scheme.name == BF16:
            self.model.register_comm_hook(None, torch_bf16)

    def step(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        loss = models.loss_of(self.model, batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def shared(self) -> list[Tensor]:
        """What has to be the same on all ranks after a step; all ranks ask together."""
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    @property
    def bytes_sent(self) -> int | None:
        """Passed to the transport so far; None where torch sends by itself."""
        return None if self.handle is None else int(self.handle.stats().bytes_sent)

    @property
    def feedback(self) -> str:
        return "none" if self.handle is None else str(self.handle.stats().feedback)

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()


# DDP refuses torch's own hook by its name where torch was built without CUDA.
def torch_bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    done: torch.futures.Future[Tensor] = default_hooks.bf16_compress_hook(None, bucket)  # type: ignore[arg-type]
    return done


class ShardedReplica(Replica):
    """The same under FSDP2: each block is a parameter group, and what is left is one."""

    def __init__(self, scheme: StepScheme, network: nn.Module, optimizer: Optimizer) -> None:
        """`network` was sharded before its optimizer was made."""
        self.scheme = scheme
        self.optimizer = optimizer
        self.model = network
        if scheme.codec is not None:
            from thinwire.integrations.fsdp import compress_fsdp  # much of torch comes with it

            how: dict[str, Any] = {"replica": scheme.replica, "optimizer": optimizer}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # narrow weights cost accuracy, which is not measured here
                self.handle = compress_fsdp(network, scheme.codec, scheme.weights, **how)

    @property
    def bytes_sent(self) -> int | None:
        """None also where torch gathers the weights by itself: nobody would know all of them."""
        return None if self.scheme.weights == "none" else super().bytes_sent

    def shared(self) -> list[Tensor]:
        """The whole weights, gathered as for a step."""
        from torch.distributed.fsdp import FSDPModule

        modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            module.unshard()
        found = [parameter.detach().float().clone() for parameter in self.model.parameters()]
        for module in modules:
            module.reshard()
        return found


def shard(network: nn.Module, blocks: Sequence[nn.Module], *, narrow: bool = False) -> None:
    """Replace the parameters by this rank's shards; `narrow`: torch computes and sends in bf16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(next(network.parameters()).device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if narrow else MixedPrecisionPolicy()
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32))  # of the loss


@dataclass(frozen=True)
class StepCase:
    """What is interleaved: the schemes of one world."""

    setup: RankSetup
    schemes: tuple[StepScheme, ...]  # torch's own two first
    name: str
    model: StepModel
    parallel: str = DDP

    def __str__(self) -> str:
        return f"{VERBS[self.parallel]} of {self.name}, world {self.setup.world}, {self.setup.link_name}"


@dataclass
class StepSample(Sample):
    params: int = 0
    digest: str = ""
    feedback: str = "none"


def run(
    setups: Sequence[RankSetup],
    *,
    model: str | None = None,
    parallel: str = DDP,
    codecs: Sequence[str] | None = None,
    rounds: int | None = None,
    quick: bool = False,
    progress: Progress = iter,
) -> Record:
    """A record of kind "collectives" whose verbs are ddp_step or fsdp_step; every rank of torchrun has it."""
    device = setups[0].device(0)
    name = model or ("mlp-1m" if quick else MODEL[device.type])
    schemes = lineup(codecs or CODECS[parallel], parallel)
    cases = [StepCase(setup, schemes, name, MODELS[name], parallel) for setup in setups]
    effort = Effort(rounds) if rounds else QUICK if quick else FULL

    def rows() -> Generator[Row]:
        for case in progress(cases):
            with launch.ranks(case.setup) as ranks:
                yield from rows_of(case, ranks.run(measure, case, effort))

    return collect("collectives", device, rows(), setups[0].threads)


def rows_of(case: StepCase, parts: Sequence[dict[str, StepSample]]) -> Iterator[Row]:
    counter = "interface_bytes" if case.setup.link else "transport_bytes"
    for scheme in case.schemes:
        samples = [part[scheme.name] for part in parts]
        yield {
            "verb": VERBS[case.parallel],
            "model": case.name,
            "codec": scheme.name,
            "algorithm": "plain" if scheme.codec is None else "compressed",
            "feedback": samples[0].feedback,
            "numel": samples[0].params,
            "bytes_per_rank": timing.sent(parts, scheme.name, counter),
            **dict.fromkeys(("bytes_formula", "wire_limit_share", "rel_error")),
            "identical": len({sample.digest for sample in samples}) == 1,
            "compute_ms": median(timing.slowest(parts, COMPUTE)) if COMPUTE in parts[0] else None,
            **timing.beside(parts, scheme.name, NONE, BF16),
            **case.setup.columns(),
        }


# The ranks' side.


def measure(case: StepCase, effort: Effort) -> dict[str, StepSample]:
    """This rank's times; all ranks run it together."""
    rank = dist.get_rank()
    device = case.setup.device(rank)
    batch = cast(Batch, tuple(part.to(device) for part in case.model.batch(rank)))
    replicas = {scheme.name: _replica(case, scheme, case.model.build().to(device)) for scheme in case.schemes}
    calls: dict[str, Call] = {name: partial(replica.step, batch) for name, replica in replicas.items()}
    samples = {NOTHING: StepSample()}
    for name, replica in replicas.items():  # one after the other: an automatic codec times its own steps in a row
        for _ in range(replica.scheme.settled):
            calls[name]()
        params = sum(parameter.numel() for parameter in replica.model.parameters())
        samples[name] = StepSample(params=params, digest=timing.digest(replica.shared()), feedback=replica.feedback)

    def sent(name: str) -> int | None:
        return replicas[name].bytes_sent if name in replicas else None

    def alone() -> None:
        with replicas[NONE].model.no_sync():
            replicas[NONE].step(batch)

    if case.parallel == DDP:
        calls[COMPUTE], samples[COMPUTE] = alone, StepSample()
    timing.take(calls, samples, effort, shaped=bool(case.setup.link), transport=sent, device=device)
    for replica in replicas.values():
        replica.close()
    gc.collect()  # DDP and its hooks refer to each other
    return samples


def _replica(case: StepCase, scheme: StepScheme, network: nn.Module) -> Replica:
    if case.parallel == FSDP2:
        shard(network, case.model.blocks(network), narrow=scheme.name == BF16)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0, momentum=0.9)
    return (ShardedReplica if case.parallel == FSDP2 else Replica)(scheme, network, optimizer)
