"""Admits requests: checks where they come from, measures them, and lets the last ones finish."""

import asyncio
import contextlib
import hmac
import time
from collections.abc import Collection, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scripts.commands.serving.bodies import ApiError
from trainer.serving.service import Compilations, Service

OPEN = frozenset({"/health", "/"})
"""Paths that need no token, as they reveal nothing about the model."""
STOPPING = ApiError(503, "The server is stopping.")
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class ServiceCollector(Collector):
    """Reads the counts of a service when Prometheus requests them."""

    def __init__(self, service: Service, compilations: Compilations):
        self.service, self.compilations = service, compilations

    def collect(self) -> Iterator[Metric]:
        counts = self.service.counts
        counters = {
            "prompt_tokens": ("Prompt tokens that were processed.", counts.prompt_tokens),
            "new_tokens": ("Tokens that were generated.", counts.new_tokens),
            "steps": ("Tokens added to each text, or batches decoded.", counts.steps),
            "reloads": ("Newer checkpoints that were loaded.", counts.reloads),
            "compilations": ("Programs compiled for requests.", self.compilations.count),
        }
        gauges = {
            "queue_length": ("Texts that wait.", self.service.waiting),
            "slots_busy": ("Texts that are being decoded.", self.service.busy_slots),
            "slots": ("Texts that can be decoded together.", self.service.slots),
            "checkpoint_step": ("Step of the checkpoint that is served.", self.service.checkpoint),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"meshloom_{name}", text, value)
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"meshloom_{name}", text, value)


class Guard:
    """Wraps an application: checks tokens and host names, counts requests, drains the server."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        paths: Collection[str],
        token: str | None,
        hosts: Collection[str] | None,
        registry: CollectorRegistry,
    ):
        self.app, self.paths, self.token, self.hosts = app, paths, token, hosts
        self._requests = Counter(
            "meshloom_requests", "Requests.", ("path", "status"), registry=registry
        )
        self._seconds = Histogram(
            "meshloom_request_seconds", "Seconds from a request to the end of its answer.",
            ("path",), buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.is_stopping = False
        self._active = 0
        self._idle = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start, status = time.perf_counter(), 0

        async def noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        error = self.refusal(scope)
        app = self.app if error is None else error.response()
        is_admitted = error is None  # a refused request does not delay the shutdown
        self._active += is_admitted
        try:
            await app(scope, receive, noting_status)
        except asyncio.CancelledError:  # the server ends before the answer is complete
            if status or not self.is_stopping:
                raise
            await STOPPING.response()(scope, receive, noting_status)
        finally:
            self._active -= is_admitted
            if not self._active:
                self._idle.set()
            path = scope["path"] if scope["path"] in self.paths else "other"
            self._requests.labels(path, str(status)).inc()
            self._seconds.labels(path).observe(time.perf_counter() - start)

    def refusal(self, scope: Scope) -> ApiError | None:
        """Returns why a request is refused; None if it is not."""
        headers = Headers(scope=scope)
        address = headers.get("host", "")
        host = address.rpartition("]")[0].lstrip("[") or address.partition(":")[0]
        if self.hosts is not None and host.lower() not in self.hosts:
            # A page of another site, with a name that resolves to this machine, sends that name.
            return ApiError(403, f"Host = {host!r}.  Legal: {', '.join(sorted(self.hosts))}.")
        if self.token is not None and scope["path"] not in OPEN:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            is_same = hmac.compare_digest(given.encode(), self.token.encode())
            if not (is_same and scheme.lower() == "bearer"):
                return ApiError(401, "Send the token of the server: Authorization: Bearer TOKEN.")
        if self.is_stopping and scope["path"] != "/metrics":
            return STOPPING
        return None

    async def drain(self, time_s: float) -> None:
        """Admits no more requests, and waits until the admitted ones are answered."""
        self.is_stopping = True
        with contextlib.suppress(TimeoutError):  # does not wait for what a client does not read
            async with asyncio.timeout(time_s):
                while self._active:
                    self._idle.clear()
                    await self._idle.wait()
