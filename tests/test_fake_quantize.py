"""Fake quantization: backends against the reference, the op against its formulas, layouts, graphs and bad input.

Shape suffixes: O outer, C channels, I inner. `Grid` in kernels/schema.py has the formulas.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cases
from cases import CPU, ROUND, Place, each_place, generated, over
from thinwire import kernels, use_backend
from thinwire.kernels import BACKENDS, Backend, FakeGradients, Grid, cpu, reference
from thinwire.qat import fake_quantize, ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RANGES = {bits: [(-(1 << bits - 1), (1 << bits - 1) - 1), (0, (1 << bits) - 1)] for bits in range(2, 9)}
SHIFTS = ("none", "zero_point", "offset")
SHAPES = [  # (outer, channels, inner): one channel, long rows, short rows as columns, one row of each, odd ends
    *((1, 1, 1), (1, 1, 17), (1, 1, 1537), (3, 1, 1000), (1, 5, 700), (2, 3, 515)),
    *((9, 16, 1), (67, 3, 1), (2, 1100, 1), (70, 21, 49), (3, 21, 49), (1, 40, 32), (1, 33, 9), (35, 5, 7)),
    (4, 64, 63),
]
BAD_SCALES = (-1.0, 0.0, math.inf, math.nan, 1e-40)  # the last one's inverse is not finite in fp32
needs_cpu = pytest.mark.skipif("cpu" not in cases.OTHERS, reason="the C kernels were not built")


def compute_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- requests to a backend, and what they must give -------------------------------------------------------------------
@dataclass(frozen=True)
class Request:
    """Arguments of both operations."""

    grid: Grid
    x: Tensor
    grad: Tensor
    scale: Tensor
    shift: Tensor | None

    def to(self, device: torch.device) -> "Request":
        return Request(self.grid, *(cases.moved(t, device) for t in (self.x, self.grad, self.scale, self.shift)))

    @property
    def elements(self) -> int:
        """Of a channel."""
        return self.x.shape[0] * self.x.shape[2]


def request(
    shape: tuple[int, int, int], dtype: torch.dtype, grid: Grid, shifted: bool = True, seed: int = 0
) -> Request:
    """Numbers of all kinds: around the grid, on its ties and ends, and beyond; both signs, zeros, NaN and Inf."""
    g = cases.seeded(seed, *shape)
    channels, compute = shape[1], compute_of(dtype)
    scale = (torch.rand(channels, generator=g) * 0.3 + 0.05).to(dtype).to(compute)
    scale[::2] = 2.0 ** torch.randint(-4, 1, (len(scale[::2]),), generator=g).to(compute)  # ties are exact there
    shift = torch.randn(channels, generator=g).to(compute) * (1 if grid.offset else grid.quant_max)
    shift[::2] = (shift[::2] * 4).round() / 4
    steps = torch.randint(2 * grid.quant_min - 3, 2 * grid.quant_max + 4, shape, generator=g) / 2  # halves are ties
    spread = grid.quant_max * torch.randn(shape, generator=g)
    x = torch.where(torch.rand(shape, generator=g) < 0.3, steps, spread).to(compute) * scale.view(-1, 1)
    if grid.offset and shifted:
        x += shift.view(-1, 1)
    flat = cases.to_dtype(x, dtype).view(-1)
    special = cases.mixed(flat.numel(), 96, torch.float32, 0, seed)
    flat[::7] = cases.to_dtype(special.to(compute), dtype)[::7]
    grad = torch.randn(shape, generator=g).to(dtype)
    grad.view(-1)[3::11] = 0
    return Request(grid, flat.view(shape), grad, scale, shift if shifted else None)


def results(backend: Backend, r: Request, factor: float = 0.37) -> dict[str, Tensor]:
    """What a backend gives, in buffers that held something else."""
    y, dx = torch.full_like(r.x, 7), torch.full_like(r.x, 7)
    sums, alone = r.scale.new_full((2, 2, *r.scale.shape), 7).unbind()
    known = backend.fake_quantize(r.grid, r.x, r.scale, r.shift, y)
    assert known is not False, "good scales were called bad"
    backend.fake_quantize_grad(r.grid, FakeGradients(r.x, r.grad, r.scale, r.shift, dx, sums), factor)
    backend.fake_quantize_grad(r.grid, FakeGradients(r.x, r.grad, r.scale, r.shift, None, alone), factor)
    rows = slice(None if r.shift is not None else 1)
    cases.assert_same(alone[rows], sums[rows], "sums without dx")
    return {"y": y.cpu(), "dx": dx.cpu(), "sums": sums.cpu()}


def additions(backend: str, elements: int) -> int:
    """Roundings of fp32 between a term and a sum of `elements` of them.

    C: its product, where none is fused; RUN elements go into 8 lanes or more, and four additions join these, or FLUSH
    rows into a column; from there on all is in doubles. Elsewhere: any order.
    """
    return 1 + (min(elements, 512 // 8 + 4) if backend == "cpu" else elements)


def sums_bound(r: Request, factor: float, backend: str) -> Tensor:
    """How far sums may be from the reference's, whose terms are the same numbers, added in doubles."""
    size_C = r.grad.double().abs().nan_to_num(0, 0, 0).sum((0, 2))
    reach = max(abs(r.grid.quant_min), abs(r.grid.quant_max), r.grid.quant_max - r.grid.quant_min)
    sizes_2C = torch.stack((size_C * reach, size_C if r.grid.offset else size_C * r.scale.double().abs()))
    unit = ROUND if r.x.dtype != torch.float64 else 2.0**-53
    adds = additions(backend, r.elements) if r.x.dtype != torch.float64 else r.elements
    return factor * (adds + 2) * unit * sizes_2C + cases.SMALLEST


