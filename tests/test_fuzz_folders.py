"""Model folders damaged at random, with a fixed seed: `verify` and `publish` neither hang nor run code, and reject each with
an error message."""

import contextlib
import copy
import json
import os
import random
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from hub_clients import contents, language_folder
from transformers import AutoModelForCausalLM

from tost_hf.hub.publishing import publish
from tost_hf.hub.verification import verify


TIMES, SECONDS = 250, 20  # cases; what each of them may take
VALUES = [None, True, -1, 0.5, 10**12, -(10**30), 1e400, "", "abc", "../../evil", [1], {"a": [{}]}, "\ud800", "a" * 99]
FILES = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json")
CODE = "tssa_sums"  # ToST's own name for a file, since any other is rejected at once
EVIL = [
    {"auto_map": {"AutoConfig": f"{CODE}.ToSTConfig"}},
    {"trust_remote_code": True},
    {"architectures": ["Evil"]},
    {"model_type": "evil"},
]
HEADER_VALUES = {  # of a tensor in a safetensors file
    "dtype": ["I32", "BOOL", "F64", "F8_E4M3", "X", 1],
    "shape": [[], [0], [10**12], [-1], [2**63, 2], "a"],
    "data_offsets": [[0, 0], [0, 2**62], [8, 4], [-4, 4], [0, 4], 7],
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder with sharded weights, and a source file that must never run."""
    folder = language_folder(tmp_path_factory.mktemp("sound") / "model", max_shard_size="80KB")
    assert {*FILES} <= contents(folder).keys()
    return folder


def damage_json(draw: random.Random, data: bytes) -> bytes:
    """Other values, names missing or more."""
    content = json.loads(data)
    for _ in range(draw.randint(1, 3)):
        place = draw.choice([content, *(value for value in content.values() if isinstance(value, dict) and value)])
        key = draw.choice([*place])
        if draw.random() < 0.25:
            del place[key]
        else:
            place |= copy.deepcopy(draw.choice([*({key: value} for value in VALUES), *EVIL]))
    return json.dumps(content).encode("utf-8", "surrogatepass")


def damage_bytes(draw: random.Random, data: bytes) -> bytes:
    """Cut, with other bytes, with more, or others entirely."""
    at = draw.randrange(len(data))
    return draw.choice(
        [
            data[:at],
            data[:at] + draw.randbytes(draw.randint(1, 8)) + data[at + draw.randint(0, 8) :],
            data + draw.choice([b"\0", b"{}", data]),
            draw.choice([b"", b"null", b"[" * 100_000, b"{" + b'"a":{' * 50_000, b"\xff\xfe{", b"1", b'"config"', b"\0" * 99]),
        ]
    )


def damage_weights(draw: random.Random, data: bytes) -> bytes:
    """Another header: its length, its entries, or its bytes."""
    length = int.from_bytes(data[:8], "little")
    header, numbers = data[8 : 8 + length], data[8 + length :]
    match draw.randrange(3):
        case 0:
            return draw.choice([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little") + data[8:]
        case 1:
            header = damage_bytes(draw, header)
        case _:
            entries = json.loads(header)
            entry = entries[draw.choice([name for name in entries if name != "__metadata__"])]
            key = draw.choice([*HEADER_VALUES])
            entry[key] = draw.choice(HEADER_VALUES[key])
            header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + numbers


@contextlib.contextmanager
def time_limit(seconds: int):
    def ring(*_):
        raise AssertionError(f"it takes longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def is_error_message(text: str) -> bool:
    first = text.strip().split("\n")[0]
    return len(first) > 15 and " " in first and "Traceback" not in text and not re.match(r"\w+(Error|Exception)\b", first)


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(torch.arange(1, 13)[None]).logits


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, TIMES, 50))
def test_a_damaged_folder(sound, tmp_path, start):
    (tmp_path / "ran").mkdir()
    for number in range(start, start + 50):
        draw = random.Random(number)
        folder = Path(shutil.copytree(sound, tmp_path / str(number)))
        evil = f"open({str(tmp_path / 'ran' / str(number))!r}, 'w')\nclass ToSTConfig: pass\n"
        (folder / f"{CODE}.py").write_text(evil)
        name = FILES[number % len(FILES)]
        special = damage_weights if name.endswith(".safetensors") else damage_json
        damaged = draw.choice([damage_bytes, special, special, special])(draw, (folder / name).read_bytes())
        (folder / name).write_bytes(damaged)
        error = None
        with time_limit(SECONDS):
            failed = [
                check.detail
                for check in verify(folder)
                if not check.passed
                and (check.name != "code" or "leads to code" in check.detail)  # of that file it speaks, too
            ]
            os.remove(folder / f"{CODE}.py")
            try:
                publish(folder, "tost/fuzzed", dry_run=True)
            except (ValueError, OSError) as rejection:
                error = rejection
        messages = [*failed, *([str(error)] if error else [])]
        assert all(map(is_error_message, messages)), (number, name, damaged[:200], messages)
        assert bool(failed) == bool(error), (number, name, damaged[:200], failed, error)
        assert not list((tmp_path / "ran").iterdir())
        assert error or torch.equal(logits(folder), logits(sound)), (number, name, damaged[:200])  # accepted, then harmless
        shutil.rmtree(folder)
