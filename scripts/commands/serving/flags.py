"""Defines the flags of `meshloom serve`."""

from typing import Annotated

from scripts.commands.shared_flags import BeamFlags, CheckpointFlags, Strings
from scripts.devices import DeviceFlags
from scripts.flag import Flag, FlagGroup


class ServeFlags(FlagGroup):
    """Serves a model over HTTP: OpenAI's completions and chats, or translations.

    A language model continues prompts at POST /v1/completions, and an imported one with a chat
    template chats at POST /v1/chat/completions; prompts join the running batch between calls of up
    to 4 steps.  A translation model translates at POST /v1/translate, by beam search.  GET
    /v1/models, /health and /metrics describe the server.  SIGTERM stops it when all answers are
    complete.
    """

    EXAMPLES = (
        "meshloom serve --model_dir=runs/mine",
        "MESHLOOM_TOKEN=$(openssl rand -hex 32) meshloom serve --model_dir=runs/mine "
        "--host=0.0.0.0",
    )
    host: str = "127.0.0.1"
    """Address to listen at. One that other machines reach needs --token."""
    port: Annotated[int, Flag(min=0, max=65535)] = 8000
    """Port to listen at; 0 chooses a free one."""
    token: Annotated[str | None, Flag(metavar="TOKEN", has_variable=True)] = None
    """What clients send as 'Authorization: Bearer TOKEN'. The variable keeps it out of the list of
    processes."""
    name: Annotated[str | None, Flag(metavar="NAME")] = None
    """Name of the model. Default: that of its directory."""
    adapter: Annotated[Strings, Flag(metavar="DIR")] = ()
    """Model directory of adapters (LoRA) of this model; may be given several times. Its name is the
    `model` of requests to it. Newer checkpoints are not loaded then."""
    slots: Annotated[int, Flag(min=1)] = 32
    """Texts that are continued, or translated, together."""
    max_length: Annotated[int | None, Flag(min=2)] = None
    """Tokens of a prompt and its continuation. Default: the row length of the task."""
    prefix: str | None = None
    """Text that each translation begins with, as `decode --prefix`: such as a language token."""
    cached_prompts: Annotated[int, Flag(min=0, max=1000)] = 4
    """Prompts in the prefix cache, of 65 tokens or more: of a prompt that begins with the same
    tokens, such as the next turn of a chat, only the rest is read. 0: no cache."""
    queue: Annotated[int, Flag(min=1)] = 256
    """Texts that wait; more are refused."""
    time_limit_s: Annotated[float, Flag(metavar="S", min=0.001)] = 120.0
    """Seconds that a request may take."""
    body_bytes: Annotated[int, Flag(min=1)] = 1_000_000
    """Largest body of a request."""
    reload_s: Annotated[float, Flag(metavar="S", min=0)] = 10.0
    """Seconds between looks for a newer checkpoint; 0 keeps the first. Only with
    --checkpoint=latest."""
    model: CheckpointFlags
    search: BeamFlags = BeamFlags()
    devices: DeviceFlags = DeviceFlags()
