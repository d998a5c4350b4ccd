"""`tost-hf serve` under requests of every kind: right, wrong, hostile."""

import json
import shutil
from itertools import product
from pathlib import Path

import pytest
import serving_clients
from hub_clients import language_folder
from serving_clients import (
    CHAT,
    COMPLETIONS,
    JSON,
    LIMIT,
    POSITIONS,
    RESPONSES,
    Served,
    asking,
    everywhere,
    serving,
)

from tost_hf.serving.application import MAX_BODY_BYTES
from tost_hf.serving.server import patch_server
from tost_hf.serving.server_generation import MAX_TOKENS


folder, served = serving_clients.folder, serving_clients.served  # fixtures


@pytest.fixture(scope="module")
def open_server():
    """A server that was started without a model."""
    with serving() as (_, port):
        yield Served(port, None, None, None)


RIGHT = {
    "to the last position": ("hi", {}, POSITIONS - 2),
    "more than there are": ("hi", {"LIMIT": 10**30}, POSITIONS - 2),
    "one position left": ("x" * (POSITIONS - 1), {}, 1),
    "greedy": ("hi", {"LIMIT": 3, "temperature": 0}, 3),
    "sampled": ("hi", {"LIMIT": 3, "temperature": 0.7, "top_p": 0.9, "seed": 3}, 3),
    "configuration without a length": ("hi", {"generation_config": "{}"}, POSITIONS - 2),
    "length of all": ("hi", {"generation_config": '{"max_length": 7}'}, 5),
    "emoji": ("🙂", {"LIMIT": 3}, 3),
    "control characters": ("\0\x1b\r\n\u2028", {"LIMIT": 3}, 3),
    "field nobody uses": ("hi", {"LIMIT": 3, "user": "me"}, 3),
}


def spread(cases: dict, on_all: int):
    """The first cases on all endpoints, plain and streamed; the others, which differ before these do, on one after another."""
    ways = list(product(LIMIT, [False, True]))
    chosen = [(name, way) for i, name in enumerate(cases) for way in (ways if i < on_all else [ways[i % len(ways)]])]
    return pytest.mark.parametrize(
        "path, stream, case",
        [pytest.param(*way, cases[name], id=f"{name}-{way[0]}-{'stream' if way[1] else 'plain'}") for name, way in chosen],
    )


@spread(RIGHT, on_all=3)
def test_right_requests(served, path, stream, case):
    text, fields, tokens = case
    fields = {LIMIT[path] if name == "LIMIT" else name: value for name, value in fields.items()}
    answer = served.ask(path, asking(path, text, stream=stream, **fields))
    assert answer.status == 200 and answer.error is None, answer
    prompt_tokens = len(served.processor(text).input_ids)
    prompt, written = answer.usage
    assert prompt == prompt_tokens
    assert 1 <= written <= tokens and prompt + written <= POSITIONS


WRONG = {  # first those that the model or each endpoint tells
    "empty": ("", {}, "The prompt is empty"),
    "as many tokens as positions": ("x" * POSITIONS, {}, "The prompt has 64 tokens; there are 64 positions"),
    "all but zero": ("hi", {"generation_config": '{"do_sample": true, "temperature": 1e-40}'}, "at least 0.001"),
    "shorter than the prompt": ("hi", {"generation_config": '{"max_length": 2}'}, "At least 1 token must be generated"),
    "no tokens": ("hi", {"LIMIT": 0}, "greater than 0"),
    "unknown field": ("hi", {"colour": "red"}, "Unexpected fields in the request: {'colour'}"),
    "many beams": ("hi", {"generation_config": '{"num_beams": 1000000}'}, "less than or equal to 8"),
    "text for a number": ("hi", {"LIMIT": "3"}, "valid integer"),
    "NaN": ("hi", {"temperature": float("nan")}, "temperature: "),
    "top_p": ("hi", {"top_p": 2}, "top_p: Input should be less than or equal to 1"),
    "seed": ("hi", {"seed": 2**70}, "seed: "),
    "another model": ("hi", {"model": "owner/other"}, "loads no other model"),
    "configuration of a list": ("hi", {"generation_config": "[]"}, "generation_config: "),
    "broken configuration": ("hi", {"generation_config": "{"}, "generation_config: Invalid JSON"),
    "code of a repository": ("hi", {"generation_config": '{"penalty_alpha": 0.6}'}, "penalty_alpha: Extra inputs"),
    "no end": ("hi", {"generation_config": '{"eos_token_id": [[]]}'}, "eos_token_id"),
}


