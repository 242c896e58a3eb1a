"""Runs `meshloom serve`, where the packages that it needs are installed."""

import importlib.util

from configs.errors import UserError
from scripts.commands.serving.flags import ServeFlags

PACKAGES = ("starlette", "uvicorn", "prometheus_client", "jinja2")


def serve(flags: ServeFlags) -> None:
    """Serves a model until a signal."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"serve: {', '.join(missing)} is not installed.  Run: pip install -e '.[serve]'"
        )
    from scripts.commands.serving.launch import server_of

    with server_of(flags) as (server, listener):
        server.run([listener])