def assert_as_reference(place: Place, r: Request, factor: float = 0.37) -> dict[str, Tensor]:
    """Bytes of y and dx; sums within their bound, and NaN or infinite where the reference's are."""
    want = results(reference, r, factor)
    with use_backend(place.backend):
        got = results(kernels.select(place.device, r.x.dtype), r.to(place.device), factor)
    cases.assert_same(got["y"], want["y"], f"y of {tuple(r.x.shape)} {r.x.dtype} {r.grid}")
    cases.assert_same(got["dx"], want["dx"], f"dx of {tuple(r.x.shape)} {r.x.dtype} {r.grid}")
    for row in range(2 if r.shift is not None else 1):
        assert_sums(got["sums"][row], want["sums"][row], sums_bound(r, factor, place.backend)[row], f"{r.grid} {row=}")
    return got


def assert_sums(got: Tensor, want: Tensor, bound: Tensor, what: str) -> None:
    finite = want.isfinite()
    cases.assert_same(got[~finite], want[~finite], what)
    gap = (got[finite].double() - want[finite].double()).abs() - bound.expand_as(want)[finite]
    assert (gap <= 0).all(), f"{what}: sums {gap.max().item()} beyond their bound"


def grids(seed: int) -> Iterator[tuple[Grid, bool]]:
    """Every rule with every kind of shift, over different ranges."""
    ranges = [*(range_ for pair in RANGES.values() for range_ in pair), (3, 20), (-9, -2), (-15, 0)]
    for i, (paper, kind) in enumerate(itertools.product((False, True), SHIFTS)):
        low, high = ranges[(seed + 5 * i) % len(ranges)]
        yield Grid(low, high, offset=kind == "offset", paper=paper), kind != "none"


@each_place
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backends_give_the_references_bytes(dtype: torch.dtype, place: Place, pytestconfig: pytest.Config) -> None:
    """On a CPU every second shape by turns, or all with --thorough."""
    turn = slice(None) if pytestconfig.option.thorough else slice(DTYPES.index(dtype) % 2, None, 2)
    for seed, shape in list(enumerate(SHAPES))[turn] if place.device == CPU else enumerate(SHAPES[2::3]):
        for grid, shifted in grids(seed):
            assert_as_reference(place, request(shape, dtype, grid, shifted, seed))


