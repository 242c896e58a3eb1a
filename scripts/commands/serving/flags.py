"""Defines the flags of `meshloom serve`."""

from typing import Annotated

from scripts.commands.shared_flags import BeamFlags, CheckpointFlags, Strings
from scripts.devices import DeviceFlags
from scripts.flag import Flag, FlagGroup


class ServeFlags(FlagGroup):
    """Serves a model over HTTP, with OpenAI's completions and chat API, or for translation.

    A language model continues prompts at POST /v1/completions.  An imported model with a chat
    template also answers at POST /v1/chat/completions.  New prompts join the running batch every
    4 steps or less (continuous batching).  A translation model translates at POST /v1/translate,
    with beam search.  GET /v1/models, /health and /metrics describe the server.  After SIGTERM the
    server completes all answers and exits.
    """

    EXAMPLES = (
        "meshloom serve --model_dir=runs/mine",
        "MESHLOOM_TOKEN=$(openssl rand -hex 32) meshloom serve --model_dir=runs/mine "
        "--host=0.0.0.0",
    )
    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines can reach requires --token."""
    port: Annotated[int, Flag(min=0, max=65535)] = 8000
    """Port to listen on; 0 chooses a free port."""
    token: Annotated[str | None, Flag(metavar="TOKEN", has_variable=True)] = None
    """Clients send 'Authorization: Bearer TOKEN'. The process list does not show the variable."""
    name: Annotated[str | None, Flag(metavar="NAME")] = None
    """Name of the model. Default: the name of its directory."""
    adapter: Annotated[Strings, Flag(metavar="DIR")] = ()
    """Model directory of LoRA adapters for this model; may be repeated. Requests select it by its
    name as `model`. With adapters, newer checkpoints are not loaded."""
    slots: Annotated[int, Flag(min=1)] = 32
    """Number of texts that are decoded together."""
    max_length: Annotated[int | None, Flag(min=2)] = None
    """Maximum tokens of a prompt and its continuation. Default: the row length of the task."""
    prefix: str | None = None
    """Text that each translation begins with, such as a language token."""
    cached_prompts: Annotated[int, Flag(min=0, max=1000)] = 4
    """Prompts of 65 tokens or more to keep in the prefix cache. A new prompt that begins with the
    same tokens, such as the next turn of a chat, is processed only from there on. 0: no cache."""
    queue: Annotated[int, Flag(min=1)] = 256
    """Number of texts that may wait; more are refused."""
    time_limit_s: Annotated[float, Flag(metavar="S", min=0.001)] = 120.0
    """Seconds that a request may take."""
    body_bytes: Annotated[int, Flag(min=1)] = 1_000_000
    """Maximum size of a request's body."""
    reload_s: Annotated[float, Flag(metavar="S", min=0)] = 10.0
    """Seconds between checks for a newer checkpoint; 0: never. Only with --checkpoint=latest."""
    model: CheckpointFlags
    search: BeamFlags = BeamFlags()
    devices: DeviceFlags = DeviceFlags()
