"""Requests to a served policy for Hopper, right and wrong ones, each drawn from a random generator."""

import gzip
import json
import random
import sys
from dataclasses import dataclass
from typing import Any

TOKEN = "a-token.of~the+campaign/="
WIDTH = 11  # of Hopper's observations


@dataclass(frozen=True)
class Case:
    """A request as it is sent. A valid one must get its actions; one that is not `whole` may get no answer."""

    data: bytes
    body: bytes = b""
    valid: bool = False
    whole: bool = True


def post(body: bytes, *headers: str, head: str = "POST /invocations HTTP/1.1") -> bytes:
    """A request with a token; `headers` without a content type get the right one."""
    lines = [head, "Host: a", f"Content-Length: {len(body)}", *headers]
    if not any(header.lower().startswith("content-type") for header in headers):
        lines.append("Content-Type: application/json")
    if not any(header.lower().startswith("authorization") for header in headers):
        lines.append(f"Authorization: Bearer {TOKEN}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def random_tree(rng: random.Random) -> dict[str, Any]:
    """A valid request of one to five rows."""
    scale = rng.choice([0.1, 1, 1, 1, 100, 1e4])

    def row() -> list[float]:
        return [rng.choice([0, rng.gauss(0, scale), rng.randint(-9, 9)]) for _ in range(WIDTH)]

    tree: dict[str, Any] = {"inputs": [row() for _ in range(rng.randint(1, 5))]}
    if rng.random() < 0.7:
        tree["params"] = {"seed": rng.choice([rng.randint(-9, 9), rng.getrandbits(63)])}
        if rng.random() < 0.5:
            tree["params"]["details"] = rng.random() < 0.5
    return tree


def valid(rng: random.Random) -> Case:
    """A right request in one of the ways to write it."""
    tree = random_tree(rng)
    text = json.dumps(tree, indent=rng.choice([None, None, 1, 3]), sort_keys=rng.random() < 0.5)
    if rng.random() < 0.2:
        text = text.replace("inputs", "\\u0069nputs")
    body = rng.choice(["", " ", "\n\t"]).encode() + text.encode()
    kinds = ["application/json", "Application/JSON", "application/json;charset=utf-8", 'application/json; charset="UTF-8"']
    headers = [f"Content-Type: {rng.choice(kinds)}"]
    if rng.random() < 0.2:
        headers.append("Connection: close")
    data = post(body, *headers)
    if rng.random() < 0.2:
        head = data.partition(b"\r\n\r\n")[0].replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
        size = rng.randint(1, len(body))
        chunks = [body[start : start + size] for start in range(0, len(body), size)]
        data = head + b"\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return Case(data, body, valid=True)


JUNK: list[Any] = [
    *(None, True, False, "", "1", "NaN", "a\nTraceback (most recent call last):\n", "x" * 5000, "\u202e\0", "ü"),
    *(-0.0, 1e38, 3.4e38, -3.5e38, 1e308, 10**30, -(10**400), 10**5000, 2**63, -(2**63) - 1, 0.5),
    *(float("nan"), float("inf"), -float("inf"), [], {}, [[]], [[[0.0] * WIDTH]], {"inputs": [[0.0] * WIDTH]}),
]


def damaged_tree(rng: random.Random) -> Case:
    """A right request in which something is replaced, added, doubled or removed."""
    tree = random_tree(rng)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(tree)
    inside, key = rng.choice(places[:4] if rng.random() < 0.5 else places)
    match rng.choice(["replace", "replace", "add", "double", "remove"]):
        case "replace":
            inside[key] = rng.choice(JUNK)
        case "remove":
            del inside[key]
        case "double" if isinstance(inside, list):
            inside += [inside[key]] * rng.choice([1, 300])
        case _ if isinstance(inside, dict):
            inside[rng.choice(["inputs", "params", "sed", "", "a\nb", "a\r\n\r\nb", "x" * 5000, "\u202e\0"])] = rng.choice(JUNK)
        case _:
            inside.insert(key, rng.choice(JUNK))
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        body = json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode()
    finally:
        sys.set_int_max_str_digits(before)
    return Case(post(body), body)


PIECES = (b"[", b"}", b",", b'"', b"e9", b"-", b"\\ud800", b"\xff")


def damaged_bytes(rng: random.Random) -> Case:
    """A right request with some bytes of its body replaced, removed or inserted."""
    body = bytearray(json.dumps(random_tree(rng)).encode())
    for _ in range(rng.choice([1, 1, 2, 10])):
        start = rng.randrange(len(body) + 1)
        replacement = rng.choice([b"", rng.randbytes(1), rng.choice(PIECES)])
        body[start : start + rng.choice([0, 1, 1, 20])] = replacement
    return Case(post(bytes(body)), bytes(body))


def noise(rng: random.Random) -> Case:
    body = rng.randbytes(rng.randrange(2000))
    return Case(post(body), body)


def wrong_encoding(rng: random.Random) -> Case:
    """A right request in an encoding other than UTF-8, said or not."""
    text = json.dumps(random_tree(rng))
    encoding = rng.choice(["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7", "gzip"])
    body = gzip.compress(text.encode()) if encoding == "gzip" else text.replace("0", "ü").encode(encoding)
    said = [f"Content-Type: application/json; charset={encoding}", f"Content-Encoding: {encoding}"]
    return Case(post(body, *rng.choice([said, []])), body)


def deep(rng: random.Random) -> Case:
    depth = rng.choice([2, 100, 127, 128, 200, 1000, 10_000, 50_000])
    opening, closing = rng.choice([("[", "]"), ('{"inputs":', "}"), ('{"params":', "}")])
    body = (opening * depth + rng.choice(["", "1"]) + closing * rng.choice([0, depth])).encode()
    if rng.random() < 0.5:
        body = b'{"inputs": ' + body + b"}"
    return Case(post(body), body)


def oversized(rng: random.Random) -> Case:
    """A body, or a head, larger than the limit; the body with a length or in chunks."""
    size = rng.choice([200_000, 500_000, 2_000_000])
    body = rng.choice([b" " * size, b"[" * size, b'{"inputs": [' + b"[0,0,0,0,0,0,0,0,0,0,0]," * (size // 24)])
    if rng.random() < 0.2:
        return Case(post(b"", "X: " + "x" * size), whole=False)  # refused before it is read, so the answer may be lost
    if rng.random() < 0.3:
        head = post(b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
        return Case(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    return Case(post(body), body)


def wrong_type(rng: random.Random) -> Case:
    """A right body with a wrong, odd or missing content type."""
    body = json.dumps(random_tree(rng)).encode()
    kinds = ["text/csv", "application/parquet", "text/plain", "application/jsonx", "", ";", "*/*", "application/json, text/csv"]
    name = rng.choice(["x" * 10_000, "\xff\xfe", *kinds, *kinds])
    data = post(body, f"Content-Type: {name}")
    if rng.random() < 0.2:  # what follows the answer is not HTTP
        data = data.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
    return Case(data)


TOKENS = (
    *("", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Bearer {TOKEN.upper()}"),
    *(f"Bearer \xff{TOKEN}", f"Bearer {TOKEN} {TOKEN}", f"Bearer, Bearer {TOKEN}", "Bearer " + "x" * 10_000),
)
OTHER_PATHS = ("GET /version", "GET /health", "GET /docs", "GET /openapi.json", "GET /ping/", "GET //ping", "GET /nowhere")


def wrong_token(rng: random.Random) -> Case:
    """A right request, to any path, with a wrong token or none."""
    body = json.dumps(random_tree(rng)).encode()
    path = rng.choice(["POST /invocations", "POST /invocations", *OTHER_PATHS])
    return Case(post(body, f"Authorization: {rng.choice(TOKENS)}", head=f"{path} HTTP/1.1"))


PLACES = (
    *("GET /invocations", "PUT /invocations", "X /invocations", "GET /invocations%0a", "GET http://a/invocations", "GET /"),
    *("DELETE /ping", "POST /version", "GET /..%2f..%2fetc/passwd", "GET /%00", "GET /%ff%fe", "TRACE /", "OPTIONS *"),
    *("CONNECT a:1", "PUT /ping"),
)


def wrong_place(rng: random.Random) -> Case:
    """Another path or method."""
    return Case(post(b"", head=f"{rng.choice(PLACES)} HTTP/1.{rng.choice([0, 1])}"))


def wrong_http(rng: random.Random) -> Case:
    """Not HTTP/1.1, or a request whose head contradicts its body or itself."""
    body = json.dumps(random_tree(rng)).encode()
    right = post(body)
    length = b"Content-Length: %d" % len(body)
    replacements = (
        *(b"Content-Length: -1", b"Content-Length: x", b"Content-Length: 1e3", length + b"\r\nContent-Length: 1"),
        *(
            b" " + length,
            b"Transfer-Encoding: gzip",
            b"Transfer-Encoding: chunked",
            b"Transfer-Encoding: x, chunked",
            b"X\0Y: 1",
            b":",
        ),
    )
    match rng.choice(["replaced", "replaced", "noise", "version", "upgrade", "doubled host"]):
        case "replaced":
            replacement = rng.choice(replacements)
            return Case(right.replace(length, replacement), whole=not replacement.endswith(b" chunked"))  # it has no last chunk
        case "noise":
            return Case(rng.randbytes(rng.randrange(1, 200)) + b"\r\n\r\n")
        case "version":
            version = rng.choice([b"HTTP/9.9", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b"HTTP/1.1 x", b""])
            return Case(right.replace(b"HTTP/1.1", version, 1), body)
        case "upgrade":
            wanted = rng.choice(["websocket", "h2c", "x"])
            key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
            headers = ["Connection: Upgrade", f"Upgrade: {wanted}", key, "Sec-WebSocket-Version: 13"]
            head = rng.choice(["GET /invocations HTTP/1.1", "POST /invocations HTTP/1.1"])
            return Case(post(body, *headers, head=head), body)
    return Case(right.replace(b"Host: a", b"Host: a\r\nHost: b"))


def cut(rng: random.Random) -> Case:
    """A right request that ends too early."""
    data = valid(rng).data
    return Case(data[: rng.randrange(1, len(data))], whole=False)


KINDS = (
    *(valid, damaged_tree, damaged_tree, damaged_bytes, damaged_bytes, noise, wrong_encoding, deep, oversized),
    *(wrong_type, wrong_token, wrong_place, wrong_http, cut),
)
