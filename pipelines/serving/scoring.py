"""The server of a model: python -m pipelines.serving.scoring MODEL_URI HOST PORT [TOKEN_FILE].

It is MLflow's scoring server, but for its answers to /invocations. There each request is compared with the model's signature,
since MLflow ignores unknown fields and params, and responds to some mistakes with status 500 or a traceback. This module
imports nothing of `tap`: a model contains the code that it was logged with.
"""

import asyncio
import logging
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import uvicorn
from mlflow.environment_variables import MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.pyfunc import PyFuncModel, load_model, scoring_server
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pipelines.serving.authentication import TokenRequired, read_token
from pipelines.serving.connections import TimedConnection
from pipelines.serving.refusal import quoted, refusal

MAX_ROWS = 256  # of a request
BYTES_PER_NUMBER = 64  # as JSON, with white space
HISTORY = "history"  # the param of a policy that remembers
BUDGET = "budget_ms"  # the param of a policy that plans within a time, which it measures at first
HISTORY_BYTES = 4 << 20  # for all histories of a request; one of 1,000 whole steps of Hopper has a third of a megabyte
BODY_SECONDS = 10  # for the body of a request to arrive
SHUTDOWN_SECONDS = 15  # to finish requests; `process.running` kills the server after 20
OPEN_FILES = 10_240  # each connection is one; the usual limit of 1,024 leaves no reserve for connections that send nothing
THREADS = 32  # concurrent requests; Python's default, the number of cores plus 4, makes small batches
MAX_FLOAT32 = 3.4e38
WARM_UP = 3  # decisions: TorchScript optimises a trace at its first ones

logger = logging.getLogger(__name__)


def request_type(signature: ModelSignature) -> type[BaseModel]:
    """The type of a valid request, with `inputs` and `params`, for a model of one tensor (n, O).

    Its params are scalars, and maybe `history`: for each row of `inputs` lists of observations, actions and rewards.
    """
    strict = ConfigDict(strict=True, extra="forbid")
    number = Annotated[float, Field(ge=-MAX_FLOAT32, le=MAX_FLOAT32, allow_inf_nan=False)]
    observation, action = (
        _lists(number, width, width) for width in (signature.inputs.inputs[0].shape[1], signature.outputs.inputs[0].shape[1])
    )
    inputs = _lists(observation, 1, MAX_ROWS)
    of_steps = {"observations": observation, "actions": action, "rewards": number}
    of_rows: dict[str, Any] = {name: (_lists(_lists(each)), ...) for name, each in of_steps.items()}
    history = create_model("History", __config__=strict, **of_rows)
    fields: dict[str, Any] = {
        spec.name: (history if spec.name == HISTORY else type(spec.default), spec.default) for spec in signature.params.params
    }
    params = create_model("Params", __config__=strict, **fields)
    return create_model("Request", __config__=strict, inputs=(inputs, ...), params=(params, params()))


def _lists(item: Any, least: int = 0, most: int | None = None) -> Any:
    """The type of a list of `least` to `most` items."""
    return Annotated[list[item], Field(min_length=least, max_length=most)]


class Invocations:
    """An ASGI application that answers POST /invocations, and passes other requests on to MLflow's scoring server.

    MLflow's own answer is the same, but it parses each request again and runs it through FastAPI: 0.8 ms more of processor
    time, where a decision takes 1.6 ms.
    """

    def __init__(self, model: PyFuncModel, server: ASGIApp) -> None:
        self.model, self.server, signature = model, server, model.metadata.signature
        self.request_type = request_type(signature)
        self.timeout = MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT.get()  # type: ignore[no-untyped-call]
        params = [spec.name for spec in signature.params.params]
        self.fields = {1: ["inputs", "params"], 2: params, 3: ["observations", "actions", "rewards"]}  # by depth
        self.max_bytes = BYTES_PER_NUMBER * (MAX_ROWS + 1) * signature.inputs.inputs[0].shape[1] + 1024
        self.remedy = f"send at most {MAX_ROWS} rows at a time"
        if HISTORY in params:
            self.max_bytes += HISTORY_BYTES
            self.remedy += ", with fewer steps of their histories"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for /invocations; pass others on."""
        if scope["type"] != "http" or scope["path"] != "/invocations" or scope["method"] != "POST":
            return await self.server(scope, receive, send)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                request = await self._read(Request(scope, receive))
        except TimeoutError:
            request = refusal(408, f"The request took longer than {BODY_SECONDS} seconds to arrive; send it at once.")
        except ClientDisconnect:
            return None
        response = request if isinstance(request, Response) else await self._answer(request)
        return await response(scope, receive, send)

    async def _read(self, request: Request) -> Any:
        """The valid request, or the response to a wrong one."""
        content_type = request.headers.get("content-type", "none")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            return refusal(415, f"The content type is {quoted(content_type)}; it must be application/json.")
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.max_bytes:
                return refusal(413, f"The request is larger than {self.max_bytes} bytes; {self.remedy}.")
        try:
            return self.request_type.model_validate_json(bytes(body))
        except ValidationError as error:
            return refusal(400, self._sentence(error))

    def _sentence(self, error: ValidationError) -> str:
        """The first mistake and its place in the request."""
        first = error.errors(include_url=False)[0]
        path, what = first["loc"], quoted(first["msg"])
        if first["type"] == "extra_forbidden":
            what = f"Unknown field; the fields are {', '.join(self.fields[len(path)])}"
        return f"{'.'.join(quoted(str(key)) for key in path) or 'request'}: {what}."

    async def _answer(self, request: Any) -> Response:
        """The model's predictions, or its error in one sentence."""
        try:
            async with asyncio.timeout(self.timeout):
                return Response(await asyncio.to_thread(self._predict, request), media_type="application/json")
        except TimeoutError:
            return refusal(504, f"The request took longer than {self.timeout} seconds; send fewer rows at a time.")
        except MlflowException as error:
            status = error.get_http_status_code()  # type: ignore[no-untyped-call]
            return refusal(status, f"{quoted(error.message)}.")
        except Exception:
            logger.exception("The model failed")
            return refusal(500, "The model failed; see the server's log.")

    def _predict(self, request: Any) -> str:
        predictions = self.model.predict(np.array(request.inputs), params=request.params.model_dump(exclude_unset=True))
        answer = StringIO()
        scoring_server.predictions_to_json(predictions, answer)  # type: ignore[no-untyped-call]
        return answer.getvalue()


def warm_up(model: PyFuncModel) -> None:
    """Answer the model's example a few times: the first answers are slow, and no client should wait for them."""
    example = np.asarray(model.input_example)[:1]
    timed = BUDGET in [spec.name for spec in model.metadata.signature.params.params]
    for params in (*[{}] * WARM_UP, *([{BUDGET: 1.0}] if timed else [])):
        model.predict(example, params=params)


async def serve(model_uri: str, host: str, port: int, token: str | None) -> None:
    """Serve requests until SIGINT or SIGTERM, those with the token if there is one.

    MLFLOW_TRACKING_URI is the store of the model.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, OPEN_FILES)), hard))
    model = load_model(model_uri)
    warm_up(model)
    app: ASGIApp = Invocations(model, scoring_server.init(model))
    if token:
        app = TokenRequired(app, token)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    config = uvicorn.Config(
        app,
        host,
        port,
        http=TimedConnection,
        ws="none",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,  # a client that does not read its response must not delay it further
    )
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    model_uri, host, port, *token_file = sys.argv[1:]
    token = read_token(Path(token_file[0])) if token_file else None
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(model_uri, host, int(port), token))
