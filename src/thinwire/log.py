"""What thinwire says while it works: single lines, through the logger called "thinwire"."""

import functools
import logging
import sys


def announce(text: str) -> None:
    """Log `text` at level INFO; where nobody has set up logging, write "thinwire: text" to stderr.

    Call it on one rank. A handler on the logger "thinwire" or on the root takes the lines over, and
    `logging.getLogger("thinwire").setLevel(logging.WARNING)` silences them.
    """
    logger = logging.getLogger("thinwire")
    if logger.hasHandlers():
        logger.info(text)
    elif logger.level <= logging.INFO and logger.manager.disable < logging.INFO:
        print(f"thinwire: {text}", file=sys.stderr, flush=True)


@functools.cache
def announce_once(text: str) -> None:
    """The same, once per process."""
    announce(text)
