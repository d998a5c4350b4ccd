"""Secrets in files, names, texts and command lines: what is refused or taken out, and what ordinary files may hold."""

import base64
import json
import random
import shlex
import string
import subprocess
from pathlib import Path

import pytest
from hub_clients import language_folder, vision_folder

from tost_hf.hub.secrets import is_secret_name, safe_command, secrets_in, secrets_in_file, without_secrets


ROOT = Path(__file__).parents[1]
LETTERS, ALNUM, HEX = string.ascii_letters, string.ascii_letters + string.digits, "0123456789abcdef"
LOWER, UPPER = string.ascii_lowercase + string.digits, string.ascii_uppercase + string.digits


def drawn(alphabet: str, length: int) -> str:
    """Random letters: made here, so that this file holds nothing that looks like a secret."""
    return "".join(random.Random(f"{alphabet}{length}").choices(alphabet, k=length))


def jwt() -> str:
    parts = ({"alg": "HS256"}, {"sub": "1"})
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + ".c2ln"


SHAPES = {  # what stands before the random letters, and which they are
    "hub": ("hf_", LETTERS, 34),
    "hub-oauth": ("hf_oauth_", ALNUM, 40),
    "hub-jwt": ("hf_jwt_", ALNUM, 60),
    "hub-organization": ("api_org_", LETTERS, 34),
    "hub-old": ("api_", LETTERS, 34),
    "aws": ("AKIA", UPPER, 16),
    "aws-session": ("ASIA", UPPER, 16),
    "github": ("ghp_", ALNUM, 36),
    "github-oauth": ("gho_", ALNUM, 36),
    "github-user": ("ghu_", ALNUM, 36),
    "github-server": ("ghs_", ALNUM, 36),
    "github-refresh": ("ghr_", ALNUM, 36),
    "github-fine": ("github_" + "pat_", ALNUM, 70),
    "gitlab": ("glpat-", ALNUM, 20),
    "gitlab-deploy": ("gldt-", ALNUM, 20),
    "slack-bot": ("xoxb-", ALNUM, 40),
    "slack-user": ("xoxp-", ALNUM, 40),
    "slack-app": ("xapp-1-", ALNUM, 40),
    "slack-hook": ("https://hooks.slack.com/services/T0AB/B0CD/", ALNUM, 24),
    "openai": ("sk-", ALNUM, 48),
    "openai-project": ("sk-proj-", ALNUM, 60),
    "openai-service": ("sk-svcacct-", ALNUM, 60),
    "anthropic": ("sk-ant-api03-", ALNUM, 90),
    "openrouter": ("sk-or-v1-", HEX, 64),
    "google": ("AIza", ALNUM, 35),
    "google-oauth": ("ya29.", ALNUM, 60),
    "google-client": ("GOCSPX-", ALNUM, 28),
    "npm": ("npm_", ALNUM, 36),
    "pypi": ("pypi-AgEIcHlwaS5vcmc", ALNUM, 80),
    "sendgrid": ("SG." + "a" * 22 + ".", ALNUM, 43),
    "stripe": ("sk_" + "live_", ALNUM, 24),
    "stripe-restricted": ("rk_" + "live_", ALNUM, 24),
    "stripe-test": ("sk_" + "test_", ALNUM, 24),
    "stripe-hook": ("whsec_", ALNUM, 32),
    "twilio": ("SK", HEX, 32),
    "telegram": ("123456789:", ALNUM, 35),
    "discord": ("M" + "a" * 23 + ".abcdef.", ALNUM, 27),
    "databricks": ("dapi", HEX, 32),
    "digitalocean": ("dop_v1_", HEX, 64),
    "shopify": ("shpat_", HEX, 32),
    "groq": ("gsk_", ALNUM, 52),
    "replicate": ("r8_", ALNUM, 37),
    "vault": ("hvs.", ALNUM, 90),
    "atlassian": ("ATATT3", ALNUM, 180),
    "linear": ("lin_api_", ALNUM, 40),
    "notion": ("ntn_", ALNUM, 43),
    "square": ("sq0csp-", ALNUM, 43),
    "age": ("AGE-SECRET-" + "KEY-1", UPPER, 58),
    "azure": ("AccountKey=", ALNUM, 88),
    "bearer": ("Authorization: Bearer ", ALNUM, 40),
    "basic": ("https://bob:", ALNUM, 20),
    "mailchimp": ("", HEX, 32),
    "password": ("password: ", ALNUM, 16),
    "password-quoted": ('"db_password": "', ALNUM, 16),
    "password-environment": ("export DB_PASSWORD=", ALNUM, 20),
    "secret-key": ("AWS_SECRET_ACCESS_KEY=", ALNUM, 40),
    "client-secret": ("client_secret = '", ALNUM, 32),
    "api-key": ("WANDB_API_KEY=", HEX, 40),
    "access-token": ('{"access_token": "', ALNUM, 32),
    "npmrc": ("//registry.npmjs.org/:_authToken=", ALNUM, 36),
}
ENDS = {
    "client-secret": "'",
    "basic": "@git.example.com/x",
    "mailchimp": "-us12",
    "password-quoted": '"',
    "access-token": '"}',
}
KINDS_OF_KEYS = ("RSA ", "EC ", "DSA ", "OPENSSH ", "ENCRYPTED ", "", "SSH2 ENCRYPTED ")
SAMPLES = {name: start + drawn(alphabet, length) + ENDS.get(name, "") for name, (start, alphabet, length) in SHAPES.items()}
SAMPLES |= {f"key-{kind.strip() or 'plain'}": f"-----BEGIN {kind}PRIVATE" + " KEY-----\nMIIE" for kind in KINDS_OF_KEYS}
SAMPLES |= {
    "pgp": "-----BEGIN PGP PRIVATE" + " KEY BLOCK-----\n\nlQ",
    "putty": "PuTTY-User-Key-" + "File-2: ssh-rsa",
    "jwt": jwt(),
}
NAMES = ("prod.env", ".env.local", "id_ed25519", "deploy.pem", "key.p8", "kaggle.json", "secring.gpg")
SAMPLES |= {name: name for name in NAMES}


