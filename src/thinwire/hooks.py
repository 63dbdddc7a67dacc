"""Fixed versions of torch's DDP hooks, with the same names and signatures, over thinwire's collectives.

    ddp_model.register_comm_hook(process_group, thinwire.hooks.quantization_perchannel_hook)

A hook takes (state, bucket) and returns a future of the bucket's mean over the ranks, written into the bucket; the
state is a process group, or None for the world. For the (grad, param) pair that DDP passes while it traces a backward
pass, a hook writes the mean into grad and returns grad. Codecs are strings, because a traced op takes nothing else.

To add one: a function of (process_group, bucket), under `_of_buckets`, that returns `_mean` by a codec; annotate it
as the others are (DDP looks), and list it in `__all__`.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from thinwire import collectives, functional
from thinwire.codecs.checks import is_int
from thinwire.collectives import checks, groups
from thinwire.collectives.groups import Group
from thinwire.collectives.plan import SumAlgorithm
from thinwire.collectives.sums import fewest_roundings
from thinwire.errors import CodecError, CollectiveError

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "perchannel_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]
Hook = Callable[[Any, GradBucket], Future[Tensor]]

_LONGEST = (1 << 32) - 8  # of all blocks
_EIGHT_BITS = "int8:block={},mode=affine"
_P = ParamSpec("_P")


def _of_buckets(hook: Callable[_P, Future[Tensor]]) -> Callable[_P, Future[Tensor]]:
    """A hook that raises a clear error if it gets a gradient and perhaps a part to write, as FSDP1 passes them."""

    @wraps(hook)
    def checked(*args: _P.args, **options: _P.kwargs) -> Future[Tensor]:
        if any(isinstance(given, Tensor) for given in args):
            raise CollectiveError(
                "thinwire's hooks take the buckets of DistributedDataParallel, got a gradient, as FSDP1 passes it: "
                "shard the model with torch.distributed.fsdp.fully_shard (FSDP2), and call thinwire.compress_fsdp"
            )
        return hook(*args, **options)

    return checked


@_of_buckets
def allreduce_hook(process_group: Group, bucket: GradBucket) -> Future[Tensor]:
    """The exact mean, bitwise what DDP computes without a hook. Accepts sparse gradients, too."""
    if _is_pair(bucket) or bucket.buffer().layout == torch.strided:
        return _mean(process_group, bucket, "none")
    group = groups.resolve(process_group)
    work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)  # DDP divides sparse ones
    assert work is not None
    future: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


@_of_buckets
def fp16_compress_hook(process_group: Group, bucket: GradBucket) -> Future[Tensor]:
    """The mean: numbers travel as float16 with one scale per 128 elements, and are summed in float32.

    Scales follow the numbers, so no block overflows or underflows; one with NaN or Inf becomes NaN.
    """
    return _mean(process_group, bucket, "fp16")


@_of_buckets
def bf16_compress_hook(process_group: Group, bucket: GradBucket) -> Future[Tensor]:
    """The mean: numbers travel as bfloat16 and are summed in float32. NaN and Inf stay where they are."""
    return _mean(process_group, bucket, "bf16")


# Without CUDA, DDP refuses hooks by this name. Pickle goes by __qualname__, which stays.
bf16_compress_hook.__name__ = "bf16_mean_hook"


@_of_buckets
def quantization_pertensor_hook(process_group: Group, bucket: GradBucket) -> Future[Tensor]:
    """The mean in 8 bits, with one scale and minimum per encoded shard (or chunk of a long shard).

    NaN or Inf makes that shard NaN and leaves the others alone.
    """
    codec = _EIGHT_BITS.format(_LONGEST)
    return _mean(process_group, bucket, codec, algorithm="two_phase")  # in one shot NaN would spoil the whole bucket


@_of_buckets
def quantization_perchannel_hook(process_group: Group, bucket: GradBucket, bucket_size: int = 512) -> Future[Tensor]:
    """The mean in 8 bits, with one scale and minimum per `bucket_size` elements of the bucket.

    DDP passes no third argument: register `perchannel_hook(bucket_size)` for another size.
    NaN or Inf makes its channel NaN and leaves the others alone.
    """
    channel = _channel(bucket_size)
    codec = _EIGHT_BITS.format(_block(channel)) + ",aligned=true"  # cut between channels only
    return _mean(process_group, bucket, codec, channel=channel)


def perchannel_hook(bucket_size: int = 512) -> Hook:
    """quantization_perchannel_hook with a `bucket_size` of its own, for `register_comm_hook`."""
    channel = _channel(bucket_size)
    return _named(partial(quantization_perchannel_hook, bucket_size=channel), f"perchannel_hook({bucket_size})")


def _channel(bucket_size: int) -> int:
    if not is_int(bucket_size) or bucket_size < 1:
        raise CodecError(f"bucket_size must be a positive number of elements, got {bucket_size!r}")
    return min(bucket_size, _LONGEST)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Run `hook` on the bucket cast to float16, and return its result in the bucket's dtype.

    A number beyond 65504 becomes infinite, and so does a sum of them; fp16_compress_hook has scales and keeps it.
    """
    return _named(partial(_in_sixteen_bits, torch.float16, hook), f"fp16_compress_wrapper({_name(hook)})")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Run `hook` on the bucket cast to bfloat16, and return its result in the bucket's dtype."""
    return _named(partial(_in_sixteen_bits, torch.bfloat16, hook), f"bf16_compress_wrapper({_name(hook)})")


