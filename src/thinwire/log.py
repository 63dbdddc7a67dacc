"""Messages to the user: single lines through the logger "thinwire"."""

import functools
import logging
import sys


def announce(text: str) -> None:
    """Log `text` at level INFO; if logging is not set up, write "thinwire: text" to stderr.

    Call it on one rank. A handler on the logger "thinwire" or on the root logger receives the lines instead of stderr,
    and `logging.getLogger("thinwire").setLevel(logging.WARNING)` silences them.
    """
    logger = logging.getLogger("thinwire")
    if logger.hasHandlers():
        logger.info(text)
    elif logger.level <= logging.INFO and logger.manager.disable < logging.INFO:
        print(f"thinwire: {text}", file=sys.stderr, flush=True)


@functools.cache
def announce_once(text: str) -> None:
    """Announce the same text only once per process."""
    announce(text)
