"""Allocator and prefix tree under test, beside a brute-force model that recounts everything from scratch."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

import pytest

from yunque.engine.pages import OutOfPages, PageAllocator
from yunque.engine.prefix_tree import PrefixTree

Prefix = tuple[Hashable, tuple[int, ...]]  # namespace and tokens of whole pages


@dataclass
class Sequence:
    """A request as the model sees it: its tokens, and the pages it holds for them."""

    namespace: Hashable
    tokens: tuple[int, ...]
    pages: list[int]


class ModelledCache:
    """Every operation is done on the real thing and on the model; ``check`` compares all that can be seen.

    The model is a dictionary from prefix to page (what the tree holds), the live sequences, and pages shared by hand.
    """

    def __init__(self, num_pages: int, page_size: int, reserved: int = 1) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages, page_size, reserved=reserved)
        self.tree = PrefixTree(page_size, self.allocator)
        self.sequences: list[Sequence] = []
        self.cached: dict[Prefix, int] = {}

    def start(self, namespace: Hashable, tokens: tuple[int, ...], limit: int) -> None:
        """Match, then allocate the rest, as an engine does for a new request."""
        expected = self._cached_prefix(namespace, tokens, limit)
        probe = self.tree.probe(tokens, limit=limit, namespace=namespace)
        counts, evictable = self._references(), self.tree.num_evictable_pages
        match = self.tree.match(tokens, limit=limit, namespace=namespace)
        assert match.pages == tuple(expected)
        assert match.num_tokens == probe.num_tokens == len(expected) * self.page_size
        assert probe.num_idle_pages == sum(counts[page] == 1 for page in expected)
        assert self.tree.num_evictable_pages == evictable - sum(counts[page] == 1 for page in self._evictable(expected))
        sequence = Sequence(namespace, tokens[: match.num_tokens], list(match.pages))
        self.sequences.append(sequence)
        self.grow(sequence, tokens[match.num_tokens :])

    def grow(self, sequence: Sequence, tokens: tuple[int, ...]) -> None:
        """Append tokens; the sequence stays as it is where the pages do not suffice."""
        total = len(sequence.tokens) + len(tokens)
        need = -(-total // self.page_size) - len(sequence.pages)
        after = sequence.pages[-1] if sequence.pages else None
        if need > self.allocator.num_free:
            with pytest.raises(OutOfPages, match=f"{need} pages wanted, {self.allocator.num_free} free"):
                self.allocator.allocate(need, after=after)
            return
        new = self.allocator.allocate(need, after=after)
        assert len(set(new)) == need
        assert not set(new) & set(self._references()), "a page in use was handed out"
        sequence.pages += new
        sequence.tokens += tokens

    def insert(self, sequence: Sequence, adopt: bool) -> None:
        insertion = self.tree.insert(sequence.tokens, sequence.pages, namespace=sequence.namespace)
        num_full = len(sequence.tokens) // self.page_size
        num_added = 0
        for index in range(num_full):
            prefix = (sequence.namespace, sequence.tokens[: (index + 1) * self.page_size])
            num_added += prefix not in self.cached
            assert self.cached.setdefault(prefix, sequence.pages[index]) == insertion.pages[index]
        assert (len(insertion.pages), insertion.num_added) == (num_full, num_added)
        if adopt:
            sequence.pages = self.tree.adopt(sequence.pages, insertion)
            assert sequence.pages[:num_full] == list(insertion.pages)

    def finish(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        before = self.allocator.num_free + self.tree.num_evictable_pages
        promised = self.tree.num_reclaimable_pages(sequence.pages)
        self.allocator.release(sequence.pages)
        assert self.allocator.num_free + self.tree.num_evictable_pages == before + promised

    def evict(self, num_pages: int) -> None:
        evictable = self._evictable(self.cached.values())
        free = self.allocator.num_free
        num_freed = self.tree.evict(num_pages)
        assert num_freed == min(num_pages, len(evictable)) == self.allocator.num_free - free
        gone = {prefix for prefix, page in self.cached.items() if self.allocator.is_free(page)}
        assert len(gone) == num_freed
        assert {self.cached[prefix] for prefix in gone} <= evictable
        for prefix in gone:
            del self.cached[prefix]
        for namespace, tokens in self.cached:
            parent = tokens[: -self.page_size]
            assert not parent or (namespace, parent) in self.cached, "a page was evicted from the middle"

    def clear(self) -> None:
        self.tree.clear()
        self.cached.clear()

    def check(self) -> None:
        allocator, counts = self.allocator, self._references()
        pages = range(allocator.reserved, allocator.num_pages)
        assert [allocator.references(page) for page in pages] == [counts[page] for page in pages]
        assert allocator.num_free == sum(allocator.is_free(page) for page in pages) == len(pages) - len(counts)
        assert allocator.num_free + allocator.num_used == len(pages)
        assert self.tree.num_cached_pages == len(self.cached)
        assert self.tree.num_evictable_pages == len(self._evictable(self.cached.values()))

    def _references(self) -> Counter[int]:
        held = [page for sequence in self.sequences for page in sequence.pages]
        return Counter([*held, *self.cached.values()])

    def _cached_prefix(self, namespace: Hashable, tokens: tuple[int, ...], limit: int) -> list[int]:
        pages: list[int] = []
        end = self.page_size
        while end <= min(limit, len(tokens)) and (namespace, tokens[:end]) in self.cached:
            pages.append(self.cached[namespace, tokens[:end]])
            end += self.page_size
        return pages

    def _evictable(self, among) -> set[int]:
        """Pages ``among`` the cached ones that nobody holds, nor any page that continues them."""
        counts = self._references()
        blocked: set[Prefix] = set()
        for (namespace, tokens), page in self.cached.items():
            if counts[page] > 1:
                blocked |= {(namespace, tokens[:end]) for end in range(self.page_size, len(tokens) + 1, self.page_size)}
        return {page for prefix, page in self.cached.items() if prefix not in blocked} & set(among)
