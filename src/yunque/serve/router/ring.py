"""A consistent-hash ring: which node a key belongs to, and which come after it."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from hashlib import blake2b


class HashRing:
    """Nodes at ``virtual_nodes`` points each of a circle of 2^64 positions; a key belongs to the next point.

    Removing a node moves its own keys and no others; a node added to n takes about 1/(n + 1) of the keys and moves
    no others. Positions depend on names alone, so two routers with the same nodes agree.
    """

    def __init__(self, nodes: Iterable[str] = (), *, virtual_nodes: int = 160) -> None:
        if virtual_nodes < 1:
            raise ValueError(f"virtual_nodes is {virtual_nodes}; it must be at least 1")
        self._virtual_nodes = virtual_nodes
        self._nodes: set[str] = set()
        self._points: list[tuple[int, str]] = []
        for node in nodes:
            self.add(node)

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset(self._nodes)

    def add(self, node: str) -> None:
        """A node that is there already stays as it is."""
        if node not in self._nodes:
            self._nodes.add(node)
            self._points += [(_position(f"{node}#{number}"), node) for number in range(self._virtual_nodes)]
            self._points.sort()

    def remove(self, node: str) -> None:
        """Raises ``KeyError`` for a node that is not there."""
        self._nodes.remove(node)
        self._points = [point for point in self._points if point[1] != node]

    def walk(self, key: str) -> Iterator[str]:
        """Every node once, the key's own first, in the order in which they would inherit it."""
        start = bisect.bisect_right(self._points, (_position(key), ""))
        seen: set[str] = set()
        for index in range(len(self._points)):
            node = self._points[(start + index) % len(self._points)][1]
            if node not in seen:
                seen.add(node)
                yield node
                if len(seen) == len(self._nodes):
                    return


def _position(name: str) -> int:
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
