"""Authentication by a bearer token (RFC 6750), which is read from a file: arguments and environment are visible to others."""

import hmac
import re
import stat
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pipelines.serving.refusal import refusal


def read_token(file: Path) -> str:
    """The token in a file, which only its owner may read. Raises ValueError if it cannot be used."""
    if not file.is_file():
        raise ValueError(f"the token file {file} does not exist: write a token into a file of your own")
    if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"the token file {file} is open to other users: run `chmod 600 {file}`")
    try:
        token = file.read_text("ascii").strip()
    except OSError as error:
        raise ValueError(f"the token file {file} cannot be read ({error.strerror}): run `tap serve` as its owner") from None
    except UnicodeDecodeError:
        token = ""
    if not re.fullmatch(r"[\w.~+/-]+=*", token):
        raise ValueError(
            f"the token file {file} has no token: write one line of letters, digits and -._~+/ into it,"
            f" for example by `openssl rand -hex 32 > {file}`"
        )
    return token


class TokenRequired:
    """An ASGI application that passes on requests with the token, and GET /ping, which says only that the server is up."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 to a request without the token, before its body is read."""
        if scope["type"] == "http" and (scope["method"], scope["path"]) != ("GET", "/ping"):
            scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), self.token):
                sentence = "The request has no valid token; send the header `Authorization: Bearer TOKEN`."
                return await refusal(401, sentence, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
        return await self.app(scope, receive, send)
