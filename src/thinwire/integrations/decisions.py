"""What travels how, from step to step: schedules, races of codecs, bits dealt out by error, feedback by optimiser.

All ranks decide alike: they look at the same step numbers and at sums over ranks, never at their own measurements.
"""

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.codecs import BlockInt, Codec, Identity, TopK, registry
from thinwire.collectives.lane import LaneSpec
from thinwire.errors import CollectiveError
from thinwire.feedback import KINDS
from thinwire.integrations import auto, policy
from thinwire.integrations.moments import Agree, Moments
from thinwire.integrations.names import Names, ParameterNames, ParameterSize
from thinwire.integrations.options import DDPOptions

_MEANWHILE = BlockInt(8)  # travels while the feedback depends on an optimiser that was not seen yet
_PATIENCE = 30  # steps to wait for it; a GradScaler may skip the first ones


class Decisions:
    """The codec and feedback of every parameter at the present step.

    `whole`: every rank has all of every parameter's moments, so that gradients may be weighed by them. `outer`: they
    are outer gradients of DiLoCo.
    """

    def __init__(self, options: DDPOptions, names: ParameterNames, *, whole: bool = False, outer: bool = False) -> None:
        self._replan_every = options.replan_every
        self._error_budget = options.error_budget
        self._measure_every = options.measure_every
        self._feedback = options.feedback if options.mesh is None else "none"
        self.schedule = options.schedule
        self.rules = options.rules
        self.family = options.family  # of the optimiser, once all ranks know it
        self.sizes = names.sizes
        self._names = names
        self.moments = Moments(options.optimizers)
        self._outer = outer
        fed_back = self._feedback in KINDS  # what has feedback is not weighed
        self._weigh = options.weigh if whole and not fed_back else "none"
        self._expects = self.moments.expected  # whether moments are, once all ranks know the optimiser
        self._weighed: dict[Names, list[int]] = {}  # as `weighed` gives them, while `_weighed_by` holds
        self._weighed_by: object = None
        self._seen: dict[str, str] = {}  # families of optimisers that this rank saw, by parameter
        self._scout: Callable[[], object] | None = None  # stops looking out for optimisers that step named parameters
        if self.needs_family or (self._weigh == "auto" and not self.moments.expected and self._few_bits):
            handle = register_optimizer_step_pre_hook(functools.partial(_saw, weakref.ref(self), names))
            self._scout = weakref.finalize(self, handle.remove)
        self._base: Codec = Identity()
        self._choice: policy.Choice = Identity()
        self._widths: Mapping[str, Codec] = {}
        self._dealt = False  # whether the widths come from measured errors
        self.race: auto.Race | None = None  # while steps are timed
        self._chosen: Codec | None = None
        self.why = ""  # of what "auto" chose
        self.step = 0
        self.raced = False  # whether a race of codecs ended with the last step
        self._waited = False  # whether it was told that no optimiser was seen yet
        self._fresh = False  # whether no step under the present setting was measured yet
        self._measured: object = None  # the setting of the last measured step

    @property
    def needs_family(self) -> bool:
        """Whether any feedback depends on an optimiser that is not known."""
        return self._feedback == "auto" and self.family is None and self._few_bits

    @functools.cached_property
    def _few_bits(self) -> bool:
        """Whether anything travels in fewer than 4 bits."""
        choices = [*self.schedule.choices, *self.rules.codecs]
        if any(isinstance(choice, policy.Budget) and choice.bits < 4 for choice in choices):
            return True
        found = [leaf for choice in choices if isinstance(choice, Codec) for leaf in policy.leaves(choice)]
        return any(policy.feedback_of("auto", leaf, None) is None for leaf in found)

    def check_family(self, function: str) -> None:
        """Raise where a blank state would depend on an optimiser that is not known."""
        if self.needs_family:
            raise CollectiveError(
                "which feedback there is to load depends on the optimiser, and none was seen yet: "
                f"pass optimizer= to {function}, or name the feedback"
            )

    def end_scout(self) -> None:
        if self._scout is not None:
            self._scout()
            self._scout = None

    def begin(self, step: int, seconds: float, errors: Mapping[str, float], error: float | None, agree: Agree) -> str:
        """Decide for `step`; the last one took `seconds`. Gives what is to be told, or "".

        If it was measured, `errors` are squared ones by parameter, and `error` is the relative one of all.
        """
        if self.race is not None:
            self.race.ended(seconds, error)
        due = not self._dealt or (step - 1) % self._replan_every == 0
        if errors and isinstance(self._choice, policy.Budget) and due:
            self._deal_bits(errors, self._choice.bits, agree)
        told = self._share_family(step, agree) if self._scout is not None and step > 0 else ""
        if step > 0 and self.weighs:
            self.moments.look(self._names.tensors(), agree)
            if self.moments.settled and not self.moments.shared:
                told = told or "no second moments that all ranks have were found: gradients are not weighed by them"
        choice = self.schedule.at(step)
        if choice != self._choice:  # what was found out under another entry of the schedule does not count
            self.race = None
            self._widths = {}
            self._dealt = False
        self._choice = choice
        self.step = step
        news = self._settle_race(agree) if isinstance(self._choice, policy.Trial) else ""
        self.raced = bool(news)
        self._base = self._present_base(choice)
        if self._weighed_by != (self.setting, self.moments.shared):
            self._weighed_by = self.setting, self.moments.shared
            self._weighed.clear()
        self._fresh = self.setting != self._measured
        if self.measuring:
            self._measured = self.setting
        return news or told

    def _share_family(self, step: int, agree: Agree) -> str:
        """What any rank saw of the optimisers holds for all, one rule for several; nobody waits for ever.

        Gives what is to be told, once: a user may expect fewer bits.
        """
        known = 0 if not self._seen else 1 + policy.FAMILIES.index(policy.leading(list(self._seen.values())))
        waiting = any(name not in self._seen for name in self.sizes)
        told = [float(known), float(waiting), float(self.moments.expected)]
        shared, someone_waits, expects = agree(told, dist.ReduceOp.MAX)
        if (shared and not someone_waits) or step >= _PATIENCE:
            asked = self.family
            self.family = asked or (policy.FAMILIES[int(shared) - 1] if shared else "adaptive")
            self._expects = bool(expects)
            self.end_scout()
            if not shared and not asked:
                return f"no optimizer was seen in {step} steps: it is taken for an adaptive one, pass optimizer= if not"
        elif self.needs_family and not self._waited:
            self._waited = True
            return (
                f"{_MEANWHILE} travels instead of 1 to 3 bits until an optimizer has stepped every parameter, for "
                f"{_PATIENCE} steps at most: pass optimizer= to begin at once"
            )
        return ""

    def _present_base(self, choice: policy.Choice) -> Codec:
        if not isinstance(choice, policy.Trial):
            return _base_of(choice)
        return self._chosen if self.race is None else auto.CANDIDATES[self.race.turn]  # type: ignore[return-value]

    def _settle_race(self, agree: Agree) -> str:
        if self._chosen is None and self.race is None:
            self.race = auto.Race()
        if self.race is None or not self.race.over:
            return ""
        self._chosen, self.why = auto.decide(agree(self.race.result(), dist.ReduceOp.MAX), self._error_budget)
        self.race = None
        return f"codec='auto' chose {self.why}"

    @property
    def setting(self) -> tuple[object, ...]:
        """Changes when any parameter's codec or feedback does."""
        return self._base, tuple(self._widths.items()), self.family, self.weighs

    @property
    def compresses(self) -> bool:
        """Whether anything is compressed at this step."""
        return bool(self._widths) or not isinstance(self._base, Identity)

    @property
    def weighs(self) -> bool:
        """Whether gradients are weighed by moments, or will be once all ranks have some."""
        if self._weigh == "none":
            return False
        if self.moments.settled and not self.moments.shared:
            return False
        return self._weigh == "moments" or (self._few_bits and self.family == "adaptive" and self._expects)

    def weighed(self, names: Names) -> list[int]:
        """Which of these parameters' gradients are weighed at this step.

        None that has feedback: what it remembers would be multiplied by the growth of the moments, which grow by it in
        turn, without end.
        """
        if not self.weighs:
            return []
        if names not in self._weighed:
            known = self.moments.shared & self.sizes.keys()
            found = {i: self._travels(name) for i, name in enumerate(names) if name in known}
            able = {i: policy.bits_of(chosen) < 16 and not kind for i, (chosen, kind) in found.items()}
            self._weighed[names] = [i for i in able if able[i]]
        return self._weighed[names]

    @property
    def in_units(self) -> bool:
        """Whether any gradient of this step was weighed by moments."""
        return any(self._weighed.values())

    def roots(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What the gradients of these parameters, which are all weighed, are divided by."""
        return self.moments.roots(parameters)

    @property
    def measuring(self) -> bool:
        if self.race is not None:
            return self.race.measures_error
        if isinstance(self._choice, policy.Budget) and (not self._dealt or self.step % self._replan_every == 0):
            return True
        every = self._measure_every
        return every > 0 and (self._fresh or self.step % every == 0)

    def _deal_bits(self, errors: Mapping[str, float], bits: float, agree: Agree) -> None:
        """Give every layer its width anew, by the errors of all ranks."""
        names = sorted(errors)
        agreed = agree([errors[name] for name in names], dist.ReduceOp.SUM)
        if not all(math.isfinite(value) for value in agreed):
            return  # a step with NaN or Inf says nothing about errors
        layers = []
        fixed_bytes = 0
        fixed_numel = 0
        for name, lost in zip(names, agreed, strict=True):
            shape, numel, dtype = self.sizes[name]
            rule = self.rules.fixed(name, shape, dtype)
            if rule is None:
                layers.append(auto.Layer(name, numel, self._travels(name)[0], lost))
            else:
                fixed_bytes += rule.pick(name, shape).wire_bytes(numel)
                fixed_numel += numel
        self._dealt = True
        self._widths = auto.deal_bits(layers, fixed_bytes, fixed_numel, bits)
        self.why = auto.told(self._widths)

    def spec(self, name: str, size: ParameterSize) -> LaneSpec:
        """How one parameter travels, as a lane of its own would."""
        self.sizes[name] = size
        chosen, feedback = self._travels(name)
        return LaneSpec(size.numel, chosen, policy.first_phase(chosen, feedback), feedback)

    def _travels(self, name: str) -> tuple[Codec, str]:
        shape, _, dtype = self.sizes[name]
        chosen = self.rules.codec_of(name, shape, dtype, self._widths.get(name, self._base))
        feedback = self._feedback_of(chosen, self._choice)
        return (_MEANWHILE, "") if feedback is None else (chosen, feedback)

    def _feedback_of(self, chosen: Codec, choice: policy.Choice) -> str | None:
        bits = policy.bits_of(chosen)
        if self._feedback != "auto":
            return policy.feedback_of(self._feedback, chosen, self.family)
        if isinstance(choice, policy.Budget) and bits < 16 and not isinstance(chosen, TopK):
            # Widths change under way, and what is remembered must not be left behind: one rule for all of them.
            if choice.bits >= 4:
                return ""
            chosen = auto.start_width(min(choice.bits, 2.2))
        return policy.feedback_of("auto", chosen, self.family, outer=self._outer)

    def remembered(self) -> dict[str, tuple[int, str]]:
        """Elements and feedback of every parameter that has one at some step, whether or not it has begun."""
        found = {}
        for choice in self.schedule.choices:
            base = auto.CANDIDATES[-1] if isinstance(choice, policy.Trial) else _base_of(choice)
            for name, (shape, numel, dtype) in self.sizes.items():
                kind = self._feedback_of(self.rules.codec_of(name, shape, dtype, base), choice)
                if kind:
                    found[name] = numel, kind
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.family or "",
            "moments": self._expects,
            "chosen": "" if self._chosen is None else str(self._chosen),
            "why": self.why,
            "widths": [[name, str(chosen)] for name, chosen in self._widths.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Go on from what was decided before `step`; raises before anything has changed."""
        family = str(state["optimizer"])
        why = str(state["why"])
        chosen = registry.codec(state["chosen"]) if state["chosen"] else None
        widths = {name: registry.codec(spec) for name, spec in state["widths"]}
        if family:
            self.family = self.family or family  # an optimiser that this run names, or has seen, counts first
            self._expects = self._expects or bool(state.get("moments"))
            self.end_scout()
        self.race = None
        self._chosen = chosen
        self.why = why
        self._widths = widths
        self._choice = self.schedule.at(max(0, step - 1))  # what the last step was under
        if isinstance(self._choice, policy.Budget):
            self._base = _base_of(self._choice)  # widths may be dealt before the next step begins
        self._dealt = bool(self._widths)


def _base_of(choice: Codec | policy.Budget) -> Codec:
    return auto.start_width(choice.bits) if isinstance(choice, policy.Budget) else choice


def _saw(
    found: "weakref.ref[Decisions]", names: ParameterNames, optimizer: Optimizer, args: object, kwargs: object
) -> None:
    decisions = found()
    stepped = [names.get(p) for group in optimizer.param_groups for p in group["params"]]
    mine = [name for name in stepped if name is not None]
    if decisions is None or not mine:
        return
    decisions.moments.saw(optimizer)
    family = policy.family(optimizer)
    for name in mine:
        decisions._seen[name] = policy.leading([family, decisions._seen.get(name, family)])
