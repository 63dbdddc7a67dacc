"""Pages and charts of records: benchmarks/pages.py and benchmarks/charts.py."""

import html
import re

import pytest

from benchmarks import charts, pages
from test_report import a_record, recorded

ONE_OF_EACH = ("codec_cpu", "kernels_cpu_aarch64", "collectives_1gbit", "train_gpt", "qat_digits", "soak")


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
