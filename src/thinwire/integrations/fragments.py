"""The parts of a model that DiLoCo averages by turns, an average that is under way, and whether it comes in time."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thinwire.collectives.channel import wait_in
from thinwire.errors import CollectiveError
from thinwire.integrations.averager import Future
from thinwire.integrations.names import plain_name

_LOOK_S = 0.005  # between two looks at the store
_IN_TIME = "in time"
_LATE = "late"


class Fragment:
    """Parameters that are averaged together, and their outer copies, in fp32, one after the other in one buffer.

    Where one of the parameters is in fp64, all of that is too.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self.names = tuple(name for name, _ in named)
        self.parameters = [parameter for _, parameter in named]
        self.shapes = [tensor.shape for tensor in self.own()]
        self.dtype = torch.float64 if any(p.dtype == torch.float64 for p in self.parameters) else torch.float32
        self.outer = [nn.Parameter(tensor.detach().to(self.dtype, copy=True)) for tensor in self.own()]

    def own(self) -> list[Tensor]:
        """This rank's parameters; of a sharded one, its shard."""
        return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in self.parameters]

    def has_learnt(self) -> bool:
        """Whether this rank's parameters differ from the outer ones."""
        return not all(map(_stays, self.own(), self.outer))

    @property
    def stopped(self) -> str:
        """A parameter that was frozen before the last round, as on all ranks; "" if there is none."""
        found = zip(self.names, self.parameters, self.own(), self.outer, strict=True)
        return next((name for name, p, own, copy in found if not p.requires_grad and _stays(own, copy)), "")

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.detach().to(self.dtype).reshape(-1) for tensor in tensors])

    def split(self, buffer: Tensor) -> list[Tensor]:
        parts = buffer.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@dataclass(eq=False)
class Round:
    """An average of outer gradients under way."""

    fragment: int
    due: int  # the inner step after which it is applied
    sent: Tensor  # this rank's parameters when it began
    average: Tensor
    future: "Future[Tensor] | None"
    group: dist.ProcessGroup
    late: bool = False  # on some rank it was not there in time: it is applied when the next round begins

    def wait(self) -> Tensor:
        if self.future is not None:
            wait_in(self.group, self.future, self.average)
            self.future = None
        return self.average


class Deadline:
    """Whether averages came in time, decided once for all ranks: in their group's store, by whoever knows first.

    Every rank asks for the verdicts on one average after the other, in the same order. The last rank to have an average
    says that it came in time; the first that has waited too long says that it is late. The store keeps what was said
    first, and all ranks go by it, those too that ask later.
    """

    def __init__(self, group: dist.ProcessGroup, key: str, seconds: float) -> None:
        if dist.get_backend(group).endswith("nccl"):
            raise CollectiveError(
                "deadline: on NCCL the host does not see when an average is there: use gloo across sites"
            )
        self._store = group.get_group_store()
        self._key = key  # nobody else's in that store
        self._world = group.size()
        self._seconds = seconds
        self._asked = 0

    def is_met(self, average: "Future[Tensor] | None") -> bool:
        """Whether all ranks had this average in time; all of them ask, those too that have waited for it (None)."""
        key = f"{self._key}/{self._asked}"
        self._asked += 1
        until = time.monotonic() + self._seconds
        there = threading.Event()
        if average is None:
            there.set()
        else:
            average.add_done_callback(lambda _: there.set())
        if there.wait(self._seconds) and self._store.add(f"{key}/count", 1) == self._world:
            self._say(key, _IN_TIME)
        while not self._store.check([f"{key}/verdict"]):
            if time.monotonic() >= until:
                self._say(key, _LATE)
                break
            time.sleep(_LOOK_S)
        said = self._store.get(f"{key}/verdict").decode()
        if self._store.add(f"{key}/read", 1) == self._world:  # the last one leaves nothing behind
            for name in ("count", "verdict", "read"):
                self._store.delete_key(f"{key}/{name}")
        return bool(said == _IN_TIME)

    def _say(self, key: str, verdict: str) -> None:
        self._store.compare_set(f"{key}/verdict", "", verdict)


def _stays(own: Tensor, copy: Tensor) -> bool:
    """Whether a rank's parameter is still the outer one."""
    return torch.equal(own, copy.to(own.dtype))


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.to_local() if isinstance(tensor, DTensor) else tensor).all())


def trained(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter that learns, by its name without wrappers; a sharded one, if this rank has elements of it."""
    if not isinstance(model, nn.Module):
        raise CollectiveError(f"expected a model, got {type(model).__name__}: pass the nn.Module")
    named = [(plain_name(name), p) for name, p in bare(model).named_parameters() if p.requires_grad]
    found: list[tuple[str, Tensor]] = []
    found += [(name, p) for name, p in named if not isinstance(p, DTensor) or p.to_local().numel()]
    complex_ones = [name for name, p in found if p.is_complex()]
    if complex_ones or not found:
        what = f"complex ones ({complex_ones[0]})" if complex_ones else "none that learns"
        raise CollectiveError(f"DiLoCo averages real parameters, got {what}")
    return found


def bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def cut(named: Sequence[tuple[str, Tensor]], count: int) -> list[list[tuple[str, Tensor]]]:
    """`count` parts one after the other, about equally large, none of them empty."""
    total = sum(parameter.numel() for _, parameter in named)
    found: list[list[tuple[str, Tensor]]] = [[] for _ in range(count)]
    index = 0
    seen = 0
    for at, one in enumerate(named):
        numel = one[1].numel()
        left = len(named) - at  # every later part needs one
        full = seen + numel / 2 >= total * (index + 1) / count or left < count - index
        if found[index] and index + 1 < count and full:
            index += 1
        found[index].append(one)
        seen += numel
    return found
