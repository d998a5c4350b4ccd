"""Secrets in files, names, texts and command lines: what is rejected or taken out, and what ordinary files may hold."""

import importlib.util
import json
import random
import shlex
import string
import subprocess
from pathlib import Path

import pytest
from hub_clients import language_folder, vision_folder

from tost_hf import cli
from tost_hf.hub.publishing import publish
from tost_hf.hub.secrets import holds_hub_token, is_secret_name, redact, safe_command, secrets_in_file
from tost_hf.hub.verification import verify


ROOT = Path(__file__).parents[1]
LETTERS, ALNUM, HEX = string.ascii_letters, string.ascii_letters + string.digits, "0123456789abcdef"


def drawn(alphabet: str, length: int) -> str:
    """Random letters: made here, so that this file holds nothing that looks like a secret."""
    return "".join(random.Random(f"{alphabet}{length}").choices(alphabet, k=length))


HUB_TOKENS = {
    "hub": "hf_" + drawn(LETTERS, 34),
    "hub-oauth": "hf_oauth_" + drawn(ALNUM, 40),
    "hub-jwt": "hf_jwt_" + drawn(ALNUM, 60),
    "hub-organization": "api_org_" + drawn(LETTERS, 34),
    "hub-old": "api_" + drawn(LETTERS, 34),
}
OTHERS = {  # one of each family that detect-secrets knows
    "aws": "AKIA" + drawn(string.ascii_uppercase, 16),
    "github": "ghp_" + drawn(ALNUM, 36),
    "gitlab": "glpat-" + drawn(ALNUM, 20),
    "slack": "xoxb-" + drawn(string.digits, 12) + "-" + drawn(ALNUM, 24),
    "private-key": "-----BEGIN RSA PRIVATE" + " KEY-----\nMIIE",
    "basic-auth": "https://bob:" + drawn(ALNUM, 20) + "@git.example.com/x",
    "password": f'password = "{drawn(ALNUM, 16)}"',
}
NAMES = ("prod.env", ".env.local", "id_ed25519", "deploy.pem", "key.p8", "kaggle.json", "secring.gpg")


@pytest.mark.parametrize("token", HUB_TOKENS.values(), ids=HUB_TOKENS)
def test_tokens_of_the_hub(token, tmp_path, monkeypatch):
    """Alone, amid a line, in other encodings, across the pieces a file is read in; and they are taken out of a text."""
    text = f"some words before it\n  {token}\nand after"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"):
        assert holds_hub_token(text.encode(encoding)), encoding
    monkeypatch.setattr("tost_hf.hub.secrets.CHUNK_BYTES", 2**15)
    (tmp_path / "large").write_bytes(b"\xff" * (2**15 - 30) + text.encode() + b" word" * 2**13)
    assert secrets_in_file(tmp_path / "large") == ["Hugging Face Token"]
    assert redact(text) == "some words before it\n  REMOVED\nand after"


@pytest.mark.parametrize("secret", OTHERS.values(), ids=OTHERS)
def test_secrets_found_by_detect_secrets(secret, tmp_path):
    (tmp_path / "notes.txt").write_text(f"some words before it\n{secret}\nand after")
    assert secrets_in_file(tmp_path / "notes.txt")


def test_secret_file_names():
    assert all(is_secret_name(f"deep/{name}") and is_secret_name(name.upper()) for name in NAMES)
    for name in ("tokenizer.json", "tokens.txt", "special_tokens_map.json", "environment.yml", "keys.md", "vocab.json"):
        assert not is_secret_name(name)


def test_without_detect_secrets(tmp_path, monkeypatch, capsys):
    """Publishing says what to install; `verify` looks for the Hub's tokens alone and says so."""
    folder, find = language_folder(tmp_path / "model"), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "detect_secrets" else find(name))
    with pytest.raises(ImportError, match=r"pip install 'tost-hf\[publish\]'"):
        publish(folder, "tost/rejected", dry_run=True)
    assert cli.main(["publish", str(folder), "tost/rejected", "--dry-run"]) == 1
    assert "detect-secrets, which is not installed" in capsys.readouterr().err
    (checked,) = (check for check in verify(folder) if check.name == "files")
    assert checked.passed and "without detect-secrets" in checked.detail
    (folder / "notes.txt").write_text(HUB_TOKENS["hub"])
    assert not all(check.passed for check in verify(folder))


def ordinary_files(folder: Path) -> list[Path]:
    """What models and their training leave, and this repository's pages."""
    language_folder(folder / "language", with_code=True)
    vision_folder(folder / "vision")
    vocabulary = {drawn(ALNUM, length): length for length in range(1, 80)} | {"secret": 90, "password": 91, "hf_": 92}
    texts = {
        "tokenizer.json": json.dumps({"model": {"vocab": vocabulary, "merges": [[x, y] for x in "abc" for y in vocabulary]}}),
        "merges.txt": "\n".join(f"{word[:3]} {word[3:]}" for word in vocabulary),
        "tokenizer_config.json": '{"pad_token": "<|endoftext|>", "auth_token": null, "_commit_hash": "'
        + drawn(HEX, 40)
        + '"}',
        "training.json": '{"hub_token": "<HUB_TOKEN>", "push_to_hub_token": null, "hub_model_id": "me/x", "seed": 42}',
        "log.txt": "\n".join(f"step {i} loss {1 / (i + 1):.9f} sha256 {drawn(HEX, 64)} {drawn(HEX, 40)}" for i in range(50)),
        "hashes.txt": "model-00001-of-00002.safetensors " + drawn(HEX, 64) + " 01234567-89ab-cdef-0123-456789abcdef",
        "key.txt": "-----BEGIN PUBLIC KEY-----\n" + drawn(ALNUM, 64) + "\n-----END PUBLIC KEY-----",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    pages = subprocess.run(["git", "ls-files", "*.md", "LICENSE"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in folder.rglob("*") if path.is_file()] + [ROOT / name for name in pages.stdout.split()]


def test_no_false_positives(tmp_path):
    assert {str(path): kinds for path in ordinary_files(tmp_path) if (kinds := secrets_in_file(path))} == {}


COMMANDS = (
    "-t S3; --token S3; --token 'S3 and more'; --token=S3; --hub_token S3; --hub-token S3; --hub_token=S3; --HUB-TOKEN S3; "
    '--hub_tok S3; --hub_t S3; --tok=S3; --push_to_hub_token S3; --use-auth-token S3; --api-key S3; --password "it\'s S3"; '
    "--model_args pretrained=x,token=S3,dtype=float32; hub_token=S3"
).split("; ")
JSON_OPTION = """--model_kwargs '{"token": "S3", "revision": "main"}'"""
BARE_TOKEN = "--text hf_" + drawn(LETTERS, 20) + "S3" + drawn(LETTERS, 14)


@pytest.mark.parametrize("words", [*COMMANDS, JSON_OPTION, BARE_TOKEN])
def test_recorded_commands(words):
    ordinary = ["run.py", "--tokenizer_name", "a b", "--hub_model_id", "me/x", "--temperature=1", "--max_new_tokens", "5"]
    for argv in ([*ordinary, *shlex.split(words), "--do_train"], [*shlex.split(words), *ordinary]):
        command = safe_command(argv)
        assert "S3" not in command and command.count("REMOVED") == 1
        assert [word for word in shlex.split(command) if word in ordinary] == ordinary
        assert "--tokenizer_name 'a b' --hub_model_id me/x" in command


def test_option_without_value():
    assert safe_command(["x", "--use_auth_token", "--do_train", "a"]) == "x --use_auth_token --do_train a"
