"""`Metrics`: numbers of a server in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from lmcore_serve.served_model import ServedModel

__all__ = ["Metrics"]

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Numbers of requests and of the work for them."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        """Begin with no requests.

        Args:
            models: Models by name.
        """
        self._registry = CollectorRegistry()
        self._registry.register(_Services(models))
        self._requests = Counter(
            "lmcore_requests",
            "Requests that were answered.",
            ("route", "method", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "lmcore_request_seconds",
            "Time from the start of a request to the end of its reply.",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )

    def count(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request.

        Args:
            route: Path of its endpoint.
            method: HTTP method.
            status: HTTP status of the reply.
            seconds: Time that it took.
        """
        known = {"GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "PATCH"}
        self._requests.labels(route, method if method in known else "other", str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Return all numbers."""
        return generate_latest(self._registry)


class _Services(Collector):
    """Numbers that the services of the models keep."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Return the numbers of now."""
        running = GaugeMetricFamily(
            "lmcore_running_texts", "Texts that are being generated.", labels=["model"]
        )
        waiting = GaugeMetricFamily("lmcore_waiting_texts", "Texts in the queue.", labels=["model"])
        prompts = CounterMetricFamily(
            "lmcore_prompt_tokens", "Tokens of prompts that were begun.", labels=["model"]
        )
        generated = CounterMetricFamily(
            "lmcore_generated_tokens", "Tokens that were generated.", labels=["model"]
        )
        ended = CounterMetricFamily(
            "lmcore_texts", "Texts that have ended, by reason.", labels=["model", "reason"]
        )
        for name, model in self._models.items():
            service, totals = model.service, model.service.statistics
            running.add_metric([name], service.num_running)
            waiting.add_metric([name], service.num_waiting)
            prompts.add_metric([name], totals.prompt_tokens)
            generated.add_metric([name], totals.generated_tokens)
            for reason, count in totals.ended.items():
                ended.add_metric([name, reason], count)
        yield from (running, waiting, prompts, generated, ended)
