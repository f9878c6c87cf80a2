"""The gateway's own part of OpenAI's API, for the OpenAPI page (``/docs``). The engines document the rest."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

Count = Annotated[int, Field(ge=0)]


class Error(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(BaseModel):
    error: Error


class ServedModel(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ServedModel]


class ReplicaCount(BaseModel):
    replicas: Count
    serving: Count


class Health(BaseModel):
    status: Literal["ok", "unhealthy"]
    models: dict[str, ReplicaCount]


class Completion(BaseModel):
    model_config = ConfigDict(extra="allow")

    choices: list


_MEANINGS = {
    400: "The request is malformed, or the engine refuses it",
    401: "No valid API key",
    404: "The model is not served here",
    408: "The body did not arrive in time",
    413: "The body is too large",
    422: "Refused by the engine",
    429: "Too many requests at once; see Retry-After",
    500: "The engine failed",
    502: "No replica gave an answer",
    503: "No replica of the model is up; see Retry-After",
    504: "The engine did not answer in time",
}


def errors(*statuses: int) -> dict:
    """Documentation of a route's error answers; all of them by default."""
    return {status: {"model": ErrorBody, "description": _MEANINGS[status]} for status in statuses or _MEANINGS}


def chat_body(names: list[str]) -> type[BaseModel]:
    """A chat request. The gateway reads only ``model``; the rest is up to the engine."""
    return create_model(
        "ChatBody",
        __config__=ConfigDict(extra="allow"),
        model=Literal[tuple(names)],
        messages=(list[dict], Field(min_length=1)),
        stream=(bool | None, None),
    )
