"""Whether an average came in time, decided once for all ranks: in their group's store, by whoever knows first."""

import threading
import time

import torch.distributed as dist
from torch import Tensor

from thinwire.errors import CollectiveError
from thinwire.integrations.averager import Future

_LOOK_S = 0.005  # between two looks at the store
_IN_TIME = "in time"
_LATE = "late"


class Deadline:
    """Verdicts on one average after the other, which every rank asks for in the same order.

    The last rank to have an average says that it came in time; the first that has waited too long says that it is late.
    The store keeps what was said first, and all ranks go by it, those too that ask later.
    """

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        if dist.get_backend(group).endswith("nccl"):
            raise CollectiveError(
                "deadline: on NCCL the host does not see when an average is there: use gloo across sites"
            )
        self._store = group.get_group_store()
        self._world = group.size()
        self._seconds = seconds
        self._asked = 0

    def is_met(self, average: "Future[Tensor]") -> bool:
        """Whether all ranks had this average in time; all of them ask."""
        key = f"thinwire/diloco/{self._asked}"
        self._asked += 1
        until = time.monotonic() + self._seconds
        there = threading.Event()
        average.add_done_callback(lambda _: there.set())
        if there.wait(self._seconds) and self._store.add(f"{key}/count", 1) == self._world:
            self._say(key, _IN_TIME)
        while not self._store.check([f"{key}/verdict"]):
            if time.monotonic() >= until:
                self._say(key, _LATE)
                break
            time.sleep(_LOOK_S)
        said = self._store.get(f"{key}/verdict").decode()
        if self._store.add(f"{key}/read", 1) == self._world:  # the last one leaves nothing behind
            for name in ("count", "verdict", "read"):
                self._store.delete_key(f"{key}/{name}")
        return bool(said == _IN_TIME)

    def _say(self, key: str, verdict: str) -> None:
        self._store.compare_set(f"{key}/verdict", "", verdict)
