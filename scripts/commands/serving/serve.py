"""Runs `meshloom serve`, if the packages that it needs are installed."""

from configs.errors import extra_required
from scripts.commands.serving.flags import ServeFlags


def serve(flags: ServeFlags) -> None:
    """Serves a model until a signal arrives."""
    with extra_required("serve", "serve"):
        from scripts.commands.serving.launch import server_of

    with server_of(flags) as (server, listener):
        server.run([listener])
