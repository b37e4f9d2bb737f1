"""The commands of `kvatlas`. Heavy modules are imported only when they are needed."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from cluster import quickstart
from cluster.errors import UserError
from cluster.http.keys import ADMIN_KEY, Access
from cluster.serve.local import serve_here, table
from cluster.tools.bench import command as load_bench
from cluster.tools.capacity import command as capacity
from cluster.tools.context import command as context
from cluster.tools.replay import command as replay
from configs.loading import ConfigError, load
from configs.schema import Config

USAGE_ERROR, INTERRUPTED = 2, 130

WHERE_S = 30.0
"""How long `kvatlas where` waits for each part of the answer."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return run(lambda: options.run(options))


def run(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; a UserError becomes one message and code 2."""
    try:
        return command()
    except UserError as error:
        print(f"kvatlas: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvatlas", description="LLM serving on Ray")
    commands = parser.add_subparsers(required=True, metavar="command")
    serve = commands.add_parser("serve", help="start a server on this machine")
    serve.set_defaults(run=_serve)
    check = commands.add_parser("check", help="print the memory plan, start nothing")
    check.set_defaults(run=_check)
    check.add_argument("file", nargs="?", metavar="CONFIG", help="a YAML file of settings")
    for command in (serve, check):
        command.add_argument("--config", metavar="FILE", help="a YAML file of settings")
        command.add_argument(
            "--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
            help="one setting, may be repeated; docs/configuration.md lists them",
        )  # fmt: skip
    capacity.arguments(commands.add_parser("capacity", help="how many sequences fit in a memory"))
    replay.arguments(
        commands.add_parser("replay", help="what a routing policy is worth on a trace")
    )
    bench = commands.add_parser("bench", help="load on a live server, and what its clients see")
    load_bench.arguments(bench)
    others = bench.add_subparsers(metavar="context")
    context.arguments(
        others.add_parser("context", help="context parallelism: exchanges, balance, capacity")
    )
    where = commands.add_parser("where", help="where a token lies, or whose tokens a block holds")
    where.set_defaults(run=_where)
    where.add_argument("request", nargs="?", help="the id in the answer, or from /debug/requests")
    where.add_argument("token", nargs="?", type=int, help="counted from 0, prompt included")
    where.add_argument("--block", type=int, help="whose tokens lie in this physical block")
    where.add_argument("--rank", type=int, default=0, help="of which worker of the gang (0)")
    where.add_argument("--gang", default="", help="of which gang; needed where there are several")
    where.add_argument("--group", type=int, default=0, help="of which layer group (0)")
    where.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    return parser


def _config(options: argparse.Namespace) -> Config:
    try:
        config = load(options.config or getattr(options, "file", None), options.set)
    except ConfigError as error:
        raise UserError(str(error)) from None
    Access(config.server, os.environ, behind_proxy=False)  # raises where its keys cannot be used
    return config


def _model(config: Config) -> Path:
    return quickstart.resolve(config.model.path, config.model.revision, say=say)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _serve(options: argparse.Namespace) -> int:
    config = _config(options)
    return serve_here(config, str(_model(config)), say=say)


def _check(options: argparse.Namespace) -> int:
    config = _config(options)
    directory = _model(config)
    from worker.execution.model import UnsupportedModel
    from worker.startup.memory import DoesNotFit
    from worker.startup.start import resolve

    for pool in config.pools:
        try:
            spec = resolve(config.of_pool(pool), directory, ranks=pool.gang_size)
        except (DoesNotFit, UnsupportedModel) as error:
            raise UserError(f"pool {pool.name}: {error}" if pool.name else str(error)) from None
        if pool.name:
            of = "one worker" if pool.gang_size == 1 else f"each of {pool.gang_size} workers"
            print(f"pool {pool.name}, {of}:")
        print(table(spec.table()))
    return 0


def _where(options: argparse.Namespace) -> int:
    if (options.block is None) == (options.token is None):
        raise UserError("ask for a REQUEST and a TOKEN, or for a --block")
    names = ("request", "token") if options.block is None else ("block", "rank", "group", "gang")
    query = urlencode({name: getattr(options, name) for name in names}, quote_via=quote)
    print(json.dumps(_answer(options.url, f"/debug/where?{query}"), indent=2))
    return 0


def _answer(url: str, path: str) -> Any:
    """The JSON that a server at `url`, which may have a path of its own, answers. Raises UserError.
    No proxy is asked, and the admin key goes over TLS where the URL says https."""
    address = urlsplit(url)
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    try:
        kind, host, port = kinds.get(address.scheme), address.hostname, address.port
    except ValueError as error:  # the port is no number
        raise UserError(f"--url {url}: {error}") from None
    if kind is None or not host:
        raise UserError(f"--url must be http://HOST[:PORT][/PATH] or https://..., got {url!r}")
    key = os.environ.get(ADMIN_KEY)
    connection = kind(host, port, timeout=WHERE_S)
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request("GET", address.path.rstrip("/") + path, headers=headers)
        response = connection.getresponse()
        body = json.loads(response.read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(f"{url} does not answer: {error}") from None
    finally:
        connection.close()
    if response.status != 200:
        reason = body.get("error") if isinstance(body, dict) else None
        raise UserError(str(reason["message"] if reason else body))
    return body


if __name__ == "__main__":
    sys.exit(main())
