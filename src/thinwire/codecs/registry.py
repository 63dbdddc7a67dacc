"""The string form of codecs: `codec("int4:block=128")` and what `str(codec)` gives back."""

import inspect
import re
from collections.abc import Callable
from functools import partial

from thinwire.codecs.base import Codec
from thinwire.codecs.leaves import BlockInt, Cast, Identity, Lloyd, TopK, Trellis
from thinwire.codecs.select import ByName, BySize
from thinwire.errors import CodecError

_LEAVES: dict[str, Callable[..., Codec]] = {
    "none": Identity,
    **{name: partial(Cast, name) for name in ("bf16", "fp16", "e4m3", "e5m2")},
    **{f"int{bits}": partial(BlockInt, bits) for bits in range(8, 1, -1)},
    **{f"lloyd{bits}": partial(Lloyd, bits) for bits in range(4, 0, -1)},
    "topk": TopK,
    **{f"trellis{bits}": partial(Trellis, bits) for bits in range(3, 0, -1)},
}
_COMPOSITE = re.compile(r"(bysize|byname)\((.*)\)", re.DOTALL)
_WORDS = {"true": True, "false": False, "True": True, "False": False}


def codec(spec: str | Codec) -> Codec:
    """The codec that a string names: "int8", "int4:block=128,mode=affine", "lloyd2:block=256", "topk:fraction=0.02".

    Codecs made of codecs: "bysize(small=bf16; large=int4; min_numel=4096)", "byname(*.bias=bf16; *=lloyd4)".
    A codec is returned as it is. Example: thinwire.codec("int4:block=128").wire_bytes(1_000_000)
    """
    if isinstance(spec, Codec):
        return spec
    if not isinstance(spec, str):
        raise CodecError(f"expected a codec or a string such as 'int4:block=128', got {spec!r}")
    text = spec.strip()
    composite = _COMPOSITE.fullmatch(text)
    if composite:
        return _composite(composite[1], _entries(composite[2]))
    name, colon, options = text.partition(":")
    if name not in _LEAVES:
        raise CodecError(f"unknown codec {spec!r}; known: {', '.join(names())}, bysize(...), byname(...)")
    if colon and not options:
        raise CodecError(f"codec {spec!r} ends in ':' without options such as block=128")
    return _build(name, _LEAVES[name], options.split(",") if options else [])


def names() -> tuple[str, ...]:
    """The names of the codecs that are not made of others."""
    return tuple(_LEAVES)


def _build(name: str, make: Callable[..., Codec], entries: list[str]) -> Codec:
    known = [p for p in inspect.signature(make).parameters if p not in ("format", "bits")]
    values: dict[str, Codec | int | float | bool | str] = {}
    for entry in entries:
        key, equals, value = (part.strip() for part in entry.partition("="))
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise CodecError(f"codec {name!r} does not know the option {entry.strip()!r}; options: {allowed}")
        if not equals:
            raise CodecError(f"codec {name!r}: the option {key!r} needs a value, as in {key}=...")
        if key in values:
            raise CodecError(f"codec {name!r} got the option {key!r} twice")
        values[key] = codec(value) if key in ("small", "large") else _value(value)
    return make(**values)


def _value(text: str) -> int | float | bool | str:
    if re.fullmatch(r"-?[0-9]{1,30}", text):
        return int(text)
    if re.fullmatch(r"-?[0-9]*\.?[0-9]+(e-?[0-9]+)?", text):
        return float(text)
    return _WORDS.get(text, text)


def _composite(name: str, entries: list[str]) -> Codec:
    if name == "bysize":
        return _build(name, BySize, entries)
    pairs = [tuple(part.strip() for part in entry.split("=", 1)) for entry in entries]
    if any(len(pair) != 2 for pair in pairs):
        raise CodecError(f"byname(...) takes entries 'pattern=codec' separated by ';', got {'; '.join(entries)!r}")
    return ByName([(pattern, spec) for pattern, spec in pairs])


def _entries(body: str) -> list[str]:
    """Split at the semicolons that stand outside parentheses."""
    entries = []
    depth = 0
    start = 0
    for i, char in enumerate(body):
        depth += (char == "(") - (char == ")")
        if char == ";" and depth == 0:
            entries.append(body[start:i])
            start = i + 1
    return [entry for entry in [*entries, body[start:]] if entry.strip()]
