"""Launches of GPU kernels: arguments by name, and a compiled kernel kept by what Triton distinguishes."""

from typing import Any

import pytest
import torch

from thinwire.kernels.triton.prepared import Prepared

NAMES = ("x", "stride", "numel", "wire", "SIZE")
X = torch.zeros(8)
WIRE = torch.zeros(8, dtype=torch.uint8)


class Kernel:
    """Stands in for one of Triton's, and for what it compiles: the arguments of every launch, by name."""

    arg_names = NAMES
    do_not_specialize = ("stride", "numel")

    def __init__(self, compiles: bool = True) -> None:
        self.made = Kernel(compiles=False) if compiles else None
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> Kernel | None:
            self.launches.append({"grid": grid, **dict(zip(NAMES, args, strict=True)), **options})
            return self.made

        return launch


def start(kernel: Kernel, size: int = 4, numel: int = 32, **given: Any) -> None:
    launch = Prepared(kernel, X.device, 7, 2, {"numel": numel, "unasked": 5}, {"SIZE": size, "UNASKED": True})
    launch(**{"wire": WIRE, "x": X, "stride": 3, **given})


def test_arguments_find_their_places_by_name() -> None:
    kernel = Kernel()
    start(kernel)
    start(kernel, stride=48)
    known = {"x": X, "numel": 32, "wire": WIRE, "SIZE": 4}
    assert kernel.made is not None
    assert kernel.launches == [{**known, "grid": (7,), "stride": 3, "num_warps": 2, "enable_fp_fusion": False}]
    assert kernel.made.launches == [{**known, "grid": (7, 1, 1), "stride": 48}]


def test_another_length_of_the_same_kind_is_not_compiled_again() -> None:
    kernel = Kernel()
    start(kernel, numel=32)
    start(kernel, numel=48)
    assert kernel.made is not None
    assert [launch["numel"] for launch in kernel.launches + kernel.made.launches] == [32, 48]
    assert len(kernel.launches) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(9)[1:]},  # not on 16 bytes
        {"x": torch.zeros(8, dtype=torch.bfloat16)},
        {"stride": 1 << 31},  # 64 bits
        {"numel": 1 << 40},
        {"numel": 33},
        {"size": 8},
    ],
    ids=lambda other: "".join(other),
)
def test_what_triton_distinguishes_is_compiled_by_itself(other: dict[str, Any]) -> None:
    kernel = Kernel()
    start(kernel)
    start(kernel, **other)
    assert len(kernel.launches) == 2


def test_a_missing_and_a_surplus_name_are_slips_of_ours() -> None:
    launch = Prepared(Kernel(), X.device, 7, 2, {"numel": 32}, {"SIZE": 4})
    with pytest.raises(AssertionError, match="wire"):
        launch(x=X, stride=1)
    with pytest.raises(KeyError, match="numel"):
        launch(x=X, stride=1, wire=WIRE, numel=2)


def test_integers_of_a_call_are_none_that_triton_specialises() -> None:
    with pytest.raises(AssertionError):
        start(Kernel(), x=16)
