"""Kernels on a GPU: streams, graphs, no host sync, broken headers, tensors beyond 2**31 elements.

That they give the reference's bytes is in tests/test_kernels.py.
"""

import functools
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import cases
from cases import CUDA, ON_CUDA, Place
from test_kernels import assert_as_reference, encodings, sum_and_recoding, with_residual
from thinwire import BlockInt, Cast, Codec, Identity, Lloyd, Trellis, kernels, use_backend
from thinwire.kernels import hashing, reference
from thinwire.wire import Layout

pytestmark = list(cases.needs_cuda)
Tensors = dict[str, Tensor]
one_of_each = pytest.mark.parametrize("codec", cases.ONE_OF_EACH, ids=str)
CAPTURED = [BlockInt(8), Lloyd(4), Trellis(2), Identity(), BlockInt(3, 40, "affine", "stochastic"), Cast("e4m3", 64)]


# --- every operation at once ------------------------------------------------------------------------------------------
def tensors_of(codec: Codec, n: int, seed: int = 0) -> Tensors:
    """What the operations read, drawn from `seed`, and what they write, still garbage; on the CPU."""
    xs = [cases.content("gaussian", n, seed=10 * seed + rank) for rank in range(2)]
    with use_backend("reference"):
        wires_WN = cases.wires_of(codec, xs, step=2)
    blank = torch.full((n,), torch.nan)
    garbage = torch.full_like(wires_WN[0], cases.GARBAGE)
    read = {"x": xs[0], "residual": xs[1], "wires": wires_WN}
    wires = ("wire", "carried", "recoded", "recoded by headers")
    outs = ("decoded", "decoded by header", "sum", "sum by headers", "again")
    return {**read, **{name: garbage.clone() for name in wires}, **{name: blank.clone() for name in outs}}


def on_device(tensors: Tensors) -> Tensors:
    return {name: tensor.to(CUDA) for name, tensor in tensors.items()}


def fill(tensors: Tensors, contents: Tensors) -> None:
    """Other contents in the same memory."""
    for name, tensor in tensors.items():
        tensor.copy_(contents[name])


def run_all(codec: Codec, t: Tensors) -> None:
    """Every operation, with keys by step and from headers; one reads what another wrote."""
    n, wires_WN = t["x"].numel(), t["wires"]
    codec.encode(t["x"], t["wire"], step=1)
    codec.encode(t["x"], t["carried"], step=1, residual=t["residual"])
    codec.decode(wires_WN[1], t["decoded"], step=2)
    codec.decode(wires_WN[1], t["decoded by header"])
    codec.decode_sum(wires_WN, t["sum"], scale=0.5, step=2)
    codec.decode_sum(wires_WN, t["sum by headers"], scale=0.5)
    codec.recode(wires_WN, t["recoded"], n, scale=0.5, step=2, trusted=True)
    codec.recode(wires_WN, t["recoded by headers"], n, scale=0.5, step=2)
    codec.decode(t["wire"], t["again"])


def expected(codec: Codec, contents: Tensors) -> Tensors:
    """What the reference makes of it on the CPU."""
    want = {name: tensor.clone() for name, tensor in contents.items()}
    with use_backend("reference"):
        run_all(codec, want)
    return want


def assert_alike(got: Tensors, want: Tensors, what: str = "") -> None:
    for name in want:
        cases.assert_same(got[name].cpu(), want[name], f"{what} {name}")


def test_a_gpu_is_served_by_its_own_kernels() -> None:
    assert kernels.select(CUDA) is kernels.BACKENDS["triton"]


@one_of_each
def test_nothing_waits_for_the_host(codec: Codec) -> None:
    """And keys read from headers on the device are those of the step."""
    contents = tensors_of(codec, 5003)
    tensors = on_device(contents)
    run_all(codec, tensors)  # compiles
    fill(tensors, contents)
    with cases.no_host_sync():
        run_all(codec, tensors)
    assert_alike(tensors, expected(codec, contents))


@pytest.mark.parametrize("n", [1, 5003])
@pytest.mark.parametrize("codec", CAPTURED, ids=str)
def test_a_graph_gives_the_bytes_of_an_eager_call(codec: Codec, n: int) -> None:
    tensors = on_device(tensors_of(codec, n))
    run_all(codec, tensors)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all(codec, tensors)
    for seed in (1, 2, 3):
        contents = tensors_of(codec, n, seed)
        fill(tensors, contents)
        graph.replay()
        assert_alike(tensors, expected(codec, contents), f"replay {seed}")


