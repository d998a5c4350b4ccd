# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Passwords, keys and access tokens: whether a file holds one, and how to take tokens out of texts and command lines.

File names are looked at, tokens of the Hub are looked for in all bytes, and the package detect-secrets (the extra
`tost-hf[publish]`) looks for others in text.
"""

import importlib.util
import re
import shlex
from collections.abc import Iterable
from pathlib import Path


REMOVED = "REMOVED"
CHUNK_BYTES, OVERLAP_BYTES = 2**20, 2**10  # read at once, and read again of these: a token may lie across the cut
HUB_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_(?:[A-Za-z0-9]{30,}|(?:oauth|jwt)_[\w.=-]{20,})|api_(?:org_)?[A-Za-z]{34}(?![A-Za-z0-9]))",
    re.ASCII,
)
SECRET_NAMES = re.compile(
    r"(.*\.env|\.env\..*|\.netrc|_netrc|\.git-credentials|\.htpasswd|\.pypirc|\.npmrc|\.pgpass|\.my\.cnf|\.s3cfg|\.boto"
    r"|\.dockercfg|kubeconfig|kaggle\.json|stored_tokens|id_(rsa|dsa|ecdsa|ed25519).*|credentials(\..*)?|secrets?(\..*)?"
    r"|service[-_]account.*\.json|(hf_|access_|api_|auth_)?token(\.(txt|json))?|secring\..*|.*\.(pem|key|p8|p12|pfx|ppk|kdbx"
    r"|keystore|jks|gpg|pgp))$",
    re.IGNORECASE,
)
# In these every word, or every line, may look like a secret; detect-secrets takes minutes for them.
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
MAX_TEXT_BYTES, MAX_LINE_LENGTH = 2**20, 20_000  # of what detect-secrets reads; longer lines are minified code or data


def check_detect_secrets() -> None:
    """Raises ImportError, which says what to install, where detect-secrets is missing."""
    if not has_detect_secrets():
        raise ImportError(
            "Before publishing, files are searched for secrets by the package detect-secrets, which is not installed: "
            "pip install 'tost-hf[publish]'"
        )


def has_detect_secrets() -> bool:
    return importlib.util.find_spec("detect_secrets") is not None


def is_secret_name(name: str) -> bool:
    """Whether files of this name (a path with forward slashes) usually hold secrets: `.env`, `prod.env`, `id_rsa`, `x.pem`."""
    return SECRET_NAMES.match(name.rsplit("/", 1)[-1]) is not None


def holds_hub_token(content: bytes | str) -> bool:
    """Whether a text or bytes hold a token of the Hub; an encoding as UTF-16 or UTF-32 hides none."""
    if isinstance(content, bytes):
        content = content.replace(b"\0", b"").decode("latin-1")  # UTF-16 and UTF-32 put zeros between
    return HUB_TOKEN.search(content) is not None


def secrets_in_file(path: Path) -> list[str]:
    """The kinds of secrets that a file of any size holds, sorted; without detect-secrets, of the Hub's tokens alone."""
    kinds = set()
    with open(path, "rb") as file:
        kept = b""
        while chunk := file.read(CHUNK_BYTES):
            if holds_hub_token(kept + chunk):
                kinds.add("Hugging Face Token")
            kept = chunk[-OVERLAP_BYTES:]
    if has_detect_secrets() and _is_plain_text(path):
        kinds |= _detected(path)
    return sorted(kinds)


def _is_plain_text(path: Path) -> bool:
    """Whether detect-secrets reads a file: text of lines that a person may have written."""
    if path.name in VOCABULARIES or path.stat().st_size > MAX_TEXT_BYTES:
        return False
    content = path.read_bytes()
    return b"\0" not in content and max(map(len, content.splitlines()), default=0) <= MAX_LINE_LENGTH


def _detected(path: Path) -> set[str]:
    from detect_secrets import SecretsCollection
    from detect_secrets.settings import default_settings

    found = SecretsCollection()
    with default_settings() as settings:
        settings.disable_plugins("Base64HighEntropyString", "HexHighEntropyString")  # commits and digests are no secrets
        found.scan_file(str(path))
    return {secret.type for _, secret in found}


def redact(text: str) -> str:
    """The text with each token of the Hub, and each value of an option such as `--hub_token`, replaced by REMOVED."""
    return HUB_TOKEN.sub(REMOVED, _redact_options(text))


def safe_command(argv: Iterable[str]) -> str:
    """A command line as one types it, quoted, without tokens and passwords, however their options are spelt.

    `--hub_token X`, `--hub-token=X`, `--hub_tok X` (argparse completes it), `-t X`, `--model_args a=b,token=X`.
    """
    return redact(shlex.join(argv))


# Options -------------------------------------------------------------------------------------------------------------------

_PREFIX = r"(?:(?:hub|hf|push[_-]to[_-]hub|use[_-]auth|auth|access|api|bot|github|refresh|user|wandb)[_-])?"
_NAME = _PREFIX + r"token|(?:[\w-]*[_-])?(?:password|passwd|secret|(?:access|api|secret)[_-]?key)"
_OPTION_NAME = rf"(?:--(?:{_NAME}|{_PREFIX}t(?:o(?:ke?)?)?)|-t(?![\w-]))"  # also what argparse completes to a token
SECRET_VALUE = re.compile(  # each group `value` is to be taken out of a text
    rf"(?<![\w-])(?:{_OPTION_NAME}(?:=|(?:\s|\\\n){{1,40}}(?!--))(?P<word>(?:'[^']*'|\"[^\"]*\"|\\.|[^\s'\"\\])+)"
    rf"|(?:{_NAME})=(?P<assigned>'[^']*'|\"[^\"]*\"|[^\s,;&'\"\\]+)"
    rf"|(?:{_NAME})\\?[\"']\s{{0,8}}:\s{{0,8}}\\?(?P<quote>[\"'])(?P<quoted>[^\"'\\]+)\\?(?P=quote))",
    re.IGNORECASE,
)


def _redact_options(text: str) -> str:
    """Without the values of options, arguments and JSON fields that hold secrets: `--token X`, `token=X`, `"token": "X"`."""

    def replace(match: re.Match) -> str:
        assert match.lastgroup is not None  # each alternative has a group
        start, end = match.span(match.lastgroup)
        return match[0][: start - match.start()] + REMOVED + match[0][end - match.start() :]

    return SECRET_VALUE.sub(replace, text)


__all__ = ["check_detect_secrets", "holds_hub_token", "is_secret_name", "redact", "safe_command", "secrets_in_file"]
