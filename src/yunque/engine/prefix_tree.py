"""Prefix tree over full pages of token ids: who computed these tokens before, least recently used out first."""

import heapq
from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from yunque.engine.pages import PageAllocator

_TOKEN_TYPE = "I"
_TOKEN_BYTES = array(_TOKEN_TYPE).itemsize


@dataclass(frozen=True)
class Match:
    """The cached ``pages`` of a prompt's first ``num_tokens`` tokens; the caller holds one reference on each."""

    pages: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class Probe:
    """What a match would find: ``num_tokens`` in whole pages, ``num_idle_pages`` of which nobody but the tree holds
    (a match takes these out of ``num_evictable_pages``)."""

    num_tokens: int
    num_idle_pages: int


@dataclass(frozen=True)
class Insertion:
    """``pages``: the tree's page for each full page of the inserted tokens. The last ``num_added`` are the caller's
    own, new to the tree; any other may differ from the caller's page, which is then a copy of it."""

    pages: tuple[int, ...]
    num_added: int


@dataclass(eq=False)
class _Node:
    """The run of pages on one edge and what follows it; a root has no pages.

    ``tail``: trailing pages that only the tree holds. A node is busy while somebody holds a page of it or below it.
    ``counted``: what it adds to the evictable pages: its tail, once nothing below is busy.
    """

    number: int
    parent: "_Node | None"
    key: bytearray = field(default_factory=bytearray)
    pages: list[int] = field(default_factory=list)
    children: "dict[bytes, _Node]" = field(default_factory=dict)
    namespace: Hashable = None
    last_used: int = 0
    tail: int = 0
    counted: int = 0
    num_busy_children: int = 0
    is_busy: bool = False
    is_queued: bool = False


