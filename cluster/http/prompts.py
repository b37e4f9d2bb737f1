"""Checks prompts and chat messages, and converts them to the form that the tokenizer takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.errors import invalid
from cluster.http.bodies import shown
from cluster.http.openai import Served, too_long
from cluster.http.threads import Pace

IDS_PART = 16
"""Token ids that cost 1 to check on the event loop, see `threads.LONG`."""

ROLES = ("system", "developer", "user", "assistant")


async def prompts(raw: Any, served: Served, pace: Pace) -> list[str | list[int]]:
    """The prompts of a completion: a text, a list of texts, token ids, or a list of such lists."""
    if isinstance(raw, str):
        return [raw]
    wanted = "prompt must be a text, a list of texts, token ids or a list of lists of token ids"
    if not isinstance(raw, list) or not raw:
        raise invalid(f"{wanted}, not empty", "prompt")
    if type(raw[0]) is int:
        return [await _ids(raw, served, wanted, pace)]
    if len(raw) > (most := served.limits.max_prompts):
        message = f"prompt may hold {most} prompts (limits.max_prompts), got {len(raw)}"
        raise invalid(message, "prompt")
    if all(isinstance(part, str) for part in raw):
        return list(raw)
    if all(isinstance(part, list) for part in raw):
        return [await _ids(part, served, wanted, pace) for part in raw]
    raise invalid(wanted, "prompt")


async def _ids(raw: list[Any], served: Served, wanted: str, pace: Pace) -> list[int]:
    if not raw:
        raise invalid(f"{wanted}, not empty", "prompt")
    await pace(len(raw) // IDS_PART)
    check_ids(raw, served, "prompt", wanted)
    return raw


def check_ids(ids: Sequence[Any], served: Served, param: str, wanted: str) -> None:
    """Raises ApiError unless these are token ids of the model, no more than a sequence holds."""
    if len(ids) > served.max_model_len:
        raise too_long(f"{param} has {len(ids)} tokens", served, param)
    if not set(map(type, ids)) <= {int}:
        raise invalid(wanted, param)
    if ids and not (min(ids) >= 0 and max(ids) < served.vocab_size):
        raise invalid(f"{param}: token ids go from 0 to {served.vocab_size - 1}", param)


def conversation(raw: Sequence[Any], served: Served) -> list[dict[str, str]]:
    """Messages as the chat template takes them: role, one text, and a name if given."""
    if not raw:
        raise invalid("messages must hold at least one message", "messages")
    parts = sum(
        len(m["content"]) for m in raw if type(m) is dict and type(m.get("content")) is list
    )
    if len(raw) + parts > (most := served.limits.max_messages):
        counted = f"got {len(raw)} with {parts} parts" if parts else f"got {len(raw)}"
        message = f"messages may hold {most} messages and parts (limits.max_messages), {counted}"
        raise invalid(message, "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(raw)]


def _message(raw: Any, where: str) -> dict[str, str]:
    if not isinstance(raw, dict):
        raise invalid(f"{where} must be an object with role and content, got {shown(raw)}", where)
    role = raw.get("role")
    if role not in ROLES:
        named = f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}"
        raise invalid(named, f"{where}.role")
    if raw.get("tool_calls") or raw.get("function_call"):
        asked = f"{where}: tool calls are not supported"
        raise invalid(asked, f"{where}.tool_calls", code="unsupported_parameter")
    message = {"role": "system" if role == "developer" else role}
    content = raw.get("content")
    if role == "assistant" and not content:  # as histories have it after a tool call or a refusal
        content = raw.get("refusal") or ""
    message["content"] = _content(content, f"{where}.content")
    if isinstance(raw.get("name"), str):
        message["name"] = raw["name"]
    return message


def _content(raw: Any, where: str) -> str:
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list) or not raw:
        raise invalid(f"{where} must be a text or a list of text parts", where)
    texts = []
    for part in raw:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
            continue
        if kind not in (None, "text"):
            message = f"{where}: parts of type {shown(kind)} are not supported, only text"
            raise invalid(message, where, code="unsupported_parameter")
        if kind is None or not isinstance(part.get("text"), str):
            raise invalid(f'{where}: a part is {{"type": "text", "text": ...}}', where)
        texts.append(part["text"])
    return "".join(texts)
