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


def errors(*statuses: int) -> dict:
    """Documentation of a route's error answers."""
    return {status: {"model": ErrorBody} for status in statuses}


def chat_body(names: list[str]) -> type[BaseModel]:
    """A chat request. The gateway reads only ``model``; the rest is up to the engine."""
    return create_model(
        "ChatBody",
        __config__=ConfigDict(extra="allow"),
        model=Literal[tuple(names)],
        messages=(list[dict], Field(min_length=1)),
        stream=(bool | None, None),
    )
