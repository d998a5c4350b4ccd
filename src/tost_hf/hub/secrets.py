# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Passwords, keys and access tokens: whether a file holds one, and how to take them out of texts and command lines.

The patterns are those of detect-secrets, but for kinds of secrets that it does not know, and for the patterns that ordinary
files of a model match (bare high entropy: every tokenizer has it) or that take quadratic time.
"""

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from detect_secrets.filters.heuristic import (
    is_not_alphanumeric_string,
    is_prefixed_with_dollar_sign,
    is_sequential_string,
    is_templated_secret,
)
from detect_secrets.plugins import (
    aws,
    azure_storage_key,
    basic_auth,
    discord,
    github_token,
    gitlab_token,
    jwt,
    mailchimp,
    private_key,
    pypi_token,
    sendgrid,
    slack,
    square_oauth,
    stripe,
    telegram_token,
    twilio,
)
from detect_secrets.plugins.base import RegexBasedDetector
from detect_secrets.plugins.high_entropy_strings import Base64HighEntropyString
from detect_secrets.plugins.keyword import DENYLIST as KEYWORDS


REMOVED = "REMOVED"
PIECE, OVERLAP = 2**20, 2**14  # bytes read at once; of these, what is read again, since a secret may lie across the cut
READABLE = re.compile(rb"[\t\r\n -~]{8,}")
SECRET_NAMES = re.compile(
    r"(.*\.env|\.env\..*|\.netrc|_netrc|\.git-credentials|\.htpasswd|\.pypirc|\.npmrc|\.pgpass|\.my\.cnf|\.s3cfg|\.boto"
    r"|\.dockercfg|kubeconfig|kaggle\.json|stored_tokens|id_(rsa|dsa|ecdsa|ed25519).*|credentials(\..*)?|secrets?(\..*)?"
    r"|service[-_]account.*\.json|(hf_|access_|api_|auth_)?token(\.(txt|json))?|secring\..*|.*\.(pem|key|p8|p12|pfx|ppk|kdbx"
    r"|keystore|jks|gpg|pgp))$",
    re.IGNORECASE,
)


class HuggingFaceToken(RegexBasedDetector):
    secret_type = "Hugging Face Token"
    denylist = (
        re.compile(
            r"(?<![A-Za-z0-9])(?:hf_(?:[A-Za-z0-9]{30,}|(?:oauth|jwt)_[\w.=-]{20,})|api_(?:org_)?[A-Za-z]{34}(?![A-Za-z0-9]))"
        ),
    )


class MoreTokens(RegexBasedDetector):
    """Tokens with a mark of their own that detect-secrets 1.5 does not know."""

    secret_type = "Access Token"
    denylist = (
        re.compile(  # one pattern, since each is a pass over the file
            r"(?<![A-Za-z0-9])(?:"
            r"github_pat_\w{50,}"
            r"|sk-(?:(?:proj|svcacct|admin|ant|or|lf)-)?[\w-]{40,}"  # OpenAI, Anthropic, OpenRouter, Langfuse
            r"|xox[abceoprs]-[A-Za-z0-9-]{20,}"  # Slack
            r"|xapp-\d-[A-Za-z0-9-]{20,}"
            r"|AIza[\w-]{35}"  # Google
            r"|ya29\.[\w-]{30,}"
            r"|GOCSPX-[\w-]{28}"
            r"|npm_[A-Za-z0-9]{36}"
            r"|dapi[0-9a-f]{32}"  # Databricks
            r"|do[opr]_v1_[0-9a-f]{64}"  # DigitalOcean
            r"|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}"  # Shopify
            r"|(?:gsk|r8)_[A-Za-z0-9]{37,}"  # Groq, Replicate
            r"|(?:sk|rk)_test_[0-9a-zA-Z]{24}"  # Stripe
            r"|whsec_[A-Za-z0-9+/=]{32,}"
            r"|hv[sb]\.[\w-]{24,}"  # Vault
            r"|ATATT3[\w=-]{50,}"  # Atlassian
            r"|lin_api_[A-Za-z0-9]{40}"
            r"|(?:secret|ntn)_[A-Za-z0-9]{43}"  # Notion
            r"|AGE-SECRET-KEY-1[0-9A-Z]{58}"
            r")"
        ),
    )


class AnyPrivateKey(RegexBasedDetector):
    secret_type = private_key.PrivateKeyDetector.secret_type
    denylist = (
        *private_key.PrivateKeyDetector.denylist,
        re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY( BLOCK)?-----"),
        re.compile(r"PuTTY-User-Key-File-\d"),
    )


class LinearJwtToken(jwt.JwtTokenDetector):
    """Looked for at the start of a word only: at every letter, a long word takes quadratic time."""

    denylist = [re.compile(r"(?<![\w=-])" + jwt.JwtTokenDetector.denylist[0].pattern)]


class NamedSecret(RegexBasedDetector):
    """What a text calls a password, a secret or a key, if it looks like one: `client_secret: "..."`, `DB_PASSWORD=...`."""

    secret_type = "Secret Keyword"
    denylist = (
        re.compile(
            rf"(?:{'|'.join(KEYWORDS)}|(?:access|api|auth|bearer|bot|hf|hub|refresh)_?token|_authToken)"
            r"\w{0,40}\\?[\"'\]]{0,2}\s{0,8}(?::=|=>|=|:)\s{0,8}\\?[\"']?([\w/+=.~!@#$%^&*-]{12,512})(?=[\"'\\,;\s]|$)",
            re.IGNORECASE,
        ),
        re.compile(r"\bBearer +([\w/+=.~-]{20,512})"),
    )


DETECTORS: tuple[RegexBasedDetector, ...] = tuple(
    kind()
    for kind in (
        HuggingFaceToken,
        AnyPrivateKey,
        aws.AWSKeyDetector,
        azure_storage_key.AzureStorageKeyDetector,
        discord.DiscordBotTokenDetector,
        github_token.GitHubTokenDetector,
        gitlab_token.GitLabTokenDetector,
        LinearJwtToken,
        mailchimp.MailchimpDetector,
        pypi_token.PypiTokenDetector,
        sendgrid.SendGridDetector,
        slack.SlackDetector,
        square_oauth.SquareOAuthDetector,
        stripe.StripeDetector,
        telegram_token.TelegramBotTokenDetector,
        twilio.TwilioKeyDetector,
        MoreTokens,
        basic_auth.BasicAuthDetector,
        NamedSecret,
    )
)
PLACEHOLDERS = re.compile(
    r"(my|your|the)?[_-]?(api|access|auth)?[_-]?(pass|passw(or)?d|pwd|secret|token|key|removed|\W+|x+)", re.IGNORECASE
)
REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")  # as in `password=settings.password`


def is_secret_name(name: str) -> bool:
    """Whether files of this name (a path with forward slashes) usually hold secrets: `.env`, `prod.env`, `id_rsa`, `x.pem`."""
    return SECRET_NAMES.match(name.rsplit("/", 1)[-1]) is not None


def secrets_in(content: bytes | str) -> list[str]:
    """The kinds of secrets that a text holds, sorted; an encoding as UTF-16 or UTF-32 hides none."""
    if isinstance(content, str):
        return sorted({kind for kind, _ in _matches(content)})
    texts = [_words(content)]
    if b"\0" in content:  # UTF-16 and UTF-32 put zeros between
        texts.append(_words(content.replace(b"\0", b"")))
    return sorted({kind for text in texts for kind, _ in _matches(text)})


def secrets_in_file(file: Path | BinaryIO) -> list[str]:
    """The kinds of secrets that a file of any size holds, sorted; it is read in pieces."""
    if isinstance(file, Path):
        with open(file, "rb") as opened:
            return secrets_in_file(opened)
    kinds: set[str] = set()
    kept = b""
    while piece := file.read(PIECE):
        kinds.update(secrets_in(kept + piece))
        kept = piece[-OVERLAP:]
    return sorted(kinds)


def without_secrets(text: str) -> str:
    """The text with each secret, and each value of an option such as `--hub_token`, replaced by REMOVED."""
    text = _without_values(text)
    for start, end in sorted({span for _, span in _matches(text)}, reverse=True):
        text = text[:start] + REMOVED + text[end:]
    return text


def safe_command(argv: Iterable[str]) -> str:
    """A command line as one types it, quoted, without tokens and passwords, however their options are spelt.

    `--hub_token X`, `--hub-token=X`, `--hub_tok X` (argparse completes it), `--model_args a=b,token=X`.
    """
    words: list[str] = []
    secret_follows = False
    for word in argv:
        if secret_follows and not word.startswith("--"):
            words.append(REMOVED)
            secret_follows = False
            continue
        name = SECRET_OPTION.match(word)
        secret_follows = name is not None and name[0] == word
        words.append(f"{name[0]}={REMOVED}" if name and word.startswith("=", name.end()) else without_secrets(word))
    return shlex.join(words)


def _words(content: bytes) -> str:
    """What is readable in it (every pattern is ASCII, which UTF-8 keeps as it is): little is left of numbers and pictures."""
    return b"\n".join(READABLE.findall(content)).decode("ascii")


def _matches(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """(kind, (start, end)) of each secret."""
    for detector in DETECTORS:
        for pattern in detector.denylist:
            for match in pattern.finditer(text):
                if _is_real(detector, match):
                    whole = not isinstance(detector, (NamedSecret, basic_auth.BasicAuthDetector))
                    yield detector.secret_type, match.span(0 if whole else 1)


def _is_real(detector: RegexBasedDetector, match: re.Match) -> bool:
    """Whether a match is more than a placeholder, a reference or a word."""
    if isinstance(detector, jwt.JwtTokenDetector):
        return detector.is_formally_valid(match[0])
    if not isinstance(detector, (NamedSecret, basic_auth.BasicAuthDetector)):
        return True
    value = match[1]
    if PLACEHOLDERS.fullmatch(value) or is_templated_secret(value) or is_prefixed_with_dollar_sign(value):
        return False
    if isinstance(detector, basic_auth.BasicAuthDetector):
        return True
    return not (
        is_not_alphanumeric_string(value)
        or is_sequential_string(value)
        or REFERENCE.fullmatch(value)
        or not (re.search(r"\d", value) and re.search(r"[A-Za-z]", value))
        or Base64HighEntropyString().calculate_shannon_entropy(value) < 3
    )


# Options -------------------------------------------------------------------------------------------------------------------

_PREFIX = r"(?:(?:hub|hf|push[_-]to[_-]hub|use[_-]auth|auth|access|api|bot|github|refresh|user|wandb)[_-])?"
_NAME = _PREFIX + r"token|(?:[\w-]*[_-])?(?:password|passwd|secret|(?:access|api|secret)[_-]?key)"
_OPTION_NAME = rf"(?:--(?:{_NAME}|{_PREFIX}t(?:o(?:ke?)?)?)|-t(?![\w-]))"  # also what argparse completes to a token
SECRET_OPTION = re.compile(rf"{_OPTION_NAME}|(?:{_NAME})(?==)", re.IGNORECASE)
SECRET_VALUE = re.compile(  # each group `value` is to be taken out of a text
    rf"(?<![\w-])(?:{_OPTION_NAME}(?:=|(?:\s|\\\n){{1,40}}(?!--))(?P<word>(?:'[^']*'|\"[^\"]*\"|\\.|[^\s'\"\\])+)"
    rf"|(?:{_NAME})=(?P<assigned>'[^']*'|\"[^\"]*\"|[^\s,;&'\"\\]+)"
    rf"|(?:{_NAME})\\?[\"']\s{{0,8}}:\s{{0,8}}\\?(?P<quote>[\"'])(?P<quoted>[^\"'\\]+)\\?(?P=quote))",
    re.IGNORECASE,
)


def _without_values(text: str) -> str:
    """Without the values of options, arguments and JSON fields that hold secrets: `--token X`, `token=X`, `"token": "X"`."""

    def cut(match: re.Match) -> str:
        assert match.lastgroup is not None  # each alternative has a group
        start, end = match.span(match.lastgroup)
        return match[0][: start - match.start()] + REMOVED + match[0][end - match.start() :]

    return SECRET_VALUE.sub(cut, text)


__all__ = ["is_secret_name", "safe_command", "secrets_in", "secrets_in_file", "without_secrets"]
