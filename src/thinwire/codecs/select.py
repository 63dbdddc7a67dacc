"""Codecs made of codecs: the choice of a codec by a tensor's size, shape or name.

They encode nothing themselves: `pick(name, shape)` returns the codec that does, and `encode`, `decode` and the others
use it. `ByName` uses its last rule if there is no name; `BySize` goes by the length alone if there is no shape.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from thinwire.codecs.base import Codec
from thinwire.codecs.checks import is_int
from thinwire.codecs.leaves import BlockInt, Cast
from thinwire.errors import CodecError
from thinwire.kernels.schema import Encoding
from thinwire.wire import IDENTITY_DTYPES


class _Chooser(Codec):
    inputs = IDENTITY_DTYPES

    def encoding(self, dtype: torch.dtype) -> Encoding:
        """Always an error: a codec made of codecs has no encoding of its own."""
        raise CodecError(f"{self} encodes through the codec it picks: use pick(name, shape)")


@dataclass(frozen=True)
class BySize(_Chooser):
    """`small` for tensors of fewer than `min_numel` elements or `min_ndim` dimensions, `large` for the others.

    min_ndim=2 exempts norms, biases and other 1-D parameters. Only `pick`, which knows the shape, uses `min_ndim`;
    `encode` does not, since its buffers may be flat.
    """

    small: Codec = field(default_factory=Cast)
    large: Codec = field(default_factory=BlockInt)
    min_numel: int = 4096  # larger => more tensors travel as `small`
    min_ndim: int = 0  # larger => tensors of fewer dimensions travel as `small`

    def __post_init__(self) -> None:
        _check_leaf("small", self.small)
        _check_leaf("large", self.large)
        for name in ("min_numel", "min_ndim"):
            if not is_int(getattr(self, name)) or getattr(self, name) < 0:
                raise CodecError(f"{name} must be an integer, 0 or more, got {getattr(self, name)!r}")

    def pick(self, name: str = "", shape: Sequence[int] = ()) -> Codec:
        """`small` or `large`, by the shape. A shape of one dimension may be a flat buffer: see `encode`."""
        small = math.prod(shape) < self.min_numel or len(shape) < self.min_ndim
        return (self.small if small else self.large).pick(name, shape)

    def _sized(self, numel: int) -> Codec:
        return (self.small if numel < self.min_numel else self.large)._sized(numel)

    def __str__(self) -> str:
        return f"bysize(small={self.small}; large={self.large}; min_numel={self.min_numel}; min_ndim={self.min_ndim})"


@dataclass(frozen=True)
class ByName(_Chooser):
    """The codec of the first pattern that matches the tensor's name; patterns are shell-style, the last must be "*".

    ByName({"*.bias": "bf16", "*norm*": "bf16", "*": "lloyd4"}), or the same as pairs.
    """

    rules: tuple[tuple[str, Codec], ...]

    def __init__(self, rules: Mapping[str, Codec | str] | Sequence[tuple[str, Codec | str]]) -> None:
        from thinwire.codecs.registry import codec  # here, as the registry imports this module

        pairs = rules.items() if isinstance(rules, Mapping) else rules
        object.__setattr__(self, "rules", tuple((pattern, codec(c)) for pattern, c in pairs))
        if not self.rules or self.rules[-1][0] != "*":
            raise CodecError("the last rule of ByName must be '*', the codec of every other tensor")
        patterns = [pattern for pattern, _ in self.rules]
        if twice := [pattern for i, pattern in enumerate(patterns) if pattern in patterns[:i]]:
            raise CodecError(f"a pattern of ByName has one codec, got several for {twice[0]!r}: only the first counts")
        for pattern, _ in self.rules:
            if not isinstance(pattern, str) or not pattern or pattern != pattern.strip() or set(pattern) & set("=;()"):
                raise CodecError(f"a pattern is text without = ; ( ) or spaces around it, got {pattern!r}")

    def pick(self, name: str = "", shape: Sequence[int] = ()) -> Codec:
        """The codec of the first matching rule."""
        return self._match(name).pick(name, shape)

    def _sized(self, numel: int) -> Codec:
        return self._match("")._sized(numel)

    def _match(self, name: str) -> Codec:
        return next(c for pattern, c in self.rules if pattern == "*" or (name and fnmatchcase(name, pattern)))

    def __str__(self) -> str:
        return f"byname({'; '.join(f'{pattern}={c}' for pattern, c in self.rules)})"


def _check_leaf(name: str, codec: object) -> None:
    if not isinstance(codec, Codec):
        raise CodecError(f"{name} must be a codec, got {codec!r}: make one with thinwire.codec({codec!r})")
