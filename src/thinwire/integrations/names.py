"""What parameters are called, in rules and checkpoints, and how large their gradients are."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire.errors import CollectiveError

Names = tuple[str, ...]
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")  # torch.compile's, torch's and Fabric's
PADDING = "\0"  # before the name of a parameter: what follows its elements in a buffer, and belongs to none
ROW = "#"  # after the name of a parameter, before the number of a row: its part there


def plain_name(name: str) -> str:
    """The name of a module or parameter without those of what is only wrapped around it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class ParameterSize(NamedTuple):
    """The size of a parameter's gradient: complex numbers count twice."""

    shape: torch.Size
    numel: int
    dtype: torch.dtype


class ParameterNames:
    """Names that a model gives, or numbers in the order in which DDP brings parameters: the same in every run."""

    def __init__(self) -> None:
        self.sizes: dict[str, ParameterSize] = {}
        self.from_model = False
        self.needs_model = False  # because of rules by name
        self.awaited: list[str] = []  # names in the order of a pickled state
        self._names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._order: list[str] = []  # in which DDP brought them first
        self._known: dict[tuple[int, ...], tuple[weakref.ref[Tensor], Names, list[torch.Size]]] = {}

    @property
    def order(self) -> list[str]:
        """The names in the order in which DDP brings them, as far as it is known."""
        return self._order or self.awaited

    def take(self, model: nn.Module) -> None:
        self.from_model = True
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.put(parameter, plain_name(name))

    def put(self, parameter: Tensor, name: str) -> None:
        self._names[parameter] = name
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        self.sizes[name] = ParameterSize(parameter.shape, real.numel(), real.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Those that have a name, by it."""
        return {name: parameter for parameter, name in self._names.items()}

    def get(self, parameter: Tensor) -> str | None:
        name: str | None = self._names.get(parameter)
        return name

    def of(self, parameters: Sequence[Tensor]) -> tuple[Names, list[torch.Size]]:
        """Names and shapes of a bucket's parameters; looked up once, since DDP brings the same at every step."""
        key = tuple(map(id, parameters))
        found = self._known.get(key)
        if found is None or found[0]() is not parameters[0]:
            names = tuple(self._name(parameter) for parameter in parameters)
            found = self._known[key] = weakref.ref(parameters[0]), names, [p.shape for p in parameters]
        return found[1:]

    def _name(self, parameter: Tensor) -> str:
        name = self.get(parameter)
        if name is None:
            name = self._names[parameter] = self._next_name(parameter)
        if name not in self._order:
            self._order.append(name)
        return name

    def _next_name(self, parameter: Tensor) -> str:
        """DDP brings the same parameters in the same order at the first step of every run."""
        index = len(self._names)
        if self.needs_model and not self.awaited:
            raise CollectiveError("this state has rules by name, and no names: call state.name_parameters(model)")
        if not self.awaited:
            return f"parameter {index}"
        name = self.awaited[index] if index < len(self.awaited) else ""
        size = self.sizes.get(name)  # a parameter without elements has none
        if not name or (parameter.numel() if size is None else size.shape != parameter.shape):
            raise CollectiveError(
                f"this state was pickled for other parameters: {name or 'none'} comes next, got one of shape "
                f"{tuple(parameter.shape)}: name them with state.name_parameters(model)"
            )
        return name
