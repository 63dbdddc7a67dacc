"""Which codec and feedback every parameter has at a step.

`Policy` is the one place that decides: a pure function of the options, the step and what ranks have agreed on
(`Agreed`). `Chooser` brings that agreement about: it times codecs, sums errors over ranks and notes optimizers. All
ranks decide alike, because they use the same step numbers and sums over ranks, never their own measurements.

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
from thinwire.collectives.lane import LaneSpec
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
class Agreed:
    """What ranks have agreed on, apart from the options; the same on all of them."""

    family: str | None = None  # of the optimizers
    keeps_moments: bool = False  # whether one of them keeps second moments
    shared: frozenset[str] | None = frozenset()  # parameters whose moments all ranks have; None: none will be found
    candidate: Codec | None = None  # of "auto": the codec that this step times
    fastest: Codec | None = None  # of "auto": the codec that was chosen
    widths: Mapping[str, Codec] | None = None  # of "auto:2.5", by parameter, once they were dealt


class Policy:
    """The options as a pure function of the step and of what ranks have agreed on.

    whole: every rank has all of every parameter's moments, so that gradients may be weighed by them.
    outer: the gradients are outer gradients of DiLoCo.
    """

    def __init__(self, options: DDPOptions, *, whole: bool = False, outer: bool = False) -> None:
        self.schedule = options.schedule
        self.rules = options.rules
        self.feedback = options.feedback if options.mesh is None else "none"
        self.weigh = options.weigh if whole and self.feedback not in KINDS else "none"  # never what has feedback
        self.outer = outer

    @functools.cached_property
    def few_bits(self) -> bool:
        """Whether anything travels in fewer than 4 bits."""
        choices = [*self.schedule.choices, *self.rules.codecs]
        if any(isinstance(choice, Auto) and choice.bits is not None and choice.bits < 4 for choice in choices):
            return True
        found = [leaf for choice in choices if isinstance(choice, Codec) for leaf in leaves(choice)]
        return any(feedback_of("auto", leaf, None) is None for leaf in found)

    def needs_family(self, agreed: Agreed) -> bool:
        """Whether any feedback depends on an optimizer that is not known."""
        return self.feedback == "auto" and agreed.family is None and self.few_bits

    def base(self, step: int, agreed: Agreed) -> Codec:
        """The codec of parameters that no rule names, unless bits were dealt."""
        choice = self.schedule.at(step)
        if not isinstance(choice, Auto):
            return choice
        if choice.bits is not None:
            return auto.start_width(choice.bits)
        return agreed.candidate or agreed.fastest or Identity()

    def travels(self, step: int, agreed: Agreed, name: str, size: ParameterSize) -> tuple[Codec, str]:
        """The codec and the feedback ("" is none) of a parameter."""
        base = self.base(step, agreed)
        chosen = self.rules.codec_of(name, size.shape, size.dtype, (agreed.widths or {}).get(name, base))
        feedback = self._feedback(step, agreed.family, chosen)
        return (_INTERIM, "") if feedback is None else (chosen, feedback)

    def _feedback(self, step: int, family: str | None, chosen: Codec) -> str | None:
        if self.feedback != "auto":
            return feedback_of(self.feedback, chosen, family)
        choice = self.schedule.at(step)
        budget = choice.bits if isinstance(choice, Auto) else None
        if budget is not None and bits_of(chosen) < 16 and not isinstance(chosen, TopK):
            # Widths change during a run, and what is remembered must not be left behind: one rule for all of them.
            chosen = auto.start_width(min(budget, 2.2)) if budget < 4 else Lloyd(4)
        return feedback_of("auto", chosen, family, outer=self.outer)

    def weighs(self, agreed: Agreed) -> bool:
        """Whether gradients are weighed by moments, or will be once all ranks have some."""
        if self.weigh == "none" or agreed.shared is None:
            return False
        return self.weigh == "moments" or (self.few_bits and agreed.family == "adaptive" and agreed.keeps_moments)

    def is_weighed(self, step: int, agreed: Agreed, name: str, size: ParameterSize) -> bool:
        """Whether a parameter's gradients are weighed.

        Gradients with feedback are not: growing moments would multiply what it remembers, and grow further by it.
        """
        if not self.weighs(agreed) or name not in (agreed.shared or ()) or size.dtype not in _WEIGHED:
            return False
        chosen, feedback = self.travels(step, agreed, name, size)
        return bits_of(chosen) < 16 and not feedback

    def setting(self, step: int, agreed: Agreed) -> tuple[object, ...]:
        """A key that changes when any parameter's codec or feedback changes."""
        widths = tuple((agreed.widths or {}).items())
        return self.base(step, agreed), widths, agreed.family, self.weighs(agreed)

    def remembered(self, agreed: Agreed, sizes: Mapping[str, ParameterSize]) -> dict[str, tuple[int, str]]:
        """Elements and feedback of every parameter that has one at some step, whether or not it has begun."""
        found = {}
        least = replace(agreed, candidate=auto.CANDIDATES[-1])
        for step in self.schedule.starts:
            base = self.base(step, least)
            for name, (shape, numel, dtype) in sizes.items():
                kind = self._feedback(step, agreed.family, self.rules.codec_of(name, shape, dtype, base))
                if kind:
                    found[name] = numel, kind
        return found


