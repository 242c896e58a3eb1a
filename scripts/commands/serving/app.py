"""Defines the routes of the server."""

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from configs.errors import brief
from scripts.commands.serving.bodies import ApiError
from scripts.commands.serving.chat import chat
from scripts.commands.serving.completions import complete
from scripts.commands.serving.exchange import ServedModel
from scripts.commands.serving.translations import translate

FAILED = ApiError(500, "The server failed; its log says why.")
PAGE = Path(__file__).with_name("page.html").read_text()
PAGE_HEADERS = {
    # Nothing but what the page itself contains runs, and it talks to this server alone.
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src "
    "'unsafe-inline'; img-src data:; connect-src 'self'; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


async def page(request: Request) -> Response:
    """Returns the page on which a person tries the model."""
    return HTMLResponse(PAGE, headers=PAGE_HEADERS)


async def models(request: Request) -> Response:
    """Describes the model."""
    served: ServedModel = request.app.state.served
    return JSONResponse({"object": "list", "data": [served.describe()]})


async def model(request: Request) -> Response:
    """Describes the model of a name."""
    served: ServedModel = request.app.state.served
    served.check_name(request.path_params["name"])
    return JSONResponse(served.describe())


async def health(request: Request) -> Response:
    """Returns 200 while requests are answered."""
    served: ServedModel = request.app.state.served
    if served.service.failure is not None:
        raise ApiError(503, "The server failed; its log says why.")
    return JSONResponse({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Returns what Prometheus reads."""
    registry: CollectorRegistry = request.app.state.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def error_response(request: Request, error: Exception) -> Response:
    """Answers a request that failed; an error of the server itself then reaches its log."""
    if isinstance(error, ApiError):
        return error.response()
    if isinstance(error, ClientDisconnect):  # nobody reads the answer; its status is counted
        return Response(status_code=499)
    if not isinstance(error, HTTPException):
        return FAILED.response()
    path = brief(f"{request.method} {request.scope['path']}")
    legal = ", ".join(
        f"{method} {route.path}"
        for route in ROUTES
        for method in sorted((route.methods or set()) - {"HEAD"})
    )
    problem = f"{path}: {error.detail}.  Legal: {legal.replace('{name:path}', 'NAME')}."
    return ApiError(error.status_code, problem).response(error.headers)


ROUTES = [
    Route("/", page),
    Route("/v1/completions", complete, methods=["POST"]),
    Route("/v1/chat/completions", chat, methods=["POST"]),
    Route("/v1/translate", translate, methods=["POST"]),
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model),
    Route("/health", health),
    Route("/metrics", metrics),
]


def application(served: ServedModel, registry: CollectorRegistry) -> Starlette:
    """Makes the application of a served model."""
    kinds: tuple[type[Exception], ...] = (ApiError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(routes=ROUTES, exception_handlers=dict.fromkeys(kinds, error_response))
    app.state.served, app.state.registry = served, registry
    return app
