"""Whether the kernels of this machine work: every op of every codec against the reference."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import torch
from torch import Tensor

from thinwire.codecs import Codec, codec, names
from thinwire.kernels import Backend, Encoding, hashing, reference, select

CASES = ((385, torch.float32), (1, torch.bfloat16))  # three blocks and a bit, one element
OPTIONS = (
    *("int8:mode=affine", "int3:block=24,mode=affine", "int4:rounding=stochastic"),
    *("lloyd2:block=64", "lloyd3:rotate=false", "lloyd4:scale=unbiased"),
)
OPS = ("encode", "encode_residual", "decode", "decode_sum", "recode")
FEW = ("int8", "lloyd4")
FEW_OPS = ("encode", "decode", "recode")
WORLD = 3
_KEY = hashing.key(0, 0, hashing.ROTATION)


def codecs() -> list[Codec]:
    """Every codec that is not made of others, and one of each option that changes the bytes."""
    return [codec(spec) for spec in (*names(), *OPTIONS)]


def differences(backend: Backend, device: torch.device, few: bool = False) -> tuple[int, list[str]]:
    """How many results of `backend` were compared with the reference, and those whose bytes differ; [] is good.

    few: what a DDP model uses first, for kernels that are compiled when they are used.
    """
    compared = [codec(spec) for spec in FEW] if few else codecs()
    ops, cases = (FEW_OPS, CASES[:1]) if few else (OPS, CASES)

    def compare(chosen: Codec, numel: int, dtype: torch.dtype) -> list[tuple[str, bool]]:
        how = chosen.encoding(dtype)
        if select(device, how.format) is reference:  # it serves this format alone
            return []
        x_WN = _inputs(numel, device).to(dtype)
        ours, theirs = (_results(each, how, x_WN, ops) for each in (backend, reference))
        return [(f"{op} {chosen} {dtype} numel={numel}", _same_bytes(ours[op], theirs[op])) for op in theirs]

    with ThreadPoolExecutor(8 if device.type == "cuda" else 1) as pool:  # so that kernels are compiled together
        waiting = [pool.submit(compare, chosen, *case) for chosen, case in product(compared, cases)]
        found = [pair for one in waiting for pair in one.result()]
    return len(found), [name for name, same in found if not same]


def _results(backend: Backend, how: Encoding, x_WN: Tensor, ops: Sequence[str]) -> dict[str, Tensor]:
    """What each op gives; ops after encode start from the reference's wires, so that one fault is named once."""
    layout = how.format.layout(x_WN.shape[1])
    wires_WN = x_WN.new_empty(len(x_WN), layout.nbytes, dtype=torch.uint8)
    for x, wire in zip(x_WN, wires_WN, strict=True):
        reference.encode(how, x, wire, None, rotation=_KEY, dither=1)

    def encode(residual: Tensor | None) -> Tensor:
        wire = torch.full_like(wires_WN[0], 255)
        backend.encode(how, x_WN[0], wire, residual, rotation=_KEY, dither=1)
        return wire if residual is None else torch.cat((wire, residual.view(torch.uint8)))

    def decode_sum(world: int) -> Tensor:
        out = torch.empty_like(x_WN[0])
        backend.decode_sum(how.format, wires_WN[:world], out, scale=1 / world, rotation=_KEY)
        return out

    def recode() -> Tensor:
        wire = torch.full_like(wires_WN[0], 255)
        backend.recode(how, wires_WN, wire, x_WN.shape[1], scale=1 / len(x_WN), rotation=_KEY, dither=1)
        return wire

    every = {
        "encode": lambda: encode(None),
        "encode_residual": lambda: encode(x_WN[1].float().clone()),  # a copy: encode writes into it
        "decode": lambda: decode_sum(1),
        "decode_sum": lambda: decode_sum(len(x_WN)),
        "recode": recode,
    }
    return {op: every[op]() for op in ops}


def _inputs(numel: int, device: torch.device) -> Tensor:
    return torch.randn(WORLD, numel, generator=torch.Generator().manual_seed(numel)).to(device)


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (one, other)))
