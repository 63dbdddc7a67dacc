"""Which codec every parameter's gradient travels in, and with which feedback. Pure decisions: nothing is sent here."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from thinwire.codecs import BlockInt, ByName, BySize, Cast, Codec, Identity, Lloyd, TopK, codec
from thinwire.codecs.checks import is_int
from thinwire.errors import CodecError
from thinwire.feedback import KINDS
from thinwire.integrations.names import bare_optimizer

FEEDBACKS = ("auto", "none", *KINDS)
TINY = 1024  # elements; a tensor with fewer travels in 16 bits: its blocks would hardly fill a scale
Exempt = str | Sequence[str] | Callable[[str, torch.Size], bool]
CodecLike = str | Codec


@dataclass(frozen=True)
class Trial:
    """codec="auto": try the candidates on real steps, keep the fastest that meets the error budget."""

    def __str__(self) -> str:
        return "auto"


@dataclass(frozen=True)
class Budget:
    """codec="auto:2.5": as many bits per element on average, dealt out by measured error."""

    bits: float

    def __str__(self) -> str:
        return f"auto:{self.bits:g}"


Choice = Codec | Trial | Budget


def parse(spec: object) -> Choice:
    """The codec, or the way of finding one, that a user's `codec` names."""
    text = spec.strip() if isinstance(spec, str) else ""
    if text == "auto":
        return Trial()
    if not text.startswith("auto:"):
        return codec(spec)  # type: ignore[arg-type]
    with contextlib.suppress(ValueError):
        if 1.1 <= (bits := float(text.removeprefix("auto:"))) <= 8.2:
            return Budget(bits)
    raise CodecError(f"{text!r}: expected bits per element from 1.1 to 8.2, such as 'auto:2.5'")


class Schedule:
    """The choice that holds from each step on."""

    def __init__(self, spec: object, warmup_steps: int) -> None:
        if not is_int(warmup_steps) or warmup_steps < 0:
            raise CodecError(f"warmup_steps must be an integer, 0 or more, got {warmup_steps!r}")
        if not isinstance(spec, Mapping):
            spec = {0: "none", warmup_steps: spec} if warmup_steps else {0: spec}
        elif warmup_steps:
            raise CodecError("warmup_steps and a schedule of codecs exclude each other: write {0: 'none', N: ...}")
        if not spec or any(not is_int(step) or step < 0 for step in spec):
            raise CodecError(
                f"a schedule maps steps, 0 or more, to codecs, e.g. {{0: 'none', 100: 'int8'}}: got {spec}"
            )
        self._from = {step: parse(spec[step]) for step in sorted(spec)}
        self.choices = list(self._from.values())  # all that hold at some step

    def at(self, step: int) -> Choice:
        """What holds at `step`; nothing is compressed before the first entry."""
        begun = [choice for start, choice in self._from.items() if step >= start]
        return begun[-1] if begun else Identity()

    def __str__(self) -> str:
        if list(self._from) == [0]:
            return str(self._from[0])
        return "{" + ", ".join(f"{step}: {choice}" for step, choice in self._from.items()) + "}"