@_of_buckets
def _in_sixteen_bits(dtype: torch.dtype, hook: Hook, state: Any, bucket: GradBucket, *_: Any) -> Future[Tensor]:
    """The hook's result in the bucket's own dtype, written into the bucket."""
    numbers = _numbers(bucket)
    narrow = numbers.to(dtype)
    if _is_pair(bucket):
        result: Any = hook(state, (narrow, bucket[1]))  # type: ignore[arg-type, index]
        if isinstance(result, Future):
            result = result.wait()
        numbers.copy_(narrow if result is None else _tensor(result))
        return cast("Future[Tensor]", bucket[0])  # type: ignore[index]
    buffer = bucket.buffer()
    bucket.set_buffer(narrow)

    def finish(future: Future[Tensor]) -> Tensor:
        numbers.copy_(_tensor(future.value()))
        bucket.set_buffer(buffer)
        return buffer

    return hook(state, bucket).then(finish)


def _tensor(result: Any) -> Tensor:
    """The tensor that a hook returns; DDP also accepts a list of one, as torch's own works hold."""
    tensor: Tensor = result[0] if isinstance(result, list | tuple) else result
    return tensor


def _named(hook: Any, name: str) -> Hook:
    """A partial with the names that DDP reads; it pickles if what it holds does."""
    hook.__name__ = hook.__qualname__ = name
    return cast(Hook, hook)


def _name(hook: Hook) -> str:
    return getattr(hook, "__name__", type(hook).__name__)


def _mean(
    state: Group, bucket: Any, codec: str, *, algorithm: SumAlgorithm | None = None, channel: int = 8
) -> Future[Tensor]:
    """Write the mean over the ranks into the bucket; every `channel` numbers have a block.

    Codecs with scales take numbers of any size. The others hold plain floats, whose sum could overflow where the mean
    does not: ranks add up their numbers times 1 / world, which is what DDP does without a hook, to the last bit.
    The algorithm of the fewest roundings is taken where none is named.
    """
    group = groups.resolve(state)
    world = group.size()
    carried = numbers = _numbers(bucket)
    op = "sum" if codec in ("none", "bf16") else "avg"
    if op == "sum":
        numbers.mul_(1 / world)
    elif world > 1:  # a single rank sends and rounds nothing
        carried = _filled(numbers.float() if numbers.dtype == torch.float64 else numbers, channel)  # no codec has fp64
    algorithm = "plain" if codec == "none" else algorithm or fewest_roundings(world)
    if _is_pair(bucket):  # one op of a graph: for plain sums torch's own, which its compiler knows how to fuse
        if algorithm == "plain":
            from torch.distributed import _functional_collectives  # 20 ms, for this path only

            result: Tensor = _functional_collectives.all_reduce(carried, op, group)
        else:
            result = functional.all_reduce(carried, op, group, codec=codec, algorithm=algorithm)
        numbers.copy_(result if carried is numbers else _emptied(result, numbers, channel))
        return cast("Future[Tensor]", bucket[0])  # DDP's signature knows no pairs

    def finish(future: "Future[list[Tensor]]") -> Tensor:
        future.value()  # raises what went wrong
        if carried is not numbers:
            numbers.copy_(_emptied(carried, numbers, channel))
        return buffer

    buffer: Tensor = bucket.buffer()
    work = collectives.all_reduce(carried, functional.OPS[op], group, True, codec=codec, algorithm=algorithm)
    assert work is not None
    return work.get_future().then(finish)


def _is_pair(bucket: object) -> bool:
    """Whether DDP is tracing: it then passes (grad, param), against its signature, and expects grad, not a future."""
    return isinstance(bucket, tuple)


def _numbers(bucket: Any) -> Tensor:
    """What DDP passes, a bucket or a pair (grad, param), as real numbers that can be changed in place."""
    grad: Tensor = bucket[0] if _is_pair(bucket) else bucket.buffer()
    checks.check_gradient(grad)
    if grad.is_complex():
        grad = grad.conj() if grad.is_conj() else grad  # the mean of conjugates is the conjugate of the mean
        return torch.view_as_real(grad)
    return grad


# [Note: Channels] A block is a multiple of 8. Whole channels of another length are filled up to the next one with
# copies of their last number, which change neither minimum nor maximum; what is left over at the end is a short block.


def _block(channel: int) -> int:
    return -(-channel // 8) * 8


def _filled(x: Tensor, channel: int) -> Tensor:
    """Every whole channel as a block; x itself where they are blocks already."""
    if channel % 8 == 0:
        return x
    rows = x.numel() // channel
    whole, rest = x.reshape(-1).split([rows * channel, x.numel() - rows * channel])
    columns = torch.arange(_block(channel), device=x.device).clamp(max=channel - 1)
    return torch.cat([whole.view(rows, channel)[:, columns].reshape(-1), rest])


def _emptied(x: Tensor, like: Tensor, channel: int) -> Tensor:
    """The numbers of `_filled`, in the shape of `like`."""
    if channel % 8 == 0:
        return x
    rows = like.numel() // channel
    whole, rest = x.split([rows * _block(channel), x.numel() - rows * _block(channel)])
    return torch.cat([whole.view(rows, _block(channel))[:, :channel].reshape(-1), rest]).view(like.shape)
