"""Schedules from a hierarchy: a chain of blocks, each of them a chain of smaller blocks, and so on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memplan.config import Config
from memplan.solvers.chain import coarse_cuts, fine_cuts, layer_cuts, make_chain
from memplan.solvers.expand import SolvedChain, _last_reads, _outside, _table, expand
from memplan.solvers.flat import Flat, Ints
from memplan.solvers.hierarchy_options import best_options, limited, searched, whole_peak_bytes
from memplan.solvers.options import BlockOptions, LocalBlock, cut_orders, localise
from memplan.solvers.replay import fill, replay
from memplan.solvers.rotor import distinct_slots, solve_chain


class P:
    grains = (96, 48, 24, 12, 6, 3, 2)
    inner_fine = 40
    inner_coarse = 12
    coarse_from = 24
    inner_slots = 200
    slots = 800
    sizes = 8
    outer_sizes = 48
    shares = (0.0, 0.4)
    targets = 6
    tries = 0
    options = 64
    search_from = 3


class Hierarchy:
    def __init__(self, config: Config, p=P):
        self.config, self.p = config, p
        self.known = {}
        self.calls = 0

    def solved(self, flat, keys, positions, most_bytes, slots, small, within=0):
        chain = make_chain(flat, positions)
        last_read = _last_reads(flat)
        outside = _outside(flat, chain, last_read)
        blocks, options = [], []
        for index, block in enumerate(chain.blocks):
            local = localise(flat, block, outside.incoming[index], last_read, keys)
            blocks.append(local)
            options.append(self.options(local, keys_of(keys, local), small, within))
        unit = max(1, -(-most_bytes // slots))
        table = _table(flat, chain, blocks, options, outside, unit)
        return SolvedChain(chain, tuple(blocks), tuple(options), table, solve_chain(table, slots), unit)

    def options(self, local, keys, small, within=0):
        self.calls += 1
        small = small or (within > 0 and 4 * local.flat.arrays.boundary > 3 * within)
        key = (local.signature, small)
        if key not in self.known:
            self.known[key] = self.find(local, keys, small)
        return self.known[key]

    def find(self, local, keys, small):
        p = self.p
        orders = cut_orders(local, self.config.block_cuts)
        n = local.flat.arrays.boundary
        if small or n < p.search_from:
            return best_options(local, orders, 24)
        most = whole_peak_bytes(local)
        f = local.flat
        seen = {()}
        for pos, sm in ((fine_cuts(f, p.inner_fine), True), *(((coarse_cuts(f, p.inner_coarse), False),) if n > p.coarse_from else ())):
            if pos in seen: continue
            seen.add(pos)
            for x in p.shares:
                fx = limited(f, int(x * most))
                s = self.solved(fx, keys, pos, int((1.125 + x) * most) + 1, p.inner_slots, sm, n)
                for m in distinct_slots(s.front, p.sizes):
                    o = expand(fx, s, m)
                    peak = replay(fx.arrays, o, np.zeros(len(o), dtype=np.int64))[0]
                    if peak < 0: continue
                    orders.append(o)
                    orders.append(fill(fx.arrays, o, peak, 8))
        for x in p.shares:
            orders += searched(limited(f, int(x * most)), orders, p.targets, p.tries)
        return best_options(local, orders, p.options)


def keys_of(keys, local):
    return tuple("" if op < 0 else keys[op] for op in local.ops)


def hierarchy(flat: Flat, keys, most_bytes, config, p=P) -> Iterator[Ints]:
    h = Hierarchy(config, p)
    hierarchy.last = h
    seen = set()
    beyond = max(1, most_bytes - flat.arrays.base_bytes)
    for g in p.grains:
        c = coarse_cuts(flat, g)
        for pos in (layer_cuts(flat, c), c):
            if pos in seen: continue
            seen.add(pos)
            s = h.solved(flat, keys, pos, beyond + beyond // 8, p.slots, False)
            for m in distinct_slots(s.front, p.outer_sizes):
                o = expand(flat, s, m)
                peak = replay(flat.arrays, o, np.zeros(len(o), dtype=np.int64))[0]
                if peak >= 0:
                    yield fill(flat.arrays, o, peak, 8)
