"""Warns of layers that drop too much or use their experts too unevenly."""

import logging

from models.feed_forward.moe.routing import Router
from trainer.metrics.expert_load import Layer, stats_by_layer
from trainer.observers import Observer, StepResult
from trainer.run import Run

logger = logging.getLogger(__name__)
WARN_EVERY = 100  # steps
DROPPED_BOUND = 0.25  # of the choices of a layer
LOAD_BOUND = 8.0  # times the even share that one expert gets


class RouterWarnings(Observer):
    """Logs the warnings of a step now and then."""

    def on_start(self, run: Run, first_step: int) -> None:
        self._run = run

    def on_step(self, result: StepResult) -> None:
        if self._run.at_interval(result.step, WARN_EVERY):
            for warning in warnings(stats_by_layer(result.loads), self._run.model.router):
                logger.warning("Step %d: warning: %s", result.step, warning)


def warnings(layers: dict[str, Layer], router: Router | None) -> list[str]:
    """Names the layers that drop too much or use their experts too unevenly, and the remedy."""
    messages = []
    more_slots, more_even = remedy(router, "capacity_factor"), remedy(router, "aux_loss")
    for name, layer in layers.items():
        for i, share in enumerate(layer["dropped"], 1):
            if share > DROPPED_BOUND:
                messages.append(
                    f"{name}: {share:.0%} of the choices number {i} found no place.  "
                    f"Raise {more_slots}, or {more_even}."
                )
        times = max(layer["load"]) * len(layer["load"])
        if times > LOAD_BOUND:
            messages.append(
                f"{name}: one expert has {times:.1f} times its even share of the tokens.  "
                f"Raise {more_even}."
            )
    return messages


def remedy(router: Router | None, setting: str) -> str:
    """Names a setting of the router with its value.

    >>> from models.feed_forward.moe.routing import Top2
    >>> remedy(Top2(aux_loss=0.02), "aux_loss")
    'Top2.aux_loss (now 0.02)'
    """
    if router is None:
        return f"the router's {setting}"
    return f"{type(router).__name__}.{setting} (now {getattr(router, setting)})"
