"""Errors for users: `ApiError` ends a request (OpenAI's error format), `UserError` a command."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# SDKs retry these statuses without the header `x-should-retry: false`.
_FINAL_BY_DEFAULT = (408, 500, 504)


@dataclass(eq=False)
class ApiError(Exception):
    """A response of 4xx or 5xx: `code` is for programs, `message` says what would be accepted."""

    status: int
    code: str
    message: str
    param: str | None = field(default=None, kw_only=True)
    retry_after_s: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """The JSON body, also sent as the last event of a stream that fails."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, default)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Headers that say whether and when to retry, or how to authenticate."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.retry_after_s is not None:
            return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}
        return {"x-should-retry": "false"} if self.status in _FINAL_BY_DEFAULT else {}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A 400: the request itself is invalid."""
    return ApiError(400, code, message, param=param)


class UserError(Exception):
    """Ends a command: one message for people, exit code 2."""
