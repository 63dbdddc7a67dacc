"""The configurations of GPU kernels: known ones from the disk, others measured once, defaults where it cannot be."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from thinwire import BlockInt, Identity, Lloyd
from thinwire.kernels.triton import tuning
from thinwire.kernels.triton.launch import Config

GPU = torch.device("cuda", 0)
INT8 = BlockInt(8).encoding(torch.float32)
NAME = "encode block_int8.0/128 float32"
BEST = Config(8, 2)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a card that is not there; a measurement on it finds BEST."""
    path = tmp_path / "cache" / "kernels.json"
    monkeypatch.setattr(tuning, "_file", lambda device: path)
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "_announced", False)
    monkeypatch.setattr(tuning, "_measured", lambda *request: BEST)
    monkeypatch.setattr(tuning, "_capturing", lambda device: False)
    monkeypatch.delenv("THINWIRE_TUNE", raising=False)
    tuning._known.cache_clear()
    yield path
    tuning._known.cache_clear()


def choose(numel: int = tuning.LARGE, how: object = INT8, op: str = "encode") -> Config:
    return tuning.choose(op, how, torch.float32, GPU, numel)  # type: ignore[arg-type]


def test_a_large_tensor_is_measured_once_and_remembered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose() == BEST
    assert json.loads(file.read_text()) == {NAME: [8, 2]}
    monkeypatch.setattr(tuning, "_measured", lambda *request: pytest.fail("measured again"))
    assert choose() == choose(tuning.SMALL) == BEST


def test_what_the_disk_says_is_not_measured(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_nothing_is_measured_where_it_cannot_be(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_measured", lambda *request: pytest.fail("measured"))
    default = tuning.default("encode", INT8.format, torch.float32)
    assert choose(tuning.LARGE - 1) == default
    assert choose(how=Identity().encoding(torch.float32)) == Config()
    monkeypatch.setattr(tuning, "_capturing", lambda device: True)
    assert choose() == default
    monkeypatch.setattr(tuning, "_capturing", lambda device: False)
    monkeypatch.setenv("THINWIRE_TUNE", "0")
    assert choose() == default
    assert not file.exists()
    assert choose(tuning.SMALL - 1) == tuning.SHORT


def test_no_memory_to_measure_in_leaves_the_default(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_measured", lambda *request: None)
    assert choose() == tuning.default("encode", INT8.format, torch.float32)
    assert not file.exists()


def test_compiling_is_announced_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="thinwire"):
        choose()
        choose(how=Lloyd(4).encoding(torch.float32))
    (said,) = caplog.messages
    assert "compiling GPU kernels" in said
    assert str(file) in said


def test_compiling_for_small_tensors_is_announced_on_a_new_machine(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING, logger="thinwire"):
        choose(100)
        monkeypatch.setattr(tuning, "_announced", False)  # the next process
        choose(100)
    assert len(caplog.messages) == 1
    assert json.loads(file.read_text()) == {}


@pytest.mark.parametrize("codec", [BlockInt(8), BlockInt(4), BlockInt(2), Lloyd(4), Lloyd(1)], ids=str)
@pytest.mark.parametrize("op", ["encode", "encode_residual", "decode_sum", "recode"])
def test_candidates_differ(op: str, codec: BlockInt | Lloyd) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found = tuning.candidates(op, codec.encoding(dtype).format, dtype)
        assert len(set(found)) == len(found) >= 2
        assert tuning.default(op, codec.encoding(dtype).format, dtype) == found[0]
