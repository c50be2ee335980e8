"""The bearer token of a server: its file, and the requests that it lets through."""

import asyncio
import os
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from pipelines.serving.authentication import TokenRequired, read_token


def write(file: Path, content: bytes, mode: int = 0o600) -> Path:
    file.write_bytes(content)
    file.chmod(mode)
    return file


def test_a_token_is_a_line_of_a_private_file(tmp_path: Path) -> None:
    assert read_token(write(tmp_path / "token", b"aZ09-._~+/==\n")) == "aZ09-._~+/=="
    assert read_token(write(tmp_path / "read-only", b"secret", 0o400)) == "secret"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610, 0o644, 0o601])
def test_a_file_open_to_others_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    file = write(tmp_path / "token", b"secret", mode)
    with pytest.raises(ValueError, match=rf"^the token file {file} is open to other users: run `chmod 600 {file}`$"):
        read_token(file)


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"a\nb", b"g\xc3\xbclle", b"\xff\xfe", b"a:b", b"=="])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match="has no token: write one line of letters, digits"):
        read_token(write(tmp_path / "token", content))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "missing", tmp_path / "pipe"):
        with pytest.raises(ValueError, match="does not exist: write a token into a file of your own"):
            read_token(path)


def ask(method: str, path: str, authorization: str | None = None) -> httpx.Response:
    """The response of an application that requires the token `secret=` and has three paths."""

    async def echo(request: Request) -> PlainTextResponse:
        return PlainTextResponse(f"reached {request.url.path}")

    async def response() -> httpx.Response:
        routes = [Route(path, echo, methods=["GET", "POST"]) for path in ("/ping", "/invocations", "/version")]
        transport = httpx.ASGITransport(TokenRequired(Starlette(routes=routes), "secret="))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
            return await client.request(method, path, headers=headers)

    return asyncio.run(response())


def test_ping_needs_no_token() -> None:
    assert ask("GET", "/ping").text == "reached /ping"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_token_opens_every_path(scheme: str) -> None:
    for path in ("/invocations", "/version", "/ping"):
        assert ask("POST", path, f"{scheme} secret=").text == f"reached {path}"


WRONG = [None, "", "Bearer", "Bearer secret", "Bearer secret=x", "Bearer  secret=", "Basic secret=", "secret=", "Bearer \xfc"]


@pytest.mark.parametrize("authorization", WRONG)
def test_another_token_opens_nothing(authorization: str | None) -> None:
    for method, path in (("POST", "/invocations"), ("GET", "/version"), ("POST", "/ping"), ("GET", "/ping/"), ("GET", "/none")):
        answer = ask(method, path, authorization)
        assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
        assert answer.json()["error_code"] == "UNAUTHENTICATED" and "Authorization: Bearer TOKEN" in answer.json()["message"]
