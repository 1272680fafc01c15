"""Seeds: streams are fixed numbers, distinct by every part of their address."""

import itertools

import numpy as np

from yunque.core.seeds import Seeds


def test_a_stream_is_the_same_number_on_every_machine():
    assert Seeds(0).stream("init") == 0xAE9FCD6D1BC55777
    assert Seeds(7).stream("sampler", 3, "a") == 0x9AB0BF3ED50FA5AD


def test_streams_differ_by_root_name_keys_and_their_types():
    addresses = [
        (0, ("a",)),
        (1, ("a",)),
        (0, ("b",)),
        (0, ("a", 1)),
        (0, ("a", "1")),
        (0, ("a", 11)),
        (0, ("a", 1, 1)),
        (0, ("a", "1,1")),
        (0, ('a", "1',)),
    ]
    values = {Seeds(root).stream(*parts) for root, parts in addresses}
    assert len(values) == len(addresses)


def test_64_bits_are_all_used():
    streams = [Seeds(0).stream("bits", index) for index in range(256)]
    assert all(0 <= stream < 2**64 for stream in streams)
    shares = [sum(stream >> bit & 1 for stream in streams) / 256 for bit in range(64)]
    assert min(shares) > 0.3
    assert max(shares) < 0.7


def test_drawing_from_one_stream_does_not_move_another():
    seeds = Seeds(5)
    before = seeds.numpy("data", 0).random(4)
    seeds.numpy("dropout").random(1000)
    seeds.python("data", 0).random()
    assert np.array_equal(before, seeds.numpy("data", 0).random(4))


def test_python_and_numpy_generators_repeat_and_neighbours_are_uncorrelated():
    assert Seeds(3).python("x").random() == Seeds(3).python("x").random()
    draws = [Seeds(3).numpy("x", index).standard_normal(2000) for index in range(4)]
    for left, right in itertools.combinations(draws, 2):
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.1
