"""How gradients travel in benchmarks.train: codecs, torch's own hooks beside them, and controls that ought to fail.

To add one of torch's: its name in `PEERS`, and how it is registered in `Replica`; for FSDP2, in `SHARDED_PEERS`
and sharded.py, where DiLoCo is too.
"""

import contextlib
import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.tasks import Task
from thinwire.codecs import codec
from thinwire.errors import CodecError
from thinwire.integrations import choice
from thinwire.integrations.choice import auto, options
from thinwire.integrations.choice.options import Feedback, Weigh
from thinwire.integrations.ddp import compress_ddp
from thinwire.tools.bench import step, timing
from thinwire.tools.bench.models import Batch
from thinwire.tools.bench.step import torch_bf16
from thinwire.tools.bench.timing import Call, Effort

DDP = "ddp"
FSDP2 = "fsdp2"
DILOCO = "diloco"
NONE = "none"
BF16 = "bf16"
MIXED = "mixed"
RANKS = {"powersgd1": 1, "powersgd2": 2, "powersgd4": 4}  # of PowerSGD's matrices
PEERS = (NONE, BF16, *RANKS)
SHARDED_PEERS = {NONE: "none", BF16: "bf16", MIXED: "bf16"}  # FSDP2's, and how they gather weights
REPLICA = "replica"
MOMENTS = "moments"
CONTROLS = {"sign": "lloyd1:rotate=false,block=1024", "int2": "int2"}
MOMENTUM = 0.9
ADAMS = {"adam": 0.0, "adamw": 0.1}  # weight decay
_POWERSGD_START = 2  # steps before PowerSGD compresses: the fewest it takes
_ONE_BUCKET_MB = 1 << 16  # PowerSGD hangs on gloo where several of its buckets are under way
_SETTLED = 6  # steps: buckets were rebuilt, ranks agreed, PowerSGD has begun
_WIDE = 8  # bits; weights that are rounded to fewer ought to fail
_RACED = auto.SETTLE_STEPS + auto.ROUNDS * len(auto.CANDIDATES) + 2


@dataclass(frozen=True)
class TrainScheme:
    """One way in which gradients travel, as it was named and as compress_ddp or compress_fsdp knows it."""

    name: str
    codec: str | None  # None: not thinwire's
    feedback: str = "none"
    exempt: str = "auto"
    weigh: str = "none"
    peer: bool = False
    control: bool = False
    weights: str | None = None  # of FSDP2: "none", "int8", "lloyd4@replica"
    every: int | None = None  # of DiLoCo: steps between two rounds

    @property
    def label(self) -> str:
        return self.name.partition("/")[0].partition("@")[0]

    @property
    def settled(self) -> int:
        """The steps after which one takes as long as the next."""
        return _RACED if self.codec == "auto" else _SETTLED

    def __str__(self) -> str:
        return self.name if self.every is None else f"{self.name} every {self.every}"


ALONE = TrainScheme("alone", None, weights="none")  # FSDP2 that copies as ever, and sends nothing
SYNCHRONOUS = TrainScheme(DDP, NONE, peer=True)  # beside DiLoCo: fp32 gradients at every step


def parse(text: str) -> TrainScheme:
    """ "int8", "auto:2.5", "lloyd2@ef21", a control or one of torch's."""
    text = text.strip()
    if text in PEERS:
        return TrainScheme(text, None, "classic" if text in RANKS else "none", peer=text != NONE)
    if text in CONTROLS:
        return TrainScheme(text, CONTROLS[text], "none", "none", control=True)
    return _compressed(text, (*CONTROLS, *PEERS))


def parse_sharded(text: str) -> TrainScheme:
    """Of FSDP2: "int8", "lloyd4/int8" (gradients, weights), "lloyd4/lloyd4@replica", or one of torch's."""
    text = text.strip()
    if text in SHARDED_PEERS:
        return TrainScheme(text, None, peer=text != NONE, weights=SHARDED_PEERS[text])
    gradients, paired, rest = text.partition("/")
    found = _compressed(gradients, tuple(SHARDED_PEERS))
    if found.weigh == MOMENTS:
        raise CodecError(f"{text!r}: a rank of FSDP2 has the {MOMENTS} of its own shards alone: leave out +{MOMENTS}")
    found = replace(found, weigh="none")
    if not paired:
        return replace(found, weights="none")
    weights, named, how = rest.partition("@")
    if named and how != REPLICA:
        raise CodecError(f"{text!r}: weights are sent themselves, or as differences with @{REPLICA}, got @{how}")
    spelt = codec(weights)
    whole = f"{spelt}{named}{how}"
    control = not named and choice.bits_of(spelt) < _WIDE
    return replace(found, name=f"{found.name}/{whole}", weights=whole, control=control)


def parse_outer(text: str) -> TrainScheme:
    """Of DiLoCo: "none" for outer gradients in fp32, "lloyd4", "lloyd2@none"."""
    text = text.strip()
    return TrainScheme(NONE, NONE) if text == NONE else _compressed(text, (NONE,))


