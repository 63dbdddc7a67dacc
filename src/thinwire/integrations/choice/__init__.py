"""Which codec and feedback every parameter has at a step.

`Policy` is the one place that decides: a pure function of the options and of what ranks have agreed on.
`Chooser` makes ranks agree: it times codecs, sums errors over ranks and notes optimizers. All ranks decide
alike, because they use the same step numbers and sums over ranks, never their own measurements.

options.py: what the user asked for. auto.py: what "auto" and "auto:2.5" make of measurements. moments.py: which
optimizers step the parameters, and gradients in Adam's units.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from thinwire.codecs import BlockInt, ByName, BySize, Cast, Codec, Identity, Lloyd, TopK, registry
from thinwire.collectives.chunks import LaneSpec
from thinwire.errors import CollectiveError
from thinwire.feedback import KINDS
from thinwire.integrations.choice import auto
from thinwire.integrations.choice.moments import Agree, Moments
from thinwire.integrations.choice.options import FAMILIES, Auto, DDPOptions, leading
from thinwire.integrations.models import Names, ParameterNames, ParameterSize

_INTERIM = BlockInt(8)  # travels while the feedback depends on an optimizer that is not known yet
_WEIGHED = (torch.float32, torch.bfloat16)  # gradients that may be scaled without overflow
_MAX_WAIT = 30  # steps to wait for that optimizer; a GradScaler may skip the first ones


@dataclass(frozen=True)
class Policy:
    """What every parameter travels in, from the options and what ranks have agreed on; it changes between steps."""

    options: DDPOptions
    choice: Codec | Auto  # the schedule's, at this step
    whole: bool = False  # every rank has all of every parameter's moments, so that gradients may be weighed by them
    outer: bool = False  # the gradients are outer gradients of DiLoCo
    # What ranks have agreed on: the same on all of them.
    family: str | None = None  # of the optimizers
    keeps_moments: bool = False  # whether one of them keeps second moments
    shared: frozenset[str] | None = frozenset()  # parameters whose moments all ranks have; None: none will be found
    candidate: Codec | None = None  # of "auto": the codec that this step times
    fastest: Codec | None = None  # of "auto": the codec that was chosen
    widths: Mapping[str, Codec] | None = None  # of "auto:2.5", by parameter, once they were dealt

    @property
    def feedback(self) -> str:
        """The feedback that was asked for; a mesh has none."""
        return self.options.feedback if self.options.mesh is None else "none"

    @property
    def weigh(self) -> str:
        """As it was asked for; what has feedback is never weighed."""
        return self.options.weigh if self.whole and self.feedback not in KINDS else "none"

    @functools.cached_property
    def few_bits(self) -> bool:
        """Whether anything travels in fewer than 4 bits."""
        choices = [*self.options.schedule.values(), *self.options.rules.codecs]
        if any(isinstance(choice, Auto) and choice.bits is not None and choice.bits < 4 for choice in choices):
            return True
        found = [leaf for choice in choices if isinstance(choice, Codec) for leaf in leaves(choice)]
        return any(feedback_of("auto", leaf, None) is None for leaf in found)

    @property
    def needs_family(self) -> bool:
        """Whether any feedback depends on an optimizer that is not known."""
        return self.feedback == "auto" and self.family is None and self.few_bits

    @property
    def budget(self) -> float | None:
        """Bits per element of "auto:2.5", if it holds at this step."""
        return self.choice.bits if isinstance(self.choice, Auto) else None

    @functools.cached_property
    def base(self) -> Codec:
        """The codec of parameters that no rule names, unless bits were dealt."""
        if not isinstance(self.choice, Auto):
            return self.choice
        if self.choice.bits is not None:
            return auto.start_width(self.choice.bits)
        return self.candidate or self.fastest or Identity()

    @property
    def compresses(self) -> bool:
        """Whether anything is compressed."""
        return not isinstance(self.base, Identity)

    def travels(self, name: str, size: ParameterSize) -> tuple[Codec, str]:
        """The codec and the feedback ("" is none) of a parameter."""
        base = (self.widths or {}).get(name, self.base)
        chosen = self.options.rules.codec_of(name, size.shape, size.dtype, base)
        feedback = self._feedback(chosen)
        return (_INTERIM, "") if feedback is None else (chosen, feedback)

    def _feedback(self, chosen: Codec) -> str | None:
        if self.feedback != "auto":
            return feedback_of(self.feedback, chosen, self.family)
        if self.budget is not None and bits_of(chosen) < 16 and not isinstance(chosen, TopK):
            # Widths change during a run, and what is remembered must not be left behind: one rule for all of them.
            chosen = auto.start_width(min(self.budget, 2.2)) if self.budget < 4 else Lloyd(4)
        return feedback_of("auto", chosen, self.family, outer=self.outer)

    @functools.cached_property
    def weighs(self) -> bool:
        """Whether gradients are weighed by moments, or will be once all ranks have some."""
        if self.weigh == "none" or self.shared is None:
            return False
        return self.weigh == "moments" or (self.family == "adaptive" and self.keeps_moments and self.few_bits)

    def is_weighed(self, name: str, size: ParameterSize) -> bool:
        """Whether a parameter's gradients are weighed.

        Gradients with feedback are not: growing moments would multiply what it remembers, and grow further by it.
        """
        if not self.weighs or name not in (self.shared or ()) or size.dtype not in _WEIGHED:
            return False
        chosen, feedback = self.travels(name, size)
        return bits_of(chosen) < 16 and not feedback

    @functools.cached_property
    def setting(self) -> tuple[object, ...]:
        """A key that changes when any parameter's codec or feedback changes."""
        return self.base, tuple((self.widths or {}).items()), self.family, self.weighs

    def remembered(self, sizes: Mapping[str, ParameterSize]) -> dict[str, tuple[int, str]]:
        """Elements and feedback of every parameter that has one at some step, whether or not it has begun."""
        found: dict[str, tuple[int, str]] = {}
        for choice in self.options.schedule.values():
            then = replace(self, choice=choice, candidate=auto.CANDIDATES[-1], widths=None)
            kinds = {name: then.travels(name, size)[1] for name, size in sizes.items()}
            found |= {name: (sizes[name].numel, kind) for name, kind in kinds.items() if kind}
        return found


