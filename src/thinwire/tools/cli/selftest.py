"""Whether the kernels of this machine work: every op of every codec against the reference."""

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
WORLD = 3
_KEY = hashing.key(0, 0, hashing.ROTATION)


def codecs() -> list[Codec]:
    """Every codec that is not made of others, and one of each option that changes the bytes."""
    return [codec(spec) for spec in (*names(), *OPTIONS)]


def differences(backend: Backend, device: torch.device, few: bool = False) -> tuple[int, list[str]]:
    """How many results of `backend` were compared with the reference, and those whose bytes differ; [] is good.

    few: what a DDP model uses first, for kernels that are compiled when they are used.
    """
    cases = product(map(codec, FEW), CASES[:1]) if few else product(codecs(), CASES)

    def compare(chosen: Codec, numel: int, dtype: torch.dtype) -> list[tuple[str, bool]]:
        how = chosen.encoding(dtype)
        if select(device, how.format) is reference:  # it serves this format alone
            return []
        x_WN = torch.randn(WORLD, numel, generator=torch.Generator().manual_seed(numel)).to(device, dtype)
        pairs = zip(OPS, *(_results(each, how, x_WN) for each in (backend, reference)), strict=True)
        return [(f"{op} {chosen} {dtype} numel={numel}", torch.equal(ours, theirs)) for op, ours, theirs in pairs]

    with ThreadPoolExecutor(8 if device.type == "cuda" else 1) as pool:  # so that kernels are compiled together
        waiting = [pool.submit(compare, chosen, *case) for chosen, case in cases]
        found = [pair for one in waiting for pair in one.result()]
    return len(found), [name for name, same in found if not same]


def _results(backend: Backend, how: Encoding, x_WN: Tensor) -> list[Tensor]:
    """The bytes that each of OPS gives; those after encode start from the reference's wires, to name a fault once."""
    numel, keys = x_WN.shape[1], {"rotation": _KEY, "dither": 1}
    wires_WN = x_WN.new_empty(WORLD, how.format.layout(numel).nbytes, dtype=torch.uint8)
    for x, wire in zip(x_WN, wires_WN, strict=True):
        reference.encode(how, x, wire, None, **keys)
    alone, fed, recoded = torch.full_like(wires_WN, 255)
    residual = x_WN[1].float().clone()  # which encode writes into
    backend.encode(how, x_WN[0], alone, None, **keys)
    backend.encode(how, x_WN[0], fed, residual, **keys)
    decoded, summed = torch.empty_like(x_WN[:2])
    backend.decode_sum(how.format, wires_WN[:1], decoded, scale=1.0, rotation=_KEY)
    backend.decode_sum(how.format, wires_WN, summed, scale=1 / WORLD, rotation=_KEY)
    backend.recode(how, wires_WN, recoded, numel, scale=1 / WORLD, **keys)
    fed = torch.cat((fed, residual.view(torch.uint8)))
    return [alone, fed, decoded.view(torch.uint8), summed.view(torch.uint8), recoded]
