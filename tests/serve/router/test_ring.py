"""The ring: balance, and how many keys move when a node comes or goes."""

from collections import Counter

import pytest

from yunque.serve.router.ring import HashRing

KEYS = [f"session-{number}" for number in range(20_000)]
NODES = [f"http://10.0.0.{number}:8000" for number in range(1, 9)]


def owners(ring: HashRing) -> dict[str, str]:
    return {key: next(ring.walk(key)) for key in KEYS}


def test_eight_nodes_share_keys_within_a_quarter_of_the_mean():
    counts = Counter(owners(HashRing(NODES)).values())
    mean = len(KEYS) / len(NODES)
    assert max(counts.values()) < 1.25 * mean
    assert min(counts.values()) > 0.75 * mean


def test_a_new_node_takes_about_its_share_and_nothing_moves_between_the_others():
    ring = HashRing(NODES[:7])
    before = owners(ring)
    ring.add(NODES[7])
    after = owners(ring)
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {after[key] for key in moved} == {NODES[7]}
    assert 0.75 / 8 < len(moved) / len(KEYS) < 1.25 / 8


def test_removing_a_node_moves_its_keys_alone_and_spreads_them():
    ring = HashRing(NODES)
    before = owners(ring)
    ring.remove(NODES[0])
    after = owners(ring)
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {before[key] for key in moved} == {NODES[0]}
    assert len(moved) == Counter(before.values())[NODES[0]]
    assert max(Counter(after[key] for key in moved).values()) < 0.35 * len(moved)


def test_owners_do_not_depend_on_the_order_in_which_nodes_came():
    assert owners(HashRing(NODES)) == owners(HashRing(reversed(NODES)))


def test_walk_names_every_node_once_and_the_heir_second():
    ring = HashRing(NODES)
    for key in KEYS[:200]:
        walk = list(ring.walk(key))
        assert sorted(walk) == sorted(NODES)
        ring.remove(walk[0])
        assert list(ring.walk(key)) == walk[1:]
        ring.add(walk[0])


def test_an_empty_ring_has_no_owner_and_bad_arguments_are_refused():
    assert list(HashRing().walk("a")) == []
    with pytest.raises(KeyError):
        HashRing().remove("a")
    with pytest.raises(ValueError, match="virtual_nodes is 0"):
        HashRing(virtual_nodes=0)
