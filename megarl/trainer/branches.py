"""A sample that is a tree, as documents in which every token is computed once.

    tokens      p p a b c d e f     e continues the last p, and f continues b
    documents   p | p a b | c d | f | p e      the second p is there twice: it predicts a and e
    parents      -1    0     1    1    0

A token's state depends on the tokens that it continues alone: what branches have in common is one
document, to which all of them attend. A state predicts one trained token; each further one has a
copy of the token that it continues before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from megarl.parallel.prefix_tree import copied
from megarl.types import Samples

ABOVE, NONE = -1, -2


class Part(NamedTuple):
    """Tokens of a sample, each of which continues the one before it: a document."""

    places: np.ndarray
    """[n] int64 index of each token among the tokens of all samples."""
    targets: np.ndarray
    """[n] int64 index of the token that each token predicts, or -1 for none."""
    parent: int
    """Number, in the list of the sample's parts, of the part that this one continues; ABOVE for the
    tokens before them, NONE for a conversation of its own."""


def next_tokens(samples: Samples) -> tuple[np.ndarray, set[int]]:
    """([T] int64 index of the token that each token predicts, or -1 for none; numbers of the rows
    of `samples.branches` whose first token is predicted by a copy of the token that it continues).
    """
    found = np.arange(1, len(samples.token_ids) + 1)
    found[samples.offsets[1:] - 1] = -1
    found[samples.branches[:, 0] - 1] = -1
    copies = set(copied(samples.branches, samples.mask))
    for number, (first, before) in enumerate(samples.branches.tolist()):
        if before >= 0 and samples.mask[first] and number not in copies:
            found[before] = first
    return found, copies


def parts_of(
    samples: Samples, number: int, begin: int, following: np.ndarray, copies: Collection[int]
) -> list[Part]:
    """The parts of sample `number` behind its first `begin` tokens, depth first: a part comes
    before those that continue it, conversations of their own come last. A branch that continues one
    of the first `begin` tokens continues the last of them, and begins with an untrained token.
    `following` and `copies`: from `next_tokens`.
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
    return _joined(np.concatenate(places), np.concatenate(targets), links)


def _joined(places: np.ndarray, targets: np.ndarray, links: dict[int, int]) -> list[Part]:
    """The nodes as parts: each as long as one node alone continues each. `links`: {node: the one
    that it continues}; others continue the node before them.
    """
    cuts = sorted({*links, *(link + 1 for link in links.values() if link >= 0)} - {len(places)})
    children: dict[int, list[int]] = {ABOVE: [], NONE: []} | {
        piece: [] for piece in range(len(cuts))
    }
    for piece, cut in enumerate(cuts):
        link = links.get(cut, cut - 1)
        children[bisect_right(cuts, link) - 1 if link >= 0 else link].append(piece)
    ends, found = [*cuts[1:], len(places)], list[Part]()
    waiting = [(piece, root) for root in (NONE, ABOVE) for piece in reversed(children[root])]
    while waiting:
        piece, parent = waiting.pop()
        chain = [piece]
        while len(children[chain[-1]]) == 1:
            chain += children[chain[-1]]
        nodes = np.concatenate([np.arange(cuts[one], ends[one]) for one in chain])
        waiting += [(child, len(found)) for child in reversed(children[chain[-1]])]
        found.append(Part(places[nodes], targets[nodes], parent))
    return found