@each_place
@pytest.mark.parametrize("offset", [False, True])
def test_bad_channels_are_nan_and_their_neighbors_are_not(offset: bool, place: Place) -> None:
    for shape in ((3, 9, 1), (2, 9, 100), (1, 9, 20)):
        r = request(shape, torch.float32, Grid(-8, 7, offset))
        r.x.nan_to_num_()
        r.scale[1 : 1 + len(BAD_SCALES)], r.shift[6] = torch.tensor(BAD_SCALES), math.nan
        wants, gots = [], []
        for backend, device, into in ((reference, CPU, wants), (BACKENDS[place.backend], place.device, gots)):
            on, y, dx = r.to(device), torch.empty_like(r.x, device=device), torch.empty_like(r.x, device=device)
            sums = torch.empty(2, 9, device=device)
            known = backend.fake_quantize(on.grid, on.x, on.scale, on.shift, y)
            assert known is (None if device.type == "cuda" else False)
            backend.fake_quantize_grad(on.grid, FakeGradients(on.x, on.grad, on.scale, on.shift, dx, sums), 1.0)
            into += [y.cpu(), dx.cpu(), sums.cpu()]
        for got, want in zip(gots[:2], wants[:2], strict=True):
            cases.assert_same(got, want)
        assert gots[0][:, 1:7].isnan().all()
        assert gots[0][:, [0, 7, 8]].isfinite().all()
        assert torch.equal(gots[2].isnan(), wants[2].isnan())
        assert gots[2][0, 1:7].isnan().all()


@each_place
def test_gradients_that_are_not_finite_stay_in_their_channel(place: Place) -> None:
    for shape in ((9, 5, 1), (2, 5, 700), (20, 5, 9)):
        for grid in (Grid(-8, 7), Grid(0, 15, offset=True, paper=True)):
            r = request(shape, torch.float32, grid)
            for channel, value in ((1, math.nan), (2, math.inf), (3, -math.inf)):
                r.grad[-1, channel, -1] = value
            got = assert_as_reference(place, r)
            assert got["sums"][:, [0, 4]].isfinite().all()
            assert not got["sums"][0, 1:4].isfinite().any()


# --- threads and cuts -------------------------------------------------------------------------------------------------
@pytest.fixture
def parts_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Tensors are cut into parts of so many elements, rows of a part half as long at least."""

    def set_size(elements: int) -> None:
        monkeypatch.setattr(cpu, "_ELEMENTS_PER_THREAD", elements)
        monkeypatch.setattr(cpu, "_WIDE_ROW", elements // 2)
        cpu._fake.cache_clear()

    yield set_size
    cpu._fake.cache_clear()


@needs_cpu
@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("shape", [*SHAPES, (1, 2, 5000), (300, 2, 1), (5, 130, 33)], ids=str)
def test_tensors_in_many_parts(shape: tuple[int, int, int], parts_of: Callable[[int], None]) -> None:
    """The parts hold every element once, whatever the shape; sums are the same for any number of threads."""
    parts_of(32)
    for grid, dtype in ((Grid(-8, 7), torch.float32), (Grid(0, 15, True, True), torch.bfloat16)):
        r = request(shape, dtype, grid, seed=3)
        by_threads = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            by_threads.append(assert_as_reference(Place("cpu", CPU), r))
        for other in by_threads[1:]:
            cases.assert_same(other["sums"], by_threads[0]["sums"], "sums")


@needs_cpu
@pytest.mark.parametrize("shape", [(1, 1, 1 << 17), (2048, 520, 1)], ids=str)
def test_long_sums_do_not_drift(shape: tuple[int, int, int], parts_of: Callable[[int], None]) -> None:
    """Equal terms in one part, all rounded the same way: added up in fp32 they would be far beyond the bound."""
    parts_of(1 << 30)
    r = request(shape, torch.float32, Grid(-8, 7))
    r.x.fill_(1e4)
    r.grad.fill_(0.1)
    assert_as_reference(Place("cpu", CPU), r)


@needs_cpu
@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("shape", [(1, 1, (1 << 19) + 5), (700, 768, 1)], ids=str)
def test_large_tensors_are_shared_by_threads(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    used, made = [], cpu._fake

    def noted(*args: Any) -> Any:
        used.append(made(*args).threads)
        return made(*args)

    monkeypatch.setattr(cpu, "_fake", noted)
    r = request(shape, torch.float32, Grid(-8, 7, paper=True))
    torch.set_num_threads(1)
    alone = assert_as_reference(Place("cpu", CPU), r)
    torch.set_num_threads(2)
    shared = results(cpu, r)
    assert set(used) == {1, 2}
    for what in alone:
        cases.assert_same(shared[what], alone[what], what)


@needs_cpu
def test_nothing_is_written_outside_the_buffers() -> None:
    for shape, dtype in itertools.product(((1, 1, 77), (3, 7, 1), (9, 3, 5), (1, 5, 33)), DTYPES[:3]):
        r = request(shape, dtype, Grid(-8, 7))
        want = results(reference, r)
        rooms = [cases.guarded(r.x.numel(), dtype, dtype.itemsize) for _ in range(2)]  # off 16 bytes by an element
        rooms.append(cases.guarded(2 * shape[1], r.scale.dtype))
        y, dx, sums = (buffer.view(to) for (_, buffer), to in zip(rooms, (shape, shape, (2, -1)), strict=True))
        cpu.fake_quantize(r.grid, r.x, r.scale, r.shift, y)
        cpu.fake_quantize_grad(r.grid, FakeGradients(r.x, r.grad, r.scale, r.shift, dx, sums), 0.37)
        cases.assert_same(y, want["y"])
        cases.assert_same(dx, want["dx"])
        for room, buffer in rooms:
            cases.assert_untouched(room, buffer, f"{shape} {dtype}")


# --- the formulas, written out ----------------------------------------------------------------------------------------
def by_hand(
    x: list[float], g: list[float], s: float, shift: float, low: int, high: int, *, kind: str, paper: bool
) -> tuple[list[float], list[float], float, float]:
    """y, dx, ds and dshift of one channel, a number at a time. Python's own round takes ties to even."""
    z = min(max(round(shift), low), high) if kind == "zero_point" else 0
    b = shift if kind == "offset" else 0.0
    y, dx, ds, dshift = [], [], [], []
    for value, slope in zip(x, g, strict=True):
        v = (value - b) / s
        code = min(max(round(v) + z, low), high) - z
        beyond = not low - z < v < high - z if paper else not low <= round(v) + z <= high
        y.append(code * s + b)
        dx.append(0.0 if beyond else slope)
        ds.append(slope * (code if beyond else round(v) - v))
        dshift.append((slope if kind == "offset" else -s * slope) if beyond else 0.0)
    return y, dx, math.fsum(ds), math.fsum(dshift)


