"""HTML by construction: what is not already HTML is escaped when it becomes part of an element."""

import html
from collections.abc import Iterable

from thinwire.tools.report import cells

_EMPTY = {"meta", "link", "br"}  # elements without an end


class Html(str):
    """Text that is HTML. Made here and nowhere else."""

    __slots__ = ()


def element(name: str, /, *children: str | Iterable[str], **attributes: str | None) -> Html:
    """<name attributes>children</name>; an attribute's "_" is a "-", a last one is dropped: class_="x"."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    start = "".join((name, *(f' {key}="{_escaped(value)}"' for key, value in given.items())))
    return Html(f"<{start}>" if name in _EMPTY else f"<{start}>{join(children)}</{name}>")


def join(children: Iterable[str | Iterable[str]]) -> Html:
    return Html("".join(_escaped(child) if isinstance(child, str) else join(child) for child in children))


def trusted(text: str) -> Html:
    """What another part of the report has made as HTML: a style sheet, a drawing."""
    return Html(text)


def _escaped(text: str) -> str:
    return text if isinstance(text, Html) else html.escape(cells.text(text))
