# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The server's application: requests are validated before they reach transformers' handlers, and errors get a message."""

import asyncio
import inspect
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Json, NonNegativeInt, PositiveInt, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.server import build_server

from .requests import MAX_BEAMS
from .server_generation import ClientRequest, GenerationFailed, current_request, shorten


MAX_BODY_BYTES = 2**20  # bounds the characters of a prompt as well
MAX_TOKENIZER_THREADS = 4
# of transformers' handlers, which read requests without checking their form
REQUEST_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    TemplateError,
    OSError,
)


def _check_template_variables(variables: dict[str, Any]) -> dict[str, Any]:
    reserved = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    if taken := sorted(variables.keys() & reserved):
        raise ValueError(f"the server sets {', '.join(taken)} itself")
    return variables


StopString = Annotated[str, Field(min_length=1, max_length=128)]
Stop = StopString | Annotated[list[StopString], Field(max_length=4)]
FrequencyPenalty = Annotated[float, Field(gt=-1, le=2)]  # plus 1, the server's repetition_penalty
Temperature = Annotated[float, Field(ge=0, le=100)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Token = Annotated[int, Field(ge=0, lt=2**31)]


class GenerationOptions(BaseModel):
    """The fields of transformers' GenerationConfig that a client may set."""

    model_config = ConfigDict(extra="forbid", strict=True)
    max_new_tokens: PositiveInt | None = None
    max_length: PositiveInt | None = None
    min_new_tokens: NonNegativeInt | None = None
    min_length: NonNegativeInt | None = None
    do_sample: bool | None = None
    use_cache: bool | None = None
    temperature: Temperature | None = None
    top_k: PositiveInt | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    no_repeat_ngram_size: NonNegativeInt | None = None
    num_beams: Annotated[int, Field(ge=1, le=MAX_BEAMS)] | None = None
    num_return_sequences: Literal[1] | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | None = None
    bos_token_id: Token | None = None
    eos_token_id: Token | Annotated[list[Token], Field(min_length=1, max_length=64)] | None = None
    pad_token_id: Token | None = None
    stop_strings: Stop | None = None
    transformers_version: str | None = None


class ModelRequest(BaseModel):
    """What a request to load a model says. Fields not named here are transformers' to accept or reject."""

    model_config = ConfigDict(extra="allow", strict=True)
    model: Annotated[str, Field(min_length=1, max_length=500)] | None = None


class GenerationRequest(ModelRequest):
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    prefix: Annotated[str, Field(max_length=500)] | None = None
    generation_config: Json[GenerationOptions] | None = None


class CompletionRequest(GenerationRequest):
    prompt: str
    suffix: str | None = None
    max_tokens: PositiveInt | None = None
    frequency_penalty: FrequencyPenalty | None = None
    stop: Stop | None = None


class MessagesRequest(GenerationRequest):
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_check_template_variables)] = {}


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(MessagesRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    frequency_penalty: FrequencyPenalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1000)] | None = None
    stop: Stop | None = None


class ResponseRequest(MessagesRequest):
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: PositiveInt | None = None
    parallel_tool_calls: bool = False


