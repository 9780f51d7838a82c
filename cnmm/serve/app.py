"""The application: HTTP in front of an engine, for uvicorn, Ray Serve, or any other server that speaks ASGI.

    app = create_app("ladder", target_ms=60)

Its lifespan starts and ends the workers; `app.state.engine.wanted_cores()` is what an autoscaler wants to know.
"""

from __future__ import annotations

import asyncio
import json
import math
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from cnmm import __version__
from cnmm._errors import UserError
from cnmm.runtime.latency import RuntimeName
from cnmm.serve import protocol
from cnmm.serve.asks import Answer, Ask, Pictures, Refusal, files, pixels, read_knobs
from cnmm.serve.bodies import body_of, form_file
from cnmm.serve.clients import hangup_of
from cnmm.serve.engine import Engine
from cnmm.serve.openapi import openapi
from cnmm.serve.page import Page, read_page
from cnmm.serve.served import KINDS

EVENTS_S = 0.25
MOST_LISTENERS = 100
"""Of events, at once."""
EXTENSIONS = ["binary_tensor_data", "classification", "model_configuration", "model_repository", "statistics"]
DEFAULT_TOP = 5

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(
    ladder: str | Path,
    *,
    target_ms: float = 60.0,
    runtime: RuntimeName | None = None,
    cores: int | None = None,
    policy: str = "adaptive",
    latency: str | Path | None = None,
) -> Starlette:
    """Serves a ladder folder. `cores`: all usable ones unless told. `runtime`: the fastest that was measured.

    What was not measured on this machine with one thread is measured first. `latency`: the folder with measurements,
    the ladder's own unless told.
    """
    engine = Engine(ladder, target_ms=target_ms, runtime=runtime, cores=cores, policy=policy, latency=latency)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            await engine.start()
        except Exception as error:  # servers only say that there was one
            app.state.failure = error
            raise
        yield
        await engine.close()

    app = Starlette(
        routes=_Handlers(engine).routes(),
        lifespan=lifespan,
        exception_handlers={
            Refusal: _refused,
            UserError: _user_error,
            HTTPException: _http_error,
            Exception: _bug,
        },
    )
    app.router.redirect_slashes = False
    app.state.engine, app.state.failure = engine, None
    return app


def reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Response(text, status, {"x-content-type-options": "nosniff", **(headers or {})}, "application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    body: dict[str, Any] = {"error": error.message}
    headers = {"connection": "close"} if error.unread else {}
    if error.retry_after_ms is not None:
        body["retry_after_ms"] = error.retry_after_ms
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1e3))
    return reply(body, error.status, headers)


async def _user_error(request: Request, error: Exception) -> Response:
    return reply({"error": str(error)}, 400)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = f"{request.method} {request.url.path}: {error.detail}"
    return reply({"error": words[:300]}, error.status_code, dict(error.headers or {}))


async def _bug(request: Request, error: Exception) -> Response:
    traceback.print_exception(error)
    return reply({"error": "internal error"}, 500)


