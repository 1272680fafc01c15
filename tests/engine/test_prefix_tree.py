"""The prefix tree and the allocator together: exact against a brute-force model, least recently used out first."""

import gc
import random
import time
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from modelled_cache import ModelledCache

from yunque.engine.pages import PageAllocator
from yunque.engine.prefix_tree import PrefixTree

NUM_PAGES, PAGE_SIZE = 40, 2
TOKENS = st.lists(st.integers(0, 1), max_size=20).map(tuple)


def tree_of(*sequences: list[int], page_size: int = 2) -> tuple[PrefixTree, PageAllocator]:
    """A tree that alone holds the pages of ``sequences``, inserted in this order."""
    allocator = PageAllocator(100, page_size)
    tree = PrefixTree(page_size, allocator)
    for tokens in sequences:
        pages = allocator.allocate(len(tokens) // page_size)
        tree.insert(tokens, pages)
        allocator.release(pages)
    return tree, allocator


class CacheMachine(RuleBasedStateMachine):
    """Random life of requests over a cache that is too small, on two tokens so that prefixes meet all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = ModelledCache(NUM_PAGES, PAGE_SIZE)

    @rule(namespace=st.sampled_from([None, "salt"]), tokens=TOKENS, short=st.integers(0, 3))
    def start(self, namespace, tokens, short):
        self.cache.start(namespace, tokens, len(tokens) - short)

    @precondition(lambda self: self.cache.sequences)
    @rule(data=st.data(), tokens=TOKENS)
    def grow(self, data, tokens):
        self.cache.grow(data.draw(st.sampled_from(self.cache.sequences)), tokens)

    @precondition(lambda self: self.cache.sequences)
    @rule(data=st.data(), adopt=st.booleans())
    def insert(self, data, adopt):
        self.cache.insert(data.draw(st.sampled_from(self.cache.sequences)), adopt)

    @precondition(lambda self: self.cache.sequences)
    @rule(data=st.data(), insert=st.booleans())
    def finish(self, data, insert):
        sequence = data.draw(st.sampled_from(self.cache.sequences))
        if insert:
            self.cache.insert(sequence, adopt=False)
        self.cache.finish(sequence)

    @rule(num_pages=st.integers(0, NUM_PAGES))
    def evict(self, num_pages):
        self.cache.evict(num_pages)

    @rule()
    def clear(self):
        self.cache.clear()

    @invariant()
    def equals_the_model(self):
        self.cache.check()


TestCacheAgainstModel = CacheMachine.TestCase
TestCacheAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_free_plus_used_is_all_pages_after_each_of_10000_random_operations():
    draw = random.Random(3)
    cache = ModelledCache(64, PAGE_SIZE)
    done = dict.fromkeys(["start", "grow", "insert", "finish", "evict", "clear"], 0)
    num_hits = num_evicted = 0
    for _ in range(10_000):
        name = draw.choices(list(done), weights=[30, 20, 25, 22, 12, 0.2])[0]
        name = "finish" if name == "start" and len(cache.sequences) == 8 else name
        tokens = tuple(draw.choices([0, 1], weights=[3, 1], k=draw.randrange(24)))
        done[name] += 1
        if name == "start":
            cache.start(draw.choice([None, None, "salt"]), tokens, len(tokens) - draw.randrange(3))
            num_hits += cache.tree.probe(tokens, limit=len(tokens)).num_tokens > 0
        elif name == "evict":
            free = cache.allocator.num_free
            cache.evict(draw.randrange(12))
            num_evicted += cache.allocator.num_free - free
        elif name == "clear":
            cache.clear()
        elif cache.sequences:
            sequence = draw.choice(cache.sequences)
            if name == "grow":
                cache.grow(sequence, tokens[:6])
            elif name == "insert":
                cache.insert(sequence, adopt=draw.random() < 0.5)
            else:
                cache.finish(sequence)
        cache.check()
    assert sum(done.values()) == 10_000
    assert min(done.values()) >= 5
    assert num_evicted > 1000
    assert num_hits > 1000
    for sequence in list(cache.sequences):
        cache.finish(sequence)
    cache.evict(64)
    cache.check()
    assert cache.allocator.num_free == 63
    assert cache.tree.num_cached_pages == 0


def test_match_stops_at_the_limit_and_at_the_last_whole_page():
    tree, allocator = tree_of([1, 2, 3, 4, 5, 6])
    for limit, num_tokens in [(6, 6), (5, 4), (4, 4), (1, 0), (0, 0), (-1, 0)]:
        match = tree.match([1, 2, 3, 4, 5, 6, 7], limit=limit)
        assert match.num_tokens == num_tokens == 2 * len(match.pages)
        allocator.release(match.pages)
    assert tree.match([1, 2, 3, 9], limit=4).num_tokens == 2


def test_salted_requests_never_share():
    tree, allocator = tree_of([1, 2, 3, 4])
    pages = allocator.allocate(2)
    insertion = tree.insert([1, 2, 3, 4], pages, namespace="salt")
    assert insertion.num_added == 2
    assert tree.match([1, 2, 3, 4], limit=4, namespace="salt").pages == tuple(pages)
    assert tree.match([1, 2, 3, 4], limit=4, namespace="other").num_tokens == 0
    assert not set(tree.match([1, 2, 3, 4], limit=4).pages) & set(pages)


class Salt:
    """A namespace whose end can be seen."""


def test_a_namespace_without_pages_is_forgotten():
    tree, allocator = tree_of([1, 2, 3, 4])
    salt = Salt()
    seen = weakref.ref(salt)
    pages = allocator.allocate(2)
    tree.insert([1, 2, 3, 4], pages, namespace=salt)
    allocator.release(pages)
    assert tree.evict(4) == 4
    del salt
    gc.collect()
    assert seen() is None


def test_single_pages_go_in_the_order_of_their_last_use():
    draw = random.Random(5)
    tree, allocator = tree_of(*[[number, number] for number in range(50)])
    uses = list(range(50))
    for _ in range(300):
        number = draw.choice(uses)
        uses.remove(number)
        uses.append(number)
        allocator.release(tree.match([number, number], limit=2).pages)
        if draw.random() < 0.1:
            assert tree.evict(1) == 1
            assert tree.probe([uses[0]] * 2, limit=2).num_tokens == 0
            del uses[0]
    assert tree.num_cached_pages == len(uses) < 30


def test_the_branch_used_longest_ago_goes_first_from_its_end():
    tree, allocator = tree_of([1, 1, 2, 2, 3, 3], [1, 1, 4, 4], [1, 1, 5, 5])
    allocator.release(tree.match([1, 1, 2, 2, 3, 3], limit=6).pages)
    left = []
    while tree.evict(1):
        probes = [tree.probe(tokens, limit=6) for tokens in ([1, 1, 2, 2, 3, 3], [1, 1, 4, 4], [1, 1, 5, 5])]
        left.append([probe.num_tokens for probe in probes])
    assert left == [[6, 2, 4], [6, 2, 2], [4, 2, 2], [2, 2, 2], [0, 0, 0]]


def test_a_probe_is_no_use_and_takes_nothing():
    tree, allocator = tree_of([1, 1], [2, 2])
    tree.probe([1, 1], limit=2)
    assert tree.evict(1) == 1
    assert (tree.probe([1, 1], limit=2).num_tokens, tree.probe([2, 2], limit=2).num_tokens) == (0, 2)
    assert allocator.num_free == 99


def test_pages_in_use_survive_eviction_and_clearing():
    tree, allocator = tree_of([1, 1, 2, 2, 3, 3])
    held = tree.match([1, 1, 2, 2], limit=4)
    assert tree.num_evictable_pages == 1
    assert tree.evict(100) == 1
    tree.clear()
    assert [allocator.references(page) for page in held.pages] == [1, 1]
    assert tree.match([1, 1], limit=2).num_tokens == 0
    allocator.release(held.pages)
    assert allocator.num_free == 100


def test_adopting_the_trees_pages_frees_the_copies():
    tree, allocator = tree_of([1, 1, 2, 2])
    own = allocator.allocate(4)
    insertion = tree.insert([1, 1, 2, 2, 3, 3, 4], own)
    assert insertion.num_added == 1
    assert allocator.num_used == 6
    pages = tree.adopt(own, insertion)
    assert pages == [*tree.match([1, 1, 2, 2, 3, 3], limit=6).pages, own[3]]
    assert pages[2:] == own[2:]
    assert allocator.num_used == 4


def test_wrong_insertions_are_refused_and_change_nothing():
    tree, allocator = tree_of([1, 1, 2, 2])
    held = tree.match([1, 1], limit=2).pages
    other = allocator.allocate(1)
    for pages, message in [([], "0 pages are fewer"), (held, "for other tokens"), ([*other, *other], "given twice")]:
        with pytest.raises(ValueError, match=message):
            tree.insert([7, 7, 8, 8][: 2 * max(1, len(pages))], pages)
    assert (tree.num_cached_pages, allocator.references(other[0])) == (2, 1)
    with pytest.raises(ValueError, match="page_size 4 differs from the allocator's 2"):
        PrefixTree(4, allocator)


def test_long_sequences_cost_little_and_evicting_does_not_grow_with_the_tree():
    num_pages = 30_000
    allocator = PageAllocator(num_pages, 16)
    tree = PrefixTree(16, allocator)
    tokens = list(range(200_000))
    started = time.process_time()
    pages = allocator.allocate(12_500)
    tree.insert(tokens, pages)
    allocator.release(pages)
    allocator.release(tree.match(tokens, limit=200_000).pages)
    assert time.process_time() - started < 1
    for branch in range(10_000):
        own = allocator.allocate(1)
        tree.insert([300_000 + branch] * 16, own)
        allocator.release(own)
    started = time.process_time()
    while tree.evict(1):
        pass
    assert time.process_time() - started < 5  # 22,500 single evictions
    assert allocator.num_free == num_pages
