"""Measures a server for Prometheus."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trainer.serving.service import Compilations, Service

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class ServiceCollector(Collector):
    """Reads the counts of a service when they are asked for."""

    def __init__(self, service: Service, compilations: Compilations):
        self.service, self.compilations = service, compilations

    def collect(self) -> Iterator[Metric]:
        counts = self.service.counts
        counters = {
            "prompt_tokens": ("Tokens of prompts that were read.", counts.prompt_tokens),
            "new_tokens": ("Tokens that were made.", counts.new_tokens),
            "steps": ("Tokens added to each text, or batches decoded.", counts.steps),
            "reloads": ("Checkpoints that replaced another.", counts.reloads),
            "compilations": ("Programs compiled for requests.", self.compilations.count),
        }
        gauges = {
            "queue_length": ("Texts that wait.", self.service.waiting),
            "slots_busy": ("Texts that are being answered.", self.service.busy_slots),
            "slots": ("Texts that can be answered together.", self.service.slots),
            "checkpoint_step": ("Step of the weights.", self.service.checkpoint),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"meshloom_{name}", text, value)
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"meshloom_{name}", text, value)


class RequestMetrics:
    """Counts requests by path and status, and measures how long they take."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.count = Counter(
            "meshloom_requests", "Requests.", ("path", "status"), registry=registry
        )
        self.seconds = Histogram(
            "meshloom_request_seconds", "Seconds from a request to the end of its answer.",
            ("path",), buckets=SECONDS, registry=registry,
        )  # fmt: skip

    def add(self, path: str, status: int, seconds: float) -> None:
        self.count.labels(path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)
