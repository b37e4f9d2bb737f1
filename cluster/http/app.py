"""The ASGI application around one `Api`: routes, background tasks, and the answers for errors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cluster.errors import ApiError, invalid
from cluster.http import bodies, debug, keys, openai, paths, prompts
from cluster.http.completions import Completion, while_connected
from cluster.http.limits import HOLD, BodyLimit, label_of
from cluster.http.responses import TOKEN_COST, error_response, json_response
from cluster.http.state import DEBUG_DEADLINE_S, Api
from cluster.http.threads import LONG, Pace
from cluster.metrics import CONTENT_TYPE, Record

log = logging.getLogger("kvatlas.ingress")

_A = TypeVar("_A", bound=openai.Asked)

COLLECT_S, LATEST_S = 30.0, 600.0
"""How often garbage in cycles is looked for while no answer holds log-probabilities, and at least.
A full collection looks at all objects, and theirs are millions."""

NEVER = 1 << 30
"""Collections of younger objects, before one of all."""

SWITCH_S = 0.001
"""Python's switch interval in an ingress: how long a thread may keep the interpreter lock."""

STAYS = "x-request-disconnect-disabled"
"""A header that makes Serve's proxy hide a disconnect. Refused: a request ends with its client."""

REREAD_S = 5.0
"""How often files of keys are read again."""

PAUSE_S = 1.0
"""How long a background task that failed waits before it runs again."""


class _App(FastAPI):
    """Lets web pages of these origins read every answer. Starlette's own place for middleware is
    inside of what answers unexpected errors."""

    def __init__(self, origins: Sequence[str], **options: Any) -> None:
        super().__init__(**options)
        self._origins = origins

    def build_middleware_stack(self) -> ASGIApp:
        app = super().build_middleware_stack()
        if self._origins:
            every = ["*"]
            app = CORSMiddleware(app, self._origins, every, every, expose_headers=every)
        return paths.Paths(app)