class _Handlers:
    """What is done at each address."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._served = engine, engine.served
        self._page: Page = read_page()
        self._listeners = 0

    def routes(self) -> list[Route]:
        get: dict[str, Endpoint] = {
            "/": self.page,
            "/about": self.about,
            "/events": self.events,
            "/metrics": self.metrics,
            "/openapi.json": self.openapi,
            "/examples": self.examples,
            "/examples/{name}": self.example,
            "/v2": self.server,
            "/v2/": self.server,
            "/v2/health/live": self.live,
            "/v2/health/ready": self.ready,
            "/v2/models/stats": self.stats,
        }
        post: dict[str, Endpoint] = {
            "/predict": self.predict,
            "/v2/repository/index": self.index,
        }
        for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            get |= {prefix: self.metadata, f"{prefix}/ready": self.model_ready, f"{prefix}/config": self.config}
            get |= {f"{prefix}/stats": self.stats}
            post |= {f"{prefix}/infer": self.infer}
        made = [
            Route(path, endpoint, methods=["POST"]) for path, endpoint in reversed(post.items())
        ]  # the busiest first
        return made + [Route(path, endpoint, methods=["GET"]) for path, endpoint in get.items()]

    # For people

    async def page(self, request: Request) -> Response:
        return Response(self._page.html, headers=self._page.headers, media_type="text/html")

    async def about(self, request: Request) -> Response:
        return reply(self._engine.about())

    async def openapi(self, request: Request) -> Response:
        return reply(openapi(self._served))

    async def metrics(self, request: Request) -> Response:
        return Response(self._engine.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def examples(self, request: Request) -> Response:
        return reply([{"name": name, "url": f"/examples/{name}"} for name in self._served.examples])

    async def example(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._served.examples:
            raise Refusal(404, f"example {name!r:.80}: there is none of that name")
        kind = KINDS[Path(name).suffix.lower()]
        return Response(self._served.examples[name], headers={"x-content-type-options": "nosniff"}, media_type=kind)

    async def events(self, request: Request) -> Response:
        if self._listeners >= MOST_LISTENERS:
            raise Refusal(503, f"{MOST_LISTENERS} listen already", retry_after_ms=1000.0)
        self._listeners += 1
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._moments(), headers=headers, media_type="text/event-stream")

    async def _moments(self) -> AsyncIterator[bytes]:
        try:
            while not self._engine.closed:
                yield b"data: " + json.dumps(self._engine.now(), separators=(",", ":")).encode() + b"\n\n"
                await asyncio.sleep(EVENTS_S)
        finally:
            self._listeners -= 1

    async def predict(self, request: Request) -> Response:
        """An image file, a form with one, or the pixels of one image at the ladder's size."""
        query = dict(request.query_params)
        top = _number("top", query.pop("top", str(DEFAULT_TOP)))
        for name in ("timeout_ms", "priority", "min_confidence"):
            if name in query:
                query[name] = _number(name, query[name])  # type: ignore[assignment]  # texts become numbers
        knobs = read_knobs(query, self._served)
        png = self._served.segments and "image/png" in request.headers.get("accept", "")
        async with body_of(request, self._engine) as body:
            pictures = self._sent(body, request.headers.get("content-type", ""))
            ask = Ask(pictures=pictures, knobs=knobs, want="png" if png else "probabilities")
            answer = await self._engine.answer(ask, hangup_of(request))
        about = {**answer.about(), "time_ms": round(answer.time_ms, 3)}
        if png:
            return Response(answer.maps[0], headers={"cnmm-answer": json.dumps(about)}, media_type="image/png")
        return reply(self._top(answer, max(1, int(top))) | about)

    def _sent(self, body: bytes, content_type: str) -> Pictures:
        kind = content_type.partition(";")[0].strip().lower()
        if kind == "multipart/form-data":
            return files([form_file(body, content_type)], self._served)
        if kind == "application/octet-stream" and len(body) == self._served.image_bytes:
            return pixels(body, (1, *self._served.ladder.preprocessing.image_shape), self._served)
        if not body:
            raise UserError("no image: send a file as the body (curl --data-binary @cat.jpg) or as the field `file`")
        return files([body], self._served)

    def _top(self, answer: Answer, num: int) -> dict[str, Any]:
        classes, row = self._served.ladder.preprocessing.classes, answer.probabilities[0].tolist()
        best = sorted(zip(row, classes, strict=True), key=lambda pair: -pair[0])
        found: dict[str, Any] = {"top": [{"label": label, "p": round(p, 6)} for p, label in best[:num]]}
        if self._served.segments:
            found["shares"] = [{"label": label, "share": round(p, 6)} for p, label in best if p > 0]
            found["size"] = answer.shapes[0]
        return found | {"confidence": answer.confidence[0]}

    # For machines

    async def server(self, request: Request) -> Response:
        return reply({"name": "cnmm", "version": __version__, "extensions": EXTENSIONS})

    async def live(self, request: Request) -> Response:
        return reply({"live": self._engine.live}, 200 if self._engine.live else 503)

    async def ready(self, request: Request) -> Response:
        return reply({"ready": self._engine.ready}, 200 if self._engine.ready else 503)

    async def model_ready(self, request: Request) -> Response:
        version = self._version(request)
        about = {"name": self._served.model, **({"version": version} if version else {})}
        return reply({**about, "ready": self._engine.ready}, 200 if self._engine.ready else 503)

    async def metadata(self, request: Request) -> Response:
        self._version(request)
        return reply(protocol.metadata(self._served))

    async def config(self, request: Request) -> Response:
        self._version(request)
        return reply(protocol.config(self._served))

    async def index(self, request: Request) -> Response:
        async with body_of(request, self._engine):
            pass  # a filter, which one model does not need
        state = {"state": "READY" if self._engine.ready else "UNAVAILABLE", "reason": ""}
        return reply([{"name": self._served.model, "version": name, **state} for name in self._served.menu.points])

    async def stats(self, request: Request) -> Response:
        version = self._version(request) if "model" in request.path_params else None
        metrics, failed = self._engine.metrics, self._engine.metrics.outcomes["error"]
        names = [version] if version else list(self._served.menu.points)
        rows = []
        for name in names:
            sums = metrics.points.get(name)
            if sums is not None or version:
                about = (sums or type(metrics.all)()).to_dict()
                rows.append({"name": self._served.model, "version": name, **about, "batch_stats": []})
        everything = {"name": self._served.model, "version": "", **metrics.all.to_dict(failed), "batch_stats": []}
        return reply({"model_stats": rows if version else [everything, *rows]})

    async def infer(self, request: Request) -> Response:
        version = self._version(request)
        async with body_of(request, self._engine) as body:
            length = request.headers.get(protocol.HEADER_LENGTH)
            asked = protocol.parse_inference(body, length, version, self._served)
            answer = await self._engine.answer(asked.ask, hangup_of(request))
        data, size = protocol.write_inference(asked, answer, self._served, version)
        if size is None:
            return Response(data, headers={"x-content-type-options": "nosniff"}, media_type="application/json")
        return Response(data, headers={protocol.HEADER_LENGTH: str(size)}, media_type="application/octet-stream")

    def _version(self, request: Request) -> str | None:
        """The version in the address, if it has one; unknown models and versions are 404."""
        model, version = request.path_params["model"], request.path_params.get("version")
        if model != self._served.model:
            raise Refusal(404, f"model {model!r:.80}: must be {self._served.model!r}")
        if version is not None and version not in self._served.menu.points:
            names = ", ".join(self._served.menu.points)
            raise Refusal(404, f"version {version!r:.80}: must be an operating point: {names}")
        return version


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{name}={text!r:.80}: must be a number")
    return number
