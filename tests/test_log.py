"""thinwire.log: lines that are seen by default, that logging takes over, and that can be silenced."""

import contextlib
import io
import logging

import pytest

from cases import on_ranks
from replicas import Group
from thinwire.log import announce

LOGGER = logging.getLogger("thinwire")


def announced(text: str) -> str:
    """What appears on stderr."""
    out = io.StringIO()
    with contextlib.redirect_stderr(out):
        announce(text)
    return out.getvalue()


@on_ranks(1, gives=["thinwire: 100 % by default\n", "thinwire: a level\n", "", ""])
def test_lines_are_seen_unless_somebody_says_otherwise(group: Group) -> list[str]:
    """In a process without handlers, as a user's script starts: by default, and at several levels."""
    found = [announced("100 % by default")]
    for level in (logging.INFO, logging.WARNING):
        LOGGER.setLevel(level)
        found.append(announced("a level"))
    LOGGER.setLevel(logging.NOTSET)
    logging.disable(logging.INFO)
    found.append(announced("disabled"))
    logging.disable(logging.NOTSET)
    return found


def test_handlers_take_the_lines_over(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "thinwire"):
        assert announced("it chose int8, 3 % faster") == ""
    assert caplog.record_tuples == [("thinwire", logging.INFO, "it chose int8, 3 % faster")]