ENDPOINTS: dict[str, type[ModelRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponseRequest,
    "/load_model": ModelRequest,
}


def build_validated_server(model_manager, chat_handler, **more_handlers) -> FastAPI:
    """transformers' application behind `RequestValidation`, with a message for each error."""
    limiter = anyio.CapacityLimiter(MAX_TOKENIZER_THREADS)
    for handler in (chat_handler, more_handlers["completion_handler"], more_handlers["response_handler"]):
        handler.handle_request = partial(start_in_thread, handler.handle_request, limiter=limiter)
    app = build_server(model_manager, chat_handler, **more_handlers)
    app.add_middleware(RequestValidation, only_model=model_manager.force_model)
    app.add_exception_handler(HTTPException, lambda _, error: error_response(error.status_code, error.detail))
    for kind in REQUEST_ERRORS:
        app.add_exception_handler(kind, lambda _, error: error_response(400, _describe_error(error)))
    for kind in (GenerationFailed, Exception):
        app.add_exception_handler(kind, lambda _, error: error_response(500, str(error) or type(error).__name__))
    return app


async def start_in_thread(function: Callable[..., Coroutine], *args: Any, limiter: anyio.CapacityLimiter) -> Any:
    """Runs a coroutine on a worker thread up to its first suspension, and the rest here, on the event loop.

    transformers' handlers load the model and tokenize before they suspend, which may take seconds.
    """
    steps = function(*args).__await__()

    def run_first_step() -> tuple[bool, Any]:
        try:
            return False, next(steps)
        except StopIteration as end:
            return True, end.value

    ended, value = await anyio.to_thread.run_sync(run_first_step, limiter=limiter)
    if ended:
        return value
    return await _resume(steps)


@types.coroutine
def _resume(steps: Generator) -> Generator:
    return (yield from steps)


def error_response(status: int, message: object) -> JSONResponse:
    """An error in the form of OpenAI's."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": shorten(message), "type": kind, "param": None, "code": None}}, status)


def _describe_error(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"The request lacks the field {error}."
    if isinstance(error, (ValueError, OSError)):
        return str(error)
    return f"The request cannot be read: {error}"


class RequestValidation:
    """ASGI middleware: passes on the POST requests that are valid, and cancels their work when the client disconnects."""

    def __init__(self, app, only_model: str | None):
        """`only_model`: the one that may be named; None where a request must name one."""
        self.app, self.only_model = app, only_model

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        try:
            body, request = self._check(scope["path"], await _read(scope, receive))
        except ClientDisconnect:
            return
        except HTTPException as error:
            await error_response(error.status_code, error.detail)(scope, receive, send)
            return
        current_request.set(request)
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def checked_body():
            for message in messages:
                return message
            await anyio.sleep_forever()

        async def watch_client() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            request.disconnect()

        watching = asyncio.create_task(watch_client())
        try:
            await self.app(scope, checked_body, send)
        finally:
            watching.cancel()
            request.disconnect()

    def _check(self, path: str, body: bytes) -> tuple[bytes, ClientRequest]:
        """The request as it was understood, so that nobody after this understands it in another way.

        Without its seed, by which the rest of the server would seed everybody's draws, and its prefix, which it does not know.
        """
        try:
            request = ENDPOINTS[path].model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "The body"
            reason = first["msg"].removeprefix("Value error, ")
            raise HTTPException(400, f"{place}: {reason}.") from error
        if request.model is None and self.only_model is None:
            raise HTTPException(400, "model: name the model that is to answer.")
        if request.model not in (None, self.only_model) and self.only_model is not None:
            raise HTTPException(400, f"This server answers for {self.only_model!r} alone and loads no other model.")
        checked = request.model_dump_json(exclude_unset=True, round_trip=True, exclude={"seed", "prefix"})
        return checked.encode(), ClientRequest(getattr(request, "seed", None), getattr(request, "prefix", None))


async def _read(scope, receive) -> bytes:
    """The body. What is not kept is read to its end all the same: a client that writes does not see the answer.

    Raises:
        HTTPException: the endpoint is unknown, or the body too large or not JSON.
        ClientDisconnect: the body is incomplete.
    """
    request, body, size = Request(scope, receive), bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MAX_BODY_BYTES:
            body += chunk
    if scope["path"] not in ENDPOINTS:
        raise HTTPException(404, f"There is no {scope['path']} here; POST to {', '.join(ENDPOINTS)}.")
    if size > MAX_BODY_BYTES:
        raise HTTPException(413, f"The body has {size} bytes; at most {MAX_BODY_BYTES} are read.")
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":  # a web page may send other kinds to any server that its reader can reach
        raise HTTPException(415, f"Send the header Content-Type: application/json, not {kind or 'none'!r}.")
    return bytes(body)
