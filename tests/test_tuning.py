"""The configurations of GPU kernels: a table, by kernel and GPU."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from thinwire import BlockInt, Identity, Lloyd, Trellis
from thinwire.kernels import Encoding
from thinwire.kernels.triton import tuning
from thinwire.kernels.triton.tuning import Config, starved as measured
from thinwire.wire import Kind

GPU = torch.device("cuda", 0)
INT8 = BlockInt(8).encoding(torch.float32)
OPS = ("encode", "encode_residual", "decode_sum", "recode")
CODECS = (BlockInt(8), BlockInt(4), BlockInt(2), Lloyd(4), Lloyd(1), Trellis(2))


@pytest.fixture(autouse=True)
def fed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU, which is not there, is an H200."""
    monkeypatch.setattr(tuning, "starved", lambda device: False)


def choose(numel: int = 1 << 22, how: Encoding = INT8, op: str = "encode") -> Config:
    return tuning.choose(op, how, torch.float32, GPU, numel)


def test_codecs_without_blocks_have_no_tiles() -> None:
    assert choose(how=Identity().encoding(torch.float32)) == Config()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_one_kernel_serves_all_sizes_but_of_a_lloyd_encode_or_recode(codec: BlockInt | Lloyd, op: str) -> None:
    how = codec.encoding(torch.float32)
    sizes = {choose(numel, how, op) for numel in (1, tuning.SMALL - 1, tuning.SMALL, 1 << 24)}
    fastest = tuning.fastest(op, how.format, torch.float32)
    two = op in ("encode", "recode") and how.format.kind == Kind.LLOYD
    assert sizes == ({fastest, tuning.SHORT} if two else {fastest})


# Multiprocessors, memory clock in kHz and bus in bits, as CUDA reports them.
GPUS = {
    "A100 40 GB": (108, 1215000, 5120, False),
    "A100 80 GB": (108, 1593000, 5120, False),
    "H100 PCIe": (114, 1593000, 5120, False),
    "H100 SXM": (132, 2619000, 5120, False),
    "H200": (132, 3201000, 6144, False),
    "A10": (72, 6251000, 384, True),
    "L40S": (142, 9001000, 384, True),
    "RTX 3090": (82, 9751000, 384, True),
    "RTX 4090": (128, 10501000, 384, True),
    "one that reports nothing": (128, 0, 384, False),
}


@pytest.mark.parametrize("gpu", GPUS)
def test_gpus_differ_by_bandwidth_per_multiprocessor(monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    count, clock, width, starved = GPUS[gpu]
    found = SimpleNamespace(multi_processor_count=count, memory_clock_rate=clock, memory_bus_width=width)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert measured.__wrapped__(GPU) is starved


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_starved_gpu_takes_small_tiles(monkeypatch: pytest.MonkeyPatch, codec: BlockInt | Lloyd, op: str) -> None:
    monkeypatch.setattr(tuning, "starved", lambda device: True)
    assert choose(how=codec.encoding(torch.float32), op=op) == tuning.STARVED
