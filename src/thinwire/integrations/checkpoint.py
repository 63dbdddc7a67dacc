"""The state of a compressed run as plain data, and back, on the same number of ranks or another."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire import feedback
from thinwire.codecs.checks import is_int
from thinwire.errors import CollectiveError, ThinwireError
from thinwire.integrations.averager import Averager, ByName
from thinwire.integrations.names import ParameterNames
from thinwire.integrations.restore import Restorer

_VERSION = 1
_ERRORS = "\0errors"  # stands for them among parameters
State = Mapping[str, Any]


def export(
    averager: Averager, restorer: Restorer, step: int, world: int, ranks: Mapping[int, ByName], means: ByName
) -> dict[str, Any]:
    """A state of `world` ranks that holds what these of them remember."""
    memories = averager.memories
    remembered = averager.decisions.remembered()
    meant = {name: size for name, size in remembered.items() if size[1] == "ef21"}
    dtype = torch.bfloat16 if memories.residuals.dtype == torch.bfloat16 else torch.float32
    errors = sorted(averager.errors.by_name().items())
    return {
        "version": _VERSION,
        "step": step,
        "world": world,
        "layout": [list(names) for names in restorer.layout],
        "feedback": [[name, kind] for name, kind in memories.kinds.items()],
        "decisions": averager.decisions.state_dict(),
        "errors": {str(k): list(errors) for k in ranks},
        "ranks": {str(k): _complete(part, remembered, dtype) for k, part in ranks.items()},
        "mean": _complete(means, meant, torch.float32),
    }


def _complete(values: ByName, remembered: Mapping[str, tuple[int, str]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """`values`, with zeros for what has nothing to remember yet: a checkpoint always has the same keys."""
    zeros = {name: torch.zeros(numel, dtype=dtype) for name, (numel, _) in remembered.items() if name not in values}
    return {**zeros, **{name: value.to("cpu", dtype) for name, value in values.items()}}


def gather(own: ByName, group: dist.ProcessGroup) -> list[dict[str, torch.Tensor]]:
    """What every rank of the group has under the same names, on the first of them; an empty list on the others.

    Every rank calls it. Tensors travel one by one: no rank but the first holds more than its own.
    """
    if group.size() == 1:
        return [dict(own)]
    device = "cuda" if dist.get_backend(group).endswith("nccl") else "cpu"  # "nccl", or "cuda:nccl"
    first = group.rank() == 0
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(group.size())] if first else []
    for name in sorted(own):
        value = own[name].to(device)
        parts = [torch.empty_like(value) for _ in found]
        dist.gather(value, parts if first else None, group=group, group_dst=0)
        for rank, part in enumerate(parts):
            found[rank][name] = part.cpu()
    return found


def gather_state(own: State, rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """The states of all ranks as one, on the first rank; an empty one on the others."""
    errors = dict(own["errors"][str(rank)])
    names = sorted(errors)
    lost = {_ERRORS: torch.tensor([errors[name] for name in names], dtype=torch.float64)}
    found = gather({**own["ranks"][str(rank)], **lost}, group)
    shared = [part.pop(_ERRORS).tolist() for part in found]
    if not found:
        return {}
    return {
        **own,
        "ranks": {str(k): part for k, part in enumerate(found)},
        "errors": {str(k): list(zip(names, values, strict=True)) for k, values in enumerate(shared)},
    }


def load(
    states: Sequence[State], rank: int, world: int, names: ParameterNames, averager: Averager, restorer: Restorer
) -> int:
    """Let `rank` of `world` ranks go on from these states: what rank k remembered goes to rank k % world.

    Gives the step to go on with; raises before anything has changed.
    """
    with reading():
        return _load(states, rank, world, names, averager, restorer)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """What goes wrong inside with a state that is damaged, or a stranger's, is told as that."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if isinstance(error, ThinwireError):
            raise
        raise CollectiveError(
            f"load_state_dict: the state is damaged, or no state of thinwire's ({type(error).__name__}: {error}); "
            "nothing was loaded"
        ) from error


def check_numbers(step: Any, world: Any, *parts: Mapping[str, torch.Tensor]) -> None:
    """Raise unless these can be a step, a number of ranks and what they remember."""
    if not is_int(step) or step < 0 or not is_int(world) or world < 1:
        raise CollectiveError(f"load_state_dict: expected a step and a number of ranks, got {step!r} and {world!r}")
    for name, values in (item for part in parts for item in part.items()):
        if not isinstance(values, torch.Tensor) or not values.is_floating_point():
            raise CollectiveError(f"load_state_dict: expected numbers of {name}, got {type(values).__name__}")
        if not bool(torch.isfinite(values).all()):
            raise CollectiveError(f"load_state_dict: what is remembered of {name} is not finite")


def _load(
    states: Sequence[State], rank: int, world: int, names: ParameterNames, averager: Averager, restorer: Restorer
) -> int:
    head = _head(states)
    parts = {int(k): part for state in states for k, part in state["ranks"].items()}
    check_numbers(head["step"], head["world"], head["mean"], *parts.values())
    wanted = list(range(rank, head["world"], world))
    if any(k not in parts for k in wanted):
        raise CollectiveError(
            f"rank {rank} of {world} needs the states that ranks {wanted} of {head['world']} saved, got "
            f"{sorted(parts)}: load_state_dict([torch.load(f) for f in files]) with the files of all ranks"
        )
    for name, values in (saved for k in wanted for saved in parts[k].items()):
        size = names.sizes.get(name)
        if size is None and names.from_model:
            raise CollectiveError(f"the state is of another model: it has {name}, which this one has not")
        if size is not None and size.numel != values.numel():
            raise CollectiveError(
                f"the state is of another model: {name} has {size.numel} elements, there {values.numel()}"
            )
    same = head["world"] == world
    errors = {k: dict(found) for state in states for k, found in state["errors"].items()}
    own = errors[str(rank)] if same else {}
    residuals = feedback.deal(parts, head["world"], rank, world)
    kinds = dict(head["feedback"])
    layout = [tuple(found) for found in head["layout"]] if same and head["layout"] else None
    averager.decisions.load_state_dict(head["decisions"], head["step"])  # from here on nothing fails
    averager.go_on(residuals, head["mean"], kinds, own)
    restorer.restore(layout)
    return int(head["step"])


def _head(states: Sequence[State]) -> State:
    """The first state, if all are of one step and world."""
    if not states:
        raise CollectiveError("load_state_dict: expected a state or a list of all ranks' states, got an empty list")
    for state in states:
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise CollectiveError("load_state_dict: expected what state_dict() of this version of thinwire gave")
        if (state["step"], state["world"]) != (states[0]["step"], states[0]["world"]):
            raise CollectiveError(
                "load_state_dict: the states are of different steps or worlds: "
                f"{[(state['step'], state['world']) for state in states]}"
            )
    return states[0]
