"""Samples that begin with the same tokens share their computation: a packed sequence as trees.

    samples   [P P P P a a]   [P P P P b]   [P P P P c c c]      (prompt P of 4 tokens, 3 responses)
    tree      P P P | P a a | P b | P c c c                      13 tokens become 12
    parents     -1      0      0      0

A causal model's states depend on earlier tokens alone, so a common prefix is computed once and
every sample attends to it. A sample's part begins with its prompt's last token, which predicts the
sample's own first token, so each trained token keeps its own target. For samples that are trees see
`branches.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.parallel.prefix_balance import FamilyBalance
from megarl.parallel.prefix_tree import DEEPEST, Size, chains, copied, documents
from megarl.settings.training import SharePrefix
from megarl.trainer.branches import NONE, BranchPart, branch_parts, next_tokens
from megarl.types import Samples

SAVES = 1 / 16
"""Share of the samples' tokens that a common prefix must save to be worth a further call of
attention for every layer."""


@dataclass(frozen=True)
class Tree:
    """Samples' tokens as documents, each computed once and listed depth first: a shared prefix, the
    rest of a sample, or a branch of a sample that is a tree.
    """

    places: np.ndarray
    """[C] int64 index of each computed token in the samples; of a prefix in its first sample."""
    targets: np.ndarray
    """[C] int64 index of the token that it predicts, or -1."""
    starts: np.ndarray
    """[D + 1] int64 first token of each document; then C."""
    parents: tuple[int, ...]
    """[D] the document that each one continues, or -1; empty where none does."""
    begins: np.ndarray
    """[D] int64 tokens before each document that it continues."""
    owners: np.ndarray
    """[D] int64 each document's sample; -1 for a prefix."""


def shareable(samples: Samples) -> np.ndarray:
    """[S] int64: how many first tokens of each sample may be shared: those before the one that
    predicts the first trained token, never the prompt's last one, and none after the first
    branching.
    """
    counts = np.zeros(len(samples), np.int64)
    for number, (first, last) in enumerate(itertools.pairwise(samples.offsets.tolist())):
        # Nothing predicts the first token of a sample.
        trained = np.flatnonzero(samples.mask[first + 1 : last])
        counts[number] = trained[0] if len(trained) else last - first - 1
    known = samples.prompts > 0
    counts[known] = np.minimum(counts, samples.prompts - 1)[known]
    first, before = samples.branches.T
    owner = np.searchsorted(samples.offsets, first, side="right") - 1
    # What predicts a trained token is the sample's own.
    limit = np.where(before < 0, first, before + ~samples.mask[first])
    np.minimum.at(counts, owner, limit - samples.offsets[owner])
    return np.maximum(counts, 0)


def must_save(share: SharePrefix) -> float:
    """The fraction of tokens that a shared prefix must save."""
    return {"auto": SAVES, "on": 0.0, "off": math.inf}[share]


def balance_of(
    samples: Samples, share: SharePrefix, windows: Sequence[int | None] = (), *, together: int = 1
) -> FamilyBalance:
    """For dividing `samples` over ranks and packed sequences; common prefixes count as often as
    they are computed. `together`: each run of so many consecutive samples stays in one packed
    sequence. `windows`: each layer's sliding window in tokens, or None.
    """
    return FamilyBalance(
        sizes_of(samples, share), must_save(share), windows=windows, together=together
    )


def leading_tokens(samples: Samples) -> list[np.ndarray]:
    """Each sample's shareable token ids."""
    starts = samples.offsets[:-1]
    spans = zip(starts.tolist(), (starts + shareable(samples)).tolist(), strict=True)
    return [samples.token_ids[first:last] for first, last in spans]


def sizes_of(samples: Samples, share: SharePrefix) -> list[Size]:
    """Each sample's length and the prefixes it could share, ascending: the longest in common with
    each other sample, and last all its shareable tokens. None with `share` "off".
    """
    if share == "off":
        return [Size(length) for length in computed_lengths(samples).tolist()]
    return list(map(Size, computed_lengths(samples).tolist(), chains(leading_tokens(samples))))


