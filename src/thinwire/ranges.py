"""Ranges for torch.profiler: thinwire::encode, thinwire::wire (messages and waits for them), thinwire::recode,
thinwire::decode.

On gloo they are in a thread of thinwire, which torch.profiler includes only with
`experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)`.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch.autograd import profiler

Function = TypeVar("Function", bound=Callable[..., Any])
_NO_RANGE = contextlib.nullcontext()


def range_of(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range of that name, if a profiler is recording."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NO_RANGE


def ranged(name: str) -> Callable[[Function], Function]:
    """A decorator: each call of the function is a range of that name, if a profiler is recording."""

    def around(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not profiler._is_profiler_enabled:  # entering a range costs a microsecond even without a profiler
                return function(*args, **kwargs)
            with profiler.record_function(name):
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    return around