def build_app(api: Api, *, echo_label: bool = True) -> FastAPI:
    """The ASGI application. `echo_label` is off behind Serve, which answers with the client's
    X-Request-Id itself."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks: dict[str, Callable[[], Awaitable[None]]] = {
            "following gangs": api.gangs.update,
            "telling who lives": api.dispatcher.tell,
            "following the index": api.follower.turn,
            "collecting garbage": partial(_collect, api),
        }
        if api.resources is not None:
            tasks["watching resources"] = api.resources.turn
        if api.config.server.api_keys_file or api.config.server.admin_key_file:
            tasks["reading keys"] = partial(_reread_keys, api)
        async with background(tasks, api.metrics.background_failure):
            yield
        api.gangs.close()
        api.text.close()

    origins = [o.strip() for o in (api.config.server.cors_origins or "").split(",") if o.strip()]
    app = _App(origins, title="kvatlas", lifespan=lifespan, redirect_slashes=False)
    app.add_middleware(api.gate.around)
    app.add_middleware(
        BodyLimit,
        limits=lambda: api.config.limits,
        tenant=lambda scope: api.access.owner(Request(scope)),
        echo=echo_label,
    )
    app.add_exception_handler(ApiError, partial(_on_api_error, api))
    app.add_exception_handler(HTTPException, partial(_on_http_error, app))
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_any_error)
    _add_completions(app, api)
    _add_text(app, api)
    _add_state(app, api)
    debug.add_debug(app, api)
    return app


@contextlib.asynccontextmanager
async def background(
    works: Mapping[str, Callable[[], Awaitable[None]]], on_failure: Callable[[str], None]
) -> AsyncIterator[None]:
    """Run each of `works` repeatedly until the `with` block ends. An exception is logged, and
    `on_failure` gets the name of the one that raised it."""

    async def repeat(name: str, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception:
                log.exception("%s failed; it runs again", name)
                on_failure(name)
                await asyncio.sleep(PAUSE_S)

    tasks = [asyncio.create_task(repeat(*named)) for named in works.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _collect(api: Api) -> None:
    until_s = time.monotonic() + LATEST_S
    await asyncio.sleep(COLLECT_S)
    while api.scores and time.monotonic() < until_s:
        await asyncio.sleep(COLLECT_S)
    gc.collect()


async def _reread_keys(api: Api) -> None:
    await asyncio.sleep(REREAD_S)
    await api.reread_keys()


async def _on_api_error(api: Api, request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    api.metrics.answered(request.scope["route"].path, error.status)
    return error_response(error)


async def _on_http_error(app: FastAPI, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, path, message = error.status_code, request.url.path, str(error.detail)
    if status == 404:
        routes = (route.path for route in app.routes if isinstance(route, Route))
        message = paths.unknown(path, dict.fromkeys(routes))
    elif status == 405:
        message = f"{path} takes no {request.method}, see the header Allow"
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
    return error_response(ApiError(status, code, message), error.headers)


async def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # the client left while it sent the body; nobody reads this


async def _on_any_error(request: Request, error: Exception) -> Response:
    # Starlette logs the traceback; the client gets only the type.
    message = f"the server failed on {request.url.path}: {type(error).__name__}"
    return error_response(ApiError(500, "internal_error", message))


async def whole(request: Request, pace: Pace) -> bytes:
    """The body. The request does not keep it, as it would by `body()` for as long as it lives."""
    parts = [part async for part in request.stream()]
    await pace(sum(map(len, parts)) // bodies.BYTES_PART)
    return b"".join(parts)


def _body_docs(kind: type[Any]) -> dict[str, Any]:
    schema = {"schema": kind.model_json_schema()}
    return {"requestBody": {"content": {"application/json": schema}, "required": True}}


def _add_completions(app: FastAPI, api: Api) -> None:
    def answering(chat: bool) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            tenant = api.access.tenant(request)
            if "?1" in request.headers.getlist(STAYS):
                raise invalid(f"{STAYS} is not supported: a request ends with its client", STAYS)
            label, shown = label_of(request.headers), keys.shown(tenant)
            record = Record(request.url.path, time.monotonic(), label=label, tenant=shown)
            timeout = request.headers.get(openai.TIMEOUT_HEADER, "")
            body = await whole(request, Pace(api.turns, tenant))
            return Completion(api, body, record, chat=chat, tenant=tenant, timeout=timeout)

        return answer

    app.post("/v1/chat/completions", openapi_extra=_body_docs(openai.ChatRequest))(answering(True))
    app.post("/v1/completions", openapi_extra=_body_docs(openai.CompletionRequest))(
        answering(False)
    )

    def card() -> dict[str, Any]:
        return {
            "id": api.model,
            "object": "model",
            "created": api.created,
            "owned_by": "kvatlas",
            "max_model_len": max(api.gangs.limits().values(), default=None),
        }

    @app.get("/v1/models", dependencies=[Depends(api.access.tenant)])
    async def models() -> Response:
        return json_response({"object": "list", "data": [card()]})

    @app.get("/v1/models/{model:path}", dependencies=[Depends(api.access.tenant)])
    async def model(model: str) -> Response:
        openai.check_model(model, api.model)
        return json_response(card())


def _add_text(app: FastAPI, api: Api) -> None:
    async def read(request: Request, kind: type[_A], pace: Pace) -> _A:
        body, hold = await whole(request, pace), request.scope[HOLD]
        limits, threads = api.config.limits, api.text.threads
        return await bodies.read(kind, body, limits, pace=pace, threads=threads, hold=hold)

    @app.post("/v1/tokenize", include_in_schema=False)
    @app.post("/tokenize", openapi_extra=_body_docs(openai.TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        tenant = api.access.tenant(request)
        pace = Pace(api.turns, tenant)
        asked = await read(request, openai.TokenizeRequest, pace)
        served = await while_connected(request.receive, api.served())
        openai.check_model(asked.model, served.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise invalid("one of prompt and messages is needed", "prompt")
        ids = await while_connected(request.receive, _ids(api, asked, served, tenant))
        if len(ids) > served.max_model_len:  # their JSON would stop the event loop for long
            param = "messages" if asked.prompt is None else "prompt"
            raise openai.too_long(f"{param} has {len(ids)} tokens", served, param)
        found = {"count": len(ids), "max_model_len": served.max_model_len, "tokens": ids}
        if asked.return_token_strs:
            found["token_strs"] = strings = list[str]()
            for start in range(0, len(ids), most := LONG // TOKEN_COST):
                await pace(LONG)
                strings += [api.text.token(token)[0] for token in ids[start : start + most]]
        await pace(len(ids))
        return json_response(found)

    @app.post("/v1/detokenize", include_in_schema=False)
    @app.post("/detokenize", openapi_extra=_body_docs(openai.DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        tenant = api.access.tenant(request)
        pace = Pace(api.turns, tenant)
        asked = await read(request, openai.DetokenizeRequest, pace)
        served = await while_connected(request.receive, api.served())
        openai.check_model(asked.model, served.model)
        prompts.check_ids(asked.tokens, served, "tokens", "tokens must be a list of token ids")
        skip = asked.skip_special_tokens
        work = api.text.decode(asked.tokens, skip_special=skip, tenant=tenant)
        return json_response({"prompt": await while_connected(request.receive, work)})


async def _ids(
    api: Api, asked: openai.TokenizeRequest, served: openai.Served, tenant: str
) -> list[int]:
    if asked.prompt is not None:
        texts, special = [asked.prompt], asked.add_special_tokens
        return (await api.text.encode(texts, special=special, tenant=tenant, served=served))[0]
    return await api.text.encode_chat(
        prompts.conversation(asked.messages or [], served),
        tenant=tenant,
        served=served,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        variables=asked.chat_template_kwargs,
    )


def _add_state(app: FastAPI, api: Api) -> None:
    @app.get("/ping")
    @app.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": metadata.version("kvatlas")})

    @app.get("/health/ready")
    async def ready(request: Request) -> Response:
        report = api.report(processes=api.access.sees_processes(request))
        return json_response(report, 200 if report["ready"] else 503)

    @app.get("/metrics", dependencies=[Depends(api.access.admin)])
    async def metrics() -> Response:
        await api.gangs.refresh(DEBUG_DEADLINE_S)
        states, missing = await api.all_states()
        headers = {"x-kvatlas-missing": "ingresses"} if missing else None
        return Response(api.metrics.text(states), headers=headers, media_type=CONTENT_TYPE)


def keep_turning() -> None:
    """Keep pauses of this process's event loop short; call it once all is loaded.

    By default a garbage collection scans all that was ever imported (123 ms with a tokenizer), or
    all that large answers hold (50 ms each). So `_collect` chooses when. And a thread that renders
    a chat template keeps the interpreter lock for 5 ms at a time.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    sys.setswitchinterval(SWITCH_S)