def _compressed(text: str, others: Sequence[str]) -> TrainScheme:
    label, named, asked = text.partition("@")
    asked, weighed, unit = asked.partition("+") if named else ("auto", "", "")
    if weighed and unit != MOMENTS:
        raise CodecError(f"{text!r}: gradients may be weighed by their {MOMENTS}, lloyd2@none+{MOMENTS}, got {unit!r}")
    if asked not in get_args(Feedback):
        raise CodecError(f"{text!r}: feedback must be one of {', '.join(get_args(Feedback))}, got {asked!r}")
    try:
        spelt = str(options.parse(label))
    except CodecError as error:
        hint = "; gradients/weights goes with --parallel fsdp2" if "/" in text else ""
        raise CodecError(f"{error}; besides codecs there are {', '.join(('auto', *others))}{hint}") from None
    weigh = MOMENTS if weighed else "none" if named else "auto"
    return TrainScheme(f"{spelt}@{asked}{weighed}{unit}" if named else spelt, spelt, asked, weigh=weigh)


def optimizer_for(kind: str, parameters: Iterable[nn.Parameter]) -> Optimizer:
    if kind == "muon":
        return MuonAndAdamW(parameters, lr=0.0)
    if kind in ADAMS:
        return torch.optim.AdamW(parameters, lr=0.0, weight_decay=ADAMS[kind])
    return torch.optim.SGD(parameters, lr=0.0, momentum=MOMENTUM)


class MuonAndAdamW(Optimizer):
    """Muon for matrices, AdamW for the rest, at one rate: Muon's updates are scaled to the size of AdamW's."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        found = list(parameters)
        matrices = [parameter for parameter in found if parameter.dim() == 2]
        others = [parameter for parameter in found if parameter.dim() != 2]
        super().__init__(found, {})
        self._parts: list[Optimizer] = [torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")]
        self._parts += [torch.optim.AdamW(others, lr=lr)] if others else []
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """A step of both."""
        for part in self._parts:
            part.step()


class Replica:
    """A network whose gradients travel in a scheme's way, on this rank. Replicas may share a network, not a step."""

    _handle: Any = None  # of compress_ddp, compress_fsdp or DiLoCo
    _power: Any = None  # of PowerSGD

    def __init__(self, scheme: TrainScheme, network: nn.Module, optimizer: Optimizer) -> None:
        cap = _ONE_BUCKET_MB if scheme.label in RANKS else None
        self.scheme = scheme
        self.optimizer = optimizer
        self.model: Any = DistributedDataParallel(network, bucket_cap_mb=cap, init_sync=False)  # a seed made them alike
        if scheme.codec is not None:
            self._handle = compress_ddp(
                self.model,
                scheme.codec,
                feedback=cast(Feedback, scheme.feedback),
                exempt=scheme.exempt,
                weigh=cast(Weigh, scheme.weigh),
                optimizer=optimizer,
            )
        elif scheme.label in RANKS:
            self._power = powersgd.PowerSGDState(None, RANKS[scheme.label], start_powerSGD_iter=_POWERSGD_START)
            self.model.register_comm_hook(self._power, powersgd.powerSGD_hook)
        elif scheme.label == BF16:
            self.model.register_comm_hook(None, torch_bf16)

    def step(self, task: Task, batch: Batch, rate: float, *, alone: bool = False) -> Tensor:
        """One step of training, and the batch's loss; `alone`: nothing is sent, the ranks' gradients stay their own."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        with self.model.no_sync() if alone else contextlib.nullcontext():
            loss = task.loss(self.model, batch)
            loss.backward()
        self.optimizer.step()
        return loss.detach()

    def weights(self) -> dict[str, Tensor]:
        """What the network computes with, by name; all ranks ask together."""
        return dict(self.model.module.named_parameters())

    @property
    def bytes_sent(self) -> int | None:
        """Handed to the transport so far; None where torch sends by itself."""
        return None if self._handle is None else int(self._handle.stats().bytes_sent)

    @property
    def feedback(self) -> str:
        return self.scheme.feedback if self._handle is None else str(self._handle.stats().feedback)

    @property
    def chosen(self) -> str | None:
        return None if self._handle is None else self._handle.stats().chosen or None

    @property
    def extra_bytes(self) -> int | None:
        """Memory that is held from step to step; None for torch's bf16, which holds none but copies every bucket."""
        if self._handle is not None:
            stats = self._handle.stats()
            return int(stats.residual_bytes + stats.scratch_bytes + stats.replica_bytes)
        if self._power is not None:
            kept = (self._power.error_dict, self._power.p_memory_dict, self._power.q_memory_dict)
            tensors: list[Tensor] = [tensor for memory in kept for tensor in memory.values()]
            return sum(tensor.nbytes for tensor in tensors)
        return 0 if self.scheme.label == NONE else None

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()


@dataclass
class TrainSample(step.StepSample):
    """One rank's measurements of steps, and what their replica says of itself."""

    extra_bytes: int | None = None
    chosen: str | None = None


def time_steps(
    replicas: dict[str, Replica], calls: dict[str, Call], samples: Mapping[str, TrainSample], effort: Effort, **how: Any
) -> None:
    """Time calls, most of them steps of replicas, by turns (`timing.take`); then close and forget the replicas."""

    def transport(name: str) -> int | None:
        return replicas[name].bytes_sent if name in replicas else None

    timing.take(calls, samples, effort, transport=transport, **how)
    for name, replica in replicas.items():
        samples[name].extra_bytes = replica.extra_bytes
        samples[name].chosen = replica.chosen
        replica.close()
    replicas.clear()
    calls.clear()
    gc.collect()  # DDP and its hooks hold each other
