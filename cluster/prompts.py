"""Prompts and conversations: the part of a request that becomes tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import invalid
from cluster.openai import Served

MAX_PROMPTS = 256
"""Prompts in one request; each is a request of its own to the engine."""

ROLES = ("system", "developer", "user", "assistant")
_RESERVED = ("messages", "tokenize", "chat_template", "add_generation_prompt", "tools", "documents")


def prompts(raw: Any, served: Served) -> list[str | list[int]]:
    """The prompts of a completion: a text, a list of them, token ids, or a list of lists."""
    if isinstance(raw, str):
        return [raw]
    wanted = "prompt must be a text, a list of texts, token ids or a list of lists of token ids"
    if not isinstance(raw, list) or not raw:
        raise invalid(f"{wanted}, not empty", "prompt")
    if type(raw[0]) is int:
        return [_ids(raw, served, wanted)]
    if len(raw) > MAX_PROMPTS:
        raise invalid(f"prompt may hold {MAX_PROMPTS} prompts, got {len(raw)}", "prompt")
    if all(isinstance(part, str) for part in raw):
        return list(raw)
    if all(isinstance(part, list) for part in raw):
        return [_ids(part, served, wanted) for part in raw]
    raise invalid(wanted, "prompt")


def _ids(raw: list[Any], served: Served, wanted: str) -> list[int]:
    if not raw or not set(map(type, raw)) <= {int}:
        raise invalid(f"{wanted}, not empty", "prompt")
    check_ids(raw, served, "prompt")
    return raw


def check_ids(ids: Sequence[int], served: Served, param: str) -> None:
    """Raises unless every id is a token of the model."""
    if ids and not (min(ids) >= 0 and max(ids) < served.vocab_size):
        raise invalid(f"{param}: token ids go from 0 to {served.vocab_size - 1}", param)


def conversation(raw: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Messages as the chat template takes them: role, one text, perhaps a name."""
    if not raw:
        raise invalid("messages must hold at least one message", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(raw)]


def _message(raw: Mapping[str, Any], where: str) -> dict[str, str]:
    role = raw.get("role")
    if role not in ROLES:
        named = f"{where}.role must be one of {', '.join(ROLES)}, got {repr(role)[:80]}"
        raise invalid(named, f"{where}.role")
    if raw.get("tool_calls") or raw.get("function_call"):
        asked = f"{where}: tool calls are not supported"
        raise invalid(asked, f"{where}.tool_calls", code="unsupported_parameter")
    message = {"role": "system" if role == "developer" else role}
    message["content"] = _content(raw.get("content"), f"{where}.content")
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
        if kind not in (None, "text"):
            message = f"{where}: parts of type {repr(kind)[:80]} are not supported, only text"
            raise invalid(message, where, code="unsupported_parameter")
        if kind is None or not isinstance(part.get("text"), str):
            raise invalid(f'{where}: a part is {{"type": "text", "text": ...}}', where)
        texts.append(part["text"])
    return "".join(texts)


def template_variables(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """`chat_template_kwargs` without a way to replace what the server itself passes."""
    for name in _RESERVED:
        if name in raw:
            raise invalid(f"chat_template_kwargs may not set {name}", "chat_template_kwargs")
    return raw
