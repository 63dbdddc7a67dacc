"""The hooks that send a bucket through one codec: plain, 16-bit floats, 8-bit integers."""

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from thinwire.codecs import registry
from thinwire.collectives.transport import Group
from thinwire.errors import CodecError
from thinwire.hooks import engine

# One block, however long: what is encoded at once (a shard, or a chunk of one) has one scale and one minimum.
_PER_TENSOR = f"int8:block={(1 << 32) - 8},mode=affine"


def allreduce_hook(process_group: Group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The exact mean, bitwise what DDP computes without a hook."""
    return engine.sum_of_shares(process_group, bucket, "none")


def fp16_compress_hook(process_group: Group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean, numbers travelling as float16 under a scale for every 128, summed in float32.

    Scales follow the numbers, so no block overflows or underflows; one with NaN or Inf becomes NaN.
    """
    return engine.mean(process_group, bucket, "fp16")


def bf16_compress_hook(process_group: Group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean, numbers travelling as bfloat16, summed in float32. NaN and Inf stay where they are."""
    return engine.sum_of_shares(process_group, bucket, "bf16")


# Without CUDA, DDP refuses hooks by this name. Pickle goes by __qualname__, which stays.
bf16_compress_hook.__name__ = "bf16_mean_hook"


def quantization_pertensor_hook(process_group: Group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean in 8 bits, one scale and minimum for all that a rank encodes at once: a shard, or a chunk of one.

    NaN or Inf makes that shard NaN and leaves the others alone.
    """
    return engine.mean(process_group, bucket, _PER_TENSOR, algorithm="two_phase")  # in one shot NaN would take all


def quantization_perchannel_hook(
    process_group: Group, bucket: GradBucket, bucket_size: int = 512
) -> torch.futures.Future[Tensor]:
    """The mean in 8 bits, one scale and minimum for every `bucket_size` elements, a multiple of 8.

    DDP passes no third argument: register `perchannel_hook(bucket_size)` for another size.
    NaN or Inf makes its block NaN and leaves the others alone.
    """
    return engine.mean(process_group, bucket, _per_channel(bucket_size))


def perchannel_hook(bucket_size: int = 512) -> "PerChannelHook":
    """quantization_perchannel_hook with a `bucket_size` of its own, for `register_comm_hook`."""
    return PerChannelHook(bucket_size)


class PerChannelHook:
    """A hook that `perchannel_hook` made; an object, so that it pickles."""

    def __init__(self, bucket_size: int) -> None:
        try:
            registry.codec(_per_channel(bucket_size))
        except CodecError as error:
            raise CodecError(f"bucket_size {bucket_size!r}: {error}") from None
        self.bucket_size = bucket_size
        self.__name__ = self.__qualname__ = f"perchannel_hook({bucket_size})"  # DDP reads both

    def __call__(self, process_group: Group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The mean of a bucket, as quantization_perchannel_hook gives it."""
        return quantization_perchannel_hook(process_group, bucket, self.bucket_size)


def _per_channel(bucket_size: int) -> str:
    return f"int8:block={bucket_size},mode=affine"
