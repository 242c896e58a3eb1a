"""Files of numbers: lines stay in step with the run whatever killed it."""

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
