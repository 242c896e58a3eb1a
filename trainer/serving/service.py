"""Runs the queue of a server: jobs wait, a thread answers them, new weights replace the old."""

import abc
import collections
import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
from jax import monitoring
from jax.sharding import Mesh

from data.memory import trim_memory
from models.decoding.sampling import Sampling
from trainer.decoding.decoder import Request, TokenHypothesis

if TYPE_CHECKING:
    from trainer.serving.grammar import Grammar

logger = logging.getLogger(__name__)
Finish = Literal["stop", "length"]
GREEDY = Sampling(temperature=0)
TOGETHER_S = 0.004
"""How long an idle service waits, after its first job, for others to share a prefill pass."""
MAX_CANDIDATES = 20  # the limit of OpenAI-compatible servers for completions
Ranked = list[tuple[int, float]]
"""The likeliest tokens at one position, with their log-probabilities at temperature 1."""


class QueueFull(Exception):
    """Reports that no more jobs can wait."""


class Stopped(Exception):
    """Reports that the service accepts no more jobs."""


class NoFiniteScore(Exception):
    """Reports that a model gives a text no finite log-probability."""


class DeadEnd(Exception):
    """Reports that the grammar of a text allows no token of the vocabulary."""


@dataclasses.dataclass(frozen=True)
class TokenPenalties:
    """Holds changes to the logits of a text's tokens, as `models.decoding.slots.Penalties`."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Added to the logits of tokens."""


NO_PENALTIES = TokenPenalties()


