"""What the fields of a saved state may hold: one rule for each, so that a damaged state is rejected as a whole.

A rule is called with the name of a field and its value. It raises CollectiveError with the name, what is expected and
what was found. `field` makes the rule of one value; `fields`, `each`, `pairs` and `parts` make rules for containers.
"""

import contextlib
import inspect
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.codecs import registry
from thinwire.codecs.checks import is_int
from thinwire.errors import CodecError, CollectiveError, ThinwireError

Rule = Callable[[str, Any], None]
_LATER = ("moments", "gathered")  # optional keys: older states, and those of one rank, lack them
LISTS = (list, tuple)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Re-raise errors caused by a damaged or foreign state as CollectiveError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        if isinstance(error, ThinwireError):
            raise
        raise CollectiveError(
            f"load_state_dict: the state is damaged, or not a state of thinwire ({type(error).__name__}: {error}); "
            "nothing was loaded"
        ) from error


def field(expected: str, fits: Callable[[Any], bool]) -> Rule:
    """The rule of one value."""

    def check(name: str, value: Any) -> None:
        if not fits(value):
            raise CollectiveError(
                f"load_state_dict: expected {expected} as {name}, got {_brief(value)}: the state is damaged, or of "
                "another model; nothing was loaded"
            )

    return check


def _brief(value: Any) -> str:
    if not isinstance(value, Tensor):
        return reprlib.repr(value)
    bad = "" if is_finite(value) else " with NaN or Inf"
    return f"a tensor of {value.dtype} and shape {tuple(value.shape)}{bad}"


def fields(rules: Mapping[str, Rule]) -> Rule:
    """A mapping that has at least these keys."""

    def check(name: str, value: Any) -> None:
        MAPPING(name or "the state", value)
        for key in (key for key in rules if key in value or key not in _LATER):
            path = f"{name}.{key}" if name else key
            if key not in value:
                raise CollectiveError(f"load_state_dict: expected {path}, got a state without it; nothing was loaded")
            rules[key](path, value[key])

    return check


def each(known: Rule, rule: Callable[[str], Rule]) -> Rule:
    """A mapping of `known` names; the rule of a value may depend on its name."""

    def check(name: str, value: Any) -> None:
        MAPPING(name, value)
        for key, held in value.items():
            known(f"a name in {name}", key)
            rule(key)(f"{name}[{key}]", held)

    return check


def pairs(known: Rule, rule: Rule) -> Rule:
    """A list of pairs: a `known` name, and a value."""

    def check(name: str, value: Any) -> None:
        is_listed = isinstance(value, LISTS) and all(isinstance(pair, LISTS) and len(pair) == 2 for pair in value)
        field("a list of pairs", lambda _: is_listed)(name, value)
        for key, held in value:
            known(f"a name in {name}", key)
            rule(f"{name}[{key}]", held)

    return check


def parts(known: Rule) -> Rule:
    """Lists of `known` names, each name once."""

    def check(name: str, value: Any) -> None:
        is_listed = isinstance(value, LISTS) and all(isinstance(part, LISTS) for part in value)
        field("a list of lists", lambda _: is_listed)(name, value)
        found = [one for part in value for one in part]
        for one in found:
            known(f"a name in {name}", one)
        field("every name once", lambda _: len(set(found)) == len(found))(name, value)

    return check


def one_of(*known: str) -> Rule:
    return field(f"one of {known}", lambda value: isinstance(value, str) and value in known)


def numbers(shape: Sequence[int] | None, *, finite: bool = True) -> Rule:
    """Real numbers in one plain tensor; of one dimension if `shape` is None."""

    def fits(value: Any) -> bool:
        if not isinstance(value, Tensor) or value.layout != torch.strided or hasattr(value, "to_local"):
            return False
        shaped = value.ndim == 1 if shape is None else value.shape == torch.Size(shape)
        return shaped and value.is_floating_point() and (not finite or is_finite(value))

    return field(f"{'finite' if finite else 'real'} numbers of shape {'(n,)' if shape is None else tuple(shape)}", fits)


def is_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def is_codec(value: Any) -> bool:
    """Whether it is the string of a codec."""
    with contextlib.suppress(CodecError):
        return isinstance(value, str) and bool(registry.codec(value))
    return False


MAPPING = field("a mapping", lambda value: isinstance(value, Mapping))
LIST = field("a list", lambda value: isinstance(value, LISTS))
TEXT = field("text", lambda value: isinstance(value, str))
RANK = field("the number of a rank", lambda value: isinstance(value, str) and value.isascii() and value.isdecimal())
FLAG = field("True or False", lambda value: isinstance(value, bool))
CODEC = field("a codec", is_codec)
STEPS = field("a number of steps below 2**48", lambda value: is_int(value) and 0 <= value < 1 << 48)
RANKS = field("a number of ranks from 1 to 2**20", lambda value: is_int(value) and 1 <= value <= 1 << 20)


