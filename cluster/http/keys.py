"""API keys: which tenant a request belongs to, and who may use the admin routes.

Admin routes are `/metrics`, `/debug` and `/map`. Keys come from files or the environment. Only
digests are kept, made with a random secret of each process: a digest that leaks is no key, and keys
cannot be tried against it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import Request

from cluster.errors import ApiError, UserError
from configs.schema import ServerConfig

API_KEYS, ADMIN_KEY = "KVATLAS_API_KEYS", "KVATLAS_ADMIN_KEY"
"""Environment variables. The first has pairs `tenant: key`, separated by commas or line ends; the
second has one key."""

WEIGHTS = 0.01, 100.0
"""The least and the largest weight of a tenant."""

MAX_KEYS = 1000
"""Every request is compared with all of them."""

_FILE_BYTES_MAX = 1 << 20
_TENANT = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_NUMBER = re.compile(r"\d{1,3}(\.\d{1,3})?")
_KEY = re.compile(r"[!-~]{16,512}")
_KEY_RULE = "16 to 512 visible ASCII characters"
# A proxy sends these: the address of the connection is not the client's.
_FORWARDED = frozenset({"forwarded", "via", "x-forwarded-for", "x-real-ip"})

_Line = tuple[str, str]  # where it stands, its text


class Access:
    """Which requests are allowed. Raises UserError when keys are configured but cannot be used.

    With `behind_proxy` all requests come through a proxy on this machine that does not identify
    itself. Then no client counts as local, and admin routes need the admin key.
    """

    def __init__(
        self, server: ServerConfig, environment: Mapping[str, str], *, behind_proxy: bool
    ) -> None:
        self._server = server
        self._environment = environment
        self._secret = secrets.token_bytes(32)
        self._behind_proxy = behind_proxy
        self._tenants: Sequence[tuple[str, bytes]] = ()
        self._admins: Sequence[tuple[str, bytes]] = ()
        self._weights: Mapping[str, float] = {}
        self.problem = ""  # why the files as they are now are not in use
        self._read()
        if server.require_keys and not self._tenants:
            raise UserError(
                "server.require_keys is on, and no API keys are configured: name a file of them in "
                f"server.api_keys_file, or set {API_KEYS} where the ingresses run"
            )

    @property
    def keyed(self) -> bool:
        """Whether requests need API keys, so that clients may be strangers to each other."""
        return bool(self._tenants)

    def sees_processes(self, request: Request) -> bool:
        """Whether a request may see hosts and process ids: with the admin key, and anybody where no
        keys are configured at all."""
        if not self._admins:
            return not self._tenants
        return bool(self._owner(request, self._admins))

    def reread(self) -> bool:
        """Read the files again; returns whether the keys have changed. Files that cannot be used
        change nothing and set `problem`."""
        before = self._tenants, self._admins, self._weights
        try:
            self._read()
        except UserError as error:
            self.problem = str(error)
            return False
        self.problem = ""
        return before != (self._tenants, self._admins, self._weights)

    def tenant(self, request: Request) -> str:
        """The tenant whose key the request carries; "" if none is needed. Raises 401."""
        found = self.owner(request)
        if self._tenants and not found:
            raise _unknown("a valid API key is needed")
        return found

    def owner(self, request: Request) -> str:
        """The tenant of a request; "" where it has no valid key too."""
        return self._owner(request, self._tenants) if self._tenants else ""

    def weight(self, tenant: str) -> float:
        """How much of an engine a tenant gets where others want it too, compared with 1."""
        return self._weights.get(tenant, 1.0)

    def admin(self, request: Request) -> None:
        """Raises 401 or 403 unless the request may use admin routes."""
        if self._admins:
            if not self._owner(request, self._admins):
                raise _unknown("this route needs the admin key")
        elif self._behind_proxy or not _from_here(request):
            setting = f"an admin key opens it to others (server.admin_key_file or {ADMIN_KEY})"
            message = f"{request.url.path} answers clients on the server's own machine; {setting}"
            raise ApiError(403, "admin_only", message)

    def _owner(self, request: Request, owners: Sequence[tuple[str, bytes]]) -> str:
        """The owner of the request's key, "" for none. Takes equally long for all keys: no
        comparison ends early, nor does the loop."""
        given, found = self._digest(_bearer(request)), ""
        for owner, digest in owners:
            if hmac.compare_digest(digest, given):
                found = owner
        return found

    def _read(self) -> None:
        source = f"server.api_keys_file or {API_KEYS}"
        weights, pairs = dict[str, float](), list[tuple[str, str]]()
        for line in self._lines(API_KEYS, "api_keys_file"):
            tenant, weight, key = _pair(line, source)
            pairs.append((tenant, key))
            if weights.setdefault(tenant, weight) != weight:
                raise UserError(f"{line[0]}: {tenant} has another weight in a line before")
        admins = [_key(*line) for line in self._lines(ADMIN_KEY, "admin_key_file")]
        keys = [key for _, key in pairs] + admins
        if len(set(keys)) < len(keys):
            raise UserError(f"the same key is given twice (in {source}, or as the admin key too)")
        if len(keys) > MAX_KEYS:
            raise UserError(f"at most {MAX_KEYS} keys are possible ({source}), got {len(keys)}")
        self._tenants = [(tenant, self._digest(key)) for tenant, key in pairs]
        self._admins = [("admin", self._digest(key)) for key in admins]
        self._weights = weights

    def _lines(self, variable: str, name: str) -> list[_Line]:
        """The lines with keys, none if nothing is configured. An empty file is an error."""
        file: str | None = getattr(self._server, name)
        given, setting = self._environment.get(variable), f"server.{name}"
        if given is not None and file is not None:
            raise UserError(f"{variable} and {setting} are both set: leave one out")
        if given is not None:
            found = _numbered(variable, re.split(r"[,\n]", given))
        elif file is not None:
            found = _numbered(file, _text(file, setting).splitlines())
        else:
            return []
        if not found:
            raise UserError(f"{file or variable} holds no key: leave {setting} and {variable} out")
        return found

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode(), key=self._secret, digest_size=32).digest()


def salt(tenant: str, cache_salt: str) -> str:
    """The salt of block hashes, which keeps apart the cached prompts of tenants and cache salts.

    It is empty if both are. No two pairs give the same salt.
    """
    if not tenant and not cache_salt:
        return ""
    made = hashlib.blake2b(digest_size=32, person=b"kvatlas-salt")
    for part in (tenant.encode(), cache_salt.encode()):
        made.update(len(part).to_bytes(8, "little") + part)
    return made.hexdigest()


def shown(tenant: str) -> str:
    """A tenant's name in logs and engines: eight hexadecimal digits, the same everywhere."""
    return hashlib.blake2b(tenant.encode(), digest_size=4).hexdigest() if tenant else ""