@spread(WRONG, on_all=8)
def test_wrong_requests(served, path, stream, case):
    text, fields, message = case
    fields = {LIMIT[path] if name == "LIMIT" else name: value for name, value in fields.items()}
    steps = []
    with served.before_each_step(steps.append):
        answer = served.ask(path, asking(path, text, **{"stream": stream} | fields))
    assert not steps, "The model was run."
    assert answer.status in (400, 422) and message in answer.error and len(answer.error) > 20, answer


def chat(**fields) -> tuple[str, dict]:
    return CHAT, asking(CHAT, "hi", **fields)


ODD = {
    "stop of nothing": (*chat(stop=""), 400, "stop"),
    "five stops": (*chat(stop=list("abcde")), 400, "stop"),
    "frequency": (*chat(frequency_penalty=-1), 400, "frequency_penalty: Input should be greater than -1"),
    "bias of a token unknown": (*chat(logit_bias={"99999": 1}), 400, "vocabulary size is 320"),
    "own template": (*chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}), 400, "the server sets chat_template"),
    "tools of numbers": (*chat(tools=[5]), 400, "tools.0"),
    "no messages": (CHAT, {"messages": []}, 400, "messages: "),
    "message without a role": (CHAT, {"messages": [{"content": "hi"}]}, 400, "messages.0.role: Field required"),
    "part without text": (CHAT, asking(CHAT, [{"type": "text"}]), 400, "lacks the field 'text'"),
    "calls of a number": (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, 400, "cannot be read"),
    "input of nothing": (RESPONSES, {"input": []}, 400, "input"),
    "input of an unknown kind": (RESPONSES, {"input": [{"role": "user"}, {"type": "odd"}]}, 422, "Unsupported input item"),
    "prompts": (COMPLETIONS, {"prompt": ["a", "b"]}, 400, "prompt"),
    "no prompt": (COMPLETIONS, {}, 400, "prompt: Field required"),
    "empty body": (COMPLETIONS, b"", 400, "Invalid JSON"),
    "half a character": (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, "Invalid JSON"),
    "deep": (COMPLETIONS, b"[" * 10**6, 400, "recursion limit"),
    "huge": (COMPLETIONS, b" " * (MAX_BODY_BYTES + 1), 413, f"at most {MAX_BODY_BYTES} are read"),
    "load another model": ("/load_model", {"model": "owner/other"}, 400, "loads no other model"),
    "load nothing": ("/load_model", {}, 422, "Missing `model`"),
    "unload": ("/reset", {}, 404, "There is no /reset here"),
    "unknown place": ("/v2/completions", {}, 404, "There is no /v2/completions here"),
}


@everywhere
def test_beams_are_not_streamed(served, path):
    ask = {LIMIT[path]: 3, "generation_config": '{"num_beams": 2}'}
    assert served.ask(path, asking(path, "hi", stream=False, **ask)).usage == (2, 3)
    answer = served.ask(path, asking(path, "hi", stream=True, **ask))
    assert answer.status == 400 and "cannot be streamed" in answer.error


def test_model_whose_own_settings_ask_for_code_is_not_run(served, monkeypatch):
    """transformers would take contrastive search from a repository, and ask at the server's terminal whether to run it."""
    monkeypatch.setattr(served.model.generation_config, "penalty_alpha", 0.6)
    monkeypatch.setattr(served.model.generation_config, "top_k", 4)
    answer = served.ask(COMPLETIONS, asking(COMPLETIONS, "hi"))
    assert answer.status == 400 and "contrastive_search is not possible here" in answer.error


@pytest.mark.parametrize("path, body, status, message", ODD.values(), ids=ODD)
def test_odd_requests(served, path, body, status, message):
    answer = served.ask(path, body)
    assert (answer.status, message in answer.error) == (status, True), answer
    assert len(answer.error) > 10


