"""Streamed completions, with the arrival time of every chunk."""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stream:
    """One streamed completion, read by its own thread."""

    host: str
    port: int
    prompt: str
    tokens: int
    text: str = ""
    arrived_s: list[float] = field(default_factory=list)
    error: str | None = None
    id: str | None = None
    ended: bool = False
    took_s: float = 0.0

    def start(self) -> Stream:
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        body = {
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        began_s = time.monotonic()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body))
            answer = connection.getresponse()
            if answer.status != 200:
                self.error = f"{answer.status}: {answer.read().decode()[:300]}"
                return
            for line in answer:
                self._take(line.decode().strip())
            if not self.ended:
                self.error = self.error or "the stream ended without [DONE]"
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
            self.took_s = time.monotonic() - began_s

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.ended = True
        elif line.startswith("data: "):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                self.error = chunk["error"]["message"]
                return
            self.id = chunk["id"]
            if text := chunk["choices"][0]["text"]:
                self.text += text
                self.arrived_s.append(time.monotonic())

    @property
    def done(self) -> bool:
        return self.ended or self.error is not None

    @property
    def longest_gap_s(self) -> float:
        gaps = (b - a for a, b in zip(self.arrived_s, self.arrived_s[1:], strict=False))
        return max(gaps, default=0.0)
