"""The prefix cache's tree: takes written pages with the keys of what they hold, gives those that a prompt can share.

A node is a page of the pool, under the key of its whole path: a hash of the parent's key and the page's tokens, which
starts from the extra keys (`root_key`). A child is in the tree only while its parent is, so the keys of a prompt that
are in it come before those that are not. Who holds a page is the pool's matter: it tells which nodes become idle
(nobody holds them) or are held again. Whoever holds a node holds its parent, so idle nodes have idle children only, and
all of them can be evicted, leaves first. Ids only; nothing here knows of steps.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

import numpy as np

KEY_BYTES = 32
NO_NODE = -1  # the parent of a first page
SPARE_ENTRIES = 1024  # of the heap of leaves, before those that have gone out of date are thrown away

# What is evicted first has the least of these; the time of last use decides between equals.
RANKS: dict[str, Callable[[PrefixCache, int], int]] = {
    "lru": lambda cache, node: 0,
    "lfu": lambda cache, node: int(cache.uses_P[node]),
    "priority": lambda cache, node: -int(cache.priority_P[node]),  # a lower number is more important
}


def root_key(extras: Mapping[str, str]) -> bytes:
    """Where the keys of prompts start that may share pages: those with the same extra keys.

    Each name and each value goes in with its length, so that no two sets of extra keys look alike; an empty value is
    not the same as none.
    """
    digest = blake2b(b"jaxserve prefix", digest_size=KEY_BYTES)
    for name in sorted(extras):
        for part in (name, extras[name]):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def whole_pages(tokens: int, page_size_tokens: int, granule_tokens: int = 1) -> int:
    """Pages at the start of so many tokens that may be shared: those that end where a granule, a power of two, does."""
    granule_tokens = max(page_size_tokens, granule_tokens)
    return tokens // granule_tokens * granule_tokens // page_size_tokens


def extend_keys(keys: Sequence[bytes], token_ids: np.ndarray, page_size_tokens: int) -> list[bytes]:
    """The keys of the full pages of `token_ids`, int32 [tokens], behind those in `keys`, whose first is the root.

    A microsecond a page: prompts are hashed in the thread that hands them over, never in the engine's loop.
    """
    page_bytes, parent, behind = 4 * page_size_tokens, keys[-1], []
    data = np.ascontiguousarray(token_ids, "<i4")[(len(keys) - 1) * page_size_tokens :].tobytes()
    for at in range(0, len(data) - page_bytes + 1, page_bytes):
        parent = blake2b(parent + data[at : at + page_bytes], digest_size=KEY_BYTES).digest()
        behind.append(parent)
    return behind


class PrefixCache:
    """The nodes of one lane's pool, as arrays by page.

    token_PK: int32 [P, K]; parent_P, children_P, uses_P, priority_P: int32 [P]; used_P: int64 [P], a count of releases;
    idle_P, proven_P: bool [P]. A node is proven once a token was sampled over it whose logits were no NaN.
    """

    def __init__(self, num_pages: int, page_size_tokens: int, eviction: str = "lru") -> None:
        self.idle_pages = self.evicted_pages = 0  # nodes that nobody holds; a count since the start
        self.token_PK = np.zeros((num_pages, page_size_tokens), np.int32)
        self.parent_P = np.full(num_pages, NO_NODE, np.int32)
        self.children_P = np.zeros(num_pages, np.int32)
        self.uses_P = np.zeros(num_pages, np.int32)
        self.priority_P = np.zeros(num_pages, np.int32)
        self.used_P = np.zeros(num_pages, np.int64)
        self.idle_P = np.zeros(num_pages, bool)
        self.proven_P = np.zeros(num_pages, bool)
        self._node: dict[bytes, int] = {}
        self._key: list[bytes | None] = [None] * num_pages  # None: not a node
        self._rank = RANKS[eviction]
        self._leaves: list[tuple[int, int, int]] = []  # a heap of rank, last use, node; some are out of date
        self._releases = 0

    @property
    def page_size_tokens(self) -> int:
        """Tokens of a page."""
        return self.token_PK.shape[1]

    def __len__(self) -> int:
        return len(self._node)

    def depth(self, keys: Sequence[bytes]) -> int:
        """How many of a path's keys are in the tree, from its first page on; they always come first. A microsecond."""
        node = self._node
        return bisect_left(keys, True, key=lambda key: key not in node)

    def path(self, keys: Sequence[bytes]) -> np.ndarray:
        """The nodes of those, int32 [depth]."""
        depth = self.depth(keys)
        return np.fromiter(map(self._node.__getitem__, keys[:depth]), np.int32, depth)

    def match(self, keys: Sequence[bytes], token_ids: np.ndarray) -> np.ndarray:
        """As `path`, for a prompt that is to use the nodes: up to the first whose tokens are not the prompt's."""
        nodes = self.path(keys)
        page = self.page_size_tokens
        wanted = token_ids[: len(nodes) * page].reshape(-1, page)
        same = (self.token_PK[nodes] == wanted).all(axis=1)
        return nodes if same.all() else nodes[: int(same.argmin())]

    def add(self, keys: Sequence[bytes], token_ids: np.ndarray, pages: np.ndarray, parent: int, priority: int) -> None:
        """Make nodes of held pages: a path below `parent` of keys that are not in the tree; token_ids int32 [N * K]."""
        assert len(pages) == len(keys) and not any(map(self._node.__contains__, keys)), "a page enters the tree twice"
        names = pages.tolist()
        self._node.update(zip(keys, names, strict=True))
        for name, key in zip(names, keys, strict=True):
            assert self._key[name] is None, f"page {name} is in the tree under another key"
            self._key[name] = key
        self.token_PK[pages] = token_ids.reshape(-1, self.page_size_tokens)
        self.parent_P[pages] = [parent, *names[:-1]]
        self.children_P[pages] = 1
        self.children_P[pages[-1:]] = 0
        if parent != NO_NODE:
            self.children_P[parent] += 1
        self.uses_P[pages] = 1
        self.priority_P[pages] = priority
        self.idle_P[pages] = self.proven_P[pages] = False

    def is_node(self, pages: np.ndarray) -> np.ndarray:
        """Which of the pages are nodes, bool [N]."""
        return np.fromiter((self._key[page] is not None for page in pages.tolist()), bool, len(pages))

    def use(self, nodes: np.ndarray, priority: int) -> None:
        """A request takes these from the cache."""
        self.uses_P[nodes] += 1
        self.priority_P[nodes] = np.minimum(self.priority_P[nodes], priority)

    def hold(self, nodes: np.ndarray) -> None:
        """Somebody holds these, which were idle."""
        self.idle_P[nodes] = False
        self.idle_pages -= len(nodes)

    def let_go(self, nodes: np.ndarray) -> None:
        """Nobody holds these any more: they may be evicted from now on."""
        self._releases += 1
        self.used_P[nodes] = self._releases
        self.idle_P[nodes] = True
        self.idle_pages += len(nodes)
        for node in nodes[self.children_P[nodes] == 0].tolist():
            self._push(node)

    def _push(self, node: int) -> None:
        if len(self._leaves) >= len(self._key) + SPARE_ENTRIES:
            leaves = np.flatnonzero(self.idle_P & (self.children_P == 0))
            self._leaves = [self._entry(leaf) for leaf in leaves.tolist()]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, self._entry(node))

    def _entry(self, node: int) -> tuple[int, int, int]:
        return self._rank(self, node), int(self.used_P[node]), node

    def evict(self, count: int) -> np.ndarray:
        """Take so many idle nodes out of the tree, int32 [count]; the caller made sure that there are as many."""
        assert count <= self.idle_pages, (count, self.idle_pages)
        gone: list[int] = []
        while len(gone) < count:
            entry = heapq.heappop(self._leaves)
            node = entry[2]
            if not self.idle_P[node] or self.children_P[node] or entry != self._entry(node):
                continue  # it was used, or went, since it was put there
            parent = int(self.parent_P[node])
            self._remove(node)
            gone.append(node)
            if parent != NO_NODE:
                self.children_P[parent] -= 1
                if not self.children_P[parent] and self.idle_P[parent]:
                    self._push(parent)
        self.evicted_pages += count
        return np.array(gone, np.int32)

    def _remove(self, node: int) -> None:
        key = self._key[node]
        assert key is not None, node
        del self._node[key]
        self._key[node] = None
        self.idle_pages -= int(self.idle_P[node])
        self.idle_P[node] = False

    def forget(self, node: int) -> np.ndarray:
        """Take a node and all below it out of the tree; bool [P]: those pages. Held ones stay with their holders."""
        lost_P = np.zeros(len(self._key), bool)
        lost_P[node] = True
        node_P = self.is_node(np.arange(len(self._key)))
        while True:  # once for each level: rare, and pages are few against what it is called for
            below_P = node_P & (self.parent_P != NO_NODE) & lost_P[self.parent_P] & ~lost_P
            if not below_P.any():
                break
            lost_P |= below_P
        parent = int(self.parent_P[node])
        if parent != NO_NODE:
            self.children_P[parent] -= 1
            if not self.children_P[parent] and self.idle_P[parent]:
                self._push(parent)
        return self._take_out(lost_P)

    def clear(self) -> np.ndarray:
        """Take all nodes out of the tree; bool [P]: those pages."""
        return self._take_out(self.is_node(np.arange(len(self._key))))

    def _take_out(self, lost_P: np.ndarray) -> np.ndarray:
        for page in np.flatnonzero(lost_P).tolist():
            self._remove(page)
        return lost_P

    def check(self) -> None:
        """Raise AssertionError unless keys, parents, children and the count of idle nodes agree."""
        nodes = np.array(sorted(self._node.values()), np.int64)
        node_P = self.is_node(np.arange(len(self._key)))
        parents = self.parent_P[nodes]
        children_P = np.bincount(parents[parents != NO_NODE], minlength=len(self._key))
        busy_below = parents[(parents != NO_NODE) & ~self.idle_P[nodes]]
        wrong = {
            "pages without their key": nodes.tolist() != np.flatnonzero(node_P).tolist(),
            "parents that are no nodes": not node_P[parents[parents != NO_NODE]].all(),
            "children counted wrongly": (children_P[nodes] != self.children_P[nodes]).any(),
            "idle nodes counted wrongly": int(self.idle_P.sum()) != self.idle_pages or (self.idle_P & ~node_P).any(),
            "an idle node above a held one": self.idle_P[busy_below].any(),
        }
        if any(wrong.values()):
            raise AssertionError(f"prefix tree: {', '.join(text for text, found in wrong.items() if found)}")