def check_version(state: Any, version: int, at: str = "") -> None:
    """Raise unless it is a state of this version."""
    if not isinstance(state, Mapping) or not is_int(state.get("version")) or state["version"] != version:
        raise CollectiveError(
            "load_state_dict: expected what state_dict() of this version of thinwire gave, got "
            + (at and f"as {at} ")
            + (f"version {state.get('version')!r}" if isinstance(state, Mapping) else reprlib.repr(state))
        )


def head_of(states: Sequence[Mapping[str, Any]], version: int, step: str, at: str = "") -> Mapping[str, Any]:
    """The first state. Raise unless all have the same world and the same step (under the key `step`)."""
    if not states:
        raise CollectiveError("load_state_dict: expected a state or a list of all ranks' states, got an empty list")
    for state in states:
        check_version(state, version, at)
        if (state[step], state["world"]) != (states[0][step], states[0]["world"]):
            raise CollectiveError(
                "load_state_dict: the states are of different steps or worlds: "
                f"{[(state[step], state['world']) for state in states]}"
            )
    return states[0]


def load_optimizer(name: str, optimizer: Optimizer, saved: Any) -> None:
    """Load the saved state of an optimizer (the field `name`), or raise and change nothing."""
    if type(optimizer).__module__.startswith("torch.optim."):  # others check their states themselves
        _check_optimizer(name, optimizer, saved)
    before = optimizer.state_dict()
    try:
        optimizer.load_state_dict(deepcopy(saved))  # torch would keep the saved tensors, and change them
    except Exception:
        optimizer.load_state_dict(before)
        raise


def _check_optimizer(name: str, optimizer: Optimizer, saved: Any) -> None:
    """Raise unless `optimizer`, one of torch's own, can step from the saved state."""
    ids = [settings["params"] for settings in optimizer.state_dict()["param_groups"]]

    def is_listed(value: Any) -> bool:
        is_list = isinstance(value, list) and all(isinstance(settings, Mapping) for settings in value)
        return is_list and [settings.get("params") for settings in value] == ids

    def is_kept(value: Any) -> bool:
        return not isinstance(value, Tensor) or (value.is_floating_point() and is_finite(value))

    listed = field(f"the settings of {[*map(len, ids)]} parameters", is_listed)
    fields({"param_groups": listed, "state": MAPPING})(name, saved)
    found: dict[Any, tuple[Tensor, Mapping[str, Any]]] = {}
    for index, (settings, present) in enumerate(zip(saved["param_groups"], optimizer.param_groups, strict=True)):
        rules = {key: _setting(value) for key, value in present.items() if key in settings}
        fields(rules)(f"{name}.param_groups[{index}]", settings)
        found |= {key: (one, settings) for key, one in zip(ids[index], present["params"], strict=True)}
    number = field("the number of a parameter", lambda key: key in found)
    each(number, lambda _: each(TEXT, lambda _: field("finite numbers", is_kept)))(f"{name}.state", saved["state"])
    for key, (parameter, settings) in found.items():
        held = saved["state"].get(key, {})
        try:
            _try_step(type(optimizer), parameter, settings, held)
        except Exception as error:
            raise CollectiveError(
                f"load_state_dict: expected a state from which {type(optimizer).__name__} can step a parameter of "
                f"shape {tuple(parameter.shape)} as {name}.state[{key}], got "
                f"{ {what: _brief(value) for what, value in held.items()} } ({error}); nothing was loaded"
            ) from error


def _setting(present: Any) -> Rule:
    """The rule of an optimizer's setting, by its present value; `_try_step` finds other faults."""
    if isinstance(present, bool):
        return field("True, False or None", lambda value: isinstance(value, bool | None))
    if not isinstance(present, int | float):
        return lambda *_: None
    least = -math.inf if present < 0 else 0

    def fits(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return isinstance(value, Tensor) or (is_number and least <= value < math.inf)

    return field(f"a finite number from {least}", fits)


def _try_step(kind: Any, parameter: Tensor, settings: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    """Step a parameter of zeros from a copy of a saved state, with gradients of ones; raises if a real step would."""
    zeros = nn.Parameter(torch.zeros_like(parameter))
    zeros.grad = torch.ones_like(parameter)
    taken = set(inspect.signature(kind).parameters) - {"params"}
    probe = kind([zeros], **{key: value for key, value in settings.items() if key in taken})  # checks the settings
    one = {key: value for key, value in settings.items() if key != "param_names"} | {"params": [0]}
    probe.load_state_dict({"state": {0: deepcopy(held)}, "param_groups": [one]})
    probe.step()
    if not is_finite(zeros):
        raise CollectiveError("the result is not finite")
