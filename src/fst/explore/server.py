"""The page over HTTP, for the browser of this machine alone.

Listens on 127.0.0.1. Another host name (DNS rebinding) or another origin is refused, bodies are
bounded, and one computation runs at a time: a request that a newer one has overtaken is dropped.
"""

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from fst.explore.explorer import Explorer
from fst.explore.problems import LARGEST_DRAW, whole_number

ADDRESS = "127.0.0.1"
LARGEST_BODY = 2**20
SCRIPTS = ("explore.js", "plots.js", "explore.css")
PAGES = {"/": "index.html"} | {f"/{name}": name for name in SCRIPTS}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


Explorers = Mapping[str, Callable[[], Explorer]]
"""What the page can show, by name, each made when it is asked for; the first one is shown first."""


class SupersededError(Exception):
    """A newer request has come: nobody waits for this one."""


def make_app(explorers: Explorers, port: int) -> ASGIApp:
    """The application; `port` is part of the only host names it answers to."""
    worker = ThreadPoolExecutor(max_workers=1)  # one computation at a time
    newest = 0
    hosts = {f"{name}:{port}" for name in (ADDRESS, "localhost")}
    pages = {f"http://{host}" for host in hosts}

    async def guard(request: Request, call_next: RequestResponseEndpoint) -> Response:
        """Refuse requests that another page makes, or that reach us by another name."""
        named, origins = (
            [value.lower() for value in request.headers.getlist(name)]
            for name in ("host", "origin")
        )
        refused = None
        if len(named) != 1 or named[0] not in hosts:
            refused = "this page answers to its own address only"
        elif not pages.issuperset(origins):
            refused = "requests of other pages are refused"
        answered = JSONResponse({"error": refused}, 403) if refused else await call_next(request)
        answered.headers.update(HEADERS)
        return answered

    async def compute(request: Request, work: Callable[[Explorer], Any]) -> Response:
        def on_its_model() -> Any:
            name = request.query_params.get("model", next(iter(explorers)))
            if name not in explorers:
                raise ValueError(f"model must be one of {', '.join(explorers)}")
            return work(explorers[name]())

        try:
            found = await asyncio.get_running_loop().run_in_executor(worker, on_its_model)
        except SupersededError:
            return JSONResponse({"error": "a newer request has come"}, 409)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse(found)

    async def page(request: Request) -> Response:
        return FileResponse(Path(__file__).parent / PAGES[request.url.path])

    async def about(request: Request) -> Response:
        return await compute(request, lambda model: model.describe() | {"models": [*explorers]})

    async def draw(request: Request) -> Response:
        nonlocal newest
        newest += 1  # whoever asks for another input waits for no answer to the last
        text = request.query_params.get("number", "")
        number = {"number": int(text) if text.isdecimal() and len(text) < 12 else None}

        def work(model: Explorer) -> dict[str, Any]:
            chosen = whole_number(number, "number", 0, LARGEST_DRAW)
            return {"input": model.problem.draw(chosen)}

        return await compute(request, work)

    async def answer(request: Request) -> Response:
        nonlocal newest
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return JSONResponse({"error": "a request must be JSON"}, 415)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_BODY:
                return JSONResponse({"error": f"at most {LARGEST_BODY} bytes"}, 413)
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            return JSONResponse({"error": "a request must be JSON"}, 400)
        newest += 1
        mine = newest

        def proceed() -> None:
            if mine != newest:
                raise SupersededError

        return await compute(request, lambda model: model.answer(asked, proceed))

    routes = [Route(path, page) for path in PAGES]
    routes += [Route("/about", about), Route("/draw", draw)]
    routes += [Route("/answer", answer, methods=["POST"])]
    return BaseHTTPMiddleware(Starlette(routes=routes), guard)


def listen(port: int) -> socket.socket:
    """A socket of this machine alone; port 0 takes a free one."""
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, got {port}")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((ADDRESS, port))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"port {port} cannot be used ({error.strerror}); another one: --port N, or --port 0"
        ) from None
    return listener


def serve(explorers: Explorers, listener: socket.socket) -> None:
    app = make_app(explorers, listener.getsockname()[1])
    config = uvicorn.Config(
        app, log_level="warning", ws="none", timeout_graceful_shutdown=2, server_header=False
    )
    uvicorn.Server(config).run(sockets=[listener])