@pytest.mark.parametrize("codec", CAPTURED, ids=str)
def test_work_is_ordered_by_the_current_stream(codec: Codec) -> None:
    contents = tensors_of(codec, 40_003, seed=4)
    source = on_device(contents)
    tensors = on_device(tensors_of(codec, 40_003))
    run_all(codec, tensors)  # compiles
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # whatever ran on another stream would read the old contents
        fill(tensors, source)
        run_all(codec, tensors)
        got = {name: tensor.clone() for name, tensor in tensors.items()}
    side.synchronize()
    assert_alike(got, expected(codec, contents))


@pytest.mark.parametrize("place", ON_CUDA)
@pytest.mark.parametrize(
    "codec",
    [
        *(BlockInt(2, 1 << 20), BlockInt(3, 5000), BlockInt(5, 1 << 18, "affine", "stochastic"), Cast("e4m3", 3000)),
        *(BlockInt(8, (1 << 32) - 8, "affine"), Cast("fp16", 1 << 20)),
    ],
    ids=str,
)
def test_long_blocks_of_long_tensors(codec: Codec, place: Place) -> None:
    n = (1 << 21) + 4099
    xs = [cases.mixed(n, 1 << 16, torch.float32, rank, seed=6) for rank in range(2)]
    for x in xs[1:]:  # a block that is not finite hides everything else
        x.nan_to_num_(0.5)
    wires_WN = torch.stack(list(assert_as_reference(place, encodings, codec, xs).values()))
    assert_as_reference(place, with_residual, codec, xs[1], torch.ones(n))
    assert_as_reference(place, sum_and_recoding, codec, wires_WN, n)
    assert_as_reference(place, sum_and_recoding, codec, wires_WN[[1, 1]], n)


# --- headers ----------------------------------------------------------------------------------------------------------
KEY = 16  # where the header has it, as the next
LENGTH = 24
HEADER = (0, 1, 2, 3, 4, 5, 8, 11, LENGTH, 31)  # magic, version, kind, bits, variant, block, length


def all_nan(codec: Codec, wires_WN: Tensor, n: int) -> dict[str, bool]:
    """Which operations make nothing but NaN of these wires."""
    again = cases.recoded(codec, wires_WN, n)
    found = {"sum": cases.summed(codec, wires_WN, n), "recoded": cases.decoded(codec, again, n)}
    return {what: bool(out.isnan().all()) for what, out in found.items()}


@one_of_each
@pytest.mark.parametrize("n", [1, 777])
def test_a_broken_header_gives_nan_without_waiting(codec: Codec, n: int) -> None:
    """Reading it on the host, to raise as on the CPU, would wait for the stream."""
    good = cases.wires_of(codec, [cases.content("gaussian", n, seed=rank) for rank in range(2)]).to(CUDA)
    assert not any(all_nan(codec, good, n).values())
    for at in HEADER:
        for rank in range(2):
            broken = good.clone()
            broken[rank, at] ^= 1
            assert all(all_nan(codec, broken, n).values()), f"byte {at} of wire {rank}"
    broken = good[:1].clone()
    broken[0, LENGTH] ^= 1
    assert all(all_nan(codec, broken, n).values()), "one wire"


@pytest.mark.parametrize("codec", [Lloyd(4), Lloyd(1, 32)], ids=str)
def test_wires_rotated_by_unlike_keys_add_to_nan(codec: Codec) -> None:
    x = cases.content("gaussian", 777).to(CUDA)
    wires_WN = torch.stack((cases.wire_of(codec, x, step=1), cases.wire_of(codec, x, step=2)))
    assert all(all_nan(codec, wires_WN, 777).values())
    assert not any(all_nan(codec, wires_WN[1:], 777).values())


def test_a_wire_that_is_not_rotated_has_no_key() -> None:
    wire = cases.wire_of(BlockInt(8), torch.ones(777, device=CUDA))
    wire[KEY] = 1
    assert all(all_nan(BlockInt(8), wire[None], 777).values())


def test_a_known_step_stands_in_for_headers() -> None:
    """They are not read then."""
    codec, n = Lloyd(4), 777
    x = cases.content("gaussian", n).to(CUDA)
    wire = cases.wire_of(codec, x, step=9)
    want = cases.decoded(codec, wire, n)
    wire[:32] = 0
    got = torch.empty_like(want)
    codec.decode(wire, got, step=9)
    cases.assert_same(got.cpu(), want.cpu())


# --- beyond 2**31 elements --------------------------------------------------------------------------------------------
LONG = 2**31 + 4099
NEAR = 2**31 - 4096  # the region from here on is compared bit for bit
HUGE = [BlockInt(8), BlockInt(4, 32, rounding="stochastic"), Lloyd(4)]
each_huge = pytest.mark.parametrize("codec", HUGE, ids=str)


