"""DiLoCo in `bench train`: networks that train alone, and whose outer gradients travel in a scheme's way."""

from typing import cast

from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.integrations.diloco import DiLoCo
from thinwire.integrations.options import Feedback
from thinwire.tools.bench.schemes import Replica, TrainScheme


class OuterReplica(Replica):
    """A network of this rank, which shares nothing with others; `every` steps lie between two rounds."""

    def __init__(self, scheme: TrainScheme, network: nn.Module, optimizer: Optimizer, every: int) -> None:
        assert scheme.codec is not None
        self.scheme = scheme
        self.optimizer = optimizer
        self.model = network
        self._power = None
        feedback = cast(Feedback, scheme.feedback)
        self._handle = DiLoCo(network, optimizer, every=every, codec=scheme.codec, feedback=feedback)

    def weights(self) -> dict[str, Tensor]:
        self._handle.close()
        return dict(self.model.named_parameters())

    @property
    def extra_bytes(self) -> int | None:
        """Outer parameters and what the outer optimizer remembers of them are held, too."""
        outer = self._handle.outer_optimizer
        kept = [p for group in outer.param_groups for p in group["params"]]
        kept += [value for state in outer.state.values() for value in state.values() if isinstance(value, Tensor)]
        return (super().extra_bytes or 0) + sum(int(tensor.nbytes) for tensor in kept)
