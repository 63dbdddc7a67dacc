"""What the user asked for: codecs, schedules, rules by name and the options of compress_ddp, checked once."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, TypedDict, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from thinwire.codecs import ByName, Cast, Codec, Identity, codec, registry
from thinwire.codecs.checks import is_int
from thinwire.collectives.checks import check_algorithm, check_recodes
from thinwire.collectives.message import Nodes
from thinwire.errors import CodecError, CollectiveError
from thinwire.feedback import KINDS, Ledger
from thinwire.integrations.models import bare_optimizer

TINY = 1024  # elements; smaller tensors travel in 16 bits: their blocks would hardly fill a scale
Exempt = str | Sequence[str] | Callable[[str, torch.Size], bool]
CodecLike = str | Codec
EXACT: Final = "exact"  # weights of FSDP2 as exact differences
Weights = Codec | Literal["exact"]
CodecChoice = CodecLike | Mapping[int, CodecLike]
BY_MODEL = ("inside", "weights", "replica", "mesh")  # options that depend on how a model is wrapped
Optimizers = Optimizer | str | Sequence[Optimizer | str] | None
Feedback = Literal["auto", "none", "classic", "ef21"]
OnNonfinite = Literal["propagate", "raise"]
Weigh = Literal["auto", "none", "moments"]
Algorithm = Literal["auto", "one_shot", "two_phase"]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Auto:
    """codec="auto" times candidates on real steps; "auto:2.5" deals out so many bits per element by measured error."""

    bits: float | None = None

    def __str__(self) -> str:
        return "auto" if self.bits is None else f"auto:{self.bits:g}"


def parse(spec: object) -> Codec | Auto:
    """The codec, or the way of finding one, that a user's `codec` names."""
    text = spec.strip() if isinstance(spec, str) else ""
    if text == "auto":
        return Auto()
    if not text.startswith("auto:"):
        return codec(spec)  # type: ignore[arg-type]
    with contextlib.suppress(ValueError):
        if 1.1 <= (bits := float(text.removeprefix("auto:"))) <= 8.2:
            return Auto(bits)
    raise CodecError(f"{text!r}: expected bits per element from 1.1 to 8.2, such as 'auto:2.5'")