@pytest.fixture(scope="module")
def long_tensor() -> Iterator[Tensor]:
    if torch.cuda.mem_get_info(CUDA)[0] < 60e9:
        pytest.skip("needs 60 GB of GPU memory")
    x = torch.randn(LONG, dtype=torch.bfloat16, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1))
    x[-3:] = torch.tensor([3.0, -7.0, 0.25])
    yield x
    del x
    torch.cuda.empty_cache()


def last_spans(layout: Layout) -> list[reference._Span]:
    """The blocks from NEAR on."""
    block = layout.format.block
    full, first = layout.numel // block, NEAR // block
    spans = [reference._Span(first * block, full * block, full - first, block)]
    return [*spans, reference._Span(full * block, LONG, 1, layout.tail)] if full < layout.num_blocks else spans


def sections(layout: Layout, wire: Tensor, spans: Sequence[reference._Span], lo: int) -> Tensors:
    """Scales and codes of as many blocks as the spans have, from element `lo` on."""
    blocks = sum(s.num_blocks for s in spans)
    codes = sum(s.num_blocks * s.codes for s in spans)
    at = layout.scales_at + 2 * (lo // layout.format.block)
    found = {"scales": wire[at : at + 2 * blocks]}
    for width, start in layout.planes:
        at = start + lo * width // 8
        found[f"plane of {width}"] = wire[at : at + codes * width // 8]
    return {name: part.cpu() for name, part in found.items()}


def assert_last_blocks(layout: Layout, got: Tensor, by_reference: Tensor) -> None:
    """The reference, told of the last spans only, writes them where the first would be."""
    spans = last_spans(layout)
    want = sections(layout, by_reference, spans, 0)
    for what, part in sections(layout, got, spans, spans[0].lo).items():
        cases.assert_same(part, want[what], what)


def keys_of(codec: Codec, stream: int) -> dict[str, int]:
    how = codec.encoding(torch.bfloat16)
    rotation = hashing.key(codec.seed, 1, hashing.ROTATION) if how.format.rotated else 0
    return {"rotation": rotation, "dither": hashing.key(codec.seed, 1, stream) if how.stochastic else 0}


def assert_chunks_within_bound(codec: Codec, x: Tensor, y: Tensor) -> None:
    chunk = 1 << 25
    for at in range(0, LONG, chunk):
        cases.assert_within_bound(codec, x[at : at + chunk].float(), y[at : at + chunk])


@each_huge
def test_numbers_beyond_two_billion_are_encoded_and_decoded(codec: Codec, long_tensor: Tensor) -> None:
    wire = cases.wire_of(codec, long_tensor, step=1)
    y = torch.empty(LONG, device=CUDA)
    codec.decode(wire, y)
    assert_chunks_within_bound(codec, long_tensor, y)


@each_huge
def test_bytes_beyond_two_billion_are_the_references(codec: Codec, long_tensor: Tensor) -> None:
    """Of encode, decode_sum and recode, from a little before 2**31 on."""
    how = codec.encoding(torch.bfloat16)
    layout = how.format.layout(LONG)
    spans = last_spans(layout)
    lo = spans[0].lo
    wire = cases.wire_of(codec, long_tensor, step=1)
    again, want = torch.empty_like(wire), torch.empty_like(wire)
    y, total = (torch.empty(LONG, device=CUDA) for _ in range(2))
    with patch.object(reference, "_spans", lambda layout: spans):
        reference.encode(how, long_tensor, want, None, **keys_of(codec, hashing.DITHER))
        assert_last_blocks(layout, wire, want)
        wires_WN = torch.stack((wire, wire))
        codec.decode_sum(wires_WN, y, scale=0.5)
        rotation = keys_of(codec, hashing.DITHER)["rotation"]
        reference.decode_sum(how.format, wires_WN, total, scale=0.5, rotation=rotation)
        cases.assert_same(y[lo:].cpu(), total[lo:].cpu(), "sum")
        codec.recode(wires_WN, again, LONG, scale=0.5, step=1)
        recode = functools.partial(reference.recode, how, wires_WN, want, LONG)
        recode(scale=0.5, **keys_of(codec, hashing.DITHER_RECODE))
        assert_last_blocks(layout, again, want)


@each_huge
def test_residuals_beyond_two_billion(codec: Codec, long_tensor: Tensor) -> None:
    residual = torch.ones(LONG, device=CUDA)
    wire = cases.wire_of(codec, long_tensor, step=1, residual=residual)
    y = torch.empty(LONG, device=CUDA)
    codec.decode(wire, y)
    for part in (slice(0, 5000), slice(2**30, 2**30 + 5000), slice(NEAR, LONG)):
        cases.assert_same(residual[part].cpu(), (long_tensor[part].float() + 1 - y[part]).cpu(), f"residual {part}")
