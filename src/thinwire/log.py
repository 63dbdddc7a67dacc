"""Announcements: what the library chose or is about to do, in one line, through the `thinwire` logger."""

import logging

_logger = logging.getLogger("thinwire")


def announce(text: str) -> None:
    """Say something that a user should see without asking."""
    _logger.warning(text)
