"""Prometheus metrics of the server."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from offspec.core.events import PassStats, Result

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# Counters that add up fields of `PassStats`.
_OF_PASSES = {
    "bytes_streamed": (
        "offspec_streamed_bytes",
        "Weights copied to GPUs, or read from disk for computing on the CPU.",
    ),
    "bytes_read": ("offspec_disk_bytes", "Weights read from disk."),
    "experts_asked": (
        "offspec_experts_asked",
        "Experts requested by on-demand expert loading.",
    ),
    "experts_read": ("offspec_experts_read", "Requested experts that were not in memory."),
}


class _WithoutCreated:
    """Registry without the `_created` series of counters and histograms.

    `prometheus_client.disable_created_metrics` would remove them from other registries of the process too.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Any]:
        for metric in self._registry.collect():
            metric.samples = [each for each in metric.samples if not each.name.endswith("_created")]
            yield metric


class Metrics:
    """Metrics of one server. All methods may be called from any thread.

    link_seconds: planned time for one read of the weights over the link, in seconds. 0: estimated from the
    fastest pass.
    """

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=_SECONDS)
        self.link_seconds = 0.0
        ProcessCollector(registry=registry)
        self._requests = counter("offspec_requests", "HTTP requests.", ("route", "status"))
        self._seconds = histogram(
            "offspec_request_seconds", "From the arrival of a request to its end.", ("route",)
        )
        self._queue = gauge("offspec_queue_length", "Queued requests.")
        self._first = histogram(
            "offspec_first_token_seconds", "From the start of a queued request to its first token."
        )
        self._prompt = counter("offspec_prompt_tokens", "Tokens of prompts.")
        self._cached = counter("offspec_cached_prompt_tokens", "Prompt tokens found in a cache.")
        self._tokens = counter("offspec_answer_tokens", "Tokens of answers.")
        self._passes = counter("offspec_passes", "Forward passes of the target.")
        self._per_pass = histogram("offspec_tokens_per_pass", "Tokens per pass.", buckets=_TOKENS)
        self._of_passes = {name: counter(*about) for name, about in _OF_PASSES.items()}
        self._pass_seconds = counter("offspec_pass_seconds", "Time of passes, growing their trees included.")
        self._waited = counter("offspec_link_bound_seconds", "Time of passes spent waiting for weights.")
        self._link = gauge(
            "offspec_link_utilization",
            "Share of the last pass in which the link was busy; 1 if the pass was transfer-bound.",
        )
        self._errors = counter("offspec_errors", "Answers aborted by an error.", ("kind",))
        self._fastest = 0.0  # highest rate of a pass so far, in bytes per second

    def record_request(self, route: str, status: int, seconds: float) -> None:
        """Record the end of a request."""
        self._requests.labels(route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Set the function that counts queued requests."""
        self._queue.set_function(length)

    def record_pass(self, stats: PassStats) -> None:
        """Record the end of a pass for one of its sequences."""
        seconds, share = stats.draft_seconds + stats.target_seconds, 1 / stats.sequences
        self._passes.inc(share)
        self._tokens.inc(stats.emitted)
        self._per_pass.observe(stats.emitted)
        for name, counter in self._of_passes.items():
            counter.inc(getattr(stats, name) * share)
        self._pass_seconds.inc(seconds * share)
        self._waited.inc(stats.wait_seconds * share)
        self._fastest = max(self._fastest, stats.bytes_streamed / seconds if seconds else 0.0)
        if self._fastest:
            crossing = self.link_seconds or stats.bytes_streamed / self._fastest
            self._link.set(min(1.0, crossing / seconds))

    def record_answer(self, result: Result) -> None:
        """Record the end of an answer."""
        self._prompt.inc(result.prompt_tokens)
        self._cached.inc(result.reused_tokens)
        if result.passes:  # otherwise the client disconnected before the first pass
            self._first.observe(result.ttft_s)

    def record_error(self, kind: str) -> None:
        """Record an error of this kind that aborted an answer."""
        self._errors.labels(kind).inc()

    def page(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(cast(CollectorRegistry, _WithoutCreated(self._registry)))
