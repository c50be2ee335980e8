"""MLflow's scoring server behind a check of its requests: python -m pipelines.scoring MODEL_URI HOST PORT.

The check holds a request to the model's signature, for MLflow itself passes over unknown fields and params, and answers some
mistakes with status 500 or a traceback. What passes goes to MLflow as it came. Nothing of `tap` is imported here: a model
brings the code that it was logged with.
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

MOST_ROWS = 256  # of a request
BYTES_A_NUMBER = 64  # as JSON, with whatever blanks stand around it
THREADS = 32  # requests that are answered at once; Python's default, the number of cores and 4, would make small batches
FLOAT32 = 3.4e38


def request_type(signature: ModelSignature) -> type[BaseModel]:
    """What a request may hold for a model of one tensor (n, O) and scalar params: `inputs` and `params`."""
    strict = ConfigDict(strict=True, extra="forbid")
    (width,) = signature.inputs.inputs[0].shape[1:]
    number = Annotated[float, Field(ge=-FLOAT32, le=FLOAT32, allow_inf_nan=False)]
    row = Annotated[list[number], Field(min_length=width, max_length=width)]
    inputs = Annotated[list[row], Field(min_length=1, max_length=MOST_ROWS)]
    fields: dict[str, Any] = {spec.name: (type(spec.default), spec.default) for spec in signature.params.params}
    params = create_model("Params", __config__=strict, **fields)
    return create_model("Request", __config__=strict, inputs=(inputs, ...), params=(params, params()))


def refusal(status: int, sentence: str) -> Response:
    """An answer of the form that MLflow's own errors have."""
    content = MlflowException(sentence, BAD_REQUEST).serialize_as_json()  # type: ignore[no-untyped-call]
    return Response(content, status, media_type="application/json")


class CheckedRequests:
    """An ASGI application: the scoring server, which gets only those requests that fit the model's signature."""

    def __init__(self, server: ASGIApp, signature: ModelSignature) -> None:
        self.server, self.request_type = server, request_type(signature)
        self.known = {1: ["inputs", "params"], 2: [spec.name for spec in signature.params.params]}  # fields, by their depth
        self.most_bytes = BYTES_A_NUMBER * (MOST_ROWS + 1) * signature.inputs.inputs[0].shape[1] + 1024

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request for /invocations; pass on whatever else comes."""
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

        async def again() -> Any:
            return messages.pop() if messages else await receive()

        return await self.server(scope, again, send)

    async def _refused(self, request: Request, body: bytearray) -> Response | None:
        """The answer to a wrong request, or None; the request's body goes into `body`."""
        content_type = request.headers.get("content-type", "none")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            return refusal(415, f"The content type is {content_type}; it must be application/json.")
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.most_bytes:
                return refusal(
                    413, f"The request is larger than {self.most_bytes} bytes; send at most {MOST_ROWS} rows at a time."
                )
        try:
            self.request_type.model_validate_json(bytes(body))
        except ValidationError as error:
            return refusal(400, self._sentence(error))
        return None

    def _sentence(self, error: ValidationError) -> str:
        """The first mistake, and where it stands."""
        first = error.errors(include_url=False)[0]
        path, what = first["loc"], first["msg"]
        if first["type"] == "extra_forbidden":
            what = f"There is no such field; known are {', '.join(self.known[len(path)])}"
        return f"{'.'.join(map(str, path)) or 'request'}: {what}."


async def serve(model_uri: str, host: str, port: int) -> None:
    """Answer requests until SIGINT or SIGTERM. MLFLOW_TRACKING_URI names the store of the model."""
    model = load_model(model_uri)
    app = CheckedRequests(scoring_server.init(model), model.metadata.signature)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    # A client that does not read its answer may not hold up the end.
    await uvicorn.Server(uvicorn.Config(app, host, port, access_log=False, timeout_graceful_shutdown=5)).serve()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
