"""What the tests of the server share: a server in this process, its clients, their answers."""

import http.client
import json
import socket
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hub_clients import language_folder


pytest.importorskip("openai", reason="the packages of the [serve] extra are not installed")

from tost_hf.serving.server import patch_server


POSITIONS = 64  # of the model of language_folder; its tokens are bytes
JSON = {"Content-Type": "application/json"}
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
LIMIT = {COMPLETIONS: "max_tokens", CHAT: "max_tokens", RESPONSES: "max_output_tokens"}
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
everywhere = pytest.mark.parametrize("path", LIMIT)


def asking(path: str, text, **fields) -> dict:
    """A request body that asks for what follows this text."""
    if path == CHAT:
        return {"messages": [{"role": "user", "content": text}]} | fields
    return {"prompt" if path == COMPLETIONS else "input": text} | fields


class Answer(NamedTuple):
    status: int
    text: str

    @property
    def error(self) -> str | None:
        """The message of an error, in an answer or in a stream."""
        for event in self.events:
            error = event.get("error") or (event.get("response") or {}).get("error")
            if error:
                return error if isinstance(error, str) else error["message"]
        return None

    @property
    def events(self) -> list[dict]:
        lines = self.text.splitlines() if self.text.startswith("data: ") else [self.text]
        return [json.loads(line.removeprefix("data: ")) for line in lines if line]

    @property
    def usage(self) -> tuple[int, int]:
        """Tokens of the prompt and of what followed."""
        last = self.events[-1]
        usage = last.get("usage") or last["response"]["usage"]
        chat_names = usage.get("prompt_tokens"), usage.get("completion_tokens")
        return chat_names if chat_names != (None, None) else (usage["input_tokens"], usage["output_tokens"])


class Served(NamedTuple):
    """A running server with one model."""

    port: int
    folder: Path
    model: torch.nn.Module
    processor: object

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, path: str, body: dict | bytes | None = None, method: str = "POST", headers: dict = JSON) -> Answer:
        connection = self.connect()
        connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body, headers)
        response = connection.getresponse()
        answer = Answer(response.status, response.read().decode())
        connection.close()
        return answer

    @contextmanager
    def before_each_step(self, action):
        """`action(tokens)` is called before each forward of the model, with its token ids."""

        def before(module, args, inputs):
            action(inputs["input_ids"])

        hook = self.model.register_forward_pre_hook(before, with_kwargs=True)
        yield
        hook.remove()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def serving(prefix_files=None, prefix_cache_bytes=None, **options):
    """A server in this process, with these options of `transformers serve`; and its port."""
    from transformers.cli.serve import Serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with patch_server(prefix_files, prefix_cache_bytes):
        running = Serve(device="cpu", host="127.0.0.1", port=port, non_blocking=True, **options)
        wait_until(lambda: running.server.started)
        yield running, port
        running.kill_server()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = language_folder(tmp_path_factory.mktemp("served") / "tiny")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return folder


@pytest.fixture(scope="module")
def served(folder):
    with serving(force_model=str(folder)) as (running, port):
        (loaded,) = running._model_manager.loaded_models.values()
        yield Served(port, folder, loaded.model, loaded.processor)