@pytest.mark.parametrize("kind", SHIFTS)
@pytest.mark.parametrize("gradient", get_args(ops.Gradient))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_formulas_element_by_element(dtype: torch.dtype, gradient: str, kind: str) -> None:
    """Scales are powers of two, x and shifts have few bits: all but the sums is exact, ties and ends included."""
    g = cases.seeded(5)
    for low, high in ((-8, 7), (0, 15), (0, 3), (-9, -2), (3, 20)):
        scale = 2.0 ** torch.randint(-3, 3, (6,), generator=g).float()
        shift = torch.randint(-50, 50, (6,), generator=g).float() / (8 if kind == "offset" else 4)
        x = torch.randint(-120, 121, (6, 40), generator=g) / 4 * scale.view(-1, 1)
        if kind == "offset":
            x = (x * 8).round() / 8
        x = x.to(dtype).requires_grad_()
        grad = torch.randn(6, 40, generator=g).to(dtype)
        scale, shift = (t.to(compute_of(dtype)).requires_grad_() for t in (scale, shift))
        shifts = {} if kind == "none" else {kind: shift}
        y = fake_quantize(
            x, scale, quant_min=low, quant_max=high, axis=0, gradient=gradient, scale_gradient=False, **shifts
        )
        y.backward(grad)
        unit = torch.finfo(compute_of(dtype)).eps / 2
        assert x.grad is not None
        assert scale.grad is not None
        for c in range(6):
            channel = by_hand(
                *(x[c].tolist(), grad[c].tolist(), scale[c].item(), shift[c].item(), low, high),
                kind=kind,
                paper=gradient == "lsq",
            )
            assert y[c].tolist() == torch.tensor(channel[0], dtype=torch.float64).to(dtype).tolist()
            assert x.grad[c].tolist() == channel[1]
            size = grad[c].double().abs().sum().item() * 42 * unit
            assert abs(scale.grad[c].item() - channel[2]) <= size * (abs(low) + abs(high) + 20)
            if shifts:
                assert abs(shift.grad[c].item() - channel[3]) <= size * max(1.0, scale[c].item())


