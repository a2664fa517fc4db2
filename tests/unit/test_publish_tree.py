"""The tree over which engines pass weights on."""

from __future__ import annotations

import math

from megarl.weight_sync.transports.forwarding import FANOUT, children, parent


def test_the_tree_reaches_every_engine_once_in_few_hops() -> None:
    for engines in (1, 2, 3, 4, 7, 8, 9, 100, 512, 1000):
        reached, hops, level = [0], 0, [0]
        while level:
            assert all(
                parent(child) == engine for engine in level for child in children(engine, engines)
            )
            assert all(len(children(engine, engines)) <= FANOUT for engine in level)
            level = [child for engine in level for child in children(engine, engines)]
            reached, hops = reached + level, hops + 1
        assert sorted(reached) == list(range(engines)) and parent(0) is None
        assert hops == 1 + int(math.log2(engines))
