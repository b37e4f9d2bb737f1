from __future__ import annotations

import pytest

from cluster.errors import ApiError, invalid


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "invalid_request_error"),
        (429, "rate_limit_error"),
        (503, "server_error"),
    ],
)
def test_the_body_is_openai_s(status: int, kind: str) -> None:
    error = ApiError(status, "code", "what to do", param="top_p").body()["error"]
    assert error == {"message": "what to do", "type": kind, "param": "top_p", "code": "code"}


@pytest.mark.parametrize(("asked_s", "told"), [(0.0, "1"), (1.0, "1"), (1.01, "2"), (30, "30")])
def test_a_client_is_told_whole_seconds_to_wait(asked_s: float, told: str) -> None:
    assert ApiError(429, "c", "m", retry_after_s=asked_s).headers() == {"retry-after": told}


def test_what_would_fail_again_is_not_to_be_tried_again() -> None:
    assert ApiError(500, "c", "m").headers() == {"x-should-retry": "false"}
    assert ApiError(503, "c", "m").headers() == {}
    assert invalid("m").headers() == {}
