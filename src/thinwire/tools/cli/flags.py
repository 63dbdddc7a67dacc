"""Flags that several commands have, and flags that hold lists: "int8,int4:block=32,mode=affine" and its kind."""

import os
import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.codecs import Codec, codec
from thinwire.errors import CodecError
from thinwire.tools.cli.screen import usage_errors
from thinwire.tools.local import link as links
from thinwire.tools.local.link import BenchError, ShapedLink

Device = StrEnum("Device", ["cpu", "cuda"])
Words = list[str] | None  # of a flag that may be repeated, and hold several with commas
_OPTION = re.compile(r"\s*\w+\s*=")  # "mode=affine"; a codec has a ":" or "(" before its first "="
_COMMA = re.compile(r",(?![^(]*\))")  # outside the parentheses of bysize(...) and byname(...)


def option(text: str, metavar: str = "A,B") -> Any:
    return typer.Option(metavar=metavar, help=text)


def count(text: str, least: int = 1, most: int | None = None) -> Any:
    return typer.Option(min=least, max=most, metavar="N", help=text)


LinkRate = Annotated[str | None, option("A shaped link for every rank, such as 1gbit; needs root.", "RATE")]
Json = Annotated[str | None, option('Write the record there; "-" is standard output, with no table.', "FILE")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes and few rounds: seconds, and rougher numbers.")]


def codecs(given: Sequence[str] | None, default: Sequence[str]) -> list[Codec]:
    """The codecs of a flag that may be repeated and may hold several, or the default ones."""
    with usage_errors("--codecs", CodecError):
        return list(dict.fromkeys(codec(spec) for spec in specs(given) or default))


def specs(given: Sequence[str] | None) -> list[str]:
    """Split at commas, but leave a piece "option=value" with the codec before it."""
    found: list[str] = []
    for text in given or ():
        for place, piece in enumerate(_COMMA.split(text)):
            if place and _OPTION.match(piece):
                found[-1] += f",{piece}"
            else:
                found.append(piece.strip())
    return found


def counts(given: Sequence[str] | None, flag: str, least: int = 1, most: int | None = None) -> list[int] | None:
    """The integers of a flag that may be repeated; None where it was not given."""
    found = pieces(given)
    for word in found:
        if not re.fullmatch(r"[1-9]\d*", word) or int(word) < least or (most is not None and int(word) > most):
            limits = f"from {least} to {most}" if most is not None else f"of {least} or more"
            raise typer.BadParameter(f"expected integers {limits}, got {word!r}", param_hint=flag)
    return list(map(int, found)) or None


def pieces(given: Sequence[str] | None) -> list[str]:
    return list(dict.fromkeys(word.strip() for text in given or () for word in text.split(",")))


def refuse(why: str, **given: object) -> None:
    """No flag is accepted and then ignored."""
    for flag, value in given.items():
        if value is not None:
            raise typer.BadParameter(why, param_hint=f"--{flag}")


def writable(path: str | None, flag: str) -> None:
    """Refuse a file that cannot be written now rather than after minutes of measuring; "-" is standard output."""
    if path is None or path == "-":
        return
    folder = Path(path).parent
    if not folder.is_dir() or Path(path).is_dir() or not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written: name a file in a folder that exists", param_hint=flag)


def shaped(link: str | None) -> ShapedLink | None:
    """The link that --link names, if any."""
    with usage_errors("--link", BenchError):
        return None if link is None else links.parse(link)
