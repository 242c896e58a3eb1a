"""An example of your own tracker: sends a run's metrics to MLflow Tracking (`pip install mlflow`).

A run file needs `import docs.examples.mlflow_tracker` and `Run.trackers = (@MLflow(),)`.
"""

import functools
import time

from configs.spec import spec
from trainer.metrics.trackers import Background, Numbers, TrackedRun, Tracker, TrackerSpec, known_id

MLFLOW_ID = "mlflow.id"
MAX_PARAM_CHARACTERS = 6000


@spec
class MLflow(TrackerSpec):
    """Sends metrics and settings to MLflow Tracking."""

    PACKAGE, ID_FILE = "mlflow", MLFLOW_ID

    tracking_uri: str | None = None
    """Server or database, such as "http://localhost:5000". None: MLFLOW_TRACKING_URI, or MLflow's
    default."""
    experiment: str = "meshloom"
    """Experiment of the run, which is created if it does not exist."""
    name: str | None = None
    """Name of the run. None: the name of the model directory."""

    def open(self, run: TrackedRun) -> Tracker:
        return Background("MLflow", lambda: MLflowRun(self, run))


class MLflowRun(Tracker):
    """Logs to an MLflow run: a new one, or the one recorded in the model directory."""

    def __init__(self, spec: MLflow, run: TrackedRun):
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=spec.tracking_uri)
        path = run.folder / MLFLOW_ID
        is_new = not path.exists()
        self._id = known_id(path, lambda: self._create(spec, run))
        if is_new:  # MLflow does not allow later changes
            params = [
                Param(name, str(x)[:MAX_PARAM_CHARACTERS]) for name, x in run.settings.items()
            ]
            self._client.log_batch(self._id, params=params)
        else:
            self._client.update_run(self._id, status="RUNNING")
        # Returns the last step of a metric that the service had when this process began.
        self._last_step = (lambda name: -1) if is_new else functools.cache(self._newest_step)

    def log(self, step: int, numbers: Numbers) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        # A resumed run repeats the steps after its checkpoint, and the service would keep both.
        metrics = [
            Metric(name, number, now_ms, step)
            for name, number in numbers.items()
            if step > self._last_step(name)
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def _newest_step(self, name: str) -> int:
        history = self._client.get_metric_history(self._id, name)
        return max((metric.step for metric in history), default=-1)

    def close(self, *, succeeded: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if succeeded else "FAILED")

    def _create(self, spec: MLflow, run: TrackedRun) -> str:
        known = self._client.get_experiment_by_name(spec.experiment)
        create = self._client.create_experiment
        experiment_id = known.experiment_id if known else create(spec.experiment)
        made = self._client.create_run(experiment_id, run_name=spec.name or run.name)
        return str(made.info.run_id)