def test_other_methods_and_content_types_are_rejected(served):
    """A web page elsewhere can send other content types without being asked."""
    answer = served.ask(COMPLETIONS, method="PUT")
    assert answer.status == 405 and answer.error == "Method Not Allowed"
    for headers in ({}, {"Content-Type": "text/plain"}):
        answer = served.ask(COMPLETIONS, asking(COMPLETIONS, "hi"), headers=headers)
        assert answer.status == 415 and "Content-Type: application/json" in answer.error


def test_own_model_is_named_and_loaded(served):
    assert [model["id"] for model in json.loads(served.ask("/v1/models", method="GET").text)["data"]] == [str(served.folder)]
    assert '"status": "ready"' in served.ask("/load_model", {"model": str(served.folder)}).text
    assert served.ask("/health", method="GET").status == 200
    assert served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", model=str(served.folder), max_tokens=2)).usage == (2, 2)


def test_request_id_of_a_client_is_only_repeated(served):
    for value in ("\xff\xfe", "x" * 5000, "{}{}", ""):
        answer = served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=1), headers=JSON | {"X-Request-Id": value})
        assert answer.status == 200 and answer.usage == (2, 1)


def test_client_that_sends_half_a_request(served):
    for sent in (b'{"prompt": "h', b""):
        connection = served.connect()
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "1000")
        connection.endheaders(sent)
        connection.sock.close()
    assert served.ask("/health", method="GET").status == 200


def foreign_code(folder: Path) -> None:
    """The folder now asks for remote code, which leaves a mark when it runs."""
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))


VISION_CONFIG = '{"model_type": "tost_vision", "architectures": ["ToSTForImageClassification"]}'
NOT_SERVED = {
    "no folder": (lambda folder: shutil.rmtree(folder), ""),
    "foreign code": (foreign_code, "trust_remote_code"),
    "damaged weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "damaged"),
    "no tokenizer": (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "tokenizer"),
    "vision model": (lambda folder: (folder / "config.json").write_text(VISION_CONFIG), "ToSTVisionConfig"),
    "odd classes": (lambda folder: (folder / "config.json").write_text('{"architectures": [3]}'), "Unrecognized"),
}


@pytest.mark.parametrize("damage, message", NOT_SERVED.values(), ids=NOT_SERVED)
def test_open_server_refuses_what_it_cannot_load(open_server, tmp_path, damage, message):
    folder = language_folder(tmp_path / "named")
    damage(folder)
    for path in LIMIT:
        answer = open_server.ask(path, asking(path, "hi", model=str(folder)))
        assert answer.status == 400 and message in answer.error and len(answer.error) > 20, answer
    loading = open_server.ask("/load_model", {"model": str(folder)})
    assert loading.events[-1]["status"] == "error" and message in loading.events[-1]["message"]
    assert not (folder / "ran").exists()


def test_open_server_loads_what_is_named(open_server, folder):
    nameless = open_server.ask(COMPLETIONS, asking(COMPLETIONS, "hi"))
    assert nameless.status == 400 and nameless.error == "model: name the model that is to answer."
    assert open_server.ask(COMPLETIONS, asking(COMPLETIONS, "hi", model=str(folder), max_tokens=3)).usage == (2, 3)
    assert open_server.ask("/v1/models", method="GET").status == 200


def test_prompts_of_a_model_without_positions_are_bounded(served, monkeypatch):
    monkeypatch.setattr(served.model.config, "max_position_embeddings", None)
    answer = served.ask(COMPLETIONS, asking(COMPLETIONS, "x" * (MAX_TOKENS + 1)))
    assert answer.status == 400 and f"The prompt has {MAX_TOKENS + 1} tokens" in answer.error


@pytest.mark.parametrize(
    "module, name",
    [
        ("model_manager", "ModelManager"),
        ("model_manager", "transformers"),
        ("utils", "GenerationState"),
        ("server", "build_server"),
        ("completion", "CompletionUsage"),
        ("response", "compute_usage"),
    ],
)
def test_server_without_a_part_to_guard_is_not_started(module, name, monkeypatch):
    monkeypatch.delattr(f"transformers.cli.serving.{module}.{name}")
    with pytest.raises(ImportError, match=f"has no {module}.{name}, which tost-hf replaces"), patch_server():
        pass