@dataclasses.dataclass(eq=False)
class Job:
    """Holds a request and, as it arrives, its answer.

    Only the service's thread writes the answer; it then calls `notify` of the service.
    """

    request: Request
    sampling: Sampling = GREEDY
    penalties: TokenPenalties = NO_PENALTIES
    grammar: "Grammar | None" = None
    adapter: int = 0
    """Number of the model's adapter that reads the text, from 1; 0 is none."""
    streams: bool = False
    """Whether each token is announced; otherwise only the end."""
    on_change: Callable[[], None] = lambda: None
    tokens: list[int] = dataclasses.field(default_factory=list)
    """New tokens, without the end."""
    log_probabilities: list[float] = dataclasses.field(default_factory=list)
    """Of the tokens, and of the end token if there is one."""
    candidates: int = 0
    """How many of the likeliest tokens are wanted at each position, at most MAX_CANDIDATES."""
    likeliest: list[Ranked] = dataclasses.field(default_factory=list)
    """At the positions of the tokens, and of the end token if there is one."""
    end_id: int | None = None
    """The token that ended the text, if one did."""
    scores_prompt: bool = False
    """Whether the prompt is scored."""
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were in the prefix cache."""
    prompt_log_probabilities: list[float] = dataclasses.field(default_factory=list)
    """Of its tokens, without the first one if the model reads no begin token before it."""
    prompt_likeliest: list[Ranked] = dataclasses.field(default_factory=list)
    hypotheses: list[TokenHypothesis] = dataclasses.field(default_factory=list)
    """Texts of a beam search, the best first."""
    finish: Finish | None = None
    """Why the text ended; None while it continues."""
    failure: BaseException | None = None
    """The error, if the job failed."""
    checkpoint: int | None = None
    """Step of the weights that compute the answer."""
    dispatched: int = 0
    """New tokens that are computed, or being computed."""
    is_cancelled: bool = False

    @property
    def is_done(self) -> bool:
        return self.finish is not None or self.failure is not None or self.is_cancelled


@dataclasses.dataclass
class ServiceCounts:
    """Counts the work of a service."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    """Steps, which add a token to each running text, or batches decoded."""
    reloads: int = 0


class Service(abc.ABC):
    """Answers jobs in a thread, as a subclass defines."""

    _running: Collection[Any] = ()
    """Slots or jobs that are being answered."""

    def __init__(self, mesh: Mesh, step: int, queue: int, slots: int):
        self.mesh, self.queue_limit, self.checkpoint = mesh, queue, step
        self.slots = slots
        """How many jobs can be answered together."""
        self.counts = ServiceCounts()
        self.failure: BaseException | None = None
        self.notify: Callable[[Sequence[Job]], None] = call_each
        """Called in the thread with the jobs that changed."""
        self._waiting = collections.deque[Job]()
        self._submitted = weakref.WeakSet[Job]()
        self._next_weights: tuple[Any, int] | None = None
        self._is_stopping = False
        self._changed = threading.Condition()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshloom-service", daemon=True)

    def start(self) -> None:
        """Starts the thread that answers, and waits until it has compiled what it runs."""
        self._thread.start()
        self._is_ready.wait()
        if self.failure is not None:
            raise self.failure

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queues jobs for an answer: all of them, or none."""
        with self._changed:
            if self.failure is not None or self._is_stopping:
                raise Stopped
            if len(self._waiting) + len(jobs) > self.queue_limit:
                raise QueueFull
            self._waiting.extend(jobs)
            self._submitted.update(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Drops jobs that nobody waits for."""
        with self._changed:
            for job in jobs:
                job.is_cancelled = True
            self._changed.notify()

    def replace(self, params: Any, step: int) -> None:
        """Sets new weights, once the texts that the old ones began are done."""
        with self._changed:
            self._next_weights = params, step
            self._changed.notify()

    @property
    def waiting(self) -> int:
        """Returns how many jobs wait."""
        return len(self._waiting)

    @property
    def busy_slots(self) -> int:
        """Returns how many jobs are being answered."""
        return len(self._running)

    def stop(self) -> None:
        """Finishes waiting and running jobs, then ends the thread."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    # What a subclass defines.

    @abc.abstractmethod
    def warm_up(self) -> None:
        """Compiles what the service runs."""

    @abc.abstractmethod
    def running(self) -> Collection[Job]:
        """Returns the jobs that are being answered."""

    @abc.abstractmethod
    def next_jobs(self) -> list[Job]:
        """Takes the jobs to begin from `_waiting`."""

    @abc.abstractmethod
    def advance(self, jobs: Sequence[Job]) -> None:
        """Begins these jobs, and does some work on all running jobs."""

    @abc.abstractmethod
    def set_weights(self, params: Any) -> None:
        """Sets new weights, while nothing runs."""

    # The thread.

    def _run(self) -> None:
        try:
            with jax.set_mesh(self.mesh):
                self.warm_up()  # in this thread: JAX's caches depend on its contexts
                trim_memory()  # used to restore the weights
                self._is_ready.set()
                while (jobs := self._next()) is not None:
                    self.advance(jobs)
        except BaseException as error:
            if self._is_ready.is_set():
                logger.exception("The service ended.")
            self._fail(error)
            self._is_ready.set()

    def _next(self) -> list[Job] | None:
        """Waits until there is work; returns the jobs to begin, or None at the end."""
        with self._changed:
            while True:
                if any(job.is_cancelled for job in self._waiting):
                    kept = (job for job in self._waiting if not job.is_cancelled)
                    self._waiting = collections.deque(kept)
                if self._next_weights is not None and not self.running():
                    (params, step), self._next_weights = self._next_weights, None
                    self.set_weights(params)
                    self.checkpoint = step
                    del params  # the service may have made copies
                    trim_memory()
                    self.counts.reloads += 1
                    logger.info("Serving the checkpoint of step %d.", self.checkpoint)
                jobs = self.next_jobs() if self._next_weights is None else []
                for job in jobs:
                    job.checkpoint = self.checkpoint
                    self.counts.prompt_tokens += len(job.request.prompt)
                if jobs or self.running():
                    return jobs
                if self._is_stopping and not self._waiting:
                    return None
                self._changed.wait()
                if self._waiting:
                    self._changed.wait_for(lambda: len(self._waiting) >= self.slots, TOGETHER_S)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = error
            jobs = [job for job in self._submitted if not job.is_done]
            self._waiting.clear()
        for job in jobs:
            job.failure = error
        self.notify(jobs)


def call_each(jobs: Sequence[Job]) -> None:
    """Calls `on_change` of each job."""
    for job in jobs:
        job.on_change()


EVENT = "/jax/core/compile/backend_compile_duration"
EVENTS = "/jax/core/compile/"
"""Prefix of the names of all parts of a compilation, which include tracing and lowering."""


class Compilations:
    """Counts compilations, and loads of compiled programs from the cache, since it was made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        self.seconds = 0.0
        monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith(EVENTS):
            with self._lock:
                self.count += event == EVENT
                self.seconds += duration_secs
