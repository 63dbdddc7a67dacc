"""The demonstration: the small GPT trained plainly and in a few codecs.

Seeds, batches, timing and columns are those of `bench train`. Its rows also have the bytes of torch's own all_reduce:
by formula, where no interface counts them (`bytes_from` says which).
"""

from collections.abc import Sequence
from dataclasses import replace

from thinwire.tools.bench import tasks, train
from thinwire.tools.bench.link import ShapedLink
from thinwire.tools.bench.record import Progress, Record, Row
from thinwire.tools.bench.schemes import BF16, NONE, TrainScheme
from thinwire.tools.bench.timing import Effort
from thinwire.tools.bench.train import TrainPlan

WORLD = 2
CODECS = ("bf16", "int8", "lloyd4", "lloyd2")
EFFORT = Effort(rounds=7, most=30, seconds=1.0)
RING_BYTES = {NONE: 4, BF16: 2}  # of a weight, in torch's own all_reduce


def lineup(codecs: Sequence[str] | None) -> tuple[TrainScheme, ...]:
    """What is trained, the uncompressed one first; CodecError where a name is not known."""
    return train.lineup("gpt", codecs or CODECS)


def run(
    world: int = WORLD,
    codecs: Sequence[str] | None = None,
    steps: int | None = None,
    link: ShapedLink | None = None,
    quick: bool = False,
    progress: Progress = iter,
) -> Record:
    """A record of kind "train". Ctrl-C raises Interrupted with the rows of the schemes that were finished."""
    task = tasks.QUICK_DEMO if quick else tasks.DEMO
    task = replace(task, steps=steps or task.steps)
    plan = TrainPlan(task, lineup(codecs), world, link, task.optimizer, train.QUICK if quick else EFFORT)
    found = zip(plan.schemes, train.rows(plan, progress), strict=True)
    return train.recorded(plan, (row | _bytes_columns(plan, scheme, row) for scheme, row in found))


def ring_bytes(scheme: TrainScheme, params: int, world: int) -> float | None:
    """What each rank sends in a ring, 2(W-1)/W of its gradients; None where torch does not send them so."""
    width = RING_BYTES.get(scheme.name)
    return None if width is None else 2 * (world - 1) / world * width * params


def _bytes_columns(plan: TrainPlan, scheme: TrainScheme, row: Row) -> Row:
    if row["bytes_per_step"] is not None:
        return {"bytes_from": "interface" if plan.link else "transport"}
    params = row["params"]
    assert isinstance(params, int)
    each = ring_bytes(scheme, params, plan.world)
    return {"bytes_per_step": each, "bytes_from": None if each is None else "formula"}
