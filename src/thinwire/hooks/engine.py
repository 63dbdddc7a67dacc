"""The mean over ranks of what DDP hands to a hook, in place: the one path under every hook.

DDP calls a hook in two ways: with a bucket, expecting a future, and while it traces a backward pass with a pair
(grad, param), expecting the gradient to have been replaced. Codecs are strings here, since a traced op takes no other.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import collectives, functional
from thinwire.collectives import checks, transport
from thinwire.collectives.hierarchical import fewest_roundings

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


def mean(
    state: transport.Group, bucket: Any, codec: str, *, algorithm: str | None = None
) -> torch.futures.Future[Tensor]:
    """The mean through a codec whose blocks have scales: however large the numbers, their sum does not overflow.

    The algorithm of the fewest roundings is taken where none is named.
    """
    group, numbers = transport.resolve(state), numbers_of(bucket)
    alone = group.size() == 1  # nothing travels, nothing is rounded
    carried = numbers.float() if numbers.dtype == torch.float64 and not alone else numbers  # codecs take no doubles
    return _reduce(group, bucket, numbers, carried, "avg", codec, algorithm or fewest_roundings(group.size()))


def sum_of_shares(state: transport.Group, bucket: Any, codec: str) -> torch.futures.Future[Tensor]:
    """The sum of every rank's numbers times 1 / world, which is what DDP does without a hook, to the last bit.

    Codecs without scales hold plain floats: their sum could overflow where the mean does not.
    """
    group, numbers = transport.resolve(state), numbers_of(bucket)
    numbers.mul_(1 / group.size())
    algorithm = "plain" if codec == "none" else fewest_roundings(group.size())
    return _reduce(group, bucket, numbers, numbers, "sum", codec, algorithm)


def is_pair(bucket: object) -> bool:
    """Whether DDP is tracing: the hook then gets (grad, param) and gives the gradient itself, not a future."""
    return isinstance(bucket, tuple)


def numbers_of(bucket: Any) -> Tensor:
    """What DDP hands over, as real numbers that can be changed in place."""
    grad: Tensor = bucket[0] if is_pair(bucket) else bucket.buffer()
    checks.check_gradient(grad)
    if grad.is_complex():
        return torch.view_as_real(grad.conj() if grad.is_conj() else grad)  # a mean of conjugates is one of the numbers
    return grad


def _reduce(
    group: dist.ProcessGroup, bucket: Any, numbers: Tensor, carried: Tensor, op: str, codec: str, algorithm: str
) -> torch.futures.Future[Tensor]:
    """Reduce `carried`, which is `numbers` or a copy of them, over the ranks and bring the result to `numbers`."""
    if is_pair(bucket):
        numbers.copy_(_traced(carried, op, group, codec, algorithm))
        return cast("torch.futures.Future[Tensor]", bucket[0])  # DDP's signature knows no pairs
    buffer: Tensor = bucket.buffer()

    def finish(future: "torch.futures.Future[list[Tensor]]") -> Tensor:
        future.value()  # raises what went wrong
        if carried is not numbers:
            numbers.copy_(carried)
        return buffer

    work = collectives.all_reduce(carried, _OPS[op], group, True, codec=codec, algorithm=algorithm)  # type: ignore[arg-type]
    assert work is not None
    return work.get_future().then(finish)


def _traced(x: Tensor, op: str, group: dist.ProcessGroup, codec: str, algorithm: str) -> Tensor:
    """The sum or mean as one op of a graph: torch's own for plain sums, which its compiler knows how to fuse."""
    if algorithm == "plain":
        from torch.distributed import _functional_collectives  # 20 ms that only this path needs

        out: Tensor = _functional_collectives.all_reduce(x, op, group)
        return out
    return functional.all_reduce(x, op, group, codec=codec, algorithm=algorithm)  # type: ignore[arg-type]
