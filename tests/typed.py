"""What type checkers see of the public surface; never run. mypy fails where a line that must be refused is not."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import thinwire

x = torch.zeros(4)


def accepted(mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """What users write."""
    work: dist.Work | None = thinwire.all_reduce(x, dist.ReduceOp.AVG, group, True, codec="int4", algorithm="one_shot")
    assert work is not None
    thinwire.all_reduce(x, group=mesh, codec=("bf16", "lloyd4"), algorithm="hierarchical", step=3)
    thinwire.broadcast(x, src=0, group=group, codec=thinwire.Lloyd(4), algorithm="compressed")
    thinwire.functional.all_reduce(x, "avg", mesh)
    print(thinwire.explain(x).algorithm, thinwire.measure(x).numel)
    thinwire.qat.prepare(torch.nn.Linear(2, 2), weight_bits=4)


def refused() -> None:
    """What they should be told before it runs."""
    thinwire.all_reduce(x, op="sum")  # type: ignore[arg-type]
    thinwire.all_reduce(x, group=3)  # type: ignore[arg-type]
    thinwire.all_reduce(x, algorithm="foo")  # type: ignore[arg-type]
    thinwire.all_gather_into_tensor(x, x, algorithm="one_shot")  # type: ignore[arg-type]
    thinwire.reduce_scatter_tensor(x, x, codec=8)  # type: ignore[arg-type]
    thinwire.functional.all_reduce(x, algorithm="compressed")  # type: ignore[arg-type]
    thinwire.no_such_name  # type: ignore[attr-defined]  # noqa: B018