class Chooser:
    """Makes ranks agree, at every step, on the `policy` of that step."""

    def __init__(self, options: DDPOptions, names: ParameterNames, *, whole: bool = False, outer: bool = False) -> None:
        self.moments = Moments(options.optimizers)
        self.agreed = options.agreed  # what ranks compare
        # Keep only the family: an optimizer may hold the model, and a model must not keep itself alive.
        asked = replace(options, optimizer=options.family)
        first = options.choice_at(0)
        self.policy = Policy(asked, first, whole, outer, family=options.family, keeps_moments=self.moments.expected)
        self.race: auto.Race | None = None  # while steps are timed
        self.raced = False  # whether a race of codecs ended with the last step
        self.measuring = False  # whether the errors of this step are measured
        self.why = ""  # why "auto" chose what it did
        self._names = names
        self.sizes = names.sizes  # of the parameters whose gradients travel
        self._warned = False  # whether the log says that int8 travels meanwhile
        self._measured: object = None  # the setting of the last measured step
        self._weighed: dict[Names, list[int]] = {}  # results of `weighed` under this policy
        expects = self.policy.weigh == "auto" and self.policy.few_bits and not self.moments.expected
        if self.policy.needs_family or expects:
            self.moments.watch(names)

    def check_family(self, function: str) -> None:
        """Raise where a blank state would depend on an optimizer that is not known."""
        if self.policy.needs_family:
            raise CollectiveError(
                "which feedback there is to load depends on the optimizer, and none was seen yet: "
                f"pass optimizer= to {function}, or name the feedback"
            )

    def begin(self, step: int, seconds: float, errors: Mapping[str, float], error: float | None, agree: Agree) -> str:
        """Agree on what `step` needs; the last one took `seconds`. Returns a message for the user, or "".

        If the last step was measured, `errors` are squared errors by parameter and `error` is the relative one of all.
        """
        if self.race is not None:
            self.race.ended(seconds, error)
        last = self.policy
        if errors and last.budget is not None and (last.widths is None or (step - 1) % last.options.replan_every == 0):
            self._deal_bits(errors, last.budget, agree)
        news = self._agree_on_family(step, agree) if self.moments.watching is not None and step > 0 else ""
        if step > 0 and self.policy.weighs:
            self.moments.look(self._names.tensors(), agree)
            given_up = self.moments.settled and not self.moments.shared
            self._update(shared=None if given_up else self.moments.shared)
            if given_up and not news:
                news = "gradients are not weighed by second moments: not all ranks have the same"
        choice = self.policy.options.choice_at(step)
        if choice != last.choice:  # measurements under another entry of the schedule do not count
            self.race = None
            self._update(choice=choice, widths=None)
        chosen = self._run_race(agree) if self.policy.choice == Auto() else ""
        self.raced = bool(chosen)
        self._update(candidate=None if self.race is None else auto.CANDIDATES[self.race.candidate])
        self.measuring = self._measures(step)
        if self.measuring:
            self._measured = self.policy.setting
        return chosen or news

    def _update(self, **news: Any) -> None:
        if any(getattr(self.policy, name) != value for name, value in news.items()):  # else it keeps what it has cached
            self.policy = replace(self.policy, **news)
            self._weighed.clear()

    def _deal_bits(self, errors: Mapping[str, float], bits: float, agree: Agree) -> None:
        """Choose every parameter's bits by the errors of all ranks."""
        names = sorted(errors)
        summed = agree([errors[name] for name in names], dist.ReduceOp.SUM)
        if not all(math.isfinite(value) for value in summed):
            return  # a step with NaN or Inf says nothing about errors
        layers = {}
        fixed_bytes = 0
        fixed_numel = 0
        for name, lost in zip(names, summed, strict=True):
            size = self.sizes[name]
            rule = self.policy.options.rules.fixed(name, size.shape, size.dtype)
            if rule is None:
                layers[name] = size.numel, auto.squares_of(self.policy.travels(name, size)[0], lost)
            else:
                fixed_bytes += rule.pick(name, size.shape).wire_bytes(size.numel)
                fixed_numel += size.numel
        widths = auto.deal_bits(layers, fixed_bytes, fixed_numel, bits)
        self._update(widths=widths)
        self.why = auto.counted(widths)

    def _agree_on_family(self, step: int, agree: Agree) -> str:
        """Agree on the optimizers' family, as any rank saw it. Ranks wait for it for `_MAX_WAIT` steps at most."""
        seen = self.moments.seen
        known = 0 if not seen else 1 + FAMILIES.index(leading(list(seen.values())))
        waiting = any(name not in seen for name in self.sizes)
        local = [float(known), float(waiting), float(self.moments.expected)]
        shared, someone_waits, expects = agree(local, dist.ReduceOp.MAX)
        if (shared and not someone_waits) or step >= _MAX_WAIT:
            asked = self.policy.family
            family = asked or (FAMILIES[int(shared) - 1] if shared else "adaptive")
            self._update(family=family, keeps_moments=bool(expects))
            self.moments.stop()
            if not shared and not asked:
                return f"no optimizer was seen in {step} steps: an adaptive one is assumed, pass optimizer= if not"
        elif self.policy.needs_family and not self._warned:
            self._warned = True
            return (
                f"{_INTERIM} travels instead of 1 to 3 bits until an optimizer has stepped every parameter, for "
                f"{_MAX_WAIT} steps at most: pass optimizer= to begin at once"
            )
        return ""

    def _run_race(self, agree: Agree) -> str:
        if self.policy.fastest is None and self.race is None:
            self.race = auto.Race()
        if self.race is None or not self.race.over:
            return ""
        options = self.policy.options
        error_budget = options.error_budget or (0.05 if options.family == "muon" else 0.15)
        fastest, self.why = auto.decide(agree(self.race.result(), dist.ReduceOp.MAX), error_budget)
        self._update(fastest=fastest)
        self.race = None
        return f"codec='auto' chose {self.why}"

    def _measures(self, step: int) -> bool:
        policy = self.policy
        if self.race is not None:
            return self.race.measures_error
        if policy.budget is not None and (policy.widths is None or step % policy.options.replan_every == 0):
            return True
        every = policy.options.measure_every
        return every > 0 and (policy.setting != self._measured or step % every == 0)

    def weighed(self, names: Names) -> list[int]:
        """Which of these parameters' gradients are weighed at this step."""
        if names not in self._weighed:
            known = [(i, name, self.sizes[name]) for i, name in enumerate(names) if name in self.sizes]
            self._weighed[names] = [i for i, name, size in known if self.policy.is_weighed(name, size)]
        return self._weighed[names]

    def feedback_in_use(self, used: Iterable[str]) -> str:
        """The kinds of feedback that lanes use, "+moments" if gradients are weighed; or "none"."""
        found = "+".join(sorted({*used} - {""})) or "none"
        return f"{found}+moments" if self.policy.weighs and any(self._weighed.values()) else found

    def spec(self, name: str, size: ParameterSize) -> LaneSpec:
        """How one parameter travels, as a lane of its own would."""
        self.sizes[name] = size
        chosen, feedback = self.policy.travels(name, size)
        return LaneSpec(size.numel, chosen, first_phase(chosen, feedback), feedback)

    def state_dict(self) -> dict[str, Any]:
        policy = self.policy
        return {
            "optimizer": policy.family or "",
            "moments": policy.keeps_moments,
            "chosen": "" if policy.fastest is None else str(policy.fastest),
            "why": self.why,
            "widths": [[name, str(chosen)] for name, chosen in (policy.widths or {}).items()],
        }

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Continue from what was agreed on before `step`; raises before anything has changed."""
        family = str(state["optimizer"])
        fastest = registry.codec(state["chosen"]) if state["chosen"] else None
        widths = {name: registry.codec(spec) for name, spec in state["widths"]} or None
        choice = self.policy.options.choice_at(max(0, step - 1))
        self._update(choice=choice, candidate=None, fastest=fastest, widths=widths, shared=frozenset())
        self.moments.forget()
        if family:  # an optimizer that this run names, or has seen, takes precedence
            moments = self.policy.keeps_moments or bool(state.get("moments"))
            self._update(family=self.policy.family or family, keeps_moments=moments)
            self.moments.stop()
        self.race = None
        self.why = str(state["why"])


def leaves(chosen: Codec) -> list[Codec]:
    """The codecs that a codec may pick."""
    if isinstance(chosen, ByName):
        return [leaf for _, inner in chosen.rules for leaf in leaves(inner)]
    if isinstance(chosen, BySize):
        return [*leaves(chosen.small), *leaves(chosen.large)]
    return [chosen]


def bits_of(chosen: Codec) -> int:
    """Bits of a code; 16 and more count as exact. 1 for topk: most of its numbers are not sent at all."""
    if isinstance(chosen, TopK):
        return 1
    if isinstance(chosen, BlockInt | Lloyd):
        return chosen.bits
    return 8 if isinstance(chosen, Cast) and chosen.format in ("e4m3", "e5m2") else 16


def feedback_of(asked: str, chosen: Codec, optimizer: str | None, *, outer: bool = False) -> str | None:
    """The feedback of a lane ("" is none), or None while it depends on an optimizer that is not known yet.

    "auto" is what trained best: none from 4 bits up, before Muon from 8; below, classic feedback before SGD and Muon,
    and none before Adam, whose variance any feedback inflates. What topk leaves out must be remembered: EF21 for Adam.
    Outer gradients of DiLoCo have none but for topk: there are few rounds, and what one of them lost comes late.
    """
    bits = bits_of(chosen)
    if asked != "auto":
        return "" if asked == "none" or bits >= 16 else asked
    if bits >= (8 if optimizer == "muon" else 4) or (outer and not isinstance(chosen, TopK)):
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
