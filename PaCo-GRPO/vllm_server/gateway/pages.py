"""What the gateway's OpenAPI page says (/docs, /openapi.json): its own part of the API. Engines document the rest."""

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

ROUTES = "POST /v1/chat/completions, GET /v1/models, GET /health, GET /metrics"
DESCRIPTION = "Routes chat completions of OpenAI's API by `model` to the replicas behind it."

_TEXT = {"type": "string"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_MEANINGS = {
    400: "Not a request that can be read, or one that the engine refuses",
    401: "No valid API key",
    404: "The model is not served here",
    408: "The body did not arrive",
    413: "The body is too large",
    422: "Refused by the engine",
    429: "Too many requests at once; see Retry-After",
    500: "The engine failed",
    502: "No replica gave an answer",
    503: "No replica of the model is up; see Retry-After",
    504: "The engine did not answer in time",
}


def _json(schema: dict, meaning: str) -> dict:
    return {"description": meaning, "content": {"application/json": {"schema": schema}}}


def _errors(*statuses: int) -> dict:
    return {status: _json(_ERROR, _MEANINGS[status]) for status in statuses}


_COMPLETION = {"type": "object", "required": ["choices"], "properties": {"choices": {"type": "array"}}}
_MODEL_LIST = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {
        "object": {"const": "list"},
        "data": {"type": "array", "items": {"type": "object", "required": ["id"], "properties": {"id": _TEXT}}},
    },
}
_COUNT = {"type": "integer", "minimum": 0}
_HEALTH = {
    "type": "object",
    "required": ["status", "models"],
    "properties": {
        "status": {"enum": ["ok", "unhealthy"]},
        "models": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["replicas", "serving"],
                "properties": {"replicas": _COUNT, "serving": _COUNT},
            },
        },
    },
}
_ANSWER = {
    "description": "The engine's answer; an event stream where `stream` is true",
    "content": {"application/json": {"schema": _COMPLETION}, "text/event-stream": {"schema": _TEXT}},
}

MODELS = {"summary": "Served models", "responses": {200: _json(_MODEL_LIST, "Served models"), **_errors(401)}}
HEALTH = {
    "summary": "Whether every model can be asked",
    "responses": {200: _json(_HEALTH, "Every model can be asked"), 503: _json(_HEALTH, "A model has no replica")},
}
METRICS = {
    "summary": "Prometheus metrics",
    "responses": {200: {"description": "Metrics", "content": {"text/plain": {"schema": _TEXT}}}, **_errors(401)},
}


def chat(names: list[str]) -> dict:
    """Options of the chat route, which serves ``names``."""
    request = {
        "type": "object",
        "required": ["model", "messages"],
        "properties": {
            "model": {"enum": names},
            "messages": {"type": "array", "minItems": 1, "items": {"type": "object"}},
            "stream": {"type": ["boolean", "null"]},
        },
        "additionalProperties": True,
        "description": "Only `model` is read here; the rest is the engine's.",
    }
    return {
        "summary": "Chat completion",
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": request}}}},
        "responses": {200: _ANSWER, **_errors(*_MEANINGS)},
    }


def describe(app: FastAPI, guarded: bool) -> None:
    """Let the page name the API key where one is needed."""

    def page() -> dict:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            if guarded:
                schema.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                schema["security"] = [{"key": []}]
                schema["paths"]["/health"]["get"]["security"] = []
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = page