class Rules:
    """The codec of a parameter, where most travel in `base`.

    First the rules by name, then the exemptions (16 bits), then `base`. Steps that compress nothing ask no rule.
    """

    def __init__(self, exempt: Exempt, policy: Mapping[str, CodecLike] | None) -> None:
        self._is_exempt = _exemption(exempt)
        self._named = [] if policy is None else _named(policy)
        self.codecs = [chosen for _, chosen in self._named]
        patterns = [] if isinstance(exempt, str) or callable(exempt) else exempt
        self._patterns = {"exempt": list(patterns), "policy": [p for p, _ in self._named if p != "*"]}
        self.by_name = any(self._patterns.values())

    def check_names(self, names: Sequence[str]) -> None:
        """Raise if a pattern matches none of a model's parameters: it was meant for some."""
        for option, patterns in self._patterns.items():
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                    raise CodecError(
                        f"{option} has the pattern {pattern!r}, which matches none of the {len(names)} parameters "
                        f"({some}): mend it, or leave it out"
                    )

    def codec_of(self, name: str, shape: torch.Size, dtype: torch.dtype, base: Codec) -> Codec:
        if isinstance(base, Identity):
            return base
        return (self.fixed(name, shape, dtype) or base).pick(name, shape)

    def fixed(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Codec | None:
        """The codec that a rule or an exemption gives a parameter, if any does."""
        for pattern, chosen in self._named:
            if pattern != "*" and fnmatchcase(name, pattern):
                return chosen
        if self._is_exempt(name, shape):
            return Cast("fp16") if dtype == torch.float16 else Cast("bf16")  # fp16 keeps its digits, others their range
        return self._named[-1][1] if self._named and self._named[-1][0] == "*" else None


def _named(policy: Mapping[str, CodecLike]) -> list[tuple[str, Codec]]:
    if not isinstance(policy, Mapping):
        raise CodecError(f"policy maps patterns of names to codecs, e.g. {{'*.embed*': 'int8'}}: got {policy!r}")
    rules = ByName([*policy.items()] if "*" in policy else [*policy.items(), ("*", "none")]).rules
    return list(rules) if "*" in policy else list(rules[:-1])


def _exemption(exempt: Exempt) -> Callable[[str, torch.Size], bool]:
    if callable(exempt):
        return exempt
    if exempt == "auto":  # norms, biases and whatever is tiny: few bytes, and their error costs most
        return lambda _, shape: len(shape) <= 1 or shape.numel() < TINY
    if exempt == "none":
        return lambda *_: False
    listed = isinstance(exempt, Sequence) and not isinstance(exempt, str)
    if not listed or not all(isinstance(pattern, str) for pattern in exempt):
        raise CodecError(f"exempt must be 'auto', 'none', a list of name patterns or a function, got {exempt!r}")
    patterns = tuple(exempt)
    return lambda name, _: any(fnmatchcase(name, pattern) for pattern in patterns)


FAMILIES = ("linear", "adaptive", "muon")  # of several optimisers the last one's rule holds
_LINEAR = ("SGD", "ASGD")  # what they do with a gradient is linear: an error may come late, but adds up


def family(optimizer: object) -> str:
    """ "linear" for SGD, "muon" for Muon, and "adaptive" for Adam's kin and for what is not known."""
    names = [kind.__name__ for kind in type(bare_optimizer(optimizer)).__mro__]
    return "muon" if "Muon" in names else "linear" if any(name in _LINEAR for name in names) else "adaptive"


def leading(families: Sequence[str]) -> str:
    """The family whose rule holds for all: Muon's where AdamW has the rest, and Adam's beside SGD."""
    return max(families, key=FAMILIES.index)


def leaves(chosen: Codec) -> list[Codec]:
    """The codecs that a codec may pick."""
    if isinstance(chosen, ByName):
        return [leaf for _, inner in chosen.rules for leaf in leaves(inner)]
    if isinstance(chosen, BySize):
        return [*leaves(chosen.small), *leaves(chosen.large)]
    return [chosen]


def bits_of(chosen: Codec) -> int:
    """Bits of a code; 16 and more are as good as exact. Of topk 1: most of its numbers are not sent at all."""
    if isinstance(chosen, TopK):
        return 1
    if isinstance(chosen, BlockInt | Lloyd):
        return chosen.bits
    return 8 if isinstance(chosen, Cast) and chosen.format in ("e4m3", "e5m2") else 16


def feedback_of(asked: str, chosen: Codec, optimizer: str | None, *, outer: bool = False) -> str | None:
    """The feedback of a lane ("" is none), or None while it depends on an optimiser that is not known yet.

    "auto" is what trained best: none from 4 bits up; below, classic feedback in front of SGD and Muon, and none in
    front of Adam, whose variance any feedback inflates. What topk leaves out has to be remembered: EF21 before Adam.
    Outer gradients of DiLoCo have none but for topk: there are few rounds, and what one of them lost comes late.
    """
    bits = bits_of(chosen)
    if asked != "auto":
        return "" if asked == "none" or bits >= 16 else asked
    if bits >= 4 or (outer and not isinstance(chosen, TopK)):
        return ""
    if optimizer is None:
        return None
    if optimizer != "adaptive":
        return "classic"
    return "ef21" if isinstance(chosen, TopK) else ""


def first_phase(chosen: Codec, feedback: str) -> Codec:
    """The codec of the first of two phases: without feedback a Lloyd code is scaled so that its error averages out."""
    if isinstance(chosen, Lloyd) and not feedback and chosen.bits <= 3 and chosen.scale == "mmse":
        return replace(chosen, scale="unbiased")
    return chosen
