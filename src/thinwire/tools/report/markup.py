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
    words = "".join(f' {_attribute(key)}="{escape(value)}"' for key, value in attributes.items() if value is not None)
    if name in _EMPTY:
        return Html(f"<{name}{words}>")
    return Html(f"<{name}{words}>{join(children)}</{name}>")


def join(children: Iterable[str | Iterable[str]]) -> Html:
    """The children one after the other."""
    return Html("".join(escape(child) if isinstance(child, str) else join(child) for child in children))


def escape(text: str) -> Html:
    """HTML as it is, any other text escaped."""
    return text if isinstance(text, Html) else Html(html.escape(cells.text(text)))


def trusted(text: str) -> Html:
    """What another part of the report has made as HTML: a style sheet, a drawing."""
    return Html(text)


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
