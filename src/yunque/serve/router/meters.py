"""The router's numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric


class Meters:
    """Counters of one router; ``gauges`` is asked at every scrape: name -> engine -> number."""

    def __init__(self, gauges: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        self._registry = CollectorRegistry()
        make = self._counter
        self.requests = make("requests", "Requests by endpoint and how they ended.", "path", "outcome")
        self.attempts = make("attempts", "Requests sent to engines, by what came of it.", "engine", "outcome")
        self.placements = make("placements", "Placements by what decided.", "why")
        self.continuations = make("continuations", "Replies that went on at another engine.", "path")
        self.continued_tokens = make("continued_tokens", "Sampled tokens that were kept so.", "path")
        self._registry.register(_Gauges(gauges))

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"yunque_router_{name}", text, labels, registry=self._registry)


class _Gauges:
    def __init__(self, read: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        for name, values in self._read().items():
            family = GaugeMetricFamily(
                f"yunque_router_{name}", f"{name.replace('_', ' ')} by engine", labels=["engine"]
            )
            for engine, value in values.items():
                family.add_metric([engine], value)
            yield family
