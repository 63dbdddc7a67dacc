"""Pages and charts of records: benchmarks/pages.py and benchmarks/charts.py."""

import html
import re

import pytest

from benchmarks import charts, pages
from test_report import a_record, recorded

ONE_OF_EACH = ("codec_cpu", "kernels_cpu_aarch64", "collectives_1gbit", "train_gpt", "qat_digits", "soak")


def test_charts_show_the_numbers_of_the_record() -> None:
    found = recorded("train_mlp_1gbit")
    by_name = {chart.name: chart for chart in charts.of(found)}
    assert set(by_name) == {"loss", "step_time", "bytes"}
    assert by_name["step_time"].labels[:2] == ["fp32", "int8"]
    assert by_name["step_time"].series == {"ms": [row["step_ms"] for row in found.rows]}
    (speedup,) = charts.of(recorded("collectives_1gbit"))
    assert (speedup.name, list(speedup.series), speedup.mark) == ("speedup", ["over fp32", "over bf16"], 1.0)
    assert charts.of(a_record("train")) == charts.of(recorded("soak")) == []
    assert charts.png(by_name["loss"]).startswith(b"\x89PNG")


def test_the_page_is_whole_and_refers_to_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "png", lambda chart: b"png")
    evil = "<script>alert('1')</script>\"&"
    text = pages.page([a_record("codec", {"distribution": evil, "codec": evil, "nmse": 0.1})], title=evil)
    assert "<script" not in text
    assert text.count(html.escape(evil)) >= 4  # title, heading, cells
    whole = pages.page([recorded(name) for name in ONE_OF_EACH], names=list(ONE_OF_EACH))
    assert set(re.findall(r'(?:src|href)="([a-z]+:)', whole)) == {"data:"}
    assert "http" not in re.sub(r'http-equiv="', "", whole)
    for tag in ("table", "figure", "tr", "td", "h2"):
        assert len(re.findall(rf"<{tag}\b", whole)) == whole.count(f"</{tag}>") > 0