def test_there_are_77_samples():
    assert len(SAMPLES) == 77


@pytest.mark.parametrize("name", SAMPLES)
def test_a_secret_is_found(name, tmp_path, monkeypatch):
    """Alone, amid a line, in other encodings, across the pieces a file is read in; and it is taken out of a text."""
    sample = SAMPLES[name]
    if name in NAMES:
        assert is_secret_name(f"deep/{name}") and is_secret_name(name.upper())
        return
    text = f"some words before it\n  {sample}\nand after"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"):
        assert secrets_in(text.encode(encoding)), encoding
    monkeypatch.setattr("tost_hf.hub.secrets.PIECE", 2**15)
    (tmp_path / "large").write_bytes(b"word " * (2**15 // 5 - 4) + text.encode() + b" word" * 2**13)
    assert secrets_in_file(tmp_path / "large")
    assert not secrets_in(without_secrets(text)) and without_secrets(text).startswith("some words before it\n")


def ordinary_files(folder: Path) -> list[Path]:
    """What models and their training leave, and this repository."""
    language_folder(folder / "language")
    vision_folder(folder / "vision")
    vocabulary = {drawn(ALNUM, length): length for length in range(1, 80)} | {
        "secret": 90,
        "password": 91,
        "hf_": 92,
        "sk-": 93,
    }
    texts = {
        "tokenizer.json": json.dumps({"model": {"vocab": vocabulary, "merges": [[x, y] for x in "abc" for y in vocabulary]}}),
        "merges.txt": "\n".join(f"{word[:3]} {word[3:]}" for word in vocabulary),
        "tokenizer_config.json": '{"pad_token": "<|endoftext|>", "auth_token": null, "extra_special_tokens": ["<secret>"]}',
        "training.json": '{"hub_token": "<HUB_TOKEN>", "push_to_hub_token": null, "hub_model_id": "me/x", "seed": 42}',
        "log.txt": "\n".join(f"step {i} loss {1 / (i + 1):.9f} sha256 {drawn(HEX, 64)} {drawn(HEX, 40)}" for i in range(50)),
        "usage.md": 'api_key="EMPTY", password = getpass(), token: ${HF_TOKEN} https://user:password@proxy, Bearer $HF_TOKEN',
        "code.py": "api_key = os.environ['OPENAI_API_KEY']\npassword=settings.password2024\nsecret_key: str = field()",
        "hashes.txt": "model-00001-of-00002.safetensors " + drawn(HEX, 64) + " 01234567-89ab-cdef-0123-456789abcdef",
        "key.txt": "-----BEGIN PUBLIC KEY-----\n" + drawn(ALNUM, 64) + "\n-----END PUBLIC KEY-----",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\0"
    )
    return [path for path in folder.rglob("*") if path.is_file()] + [ROOT / x for x in tracked if x and (ROOT / x).is_file()]


def test_ordinary_files_hold_none(tmp_path):
    found = {str(path): kinds for path in ordinary_files(tmp_path) if (kinds := secrets_in_file(path))}
    assert found == {}
    for name in ("tokenizer.json", "tokens.txt", "special_tokens_map.json", "environment.yml", "keys.md", "vocab.json"):
        assert not is_secret_name(name)


@pytest.mark.parametrize(
    "words",
    [
        ["-t", "S3"],
        ["--token", "S3"],
        ["--token", "S3 and more"],
        ["--token=S3"],
        ["--hub_token", "S3"],
        ["--hub-token", "S3"],
        ["--hub_token=S3"],
        ["--HUB-TOKEN", "S3"],
        ["--hub_tok", "S3"],
        ["--hub_t", "S3"],
        ["--tok=S3"],
        ["--push_to_hub_token", "S3"],
        ["--use-auth-token", "S3"],
        ["--api-key", "S3"],
        ["--password", "it's S3"],
        ["--model_args", "pretrained=x,token=S3,dtype=float32"],
        ["--model_kwargs", '{"token": "S3", "revision": "main"}'],
        ["hub_token=S3"],
        ["--text", "hf_" + drawn(LETTERS, 20) + "S3" + drawn(LETTERS, 14)],
    ],
    ids=" ".join,
)
def test_a_command_is_recorded_without_its_tokens(words):
    ordinary = ["run.py", "--tokenizer_name", "a b", "--hub_model_id", "me/x", "--temperature=1", "--max_new_tokens", "5"]
    for argv in ([*ordinary, *words, "--do_train"], [*words, *ordinary]):
        command = safe_command(argv)
        assert "S3" not in command and command.count("REMOVED") == 1
        assert [word for word in shlex.split(command) if word in ordinary] == ordinary
        recorded = without_secrets(shlex.join(argv))  # by something else that did not take care
        assert "S3" not in recorded and "--tokenizer_name 'a b' --hub_model_id me/x" in recorded


def test_an_option_without_its_value_takes_no_other():
    assert safe_command(["x", "--use_auth_token", "--do_train", "a"]) == "x --use_auth_token --do_train a"
