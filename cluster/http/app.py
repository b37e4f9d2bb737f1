"""The HTTP side: routes, and what all of them share. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from cluster.errors import ApiError, invalid
from cluster.http import bodies, debug, keys, openai, prompts
from cluster.http.background import background
from cluster.http.completions import Completion, while_there
from cluster.http.keys import Access
from cluster.http.limits import BodyLimit, label_of, printable
from cluster.http.peers import Peers, Said, merged
from cluster.http.responses import dumps
from cluster.http.text import TextService
from cluster.http.ui.page import add_map
from cluster.metrics import CONTENT_TYPE, Metrics, Record
from cluster.routing.block_hashes import Identities
from cluster.routing.calls import Handle, Refused
from cluster.routing.dispatch import Dispatcher
from cluster.routing.index import Mirror
from cluster.routing.registry import Gangs
from cluster.routing.router import Router
from cluster.routing.sync import Follower, Hub
from cluster.routing.waiting import Waiting
from cluster.serve.resources import Supply
from configs.schema import Config

log = logging.getLogger("kvatlas.ingress")
requests_log = logging.getLogger("kvatlas.requests")

DEBUG_DEADLINE_S = 2.0

SWITCH_S = 0.001
"""How long a thread of an ingress may keep the interpreter when another wants it."""

STAYS = "x-request-disconnect-disabled"
"""Tells Serve's proxy not to say when the client has gone."""

REREAD_S = 5.0
"""How often files of keys are read again."""


class Api:
    """What one ingress has: the workers' handle, those that Serve lists, the tokenizer, metrics."""

    def __init__(
        self,
        config: Config,
        model: str,
        handle: Handle,
        tokenizer: Any,
        *,
        name: str,
        key: bytes,
        listed: Callable[[], frozenset[str]],
        hub: Hub,
        peers: Peers,
    ) -> None:
        self.config, self.name, self.peers = config, name, peers
        self.access = Access(config.server, os.environ)
        self.model = model
        self.text = TextService(tokenizer)
        self.identities = Identities(key)
        self.gangs = Gangs(
            handle,
            listed,
            ingress=name,
            model=model,
            period_s=config.cluster.health_period_s,
            timeout_s=config.cluster.health_timeout_s,
            step_timeout_s=config.cluster.step_timeout_s,
            on_failure=lambda: self.metrics.background_failure("watch"),
            check=self.identities.problem,
        )
        self.mirror = Mirror()
        self.follower = Follower(name, self.mirror, hub, time.monotonic)
        router = Router(
            self.gangs,
            self.mirror,
            self.identities,
            name=name,
            share=lambda: (self.follower.at, self.follower.ingresses),
            config=lambda: self.config,
            clock=time.monotonic,
        )
        self.waiting = Waiting(lambda: self.config)
        self.dispatcher = Dispatcher(self.gangs, handle, router, self.waiting, name=name)
        self.metrics = Metrics(model, name, self.gangs.snapshots)
        self.created = int(time.time())
        self.supply: Supply | None = None
        self.labels: dict[str, str] = {}  # the clients' names of what the engine is working on

    async def served(self) -> openai.Served:
        """What is served, once a worker can take a request.

        Raises 429 and 503, see `Waiting.until`.
        """

        def info() -> dict[str, Any] | None:
            return self.gangs.info if self.gangs.ready() else None

        def failure(passed: str) -> ApiError:
            code = "no_capacity" if self.gangs.info is None else "worker_lost"
            message = f"{self.model} is not ready {passed}: {self.gangs.complaint}"
            return ApiError(503, code, message, retry_after_s=1)

        return self._served(await self.waiting.until(info, failure))

    def _served(self, info: dict[str, Any]) -> openai.Served:
        limits = self.gangs.limits()
        return openai.Served(
            model=self.model,
            max_model_len=max(limits.values()),
            vocab_size=info["vocab_size"],
            max_beam_width=info["max_beam_width"],
            limits=self.config.limits,
            strict=self.config.server.strict_params,
            pools=dict(sorted(limits.items(), key=lambda pool: pool[1])),
            silent=[p.name for p in self.config.pools if p.name not in limits],
        )

    def says(self) -> Said:
        """What this ingress knows that the others do not."""
        return Said(self.name, self.metrics.own(), dict(self.labels))

    async def all_say(self) -> tuple[list[Said], dict[str, Any]]:
        """What all ingresses know, and a `missing` entry where others do not answer in time."""
        try:
            return [self.says(), *await self.peers.all()], {}
        except Exception as error:
            log.warning("the other ingresses do not answer: %s", error)
            return [self.says()], {"missing": {"ingresses": type(error).__name__}}

    def finished(self, record: Record) -> None:
        """A completion request came to its end, whatever that was."""
        self.metrics.finished(record)
        requests_log.info(record.line(), extra={"record": record})

    async def reread_keys(self) -> None:
        """Use what the files of keys hold now; what is wrong with them is logged and counted."""
        before = self.access.problem
        if await asyncio.to_thread(self.access.reread):
            log.info("the keys have changed")
        if problem := self.access.problem:
            self.metrics.background_failure("keys")
            if problem != before:
                log.warning("the keys of before stay in use: %s", problem)

    def report(self) -> dict[str, Any]:
        """The body of `/health/ready`."""
        problem = "files of keys have changed and cannot be used, the log says why"
        problems = [problem] if self.access.problem else []
        if self.supply is not None and self.supply.problem:
            problems.append(self.supply.problem)
        return {**self.gangs.report(), "problems": problems}

    async def debug(self, method: str, *arguments: Any) -> tuple[list[Any], dict[str, Any]]:
        """What each worker answers, and a `missing` entry where some do not in time.

        Raises 400 where a worker refused, 503 where none answered.
        """
        answers, errors = await self.gangs.ask_all(method, *arguments, deadline_s=DEBUG_DEADLINE_S)
        for error in errors.values():
            if isinstance(error, Refused):
                raise invalid(str(error)) from None
        if not answers:
            message = "; ".join(map(str, errors.values())) or self.gangs.complaint
            raise ApiError(503, "worker_lost", message, retry_after_s=1)
        missing = {gang: str(error) for gang, error in errors.items()}
        return list(answers.values()), {"missing": missing} if missing else {}