def computed_lengths(samples: Samples) -> np.ndarray:
    """[S] int64 tokens that each sample has without sharing; where a tree branches, some count
    again.
    """
    lengths, branches = samples.lengths, samples.branches
    again = branches[copied(branches, samples.mask), 0]
    np.add.at(lengths, np.searchsorted(samples.offsets, again, side="right") - 1, 1)
    return lengths


def tree_of(samples: Samples, *, saves: float = SAVES, deepest: int = DEEPEST) -> Tree:
    """The documents of `samples`. A prefix is shared if that saves the fraction `saves` of its
    samples' tokens. `deepest`: most shared prefixes one after the other.
    """
    sizes = sizes_of(samples, "off" if math.isinf(saves) else "on")
    following, copies = next_tokens(samples)
    offsets, branches = samples.offsets.tolist(), samples.branches
    edges = np.searchsorted(branches[:, 0], samples.offsets)
    nodes, owners = list[BranchPart](), list[int]()
    # Conversations of their own: of the last documents.
    apart: list[tuple[int, int, list[BranchPart]]] = []
    numbers = list[int]()
    planned = documents(sizes, range(len(sizes)), saves=saves, deepest=deepest)
    if not any(document.is_shared for document in planned):
        planned.sort(key=lambda document: document.sample)
    for document in planned:
        above = numbers[document.parent] if document.parent >= 0 else -1
        numbers.append(len(nodes))
        if document.is_shared or edges[document.sample] == edges[document.sample + 1]:
            places = np.arange(document.begin, document.end) + offsets[document.sample]
            nodes.append(BranchPart(places, following[places], above, document.begin))
            owners.append(-1 if document.is_shared else document.sample)
            continue
        parts = branch_parts(samples, document.sample, document.begin, following, copies)
        roots = [number for number, branch in enumerate(parts) if branch.parent == NONE]
        count = roots[0] if roots else len(parts)
        nodes += _numbered(parts[:count], len(nodes), above)
        owners += [document.sample] * count
        apart.append((document.sample, count, parts[count:]))
    for sample, count, parts in apart:
        nodes += _numbered(parts, len(nodes) - count, -1)
        owners += [sample] * len(parts)
    parents = tuple(branch.parent for branch in nodes)
    return Tree(
        places=np.concatenate([following[:0], *(branch.places for branch in nodes)]),
        targets=np.concatenate([following[:0], *(branch.targets for branch in nodes)]),
        starts=np.cumsum([0, *(len(branch.places) for branch in nodes)]),
        parents=parents if any(parent >= 0 for parent in parents) else (),
        begins=np.array([branch.begin for branch in nodes], np.int64),
        owners=np.array(owners),
    )


def _numbered(parts: Sequence[BranchPart], by: int, above: int) -> list[BranchPart]:
    """`parts` with parents raised by `by`, or `above` for those without one."""
    return [
        branch._replace(parent=branch.parent + by if branch.parent >= 0 else above)
        for branch in parts
    ]


def multiplicity(tree: Tree, ends_sequence: np.ndarray) -> np.ndarray:
    """[C] int64: how many sequences each computed token is in, from a first token to an end.
    `ends_sequence` [D]: whether each document ends in one that counts.
    """
    counts, starts = np.zeros(tree.starts[-1], np.int64), tree.starts
    for number in reversed(range(len(ends_sequence))):  # before the documents that they continue
        counts[starts[number] : starts[number + 1]] += ends_sequence[number]
        parent = tree.parents[number] if tree.parents else -1
        if parent >= 0:
            shared = tree.begins[number] - tree.begins[parent]
            through = counts[starts[number] : starts[number + 1]].max(initial=0)
            counts[starts[parent] : starts[parent] + shared] += through
    return counts


def saved_tokens(starts: Sequence[int], parents: Sequence[int], begins: Sequence[int]) -> int:
    """How many tokens of a packed sequence are not computed again, compared with a sequence of its
    own for each document that no other continues from its end. Arguments: as in `Tree`,
    with a number for each document in `parents`.
    """
    ends = np.asarray(begins) + np.diff(starts)
    inner = {up for up, at in zip(parents, begins, strict=True) if up >= 0 and at == ends[up]}
    lengths = np.diff(starts).tolist()
    return sum(-lengths[number] if number in inner else at for number, at in enumerate(begins))