@pytest.mark.parametrize("gradient", get_args(ops.Gradient))
def test_factor_of_the_parameters_gradients(gradient: str) -> None:
    """1 / sqrt(n * reach): n of a channel or of all, reach the end of the range that is not zero."""
    x, g = (torch.randn(4, 50, generator=cases.seeded(i)) for i in (1, 2))
    for low, high, reach in ((-8, 7, 7), (0, 15, 15), (-15, 0, 15), (-20, -5, 20)):
        grads = []
        for scaled in (False, True):
            scale, zero = torch.full((4,), 0.3).requires_grad_(), torch.full((4,), -1.0).requires_grad_()
            numbers: dict[str, Any] = {"quant_min": low, "quant_max": high, "axis": 0, "gradient": gradient}
            y = fake_quantize(x, scale, zero_point=zero, scale_gradient=scaled, **numbers)
            grads.append(torch.stack(torch.autograd.grad(y, (scale, zero), g)).double())
        factor = 1 / math.sqrt((50 if gradient == "lsq" else 200) * reach)
        assert (grads[1] - factor * grads[0]).abs().max() <= 2 * ROUND * factor * grads[0].abs().max()


# --- layouts ----------------------------------------------------------------------------------------------------------
def run(x: Tensor, grad: Tensor, channels: int, dtype: torch.dtype = torch.float32, **how: Any) -> list[Tensor]:
    """y and the gradients of x, scale and zero point."""
    x, g = x.detach().requires_grad_(), cases.seeded(channels)
    scale = (torch.rand(channels, generator=g) * 0.3 + 0.1).to(dtype).requires_grad_()
    zero = torch.randint(-3, 4, (channels,), generator=g).to(dtype).requires_grad_()
    y = fake_quantize(x, scale, zero_point=zero, quant_min=-8, quant_max=7, **how)
    return [y.detach(), *torch.autograd.grad(y, (x, scale, zero), grad)]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "spread": lambda x: torch.stack((x, x), -1)[..., 0],
    "part": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
}


@pytest.mark.parametrize("backend", cases.SERVING)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [None, 0, 1, 2, 3])
def test_any_layout_gives_the_same_numbers(axis: int | None, layout: str, backend: str) -> None:
    """Elements and the axis from the front or the back; dense tensors keep their strides; grads of any layout."""
    x, grad = torch.randn(2, 5, 3, 4, generator=cases.seeded(1)), torch.randn(2, 5, 3, 4, generator=cases.seeded(2))
    channels = 1 if axis is None else x.shape[axis]
    with use_backend(backend):
        want = run(x, grad, channels, axis=axis)
        laid = LAYOUTS[layout](x)
        for other in LAYOUTS.values():
            got = run(laid, other(grad), channels, axis=axis if axis is None else axis - 4)
            for i in (0, 1):
                cases.assert_same(got[i], want[i])
                if layout in ("channels_last", "transposed"):
                    assert got[i].stride() == laid.stride()
            for i in (2, 3):  # another order of adding
                assert (got[i] - want[i]).abs().max() <= 120 * 2 * ROUND * grad.abs().sum() * 16
    assert LAYOUTS["channels_last"](x).stride() != x.stride()


@pytest.mark.parametrize("backend", cases.SERVING)
@pytest.mark.parametrize(
    ("shape", "axis", "channels"), [((0,), None, 1), ((0, 3), 1, 3), ((3, 0), 0, 3), ((), None, 1)]
)
def test_empty_tensors_and_tensors_of_no_dimension(
    shape: tuple[int, ...], axis: int | None, channels: int, backend: str
) -> None:
    with use_backend(backend):
        y, dx, ds, dz = run(torch.full(shape, 0.6), torch.ones(shape), channels, axis=axis)
    assert y.shape == dx.shape == shape
    assert ds.shape == dz.shape == (channels,)
    assert (ds.abs().sum() + dz.abs().sum() == 0).item() is (0 in shape)


# --- parameters -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [*DTYPES, "beside"], ids=str)
def test_scales_of_any_dtype_and_shape(dtype: Any) -> None:
    """They take part as fp32 numbers; their gradients have their dtype and shape."""
    x, grad = torch.randn(3, 8, generator=cases.seeded(1)), torch.randn(3, 8, generator=cases.seeded(2))
    narrow = torch.tensor([0.25, 0.3, 0.5]).to(torch.float64 if dtype == "beside" else dtype)
    scales = [narrow, narrow.view(3, 1), torch.stack((narrow, narrow), 1)[:, 0]]
    if dtype == "beside":
        scales.append(torch.full((1,), 0.25, dtype=torch.float64).expand(3))
    for scale in scales:
        wide = scale.float().reshape(-1).requires_grad_()
        scale = scale.detach().requires_grad_()
        y, want = (fake_quantize(x, s, quant_min=-8, quant_max=7, axis=0) for s in (scale, wide))
        cases.assert_same(y, want)
        y.backward(grad)
        want.backward(grad)
        assert wide.grad is not None
        assert (scale.grad.dtype, scale.grad.shape) == (scale.dtype, scale.shape)
        cases.assert_same(scale.grad, wide.grad.view(scale.shape).to(scale.dtype))