class Rules:
    """The codec of a parameter, where most travel in `base`.

    First the rules by name, then the exemptions (16 bits), then `base`. Steps that compress nothing follow no rule.
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
                        f"({some}): fix or remove it"
                    )

    def codec_of(self, name: str, shape: torch.Size, dtype: torch.dtype, base: Codec) -> Codec:
        """The codec of a parameter at a step whose `base` this is."""
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


FAMILIES = ("linear", "adaptive", "muon")  # among several optimizers, the last family in this order decides
_WITH_MOMENTS = ("Adam", "AdamW", "NAdam", "RAdam", "RMSprop")
_LINEAR = ("SGD", "ASGD")  # steps are linear in the gradient: what feedback adds back later makes up for an error


def family(optimizer: object) -> str:
    """ "linear" for SGD, "muon" for classes with Muon in their names, and "adaptive" for all others, as Adam."""
    names = [kind.__name__ for kind in type(bare_optimizer(optimizer)).__mro__]
    if any("Muon" in name for name in names):
        return "muon"
    return "linear" if any(name in _LINEAR for name in names) else "adaptive"


def has_moments(optimizer: object) -> bool:
    """Whether an optimizer keeps second moments."""
    return any(kind.__name__ in _WITH_MOMENTS for kind in type(optimizer).__mro__)


def leading(families: Sequence[str]) -> str:
    """The family whose rule holds for all: Muon's where AdamW has the rest, and Adam's beside SGD."""
    return max(families, key=FAMILIES.index)


class SharedKeywords(TypedDict, total=False):
    """Options that both compress_ddp and compress_fsdp take, for type checkers."""

    feedback: Feedback
    exempt: Exempt
    policy: Mapping[str, CodecLike] | None
    warmup_steps: int
    optimizer: Optimizers
    residual_dtype: torch.dtype
    error_budget: float | None
    replan_every: int
    measure_every: int
    on_nonfinite: OnNonfinite
    inside: CodecLike


class DDPKeywords(SharedKeywords, total=False):
    """Options of compress_ddp, apart from the codec: the fields of DDPOptions."""

    weigh: Weigh
    algorithm: Algorithm
    mesh: DeviceMesh | None


@dataclass(frozen=True)
class DDPOptions:
    """What `compress_ddp` was asked for; its docstring says what each option means."""

    codec: CodecChoice = "int8"
    _: KW_ONLY
    feedback: Feedback = "auto"
    exempt: Exempt = "auto"
    policy: Mapping[str, CodecLike] | None = None
    warmup_steps: int = 0
    optimizer: Optimizers = None
    residual_dtype: torch.dtype = torch.float32
    error_budget: float | None = None  # None: 0.15; before Muon 0.05, to which roundings to 4 bits do harm
    replan_every: int = 100
    measure_every: int = 100
    on_nonfinite: OnNonfinite = "propagate"
    weigh: Weigh = "auto"
    algorithm: Algorithm = "auto"
    mesh: DeviceMesh | None = None
    inside: CodecLike = "bf16"

    def __post_init__(self) -> None:
        for name, known in (("feedback", Feedback), ("weigh", Weigh), ("on_nonfinite", OnNonfinite)):
            if (given := getattr(self, name)) not in get_args(known):
                raise CodecError(f"{name} must be one of {', '.join(get_args(known))}, got {given!r}")
        Ledger(self.residual_dtype)  # says what is wrong with the dtype
        if self.feedback == "ef21" and self.residual_dtype != torch.float32:
            raise CodecError(
                "feedback='ef21' adds up what was sent, exactly: residual_dtype must be float32, got "
                f"{self.residual_dtype}"
            )
        check_algorithm(self.algorithm, get_args(Algorithm))
        if self.weigh == "moments" and self.feedback in KINDS:
            raise CodecError(
                f"weigh='moments' excludes feedback, which would be remembered in changing units, got "
                f"feedback={self.feedback!r}: leave out one of them"
            )
        for name, least in (("replan_every", 1), ("measure_every", 0)):
            if not is_int(count := getattr(self, name)) or count < least:
                raise CodecError(f"{name} must be a number of steps, got {count!r}")
        if self.error_budget is not None and not (isinstance(self.error_budget, float | int) and self.error_budget > 0):
            raise CodecError(f"error_budget must be a number above 0, got {self.error_budget!r}")
        are_known = [isinstance(one, Optimizer) or one in FAMILIES for one in self.optimizers]
        if self.optimizer is not None and not (are_known and all(are_known)):
            families = ", ".join(map(repr, FAMILIES))
            got = ", ".join(repr(one) if isinstance(one, str) else type(one).__name__ for one in self.optimizers)
            raise CodecError(f"optimizer must be torch optimizers, or one of {families}, got {got}")
        for parsed in ("schedule", "rules", "nodes"):
            getattr(self, parsed)  # says what is wrong with it
        if self.algorithm == "two_phase":
            check_recodes([one for one in self.schedule.values() if isinstance(one, Codec)], "algorithm='two_phase'")

    @functools.cached_property
    def schedule(self) -> Mapping[int, Codec | Auto]:
        """The choices by the step from which each holds, in order; nothing is compressed before the first."""
        spec, warmup_steps = self.codec, self.warmup_steps
        if not is_int(warmup_steps) or warmup_steps < 0:
            raise CodecError(f"warmup_steps must be an integer, 0 or more, got {warmup_steps!r}")
        if not isinstance(spec, Mapping):
            spec = {0: "none", warmup_steps: spec} if warmup_steps else {0: spec}
        elif warmup_steps:
            raise CodecError("warmup_steps and a schedule of codecs exclude each other: write {0: 'none', N: ...}")
        if not spec or any(not is_int(step) or step < 0 for step in spec):
            raise CodecError(f"a schedule maps steps, 0 or more, to codecs, as {{0: 'none', 100: 'int8'}}: got {spec}")
        return {step: parse(spec[step]) for step in sorted(spec)}

    def choice_at(self, step: int) -> Codec | Auto:
        """The schedule's choice at a step."""
        begun = [choice for start, choice in self.schedule.items() if start <= step]
        return begun[-1] if begun else Identity()

    @property
    def asked(self) -> str:
        """The codec or the schedule, as text."""
        listed = ", ".join(f"{step}: {choice}" for step, choice in self.schedule.items())
        return listed.removeprefix("0: ") if list(self.schedule) == [0] else f"{{{listed}}}"

    @property
    def agreed(self) -> str:
        """What all ranks have to agree on, in one line: the codec, and whatever differs from the default."""
        named = [f for f in fields(self) if f.name not in ("warmup_steps", "inside")]  # in the schedule, with the mesh
        written = {field.name: found for field in named if (found := getattr(self, field.name)) != field.default}
        written["codec"] = self.asked
        if callable(self.exempt):
            written["exempt"] = "a function"
        if self.policy:
            written["policy"] = "; ".join(f"{pattern}={codec}" for pattern, codec in self.policy.items())
        if self.optimizer is not None:
            written["optimizer"] = f"{self.family}{' with moments' if any(map(has_moments, self.optimizers)) else ''}"
        if self.nodes is not None:
            written["mesh"] = f"{self.nodes.mesh.mesh.tolist()} in {self.nodes.inside}"
        return ", ".join(f"{name}={value}" for name, value in sorted(written.items()))

    @functools.cached_property
    def rules(self) -> Rules:
        return Rules(self.exempt, self.policy)

    @property
    def optimizers(self) -> Sequence[Optimizer | str]:
        return [bare_optimizer(one) for one in _listed(self.optimizer)]

    @property
    def family(self) -> str | None:
        """The leading family of the optimizers that were passed."""
        families = [one if isinstance(one, str) else family(one) for one in self.optimizers]
        return leading(families) if families else None

    @property
    def nodes(self) -> Nodes | None:
        """The mesh and the codec inside its nodes; raises if they do not fit."""
        mesh = self.mesh
        chosen = registry.codec(self.inside)
        if mesh is None:
            if chosen == Cast("bf16"):
                return None
            raise CollectiveError(f"inside={str(chosen)!r} requires a mesh of nodes and ranks inside them: pass mesh=")
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
            what = f"a mesh of {mesh.ndim}" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
            raise CollectiveError(f"mesh must be a DeviceMesh of two dimensions, nodes and ranks inside, got {what}")
        if self.algorithm != "auto":
            raise CollectiveError(f"with mesh= the algorithm is 'hierarchical': leave out algorithm={self.algorithm!r}")
        if self.feedback not in ("auto", "none"):
            raise CollectiveError(
                "sums inside nodes and then across have no error feedback: "
                f"leave out feedback={self.feedback!r}, or the mesh"
            )
        return Nodes(mesh, chosen)


