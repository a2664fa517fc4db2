"""A sample that is a tree, as documents in which every token is computed once.

    tokens      p p a b c d e F     e continues the last p, and F continues b
    documents   p p a b c d | p e | F      the second p is there twice: it predicts a and e
    begins           0         1    4      tokens of the first document that they attend to

A state predicts one trained token; for each further one the token that it continues is copied
before it. F, of the environment, needs none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from megarl.parallel.prefix_tree import copied
from megarl.types import Samples

ABOVE, NONE = -1, -2


class BranchPart(NamedTuple):
    """A document: tokens of which each continues the one before it."""

    places: np.ndarray
    """[n] int64 index of each token among those of all samples."""
    targets: np.ndarray
    """[n] int64 index of the token that it predicts, or -1."""
    parent: int
    """The sample's part that this one continues; ABOVE for the tokens before them, NONE for a
    conversation of its own."""
    begin: int
    """Tokens before it that it continues."""


def next_tokens(samples: Samples) -> tuple[np.ndarray, set[int]]:
    """([T] int64 index of the token that each one predicts, or -1; numbers of `samples.branches`
    whose first token is predicted by a copy).
    """
    following = np.arange(1, len(samples.token_ids) + 1)
    following[samples.offsets[1:] - 1] = -1
    following[samples.branches[:, 0] - 1] = -1
    copies = set(copied(samples.branches, samples.mask))
    for number, (first, before) in enumerate(samples.branches.tolist()):
        if before >= 0 and samples.mask[first] and number not in copies:
            following[before] = first
    return following, copies


def branch_parts(
    samples: Samples, number: int, begin: int, following: np.ndarray, copies: Collection[int]
) -> list[BranchPart]:
    """The parts of sample `number` after its first `begin` tokens, depth first, conversations of
    their own last. A branch that continues one of the first tokens continues the last of them, and
    begins with an untrained token.
    """
    first, last = samples.offsets[number : number + 2].tolist()
    low, high = np.searchsorted(samples.branches[:, 0], (first, last)).tolist()
    chosen = samples.branches[low:high].tolist()
    # Nodes are the tokens in their order, and each copy before the branch that it begins. A node
    # continues the one before it, but for those in `links`: {node: the one that it continues}.
    starts = [first + begin, *(start for start, _ in chosen)]
    places, targets = list[np.ndarray](), list[np.ndarray]()
    links, nodes, count = dict[int, int](), list[int](), 0  # nodes: of the tokens `starts`
    for row, (start, end) in enumerate(zip(starts, [*starts[1:], last], strict=True)):
        before = chosen[row - 1][1] if row else first + begin - 1
        link = NONE if before < 0 and row else ABOVE
        if before >= starts[0]:
            run = bisect_right(starts, before, hi=row) - 1
            link = nodes[run] + before - starts[run]
        is_copied = row > 0 and low + row - 1 in copies
        if is_copied:
            link = links.get(link, link - 1)
            places.append(np.array([before]))
            targets.append(np.array([start]))
        if start < end:
            links[count] = link
        nodes.append(count + is_copied)
        count += is_copied + end - start
        places.append(np.arange(start, end))
        targets.append(following[start:end])
    return _joined(np.concatenate(places), np.concatenate(targets), links, begin)


def _joined(
    places: np.ndarray, targets: np.ndarray, links: dict[int, int], begin: int
) -> list[BranchPart]:
    """The nodes as parts. `links`: {node: the one that it continues, if not the one before it}.
    `begin`: tokens ABOVE the nodes.

    Where several nodes continue one, the part goes on with the one with most branches: so a part of
    a sample with n branches has at most log2(n) + 1 above it, for each of which attention is
    called.
    """
    cuts = sorted({*links, *(link + 1 for link in links.values() if link >= 0)} - {len(places)})
    children: dict[int, list[int]] = {ABOVE: [], NONE: []} | {
        piece: [] for piece in range(len(cuts))
    }
    for piece, node in enumerate(cuts):
        link = links.get(node, node - 1)
        children[bisect_right(cuts, link) - 1 if link >= 0 else link].append(piece)
    ends, parts = [*cuts[1:], len(places)], list[BranchPart]()
    leaves = [0] * len(cuts)  # of the tree behind each piece
    for piece in reversed(range(len(cuts))):
        leaves[piece] = sum(leaves[child] for child in children[piece]) or 1
    waiting = [(piece, NONE, 0) for piece in reversed(children[NONE])]
    waiting += [(piece, ABOVE, begin) for piece in reversed(children[ABOVE])]
    while waiting:
        piece, parent, depth = waiting.pop()
        nodes, aside, end = list[np.ndarray](), list[tuple[int, int, int]](), depth
        while piece is not None:
            nodes.append(np.arange(cuts[piece], ends[piece]))
            end += ends[piece] - cuts[piece]
            following = max(children[piece], key=lambda branch: leaves[branch], default=None)
            aside += [(child, len(parts), end) for child in children[piece] if child != following]
            piece = following
        waiting += reversed(aside)
        chosen = np.concatenate(nodes)
        parts.append(BranchPart(places[chosen], targets[chosen], parent, depth))
    return parts