def test_gradients_are_made_for_those_who_want_them() -> None:
    x, scale, zero = torch.randn(3, 5, generator=cases.seeded(1)), torch.full((1,), 0.4), torch.zeros(1)
    whole = [t.clone().requires_grad_() for t in (x, scale, zero)]
    grid: dict[str, int] = {"quant_min": -4, "quant_max": 3}
    fake_quantize(*whole[:2], zero_point=whole[2], **grid).sum().backward()
    for wanted in itertools.product((False, True), repeat=3):
        some = [t.clone().requires_grad_(want) for t, want in zip((x, scale, zero), wanted, strict=True)]
        y = fake_quantize(*some[:2], zero_point=some[2], **grid)
        assert y.requires_grad is any(wanted)
        if any(wanted):
            y.sum().backward()
        for got, all_of_them, want in zip(some, whole, wanted, strict=True):
            assert (got.grad is not None) is want
            if want:
                cases.assert_same(got.grad, all_of_them.grad)
    with torch.no_grad():
        assert not fake_quantize(*whole[:2], zero_point=whole[2], **grid).requires_grad


def test_no_second_derivative() -> None:
    x = torch.randn(5, generator=cases.seeded(1)).requires_grad_()
    scale = torch.full((1,), 0.4).requires_grad_()
    y = fake_quantize(x, scale, quant_min=-4, quant_max=3)
    (dx,) = torch.autograd.grad((y * x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# --- graphs -----------------------------------------------------------------------------------------------------------
def module(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return fake_quantize(x, scale, offset=offset, quant_min=-8, quant_max=7, axis=1) * 2


def stepped(act: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    inputs = [t.requires_grad_() for t in (x.clone(), torch.tensor([0.1, 0.3, 0.2]), torch.zeros(3))]
    y = act(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, torch.ones_like(y))]


def test_compiled_whole_forward_and_backward_for_any_length() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def counted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return aot(graph, inputs)

    from torch._dynamo.backends.debugging import aot_eager as aot

    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counted)
    for n in (4, 9):
        for x in (torch.randn(n, 3, 5), torch.randn(n, 3, 5).transpose(0, 2).contiguous().transpose(0, 2)):
            x = x * 2
            got, want = stepped(compiled, x), stepped(module, x)
            for mine, theirs in zip(got, want, strict=True):
                cases.assert_same(mine, theirs)
            assert got[0].stride() == want[0].stride()
    assert len(graphs) <= 2, "a graph for each layout, whatever the length"
    assert any("thinwire.fake_quantize" in str(node.target) for node in graphs[0].graph.nodes)
    torch._dynamo.reset()


def test_dispatch_modes_and_tensors_without_memory_get_the_op() -> None:
    x = torch.randn(4, 3, 5, generator=cases.seeded(1))
    parameters = torch.tensor([0.1, 0.3, 0.2]), torch.zeros(3)
    traced = make_fx(module)(x, *parameters)
    cases.assert_same(traced(2 * x, *parameters), module(2 * x, *parameters))
    with FakeTensorMode():
        fakes = [torch.empty(shape, requires_grad=True) for shape in ((4, 3, 5), (3,), (3,))]
        assert [grad.shape for grad in torch.autograd.grad(module(*fakes).sum(), fakes)] == [f.shape for f in fakes]
    assert module(*fakes).shape == x.shape


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")  # torch 2.15, of its own results
@pytest.mark.parametrize("axis", [None, 1])
def test_the_op_keeps_the_rules_of_torch_library(axis: int | None) -> None:
    channels = 1 if axis is None else 3
    x = torch.randn(4, 3, 5, generator=cases.seeded(1)).requires_grad_()
    scale, shift = torch.full((channels,), 0.2).requires_grad_(), torch.zeros(channels).requires_grad_()
    torch.library.opcheck(ops._op, (x, scale, shift, axis, 0, -8, 7, axis is None, True, True))
    half = torch.randn(4, 8).bfloat16()
    torch.library.opcheck(ops._op, (half, torch.full((8,), 0.2), None, None, 4, -8, 7, False, False, True))


# --- bad input --------------------------------------------------------------------------------------------------------
GOOD: dict[str, Any] = {"x": torch.ones(4, 6), "scale": torch.ones(1), "quant_min": -8, "quant_max": 7}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"quant_min": 7}, ValueError, "quant_min must be below quant_max, got 7 and 7"),
        ({"quant_max": 9.0}, ValueError, "quant_min and quant_max must be integers, got -8 and 9.0"),
        ({"quant_max": 1 << 20}, ValueError, r"must lie within 2\*\*20, got -8 and 1048576"),
        ({"gradient": "ste"}, ValueError, "gradient must be one of torch, lsq, got 'ste'"),
        ({"zero_point": torch.ones(1), "offset": torch.ones(1)}, ValueError, "a zero_point or an offset, not both"),
        ({"axis": 2, "scale": torch.ones(6)}, ValueError, r"axis must be within -2..1 .* \(4, 6\), got 2"),
        ({"axis": -3, "scale": torch.ones(6)}, ValueError, "got -3"),
        ({"axis": 0, "x": torch.ones(())}, ValueError, "axis must be within"),
        ({"group": 4}, ValueError, r"group=4 does not divide the rows of a tensor of shape \(4, 6\)"),
        ({"group": -3}, ValueError, "group=-3 does not divide"),
        ({"group": 3, "axis": 0}, ValueError, "an axis or a group, not both"),
        ({"group": 1, "x": torch.ones(())}, ValueError, "group=1 does not divide"),
        ({"axis": 1}, ValueError, "scale has 1 elements, 6 expected"),
        ({"scale": torch.ones(4)}, ValueError, "scale has 4 elements, 1 expected"),
        ({"group": 3}, ValueError, "scale has 1 elements, 8 expected"),
        ({"offset": torch.ones(2)}, ValueError, "zero point or offset has 2 elements, the scale 1"),
        ({"x": torch.ones(4, 6, dtype=torch.int64)}, TypeError, "x must be floating point .*got torch.int64"),
        ({"x": torch.ones(4).to(torch.float8_e5m2)}, TypeError, "got torch.float8_e5m2"),
        ({"scale": torch.ones(1, device="meta")}, ValueError, "x is on cpu and the scale on meta; move the quantizer"),
        ({"offset": torch.ones(1, device="meta")}, ValueError, "its shift on meta; move the quantizer"),
    ],
    ids=lambda value: None,
)
def test_wrong_arguments(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    fake_quantize(**GOOD)
    with pytest.raises(error, match=message):
        fake_quantize(**(GOOD | wrong))


@pytest.mark.parametrize("backend", cases.SERVING)
@over("rows", [4, 0])
@over("value", [-0.5, 0.0, 2.0**-140, math.nan, math.inf, -math.inf])
def test_a_scale_that_is_none_is_named(value: float, rows: int, backend: str) -> None:
    message = (
        rf"a scale and its inverse must be positive and finite, got {value:g} \(channel 2\); lower the learning rate"
    )
    scale = torch.tensor([1.0, 0.5, value, 2.0, -1.0])
    with use_backend(backend), pytest.raises(ValueError, match=message):
        fake_quantize(torch.ones(rows, 5), scale, quant_min=-8, quant_max=7, axis=1)


# --- any shape, axis, width and dtype ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Asked:
    """A call of the op."""

    x: Tensor
    grad: Tensor
    scale: Tensor
    shift: Tensor
    how: dict[str, Any]
    kind: str

    def answer(self) -> list[Tensor]:
        x, scale, shift = (t.detach().requires_grad_() for t in (self.x, self.scale, self.shift))
        shifts = {} if self.kind == "none" else {self.kind: shift}
        y = fake_quantize(x, scale, **self.how, **shifts)
        inputs = (x, scale, *shifts.values())
        return [y.detach(), *torch.autograd.grad(y, inputs, self.grad)]


@st.composite
def calls(draw: st.DrawFn) -> Asked:
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 17, 40]), max_size=4))
    dtype, bits, kind = (draw(st.sampled_from(of)) for of in (DTYPES, range(2, 9), SHIFTS))
    low, high = draw(st.sampled_from(RANGES[bits]))
    gradient = draw(st.sampled_from(get_args(ops.Gradient)))
    how: dict[str, Any] = {"quant_min": low, "quant_max": high, "gradient": gradient}
    split = draw(st.sampled_from(["all", "axis", "group"])) if sizes else "all"
    if split == "axis":
        how["axis"] = draw(st.integers(-len(sizes), len(sizes) - 1))
    elif split == "group":
        how["group"] = draw(st.sampled_from([n for n in (1, 2, 4, 5, 8, 17, 40) if sizes[-1] % n == 0]))
    g = cases.seeded(draw(st.integers(0, 1000)))
    order = draw(st.permutations(range(len(sizes))))
    x = torch.randn([sizes[d] for d in order], generator=g).permute(sorted(range(len(order)), key=order.__getitem__))
    channels = ops.channels_of(x, how.get("axis"), how.get("group", 0))
    scale = torch.rand(channels, generator=g) * 4 / high + 1e-3
    shift = torch.randn(channels, generator=g) * (1 if kind == "offset" else high)
    x = (x * 3).to(dtype)
    return Asked(
        x, torch.randn(sizes, generator=g).to(dtype), *(t.to(compute_of(dtype)) for t in (scale, shift)), how, kind
    )


