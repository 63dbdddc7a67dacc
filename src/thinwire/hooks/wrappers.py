"""Any other hook on 16-bit gradients: cast, run it, bring its result back in the dtype that came in."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from thinwire.hooks import engine

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


def fp16_compress_wrapper(hook: Hook) -> "CompressWrapper":
    """`hook` on a float16 bucket. What exceeds 65504 is infinite there; fp16_compress_hook has scales and is not."""
    return CompressWrapper(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> "CompressWrapper":
    """`hook` on a bfloat16 bucket."""
    return CompressWrapper(hook, torch.bfloat16)


class CompressWrapper:
    """A wrapped hook; an object, so that it pickles where the hook does."""

    def __init__(self, hook: Hook, dtype: torch.dtype) -> None:
        self.hook, self.dtype = hook, dtype
        inner = getattr(hook, "__name__", type(hook).__name__)
        short = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
        self.__name__ = self.__qualname__ = f"{short}_compress_wrapper({inner})"  # DDP reads both

    def __call__(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The hook's result in the bucket's own dtype, written into the bucket."""
        return self._on_pair(state, bucket) if engine.is_pair(bucket) else self._on_bucket(state, bucket)

    def _on_bucket(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        numbers, buffer = engine.numbers_of(bucket), bucket.buffer()
        bucket.set_buffer(numbers.to(self.dtype))

        def finish(future: torch.futures.Future[Tensor]) -> Tensor:
            numbers.copy_(_tensor(future.value()))
            bucket.set_buffer(buffer)
            return buffer

        return self.hook(state, bucket).then(finish)

    def _on_pair(self, state: Any, pair: Any) -> Any:
        numbers = engine.numbers_of(pair)
        narrow = numbers.to(self.dtype)
        result: Any = self.hook(state, (narrow, pair[1]))  # type: ignore[arg-type]
        if isinstance(result, torch.futures.Future):
            result = result.wait()
        numbers.copy_(narrow if result is None else _tensor(result))
        return pair[0]


def _tensor(result: Any) -> Tensor:
    """The tensor a hook gives; DDP also takes the list of one that torch's own works hold."""
    tensor: Tensor = result[0] if isinstance(result, list | tuple) else result
    return tensor
