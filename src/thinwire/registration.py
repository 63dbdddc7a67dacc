"""Registers the backend "thinwire" with torch.distributed. The code of groups is imported with the first group.

`import thinwire` registers it if torch.distributed is imported already, and so does the first use of any public name.
Since torch 2.14, torch finds it by itself, as an entry point of the installed package.
"""

from typing import Any

import torch.distributed as dist


def register() -> None:
    """Let init_process_group and new_group accept "cpu:thinwire", "cuda:thinwire" or both."""
    if dist.is_available() and "thinwire" not in dist.Backend.backend_list:
        dist.Backend.register_backend("thinwire", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    from thinwire.group import create

    return create(options, backend_options)
