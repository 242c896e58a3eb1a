"""Prepares the data of a multi-process run, whose processes may share a disk."""

import functools
import logging
from pathlib import Path
from typing import Any

from data import cache
from data.build import OnProgress
from data.cache import Prepared
from data.task import Task
from data.vocab import cores
from data.vocabs import Vocabs
from trainer.multihost import check_same, gather, is_first_process

logger = logging.getLogger(__name__)


def prepare(
    task: Task,
    data_dir: Path,
    *,
    vocabs: Vocabs | None = None,
    content_hash: str | None = None,
    rebuild: bool = False,
    worker_count: int | None = None,
    on_progress: OnProgress | None = None,
) -> Prepared:
    """Returns the rows of a task: process 0 prepares them while the others wait.

    A process that still has no rows in data_dir has a separate disk, and prepares them there.
    Raises in every process unless all have the same rows.  Without a worker_count, there is one
    worker per core.
    """

    def manifest() -> dict[str, Any] | None:
        return cache.TaskCaches(task, data_dir, vocabs, content_hash).manifest()

    prepare_rows = functools.partial(
        cache.prepare, task, data_dir, vocabs=vocabs, content_hash=content_hash,
        worker_count=worker_count or cores(), on_progress=on_progress,
    )  # fmt: skip
    if is_first_process():
        prepared = prepare_rows(rebuild=rebuild)
        gather(prepared.manifest)
    else:
        if rebuild or manifest() is None:
            logger.info("%s: process 0 prepares it; this process waits.", task.name)
        first = gather(dict[str, Any]())[0]
        prepared = prepare_rows(rebuild=rebuild and first != manifest())
    if "validation" in task.source.splits() and "validation" not in prepared.splits:
        remedy = ", ".join([*task.source.remedies("validation"), "or more text"])
        logger.warning(
            "Warning: %s: too few different examples to hold some out, so there is no "
            "validation.  For a validation split give it %s.", task.name, remedy,
        )  # fmt: skip
    check_same(
        {f"{name} of {task.name}": prepared.manifest[name] for name in
         ("content_hash", *prepared.vocabs.hashes())}
        | {f"rows of {task.name}": prepared.rows_hash},
        "Give all processes the same text, or copy the data of process 0: the folder "
        f"{prepared.folder.name} of its --data_dir.",
    )  # fmt: skip
    return prepared