@needs_cpu
@generated(150)
@given(calls())
def test_any_call_is_the_same_on_every_backend_and_right(call: Asked) -> None:
    """y lies on the grid, half a step from x where x is in range; on the grid already, it stays; dx is g or nothing."""
    with use_backend("reference"):
        want = call.answer()
    with use_backend("cpu"):
        got = call.answer()
        again = Asked(got[0], call.grad, call.scale, call.shift, call.how, call.kind).answer()[0]
    for mine, theirs, what in zip(got[:2], want[:2], ("y", "dx"), strict=True):
        cases.assert_same(mine, theirs, what)
        assert mine.stride() == theirs.stride()
    low, high = call.how["quant_min"], call.how["quant_max"]
    unit = torch.finfo(compute_of(call.x.dtype)).eps / 2
    size = call.grad.double().abs().sum() * 2 * (high - low)
    n = max(call.x.numel() // max(call.scale.numel(), 1), 1)
    for mine, theirs in zip(got[2:], want[2:], strict=True):
        reach = size * max(1.0, call.scale.max().item() if call.scale.numel() else 0.0)
        assert ((mine.double() - theirs.double()).abs() <= (additions("cpu", n) + 3) * unit * reach).all()
    y, dx = got[:2]
    assert (y.shape, y.dtype, dx.dtype) == (call.x.shape, call.x.dtype, call.x.dtype)
    assert ((dx == call.grad) | (dx == 0)).all()
    s, shift = (spread_over(call, t) for t in (call.scale, call.shift))
    z = shift.round().clamp(low, high) if call.kind == "zero_point" else 0.0
    b = shift if call.kind == "offset" else 0.0
    x, y = call.x.double(), y.double()
    # three roundings of fp32 on the way to v and y, one of the dtype
    size = torch.maximum(x.abs(), y.abs()) + abs(b) + (high - low) * s
    slack = size * (4 * ROUND + torch.finfo(call.x.dtype).eps)
    assert (((y - b) / s).sub(((y - b) / s).round()).abs() * s <= slack).all()
    assert (y >= (low - z) * s + b - slack).all()
    assert (y <= (high - z) * s + b + slack).all()
    inside = (x >= (low - z) * s + b) & (x <= (high - z) * s + b)
    assert ((y - x).abs() <= s / 2 + slack)[inside].all()
    if call.kind != "offset" and call.x.dtype in (torch.float32, torch.float64):
        cases.assert_same(again.double(), y, "again")


def spread_over(call: Asked, per_channel: Tensor) -> Tensor:
    """One number per channel as one per element, in float64."""
    axis, group, shape = call.how.get("axis"), call.how.get("group", 0), call.x.shape
    values = per_channel.double()
    if group:
        return values.repeat_interleave(group).view(shape)
    if axis is None:
        return values.view([1] * len(shape)).expand(shape)
    return values.view([-1 if d == axis % len(shape) else 1 for d in range(len(shape))]).expand(shape)