def settings_of(optimizer: Optimizer) -> str:
    """An optimizer and its settings that are not zero, to compare with other ranks'."""
    groups = []
    for settings in optimizer.param_groups:
        plain = {name: v.tolist() if isinstance(v, Tensor) else v for name, v in settings.items()}
        kept = [f"{name}={v}" for name, v in sorted(plain.items()) if v and isinstance(v, int | float | str | tuple)]
        groups.append(", ".join([f"{len(settings['params'])} parameters", *kept]))
    return f"{type(optimizer).__name__}({'; '.join(groups)})"


def framework_options(codec: CodecChoice, options: Mapping[str, Any], **by_model: Any) -> dict[str, Any]:
    """Options of compress_ddp or compress_fsdp for a model that comes later; raises if one is wrong for any model.

    by_model: options that are left out if they are None.
    """
    found = {**options, **{name: value for name, value in by_model.items() if value is not None}}
    for name, read in (("inside", registry.codec), ("weights", codec_of_weights)):
        if name in found:
            read(found[name])
    rest = {name: value for name, value in found.items() if name not in BY_MODEL}
    check_known("compress_ddp", DDPKeywords, rest)
    DDPOptions(codec, **rest)
    return found


def codec_of_weights(weights: CodecLike) -> Weights:
    """The codec of FSDP2's weights, or EXACT."""
    return EXACT if isinstance(weights, str) and weights.strip() == EXACT else registry.codec(weights)


def check_known(function: str, keywords: Any, given: Iterable[str]) -> None:
    """Raise for keywords that are not options of a function."""
    known = _options_in(keywords)
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() has no option {name!r}; apart from the codec it takes {', '.join(known)}")


def spelled_out(function: Function) -> Function:
    """`function` with its `**options` written out for help() and inspect, defaults included."""
    signature = inspect.signature(function)
    *first, rest = signature.parameters.values()
    (keywords,) = get_args(rest.annotation)
    options = _options_in(keywords).values()
    function.__signature__ = signature.replace(parameters=[*first, *options])  # type: ignore[attr-defined]
    return function


def _options_in(keywords: Any) -> dict[str, inspect.Parameter]:
    """The fields of DDPOptions that a TypedDict has, too."""
    known = inspect.signature(DDPOptions).parameters
    return {name: parameter for name, parameter in known.items() if name in keywords.__optional_keys__}


def _listed(given: Any) -> Sequence[Any]:
    """Optimizers as they are passed: none, one or several."""
    if given is None:
        return []
    return given if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def check_stepped(model: nn.Module, given: Optimizers) -> None:
    """Raise if optimizers are passed that step none of the model's parameters."""
    found = [one for one in (bare_optimizer(each, whole=True) for each in _listed(given)) if isinstance(one, Optimizer)]
    stepped = {id(parameter) for one in found for settings in one.param_groups for parameter in settings["params"]}
    if found and stepped.isdisjoint(map(id, model.parameters())):
        raise CollectiveError(
            "optimizer= must step the model's parameters, and steps none of them: pass the one made of "
            "model.parameters(); where it steps copies of them, pass 'linear', 'adaptive' or 'muon'"
        )
