"""A server's errors: one sentence, in the form of MLflow's."""

from collections.abc import Mapping

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST, DEADLINE_EXCEEDED, INTERNAL_ERROR, UNAUTHENTICATED
from starlette.responses import Response

CODES = {401: UNAUTHENTICATED, 500: INTERNAL_ERROR, 504: DEADLINE_EXCEEDED}  # MLflow's, by HTTP status; otherwise BAD_REQUEST


def refusal(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    """The response to a request that is not served."""
    content = MlflowException(sentence, CODES.get(status, BAD_REQUEST)).serialize_as_json()  # type: ignore[no-untyped-call]
    return Response(content, status, headers, media_type="application/json")


def quoted(text: str) -> str:
    """A client's words as part of a sentence: at most 100 characters on one line."""
    return repr(text[:100])[1:-1]