def build_app(api: Api, *, echo_label: bool = True) -> FastAPI:
    """The ASGI application. `echo_label` is off behind Serve, which answers with the client's
    X-Request-Id itself."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        works = {"following gangs": api.gangs.update, "telling who lives": api.dispatcher.tell}
        works["following the index"] = api.follower.turn
        if api.supply is not None:
            works["watching resources"] = api.supply.turn
        if api.access.from_files:
            works["reading keys"] = partial(_reread_keys, api)
        async with background(works, api.metrics.background_failure):
            yield
        api.gangs.close()
        api.text.close()

    app = FastAPI(title="kvatlas", lifespan=lifespan)
    app.add_middleware(BodyLimit, limits=lambda: api.config.limits, echo=echo_label)
    app.add_exception_handler(ApiError, _on_api_error(api))
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_any_error)
    _add_completions(app, api)
    _add_text(app, api)
    _add_state(app, api)
    add_map(app, api)
    return app


def _json(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumps(body), status, headers, media_type="application/json")


async def _reread_keys(api: Api) -> None:
    await asyncio.sleep(REREAD_S)
    await api.reread_keys()


def _on_api_error(api: Api) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        api.metrics.answered(request.scope["route"].path, error.status)
        return _json(error.body(), error.status, error.headers())

    return answer


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    answer = ApiError(error.status_code, code, str(error.detail))
    return _json(answer.body(), answer.status, {**(error.headers or {}), **answer.headers()})


async def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # in the middle of the body: nobody reads this


async def _on_any_error(request: Request, error: Exception) -> Response:
    # Starlette logs the trace; this is what the client is told.
    message = f"the server failed on {request.url.path}: {type(error).__name__}"
    answer = ApiError(500, "internal_error", message)
    return _json(answer.body(), answer.status, answer.headers())


def _body_docs(kind: type[Any]) -> dict[str, Any]:
    schema = {"schema": kind.model_json_schema()}
    return {"requestBody": {"content": {"application/json": schema}, "required": True}}


def _add_completions(app: FastAPI, api: Api) -> None:
    def answering(chat: bool) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            tenant = api.access.tenant(request)
            if "?1" in request.headers.getlist(STAYS):
                raise invalid(f"{STAYS} is not supported: a request ends with its client", STAYS)
            label, whose = label_of(request.headers), keys.shown(tenant)
            record = Record(request.url.path, time.monotonic(), label=label, tenant=whose)
            timeout = request.headers.get(openai.TIMEOUT_HEADER, "")
            body = await request.body()
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
        return _json({"object": "list", "data": [card()]})

    @app.get("/v1/models/{model:path}", dependencies=[Depends(api.access.tenant)])
    async def model(model: str) -> Response:
        if model != api.model:
            message = f"the model {model[:80]!r} is not served here, served is {api.model!r}"
            raise ApiError(404, "model_not_found", message, param="model")
        return _json(card())


def _add_text(app: FastAPI, api: Api) -> None:
    keyed: dict[str, Any] = {"dependencies": [Depends(api.access.tenant)]}

    @app.post("/tokenize", openapi_extra=_body_docs(openai.TokenizeRequest), **keyed)
    async def tokenize(request: Request) -> Response:
        asked = bodies.parse(openai.TokenizeRequest, await request.body())
        served = await while_there(request, api.served())
        openai.check_model(asked.model, served)
        if (asked.prompt is None) == (asked.messages is None):
            raise invalid("one of prompt and messages is needed", "prompt")
        if asked.prompt is not None:
            ids = (await api.text.encode([asked.prompt], special=asked.add_special_tokens))[0]
        else:
            ids = await api.text.encode_chat(
                prompts.conversation(asked.messages or [], served),
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                variables=asked.chat_template_kwargs,
            )
        body = {"count": len(ids), "max_model_len": served.max_model_len, "tokens": ids}
        if asked.return_token_strs:
            body["token_strs"] = [api.text.token(token)[0] for token in ids]
        return _json(body)

    @app.post("/detokenize", openapi_extra=_body_docs(openai.DetokenizeRequest), **keyed)
    async def detokenize(request: Request) -> Response:
        asked = bodies.parse(openai.DetokenizeRequest, await request.body())
        served = await while_there(request, api.served())
        openai.check_model(asked.model, served)
        prompts.check_ids(asked.tokens, served, "tokens", "tokens must be a list of token ids")
        skip = asked.skip_special_tokens
        return _json({"prompt": await api.text.decode(asked.tokens, skip_special=skip)})


def _add_state(app: FastAPI, api: Api) -> None:
    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/health/ready")
    async def ready() -> Response:
        report = api.report()
        return _json(report, 200 if report["ready"] else 503)

    inside: dict[str, Any] = {"dependencies": [Depends(api.access.admin)]}

    @app.get("/metrics", **inside)
    async def metrics() -> Response:
        await api.gangs.refresh(DEBUG_DEADLINE_S)
        (own, *others), missing = await api.all_say()
        headers = {"x-kvatlas-missing": "ingresses"} if missing else None
        text = api.metrics.text(merged(own, others))
        return Response(text, headers=headers, media_type=CONTENT_TYPE)

    @app.get("/debug/kv", **inside)
    async def debug_kv() -> Response:
        gangs, missing = await api.debug("debug_kv")
        return _json({"gangs": gangs, **missing})

    @app.get("/debug/index", **inside)
    async def debug_index() -> Response:
        await api.gangs.refresh(DEBUG_DEADLINE_S)
        own = {gang: stats["index"] for gang, stats in api.gangs.snapshots().items()}
        known = api.mirror.report()
        return _json({"ingress": api.dispatcher.name, "gangs": known, "own": own})

    @app.post("/debug/flush", **inside)
    async def debug_flush() -> Response:
        flushed, missing = await api.debug("flush")
        return _json({"flushed": sum(flushed), **missing})

    @app.get("/debug/requests", **inside)
    async def debug_requests(request: Request) -> Response:
        label = request.query_params.get("label")
        found, missing = await api.debug("debug_requests")
        said, unsaid = await api.all_say()
        labels = {name: given for each in said for name, given in each.labels.items()}
        named = [
            {**entry, "label": labels.get(entry["request"])} for some in found for entry in some
        ]
        if label is not None:
            named = [entry for entry in named if entry["label"] == printable(label)]
        return _json({"requests": named, **unsaid, **missing})

    @app.get("/debug/where", **inside)
    async def debug_where(request: Request) -> Response:
        return _json(await debug.answer(api, request.query_params))


def keep_turning() -> None:
    """Tell this process to stop its event loop as briefly as it can, once all is loaded.

    Left alone, a collection looks at all that was ever imported (123 ms with a tokenizer), and a
    thread that renders a chat template keeps the interpreter for 5 ms each time it has it.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)