class Chooser:
    """Makes ranks agree, at every step, on what `Policy` decides from."""

    def __init__(self, options: DDPOptions, names: ParameterNames, *, whole: bool = False, outer: bool = False) -> None:
        self.policy = Policy(options, whole=whole, outer=outer)
        self.moments = Moments(options.optimizers)
        self.agreed = Agreed(options.family, self.moments.expected)
        self.step = 0
        self.race: auto.Race | None = None  # while steps are timed
        self.raced = False  # whether a race of codecs ended with the last step
        self.why = ""  # why "auto" chose what it did
        self._names = names
        self.sizes = names.sizes  # of the parameters whose gradients travel
        self._replan_every = options.replan_every
        self._measure_every = options.measure_every
        self._error_budget = options.error_budget or (0.05 if options.family == "muon" else 0.15)
        self._warned = False  # whether the log says that int8 travels meanwhile
        self._measured: object = None  # the setting of the last measured step
        self._fresh = False  # whether no step under the present setting was measured yet
        self._weighed: dict[Names, list[int]] = {}  # results of `weighed`, while `_weighed_by` holds
        self._weighed_by: object = None
        expects = self.policy.weigh == "auto" and self.policy.few_bits and not self.moments.expected
        if self.policy.needs_family(self.agreed) or expects:
            self.moments.watch(names)

    def check_family(self, function: str) -> None:
        """Raise where a blank state would depend on an optimizer that is not known."""
        if self.policy.needs_family(self.agreed):
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
        before = self.policy.schedule.at(self.step)
        choice = self.policy.schedule.at(step)
        budget = self._budget  # of the last step
        due = self.agreed.widths is None or (step - 1) % self._replan_every == 0
        if errors and budget is not None and due:
            self._deal_bits(errors, budget, agree)
        news = self._agree_on_family(step, agree) if self.moments.watching and step > 0 else ""
        if step > 0 and self.policy.weighs(self.agreed):
            found = self._agree_on_moments(agree)
            news = news or found
        if choice != before:  # measurements under another entry of the schedule do not count
            self.race = None
            self._update(widths=None)
        self.step = step
        chosen = self._run_race(agree) if choice == Auto() else ""
        self.raced = bool(chosen)
        self._update(candidate=None if self.race is None else auto.CANDIDATES[self.race.candidate])
        if self._weighed_by != (self.setting, self.agreed.shared):
            self._weighed_by = self.setting, self.agreed.shared
            self._weighed.clear()
        self._fresh = self.setting != self._measured
        if self.measuring:
            self._measured = self.setting
        return chosen or news

    def _update(self, **news: Any) -> None:
        self.agreed = replace(self.agreed, **news)

    def _deal_bits(self, errors: Mapping[str, float], bits: float, agree: Agree) -> None:
        """Choose every parameter's bits by the errors of all ranks."""
        names = sorted(errors)
        summed = agree([errors[name] for name in names], dist.ReduceOp.SUM)
        if not all(math.isfinite(value) for value in summed):
            return  # a step with NaN or Inf says nothing about errors
        layers = []
        fixed_bytes = 0
        fixed_numel = 0
        for name, lost in zip(names, summed, strict=True):
            size = self.sizes[name]
            rule = self.policy.rules.fixed(name, size.shape, size.dtype)
            if rule is None:
                layers.append(auto.Layer(name, size.numel, self._travels(name)[0], lost))
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
            asked = self.agreed.family
            family = asked or (FAMILIES[int(shared) - 1] if shared else "adaptive")
            self._update(family=family, keeps_moments=bool(expects))
            self.moments.stop()
            if not shared and not asked:
                return f"no optimizer was seen in {step} steps: an adaptive one is assumed, pass optimizer= if not"
        elif self.policy.needs_family(self.agreed) and not self._warned:
            self._warned = True
            return (
                f"{_INTERIM} travels instead of 1 to 3 bits until an optimizer has stepped every parameter, for "
                f"{_MAX_WAIT} steps at most: pass optimizer= to begin at once"
            )
        return ""

    def _agree_on_moments(self, agree: Agree) -> str:
        self.moments.look(self._names.tensors(), agree)
        given_up = self.moments.settled and not self.moments.shared
        self._update(shared=None if given_up else self.moments.shared)
        return "gradients are not weighed by second moments: not all ranks have the same" if given_up else ""

    def _run_race(self, agree: Agree) -> str:
        if self.agreed.fastest is None and self.race is None:
            self.race = auto.Race()
        if self.race is None or not self.race.over:
            return ""
        fastest, self.why = auto.decide(agree(self.race.result(), dist.ReduceOp.MAX), self._error_budget)
        self._update(fastest=fastest)
        self.race = None
        return f"codec='auto' chose {self.why}"

    @property
    def measuring(self) -> bool:
        """Whether the errors of this step are measured."""
        if self.race is not None:
            return self.race.measures_error
        if self._budget is not None and (self.agreed.widths is None or self.step % self._replan_every == 0):
            return True
        every = self._measure_every
        return every > 0 and (self._fresh or self.step % every == 0)

    @property
    def _budget(self) -> float | None:
        """Of "auto:2.5", if it holds at this step."""
        choice = self.policy.schedule.at(self.step)
        return choice.bits if isinstance(choice, Auto) else None

    @property
    def setting(self) -> tuple[object, ...]:
        """A key that changes when any parameter's codec or feedback changes."""
        return self.policy.setting(self.step, self.agreed)

    @property
    def compresses(self) -> bool:
        """Whether anything is compressed at this step."""
        return bool(self.agreed.widths) or not isinstance(self.policy.base(self.step, self.agreed), Identity)

    @property
    def weighs(self) -> bool:
        """Whether gradients are weighed by moments, or will be once all ranks have some."""
        return self.policy.weighs(self.agreed)

    def weighed(self, names: Names) -> list[int]:
        """Which of these parameters' gradients are weighed at this step."""
        if names not in self._weighed:
            sizes = self.sizes
            able = functools.partial(self.policy.is_weighed, self.step, self.agreed)
            self._weighed[names] = [i for i, name in enumerate(names) if name in sizes and able(name, sizes[name])]
        return self._weighed[names]

    def feedback_in_use(self, used: Iterable[str]) -> str:
        """The kinds of feedback that lanes use, "+moments" if gradients are weighed; or "none"."""
        found = "+".join(sorted({*used} - {""})) or "none"
        return f"{found}+moments" if self.weighs and any(self._weighed.values()) else found

    def spec(self, name: str, size: ParameterSize) -> LaneSpec:
        """How one parameter travels, as a lane of its own would."""
        self.sizes[name] = size
        chosen, feedback = self._travels(name)
        return LaneSpec(size.numel, chosen, first_phase(chosen, feedback), feedback)

    def _travels(self, name: str) -> tuple[Codec, str]:
        return self.policy.travels(self.step, self.agreed, name, self.sizes[name])

    def remembered(self) -> dict[str, tuple[int, str]]:
        """Elements and feedback of every parameter that has one at some step, whether or not it has begun."""
        return self.policy.remembered(self.agreed, self.sizes)

    def state_dict(self) -> dict[str, Any]:
        agreed = self.agreed
        return {
            "optimizer": agreed.family or "",
            "moments": agreed.keeps_moments,
            "chosen": "" if agreed.fastest is None else str(agreed.fastest),
            "why": self.why,
            "widths": [[name, str(chosen)] for name, chosen in (agreed.widths or {}).items()],
        }

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Continue from what was agreed on before `step`; raises before anything has changed."""
        family = str(state["optimizer"])
        fastest = registry.codec(state["chosen"]) if state["chosen"] else None
        widths = {name: registry.codec(spec) for name, spec in state["widths"]} or None
        self._update(candidate=None, fastest=fastest, widths=widths, shared=frozenset())
        self.moments.forget()
        if family:  # an optimizer that this run names, or has seen, takes precedence
            moments = self.agreed.keeps_moments or bool(state.get("moments"))
            self._update(family=self.agreed.family or family, keeps_moments=moments)
            self.moments.stop()
        self.race = None
        self.why = str(state["why"])
        self.step = max(0, step - 1)


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
