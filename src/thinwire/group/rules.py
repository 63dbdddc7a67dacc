"""Which calls of a group travel in which codec: rules, and how they are parsed."""

import os
import re
from dataclasses import dataclass

import torch

from thinwire.codecs import Codec, Identity, codec as parse_codec
from thinwire.errors import CodecError, CollectiveError

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Sums alone: a group cannot tell FSDP's gather of weights from that of a checkpoint. The size is the smallest that was
# measured to gain, at 100 Mbit/s on a busy machine (benchmarks/group_cpu.json).
DEFAULT_RULES = "all_reduce=int8@32768; reduce_scatter=int8@32768"
VARIABLE = "THINWIRE_RULES"
_FORM = re.compile(r"(\w+)(?:\[(\w+)\])?\s*=\s*([^@]+?)(?:@(.*))?")


@dataclass(frozen=True)
class GroupRule:
    """Calls of an operation travel in a codec, from so many elements on."""

    operation: str  # one of OPERATIONS; send is of both ends of a message
    codec: Codec
    least: int = 1  # elements of a call, all its tensors together; smaller calls travel as they are
    dtype: torch.dtype | None = None  # None: all of DTYPES

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise CollectiveError(f"a rule's operation must be one of {', '.join(OPERATIONS)}, got {self.operation!r}")
        if self.operation != "all_reduce" and not self.codec.recodes:
            raise CodecError(f"codec {self.codec} serves sums only: {self.operation} needs another one, such as int8")

    def __str__(self) -> str:
        dtype = "" if self.dtype is None else f"[{str(self.dtype).removeprefix('torch.')}]"
        return f"{self.operation}{dtype}={self.codec}@{self.least}"


class GroupRules:
    """Rules in order: the first that fits decides. A codec of `none`, or no rule, leaves a call to torch."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise CollectiveError(f"rules must be a string such as 'all_reduce=int8@16384; send=int8', got {text!r}")
        self._rules = tuple(_rule(part.strip()) for part in text.split(";") if part.strip() not in ("", "none"))

    def __str__(self) -> str:
        return "; ".join(map(str, self._rules)) or "none"

    def find(self, operation: str, dtype: torch.dtype, numel: int | None) -> Codec | None:
        """The codec of a call; `numel` is None where ranks do not know each other's, and then every rule fits."""
        if dtype not in DTYPES.values():
            return None
        for rule in self._rules:
            if rule.operation == operation and rule.dtype in (None, dtype) and (numel is None or numel >= rule.least):
                codec = rule.codec if numel is None else rule.codec.pick(shape=(numel,))
                return None if isinstance(codec, Identity) else codec
        return None


def _rule(text: str) -> GroupRule:
    found = _FORM.fullmatch(text)
    if found is None:
        raise CollectiveError(
            f"a rule must read operation=codec@elements, such as all_reduce=int8@16384, or operation[dtype]=codec for "
            f"one dtype; got {text!r}"
        )
    operation, dtype, codec, least = found.groups()
    if dtype is not None and dtype not in DTYPES:
        raise CollectiveError(f"a rule's dtype must be one of {', '.join(DTYPES)}, got {dtype!r} in {text!r}")
    if least is not None and not least.strip().isdecimal():
        raise CollectiveError(f"a rule's elements must be a whole number, got {least!r} in {text!r}")
    try:
        return GroupRule(operation, parse_codec(codec), int(least or 1), None if dtype is None else DTYPES[dtype])
    except CodecError as error:
        raise CodecError(f"in the rule {text!r} (a semicolon ends a rule): {error}") from None


def environment_rules() -> GroupRules:
    """Those of THINWIRE_RULES, or the defaults."""
    try:
        return GroupRules(os.environ.get(VARIABLE, DEFAULT_RULES))
    except (CodecError, CollectiveError) as error:
        raise type(error)(f"{VARIABLE}: {error}") from None
