"""MLflow's scoring server behind a check of its requests: python -m pipelines.scoring MODEL_URI HOST PORT.

The check compares each request with the model's signature, since MLflow ignores unknown fields and params, and responds to some
mistakes with status 500 or a traceback. Requests that pass go to MLflow unchanged. This module imports nothing of `tap`: a
model contains the code that it was logged with.
"""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated, Any

import uvicorn
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.protos.databricks_pb2 import BAD_REQUEST
from mlflow.pyfunc import load_model, scoring_server
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

MAX_ROWS = 256  # of a request
BYTES_PER_NUMBER = 64  # as JSON, with white space
THREADS = 32  # concurrent requests; Python's default, the number of cores plus 4, makes small batches
MAX_FLOAT32 = 3.4e38


def request_type(signature: ModelSignature) -> type[BaseModel]:
    """The type of a valid request, with `inputs` and `params`, for a model of one tensor (n, O) and scalar params."""
    strict = ConfigDict(strict=True, extra="forbid")
    (width,) = signature.inputs.inputs[0].shape[1:]
    number = Annotated[float, Field(ge=-MAX_FLOAT32, le=MAX_FLOAT32, allow_inf_nan=False)]
    row = Annotated[list[number], Field(min_length=width, max_length=width)]
    inputs = Annotated[list[row], Field(min_length=1, max_length=MAX_ROWS)]
    fields: dict[str, Any] = {spec.name: (type(spec.default), spec.default) for spec in signature.params.params}
    params = create_model("Params", __config__=strict, **fields)
    return create_model("Request", __config__=strict, inputs=(inputs, ...), params=(params, params()))


def refusal(status: int, sentence: str) -> Response:
    """A response in the form of MLflow's errors."""
    content = MlflowException(sentence, BAD_REQUEST).serialize_as_json()  # type: ignore[no-untyped-call]
    return Response(content, status, media_type="application/json")


class CheckedRequests:
    """An ASGI application that passes only requests which fit the model's signature to the scoring server."""

    def __init__(self, server: ASGIApp, signature: ModelSignature) -> None:
        self.server, self.request_type = server, request_type(signature)
        self.fields = {1: ["inputs", "params"], 2: [spec.name for spec in signature.params.params]}  # by depth
        self.max_bytes = BYTES_PER_NUMBER * (MAX_ROWS + 1) * signature.inputs.inputs[0].shape[1] + 1024

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request for /invocations; pass others on unchecked."""
        if scope["type"] != "http" or scope["path"] != "/invocations" or scope["method"] != "POST":
            return await self.server(scope, receive, send)
        body = bytearray()
        try:
            refused = await self._refused(Request(scope, receive), body)
        except ClientDisconnect:
            return None
        if refused:
            return await refused(scope, receive, send)
        messages = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Any:
            return messages.pop() if messages else await receive()

        return await self.server(scope, replay, send)

    async def _refused(self, request: Request, body: bytearray) -> Response | None:
        """The response to a wrong request, None for a valid one; reads the request's body into `body`."""
        content_type = request.headers.get("content-type", "none")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            return refusal(415, f"The content type is {content_type}; it must be application/json.")
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.max_bytes:
                return refusal(
                    413, f"The request is larger than {self.max_bytes} bytes; send at most {MAX_ROWS} rows at a time."
                )
        try:
            self.request_type.model_validate_json(bytes(body))
        except ValidationError as error:
            return refusal(400, self._sentence(error))
        return None

    def _sentence(self, error: ValidationError) -> str:
        """The first mistake and its place in the request."""
        first = error.errors(include_url=False)[0]
        path, what = first["loc"], first["msg"]
        if first["type"] == "extra_forbidden":
            what = f"Unknown field; the fields are {', '.join(self.fields[len(path)])}"
        return f"{'.'.join(map(str, path)) or 'request'}: {what}."


async def serve(model_uri: str, host: str, port: int) -> None:
    """Serve requests until SIGINT or SIGTERM. MLFLOW_TRACKING_URI is the store of the model."""
    model = load_model(model_uri)
    app = CheckedRequests(scoring_server.init(model), model.metadata.signature)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    # A client that does not read its response must not delay the shutdown.
    await uvicorn.Server(uvicorn.Config(app, host, port, access_log=False, timeout_graceful_shutdown=5)).serve()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
