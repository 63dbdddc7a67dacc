"""Trellis codes in plain torch: the codes of a strand of a block are chosen together, by Viterbi's algorithm.

Element i of a block of B codes belongs to strand i % S, where S = B / 64, or 1 in a shorter block. Every code is a path
bit p and index bits q, as p + 2 q. Along a strand, with zeros before its start,

    index[i] = 4 q[i] + 2 (p[i] ^ p[i-2]) + p[i-1]

is the place of the element's level among the 2 ** (bits + 1) levels of the table. So a code can choose among half of
the levels, and the path bits before it decide which half. The two lowest bits of an index name one of four subsets of
levels; it costs the squared distance from the element to its nearest level. A path ends in one of four states,
p[i] + 2 p[i-1]; of the two paths that lead to a state, the cheaper one is kept.

Shape suffixes: K blocks, B codes of a block, L positions of a strand, S strands.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.kernels.schema import CELLS, STRAND, TRELLIS, TrellisTable

MOST = 255  # costs of paths are cut here, which the best path never reaches
_FIRST = [0, 0, 1, 1]  # for each state, the previous state with p[i-2] = 0, and below the one with p[i-2] = 1
_SECOND = [2, 2, 3, 3]
_FIRST_SUBSET = [0, 2, 1, 3]  # 2 (p[i] ^ p[i-2]) + p[i-1] for these steps
_SECOND_SUBSET = [2, 0, 3, 1]


def choose(bits: int, y_KB: Tensor) -> tuple[Tensor, Tensor]:
    """The best codes for cells of the table's grid, and the levels they stand for."""
    table = TRELLIS[bits]
    y_KLS = _in_strands(y_KB)
    costs_4KLS = costs(table).to(y_KB.device)[:, (y_KLS.clamp(-CELLS // 2, CELLS // 2 - 1) + CELLS // 2).long()]
    state_KS, back_L4KS = _search(costs_4KLS)
    path_KLS = torch.empty_like(y_KLS)
    subset_KLS = torch.empty_like(y_KLS)
    for i in range(y_KLS.shape[1] - 1, -1, -1):
        before_KS = back_L4KS[i].gather(0, state_KS[None])[0]
        path_KLS[:, i] = state_KS & 1
        subset_KLS[:, i] = 2 * (state_KS & 1 ^ before_KS) + (state_KS >> 1)
        state_KS = state_KS >> 1 | before_KS << 1
    place_KLS = torch.zeros_like(y_KLS)
    levels = torch.tensor(table.signed_levels, dtype=torch.int32, device=y_KB.device)
    for low, high in pairwise(levels.view(-1, 4)):
        place_KLS += 8 * y_KLS > (low + high)[subset_KLS.long()]
    level_KLS = levels[(4 * place_KLS + subset_KLS).long()]
    return (path_KLS + 2 * place_KLS).view_as(y_KB), level_KLS.view_as(y_KB)


def indices(codes_KB: Tensor) -> Tensor:
    """The places of the codes' levels in the table."""
    codes_KLS = _in_strands(codes_KB.int())
    path_KLS = codes_KLS & 1
    one_KLS = pad(path_KLS, (0, 0, 1, 0))[:, :-1]
    two_KLS = pad(path_KLS, (0, 0, 2, 0))[:, :-2]
    return (4 * (codes_KLS >> 1) + 2 * (path_KLS ^ two_KLS) + one_KLS).view_as(codes_KB)


def _in_strands(x_KB: Tensor) -> Tensor:
    strands = max(1, x_KB.shape[1] // STRAND)
    return x_KB.view(x_KB.shape[0], -1, strands)


def costs(table: TrellisTable) -> Tensor:
    """(4, CELLS): what it costs to round a cell to the nearest level of each subset; below 128."""
    cell = torch.arange(-CELLS // 2, CELLS // 2)
    levels = torch.tensor(table.signed_levels).view(-1, 4, 1)
    cost = (4 * cell - levels).square().amin(0)
    return (cost + (1 << table.shift - 1) >> table.shift).clamp(max=MOST // 2).int()


def _search(costs_4KLS: Tensor) -> tuple[Tensor, Tensor]:
    """The state that the best path ends in, and for every position and state whether its path had p[i-2] = 1."""
    _, num_blocks, length, strands = costs_4KLS.shape
    paths_4KS = torch.full((4, num_blocks, strands), MOST, dtype=torch.int32, device=costs_4KLS.device)
    paths_4KS[0] = 0
    back = []
    for i in range(length):
        cost_4KS = costs_4KLS[:, :, i]
        first_4KS = (paths_4KS[_FIRST] + cost_4KS[_FIRST_SUBSET]).clamp(max=MOST)
        second_4KS = (paths_4KS[_SECOND] + cost_4KS[_SECOND_SUBSET]).clamp(max=MOST)
        back.append((second_4KS < first_4KS).long())
        paths_4KS = torch.minimum(first_4KS, second_4KS)
        if i % 2:  # so that a path's cost stays below MOST
            paths_4KS = paths_4KS - paths_4KS.amin(0)
    order = torch.arange(4, device=costs_4KLS.device).view(4, 1, 1)
    return (4 * paths_4KS.long() + order).amin(0) & 3, torch.stack(back)
