"""Logging of this project: one line per record on standard error, for people or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from cluster.metrics import Record


class JsonLines(logging.Formatter):
    """Log lines as JSON objects, with the fields of a request's `Record` if the line has one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if isinstance(done := getattr(record, "record", None), Record):
            line["request"] = {name: getattr(done, name) for name in Record.__slots__}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(level: str, *, as_json: bool) -> None:
    """Send what this project logs to standard error, one line each."""
    # Serve redirects sys.stderr of a replica into its own log file; people read the console.
    handler = logging.StreamHandler(sys.__stderr__)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonLines() if as_json else plain)
    root = logging.getLogger("kvatlas")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