class PrefixTree:
    """Radix tree: an edge is a run of pages, split where two sequences part. It holds one reference on each page.

    Requests of different ``namespace`` (any hashable: a cache salt, a weight version) never share. The tree follows
    the reference counts by watching ``allocator``, so whoever holds its pages just releases them there.
    """

    def __init__(self, page_size: int, allocator: PageAllocator) -> None:
        if page_size != allocator.page_size:
            raise ValueError(f"page_size {page_size} differs from the allocator's {allocator.page_size}")
        self._page_size = page_size
        self._stride = page_size * _TOKEN_BYTES
        self._allocator = allocator
        self._roots: dict[Hashable, _Node] = {}
        self._node_of: dict[int, _Node] = {}
        # Every leaf with a tail has one entry; an entry older than its node's last use is put back when met.
        self._queue: list[tuple[int, int, _Node]] = []
        self._numbers = count()
        self._tick = 0
        self._num_evictable = 0
        allocator.watch(self._holders_changed)

    @property
    def num_cached_pages(self) -> int:
        return len(self._node_of)

    @property
    def num_evictable_pages(self) -> int:
        """Pages that ``evict`` could free now: nobody but the tree holds them or a page below them."""
        return self._num_evictable

    def match(self, tokens: Sequence[int], *, limit: int, namespace: Hashable = None) -> Match:
        """The longest cached prefix of ``tokens`` in whole pages, at most ``limit`` tokens, with a reference on each
        page for the caller. It counts as a use."""
        pages: list[int] = []
        self._tick += 1
        for node, num_shared in self._walk(self._key(tokens[: max(0, limit)]), namespace):
            node.last_used = self._tick
            pages += node.pages[:num_shared]
        self._allocator.share(pages)
        return Match(tuple(pages), len(pages) * self._page_size)

    def probe(self, tokens: Sequence[int], *, limit: int, namespace: Hashable = None) -> Probe:
        """What ``match`` would find, without taking references and without counting as a use."""
        num_pages = num_idle = 0
        for node, num_shared in self._walk(self._key(tokens[: max(0, limit)]), namespace):
            num_pages += num_shared
            before_tail = node.pages[: min(num_shared, len(node.pages) - node.tail)]
            num_idle += num_shared - sum(self._allocator.references(page) > 1 for page in before_tail)
        return Probe(num_pages * self._page_size, num_idle)

    def insert(self, tokens: Sequence[int], pages: Sequence[int], *, namespace: Hashable = None) -> Insertion:
        """Remember that ``pages`` hold the computed ``tokens``; a last page that is not full is left out.

        Where the tree has a page for the same tokens it stays, and the caller keeps its own copy (or swaps it, see
        ``adopt``). Raises ``ValueError`` when the pages are too few or one is in the tree for other tokens.
        """
        num_full = len(tokens) // self._page_size
        if len(pages) < num_full:
            raise ValueError(f"{len(pages)} pages are fewer than the {num_full} full ones of {len(tokens)} tokens")
        key = self._key(tokens)
        found: list[int] = []
        node = self._roots.get(namespace) or _Node(next(self._numbers), None, namespace=namespace)
        self._tick += 1
        for child, num_shared in self._walk(key, namespace):
            node = child if num_shared == len(child.pages) else self._split(child, num_shared)
            node.last_used = self._tick
            found += node.pages
        new = list(pages[len(found) : num_full])
        if new:
            self._add(node, key[len(found) * self._stride :], new)
        return Insertion((*found, *new), len(new))

    def adopt(self, pages: Sequence[int], insertion: Insertion) -> list[int]:
        """Swap a caller's ``pages`` for the tree's, so that its copies come free; returns its pages from now on."""
        pairs = list(zip(pages, insertion.pages, strict=False))
        self._allocator.share([kept for own, kept in pairs if own != kept])
        self._allocator.release([own for own, kept in pairs if own != kept])
        return [*insertion.pages, *pages[len(insertion.pages) :]]

    def evict(self, num_pages: int) -> int:
        """Free up to ``num_pages`` pages, from the ends of the least recently used leaves, none that a request holds;
        returns how many came free. O(log n) for each leaf that is shortened, beyond one step per page."""
        num_freed = 0
        while num_freed < num_pages and self._queue:
            last_used, _, node = heapq.heappop(self._queue)
            node.is_queued = False
            if last_used < node.last_used:
                self._enqueue(node)
            elif node.tail and not node.children:
                num_freed += self._cut(node, min(node.tail, num_pages - num_freed))
        return num_freed

    def num_reclaimable_pages(self, pages: Sequence[int]) -> int:
        """How many more pages would be free or evictable if one holder of ``pages`` (those of one sequence, in order)
        released them all."""
        allocator = self._allocator
        gained = sum(page not in self._node_of and allocator.references(page) == 1 for page in pages)
        held = set(pages)
        deepest = next((page for page in reversed(pages) if page in self._node_of), None)
        node = None if deepest is None else self._node_of[deepest]
        has_quiet_child = False  # the child just left was busy and would be no more
        while node is not None:
            tail = 0
            while tail < len(node.pages) and allocator.references(page := node.pages[-1 - tail]) <= 1 + (page in held):
                tail += 1
            is_blocked = node.num_busy_children - has_quiet_child > 0
            gained += (0 if is_blocked else tail) - node.counted
            has_quiet_child = node.is_busy and not is_blocked and tail == len(node.pages)
            node = node.parent
        return gained

    def clear(self) -> None:
        """Forget everything (the weights changed). Pages that requests hold stay theirs but are no longer found."""
        pages = list(self._node_of)
        self._roots.clear()
        self._node_of.clear()
        self._queue.clear()
        self._num_evictable = 0
        self._allocator.release(pages)

    def _key(self, tokens: Sequence[int]) -> bytes:
        return array(_TOKEN_TYPE, tokens[: len(tokens) // self._page_size * self._page_size]).tobytes()

    def _walk(self, key: bytes, namespace: Hashable) -> Iterator[tuple[_Node, int]]:
        """Nodes along ``key`` with how many of their pages it shares: all, but for the last node."""
        node, position = self._roots.get(namespace), 0
        while node is not None and position < len(key):
            node = node.children.get(key[position : position + self._stride])
            if node is None:
                return
            num_shared, num_pages = self._num_shared(node, key, position), len(node.pages)
            yield node, num_shared
            if num_shared < num_pages:
                return
            position += num_pages * self._stride

    def _num_shared(self, node: _Node, key: bytes, position: int) -> int:
        """Pages of ``node`` whose tokens are those of ``key`` from ``position``; the first one is known to be."""
        stride = self._stride
        low, high = 1, min(len(node.pages), (len(key) - position) // stride)
        if node.key[: high * stride] == key[position : position + high * stride]:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if node.key[low * stride : middle * stride] == key[position + low * stride : position + middle * stride]:
                low = middle
            else:
                high = middle
        return low

    def _split(self, node: _Node, num_upper: int) -> _Node:
        """Cut ``node`` after ``num_upper`` pages; the new node above is returned, the old one keeps what is below."""
        assert node.parent is not None
        cut = num_upper * self._stride
        upper = _Node(next(self._numbers), node.parent, node.key[:cut], node.pages[:num_upper])
        node.parent.children[bytes(upper.key[: self._stride])] = upper
        node.key, node.pages, node.parent = node.key[cut:], node.pages[num_upper:], upper
        upper.children[bytes(node.key[: self._stride])] = node
        upper.is_busy = node.is_busy  # as a whole they are what the node was, so nothing changes above
        upper.tail = max(0, node.tail - len(node.pages))
        node.tail = min(node.tail, len(node.pages))
        node.is_busy = node.num_busy_children > 0 or node.tail < len(node.pages)
        upper.num_busy_children = int(node.is_busy)
        upper.counted = 0 if node.is_busy else upper.tail
        node.counted -= upper.counted
        self._node_of.update(dict.fromkeys(upper.pages, upper))
        return upper

    def _add(self, node: _Node, key: bytes, pages: list[int]) -> None:
        """Put new ``pages`` below ``node``: onto its own run where nothing follows it, else as another child."""
        taken = [page for page in pages if page in self._node_of]
        if taken or len(set(pages)) < len(pages):
            raise ValueError(f"pages {taken or pages} are in the tree for other tokens, or given twice")
        self._allocator.share(pages)
        if node.parent is None:
            self._roots[node.namespace] = node
        if node.parent is None or node.children:
            parent, node = node, _Node(next(self._numbers), node)
            parent.children[key[: self._stride]] = node
        node.key += key
        node.pages += pages
        node.last_used = self._tick
        self._node_of.update(dict.fromkeys(pages, node))
        self._settle(node)

    def _cut(self, node: _Node, num_pages: int) -> int:
        """Free the last ``num_pages`` pages of the leaf ``node``, all of them part of its tail."""
        assert node.parent is not None
        first = bytes(node.key[: self._stride])
        gone = node.pages[-num_pages:]
        del node.pages[-num_pages:], node.key[-num_pages * self._stride :]
        for page in gone:
            del self._node_of[page]
        node.tail -= num_pages
        node.counted -= num_pages
        self._num_evictable -= num_pages
        if node.pages:
            self._enqueue(node)
        else:
            parent = node.parent
            del parent.children[first]
            self._enqueue(parent)
            if parent.parent is None and not parent.children:
                del self._roots[parent.namespace]
        self._allocator.release(gone)
        return num_pages

    def _enqueue(self, node: _Node) -> None:
        if node.tail and not node.children and not node.is_queued:
            node.is_queued = True
            heapq.heappush(self._queue, (node.last_used, node.number, node))

    def _holders_changed(self, pages: list[int]) -> None:
        for node in dict.fromkeys(self._node_of[page] for page in pages if page in self._node_of):
            self._settle(node)

    def _settle(self, changed: _Node) -> None:
        """Bring the tail of ``changed`` up to date, and what follows from it there and above."""
        changed.tail = 0
        for page in reversed(changed.pages):
            if self._allocator.references(page) > 1:
                break
            changed.tail += 1
        node: _Node | None = changed
        while node is not None:
            counted = 0 if node.num_busy_children else node.tail
            self._num_evictable += counted - node.counted
            node.counted = counted
            self._enqueue(node)
            is_busy = node.num_busy_children > 0 or node.tail < len(node.pages)
            if is_busy == node.is_busy:
                return
            node.is_busy = is_busy
            if node.parent is not None:
                node.parent.num_busy_children += 1 if is_busy else -1
            node = node.parent
