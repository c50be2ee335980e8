"""The bearer token of a server: its file, and the requests that it lets through."""

import os
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from pipelines.authentication import TokenRequired, read_token


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
    with pytest.raises(ValueError, match="has no token: write one line of letters, digits") as error:
        read_token(write(tmp_path / "token", content))
    assert (
        not content.strip() or content.decode("latin-1").strip() not in str(error.value).partition(":")[2].partition("into")[2]
    )


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "missing", tmp_path / "pipe"):
        with pytest.raises(ValueError, match="does not exist: write a token into a file of your own"):
            read_token(path)


@pytest.fixture
def client() -> TestClient:
    async def echo(request: Request) -> PlainTextResponse:
        return PlainTextResponse(f"reached {request.url.path}")

    routes = [Route(path, echo, methods=["GET", "POST"]) for path in ("/ping", "/invocations", "/version")]
    return TestClient(TokenRequired(Starlette(routes=routes), "secret="))


def test_ping_needs_no_token(client: TestClient) -> None:
    assert client.get("/ping").text == "reached /ping"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_token_opens_every_path(client: TestClient, scheme: str) -> None:
    for path in ("/invocations", "/version", "/ping"):
        assert client.post(path, headers={"Authorization": f"{scheme} secret="}).text == f"reached {path}"


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer secret", "Bearer secret=x", "Bearer  secret=", "Basic secret=", "secret=", "Bearer \xfc"],
)
def test_another_token_opens_nothing(client: TestClient, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    for method, path in (("POST", "/invocations"), ("GET", "/version"), ("POST", "/ping"), ("GET", "/ping/"), ("GET", "/none")):
        answer = client.request(method, path, headers=headers)
        assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
        assert answer.json()["error_code"] == "UNAUTHENTICATED" and "Authorization: Bearer TOKEN" in answer.json()["message"]
