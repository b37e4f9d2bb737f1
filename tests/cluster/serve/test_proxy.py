from __future__ import annotations

import warnings

import pytest
from starlette.types import Receive, Scope, Send

from cluster.serve import proxy

pytestmark = pytest.mark.anyio
Fields = list[tuple[bytes, bytes]]


def test_serve_finds_what_the_environment_names() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pydantic, about Ray Serve
        from ray.serve._private import constants
        from ray.serve._private.http_util import validate_http_proxy_callback_return
        from ray.serve._private.utils import call_function_from_import_path

    ((name, path),) = proxy.CALLBACK.items()
    assert hasattr(constants, name)
    (found,) = validate_http_proxy_callback_return(call_function_from_import_path(path))
    assert found.cls is proxy.OneLabel


@pytest.mark.parametrize(
    ("labels", "kept"),
    [
        ([], []),
        ([b"mine"], [b"mine"]),
        ([b"mine", b"other"], [b"mine"]),
        ([b"x" * (1 << 20)], [b"x" * 128]),
        ([b"caf\xc3\xa9\xff\x00\t1"], [b"caf1"]),
        ([b"\xff\xfe"], []),
        ([b""], []),
    ],
)
async def test_a_label_is_short_and_printable(labels: list[bytes], kept: list[bytes]) -> None:
    seen = list[Fields]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["headers"])

    async def nothing(*_: object) -> None:
        raise AssertionError

    others = [(b"host", b"x"), (b"accept", b"*/*")]
    headers = [others[0], *[(b"x-request-id", label) for label in labels], others[1]]
    await proxy.OneLabel(app)({"type": "http", "headers": headers}, nothing, nothing)  # type: ignore[arg-type]
    assert seen == [[*others, *[(b"x-request-id", label) for label in kept]]]