def _unknown(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", f"{message}, as Authorization: Bearer KEY")


def _bearer(request: Request) -> str:
    """The key that a request carries, "" for none or several."""
    given = request.headers.getlist("authorization")
    scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    return key.strip() if scheme.lower() == "bearer" else ""


def _text(file: str, setting: str) -> str:
    try:
        with Path(file).open("rb") as opened:
            raw = opened.read(_FILE_BYTES_MAX + 1)
        if len(raw) <= _FILE_BYTES_MAX:
            return raw.decode("ascii")
        reason = f"has more than {_FILE_BYTES_MAX} bytes"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        reason = "is not ASCII text"
    raise UserError(f"{file} {reason} ({setting})")


def _numbered(source: str, lines: Sequence[str]) -> list[_Line]:
    texts = [(f"{source}, line {n}", line.strip()) for n, line in enumerate(lines, 1)]
    return [(where, text) for where, text in texts if text and not text.startswith("#")]


def _pair(line: _Line, source: str) -> tuple[str, float, str]:
    """A tenant, its weight, and a key of it."""
    where, text = line
    owner, colon, key = text.partition(":")
    name, *weights = _unquoted(owner).split(" weight=")
    weight = _weight(where, *weights) if weights else 1.0
    if not colon or not _TENANT.fullmatch(tenant := _unquoted(name)):
        allowed = "a tenant has 1 to 64 letters, digits, dots, dashes, underscores or @"
        raise UserError(
            f"{where}: is not of the form `tenant: key` or `tenant weight=2: key` ({source}); "
            f"{allowed}"
        )
    return tenant, weight, _key(where, key)


def _weight(where: str, *texts: str) -> float:
    least, most = WEIGHTS
    if len(texts) == 1 and _NUMBER.fullmatch(texts[0]) and least <= float(texts[0]) <= most:
        return float(texts[0])
    raise UserError(f"{where}: a weight is a number from {least} to {most}")


def _key(where: str, text: str) -> str:
    key = _unquoted(text)
    if not _KEY.fullmatch(key):
        raise UserError(f"{where}: a key has {_KEY_RULE}, and no comment behind it")
    return key


def _unquoted(text: str) -> str:
    text = text.strip()
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


def _from_here(request: Request) -> bool:
    """Whether the request comes from a program on this machine: not through a proxy, and not from
    a foreign web page in a local browser (by DNS rebinding or across origins).
    """
    headers = request.headers
    peer = None if request.client is None else _address(request.client.host)
    peer = getattr(peer, "ipv4_mapped", None) or peer
    if peer is None or not peer.is_loopback or _FORWARDED & set(headers.keys()):
        return False
    host = headers.get("host", "localhost")
    try:
        name = urlsplit(f"//{host}").hostname or ""
        origin = urlsplit(headers.get("origin", f"//{host}")).netloc
    except ValueError:
        return False
    return origin == host and (name == "localhost" or _address(name) is not None)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
