"""The configurations of GPU kernels: a table by card; measured where asked for, and then known from the disk."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from thinwire import BlockInt, Identity, Lloyd, Trellis
from thinwire.kernels import Encoding
from thinwire.kernels.triton import tuning
from thinwire.kernels.triton.launch import Config
from thinwire.wire import Kind

GPU = torch.device("cuda", 0)
INT8 = BlockInt(8).encoding(torch.float32)
NAME = "encode block_int8.0/128 float32"
BEST = Config(8, 2)
OPS = ("encode", "encode_residual", "decode_sum", "recode")
CODECS = (BlockInt(8), BlockInt(4), BlockInt(2), Lloyd(4), Lloyd(1), Trellis(2))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of an H200 that is not there; measurements are asked for, and find BEST."""
    path = tmp_path / "cache" / "kernels.json"
    monkeypatch.setattr(tuning, "_file", lambda device: path)
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "_measured", lambda *request: BEST)
    monkeypatch.setattr(tuning, "_captured", lambda device: False)
    monkeypatch.setattr(tuning, "starved", lambda device: False)
    monkeypatch.setenv("THINWIRE_TUNE", "1")
    tuning._known.cache_clear()
    yield path
    tuning._known.cache_clear()


def choose(numel: int = tuning.LARGE, how: Encoding = INT8, op: str = "encode") -> Config:
    return tuning.choose(op, how, torch.float32, GPU, numel)


def test_a_large_tensor_is_measured_once_and_remembered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose() == BEST
    assert json.loads(file.read_text()) == {NAME: [8, 2]}
    monkeypatch.setattr(tuning, "_measured", lambda *request: pytest.fail("measured again"))
    assert choose() == choose(tuning.SMALL) == BEST


@pytest.mark.parametrize("value", ["0", "1"])
def test_what_the_disk_says_is_not_measured(file: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("THINWIRE_TUNE", value)
    file.parent.mkdir()
    file.write_text(json.dumps({NAME: [4, 4]}))
    monkeypatch.setattr(tuning, "_measured", lambda *request: pytest.fail("measured"))
    assert choose() == Config(4, 4)


def test_entries_of_others_are_kept(file: Path) -> None:
    file.parent.mkdir()
    file.write_text(json.dumps({"recode lloyd4.1/512 float32": [4, 1]}))
    choose()
    assert set(json.loads(file.read_text())) == {NAME, "recode lloyd4.1/512 float32"}
    assert [left.name for left in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("text", ["", "no json", "[1, 2]", json.dumps({NAME: 3}), json.dumps({NAME: [1, 3]})])
def test_a_broken_file_counts_for_nothing(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    assert choose() == BEST


def test_a_directory_that_cannot_be_written_costs_the_memory_alone(file: Path) -> None:
    file.parent.write_text("a file where the directory should be")
    assert choose() == BEST


def table(op: str = "encode", how: Encoding = INT8) -> Config:
    return tuning.candidates(op, how.format, torch.float32)[0]


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_measured_unless_asked_for(file: Path, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("THINWIRE_TUNE")
    if value is not None:
        monkeypatch.setenv("THINWIRE_TUNE", value)
    monkeypatch.setattr(tuning, "_measured", lambda *request: pytest.fail("measured"))
    assert choose() == table() != BEST
    assert not file.exists()


def test_nothing_is_measured_where_it_cannot_be(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as now:
        now.setattr(tuning, "_measured", lambda *request: pytest.fail("measured"))
        assert choose(tuning.LARGE - 1) == table()
        assert choose(how=Identity().encoding(torch.float32)) == Config()
        now.setattr(tuning, "_captured", lambda device: True)
        assert choose() == table()
    assert not file.exists()
    assert choose() == BEST  # the next time


def test_no_memory_to_measure_in_leaves_the_table(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_measured", lambda *request: None)
    assert choose() == table()
    assert not file.exists()


def test_a_measurement_is_announced(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="thinwire"):
        choose()
        choose()
    (said,) = caplog.messages
    assert said.startswith(f"measuring configurations of {NAME}")
    assert str(file) in said


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_one_kernel_serves_all_sizes_but_of_a_lloyd_encode_or_recode(
    file: Path, codec: BlockInt | Lloyd, op: str
) -> None:
    how = codec.encoding(torch.float32)
    sizes = {choose(numel, how, op) for numel in (1, tuning.SMALL - 1, tuning.SMALL, tuning.LARGE - 1)}
    two = op in ("encode", "recode") and how.format.kind == Kind.LLOYD
    assert sizes == ({table(op, how), tuning.SHORT} if two else {table(op, how)})


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_an_own_share_leaves_no_room_for_64_numbers_per_thread(codec: BlockInt | Lloyd) -> None:
    format = codec.encoding(torch.float32).format
    plain, own = (tuning.candidates(op, format, torch.float32) for op in ("recode", "recode_own"))
    assert (own == plain) == (format.kind != Kind.LLOYD)
    assert own[0].lanes <= 8


# Multiprocessors, memory clock in kHz and bus in bits, as CUDA tells them.
CARDS = {
    "A100 40 GB": (108, 1215000, 5120, False),
    "A100 80 GB": (108, 1593000, 5120, False),
    "H100 PCIe": (114, 1593000, 5120, False),
    "H100 SXM": (132, 2619000, 5120, False),
    "H200": (132, 3201000, 6144, False),
    "A10": (72, 6251000, 384, True),
    "L40S": (142, 9001000, 384, True),
    "RTX 3090": (82, 9751000, 384, True),
    "RTX 4090": (128, 10501000, 384, True),
    "one that does not tell": (128, 0, 384, False),
}


@pytest.mark.parametrize("card", CARDS)
def test_cards_are_told_apart_by_bandwidth_per_multiprocessor(card: str) -> None:
    count, clock, width, starved = CARDS[card]
    told = SimpleNamespace(multi_processor_count=count, memory_clock_rate=clock, memory_bus_width=width)
    assert tuning._starved(told) is starved


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_starved_card_takes_small_tiles(
    file: Path, monkeypatch: pytest.MonkeyPatch, codec: BlockInt | Lloyd, op: str
) -> None:
    monkeypatch.setattr(tuning, "starved", lambda device: True)
    monkeypatch.delenv("THINWIRE_TUNE")
    assert choose(how=codec.encoding(torch.float32), op=op) == tuning.STARVED


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_candidates_differ_and_hold_what_is_shipped(op: str, codec: BlockInt | Lloyd) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found = tuning.candidates(op, codec.encoding(dtype).format, dtype)
        assert len(set(found)) == len(found) >= 2
        assert tuning.STARVED in found  # else a measured one would not be known again
