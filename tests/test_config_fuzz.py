"""Configurations damaged with a fixed seed, met where users meet them: the library's loading and the command."""

import json
import math
import random
import resource
import time

import pytest
from conftest import small_config, tiny_vision_model
from transformers import AutoConfig

import tost_hf
from tost_hf.cli import main


TRIALS = 250
SECONDS, MEMORY = 30, 2**30  # of one trial, and what all may add
NESTED = json.loads("[" * 400 + "]" * 400)
VALUES = [
    *(None, True, -1, 0, 1, 3, 10**6, 2**31 - 1, 2**31, 10**12, 10**400, -(10**18)),
    *(0.5, -0.5, math.nan, math.inf, -math.inf, 1e308, 1e-320),
    *("", "x", "gelu", "float32", "日本\u202e\x00", "a" * 10**5, "../../etc/passwd", "evil.Evil", "stranger/kernel"),
    *([], [1], [1, 2], [None], ["x"] * 1000, list(range(10**4)), {}, {"a": {"b": []}}, {"0": "a", "1": "b"}, {"x": 1}),
]
HARMLESS = {  # other values that leave the model what it is
    "tost": {"max_new_tokens": 3, "pad_token_id": 5, "eos_token_id": [0, 7], "bos_token_id": None},
    "tost_vision": {"image_size": [24, 24], "id2label": {"0": "日本", "1": "<script>"}, "drop_path_rate": 0.1},
    "both": {
        "layer_norm_eps": 1e-4,
        "hidden_dropout": 0.5,
        "initializer_range": 1,
        "unknown": {"a": [NESTED]},
        "use_cache": False,
    },
}
OTHER_FIELDS = (
    "auto_map quantization_config torch_dtype attn_implementation experts_implementation num_labels per_layer_config "
    "text_config layer_types head_dim name_or_path _commit_hash __class__ __dict__ to_dict validate n_embd n_layer "
    "problem_type generation_config pruned_heads sub_configs generator"
).split()
AUTO_MAP = dict.fromkeys(("AutoConfig", "AutoModel", "AutoTokenizer", "AutoImageProcessor"), "evil.Evil")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A language and a vision model, each with code that leaves a file behind when it runs."""
    root = tmp_path_factory.mktemp("models")
    config = small_config(num_hidden_layers=1, bos_token_id=0, eos_token_id=0)
    tost_hf.ToSTForCausalLM(config).save_pretrained(root / "tost")
    tiny_vision_model(num_hidden_layers=1).save_pretrained(root / "tost_vision")
    for folder in root.iterdir():
        (folder / "evil.py").write_text(f"open({str(root / 'ran')!r}, 'w')\nclass Evil: pass\n")
    return root


def damage(text: str, chance: random.Random) -> str:
    """A configuration with one to three fields that are wrong; or its text cut, changed or wrapped."""
    fields = json.loads(text)
    kind = chance.random()
    if kind < 0.06:
        return text[: chance.randrange(len(text))]
    if kind < 0.1:
        return chance.choice(["", "[]", "5", "null", '"tost"', "[" * 10**5, f"[{text}]", "\x00" + text, '{"a": 1e999999}'])
    if kind < 0.16:
        place = chance.randrange(len(text))
        return text[:place] + chance.choice('{}[]",:0x\u0000é') + text[place + 1 :]
    if kind < 0.4:
        return json.dumps(fields | dict(chance.sample(list((HARMLESS[fields["model_type"]] | HARMLESS["both"]).items()), 3)))
    if kind < 0.46:
        return json.dumps(fields | {"auto_map": AUTO_MAP, "model_type": chance.choice([fields["model_type"], "evil", None])})
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        name = chance.choice([*fields, *OTHER_FIELDS])
        fields[name] = chance.choice([*VALUES, NESTED])
    return json.dumps(fields)


def outcome_of_command(argv, capsys) -> str:
    """`accepted`, or `rejected` where one line on stderr says why."""
    status = main([str(argument) for argument in argv])
    error = capsys.readouterr().err
    lines = error.splitlines()
    assert "Traceback" not in error
    if status == 0:
        return "accepted"
    said = [line for line in lines if line.startswith("tost-hf: error: ")]
    assert status == 1 and len(said) == 1 and 20 < len(said[0]) < 1500, (argv, error[-2000:])
    return "rejected"


@pytest.mark.slow
def test_damaged_configurations(folders, tokenizer, tmp_path, monkeypatch, capsys):
    from matplotlib.figure import Figure
    from PIL import Image

    monkeypatch.setattr(Figure, "savefig", lambda _, path: path.write_bytes(b""))  # drawing takes longer than all the rest
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("It asked."))
    Image.new("RGB", (24, 24)).save(tmp_path / "photo.png")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    chance = random.Random(20260101)
    counts = {"tried": 0, "rejected": 0, "accepted": 0, "rejected by transformers": 0}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for trial in range(TRIALS):
        kind = ("tost", "tost_vision")[trial % 2]
        folder, start = folders / kind, time.monotonic()
        sound = (folder / "config.json").read_text()
        damaged = damage(sound, chance)
        try:
            (folder / "config.json").write_text(damaged)
            outcomes = [outcome_of_loading(folder)]
            out = tmp_path / f"out{trial}"
            given = [tmp_path / "photo.png"] if kind == "tost_vision" else ["the heads", "--processor", tmp_path / "tokenizer"]
            outcomes.append(outcome_of_command(["inspect", folder, *given, "--out", out], capsys))
            assert (out / "index.html").exists() == (outcomes[-1] == "accepted")
            outcomes.append(outcome_of_command(["convert", folder, tmp_path / f"{trial}.pt"], capsys))
            assert (tmp_path / f"{trial}.pt").exists() == (outcomes[-1] == "accepted")
            outcomes.append(outcome_of_command(["info", folder], capsys))
            outcomes.append(outcome_of_command(["init", "tost-base", folder], capsys))
        except BaseException:
            print(f"Trial {trial}, {kind}: {damaged[:3000]}")
            raise
        finally:
            (folder / "config.json").write_text(sound)
        assert time.monotonic() - start < SECONDS, damaged[:3000]
        counts["tried"] += len(outcomes)
        for outcome in outcomes:
            counts[outcome] += 1
    assert not (folders / "ran").exists()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024 < MEMORY
    with capsys.disabled():
        print(f"\n{counts}")
    assert counts["rejected"] > 400 and counts["accepted"] > 200


def outcome_of_loading(folder) -> str:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError) as error:
        assert 10 < len(str(error).splitlines()[0]) < 1500
        return "rejected"
    except (TypeError, AttributeError, RecursionError):
        return "rejected by transformers"  # before any class of ours: the file is no object, or its model type no text
    assert type(config).from_dict(config.to_dict()).to_dict() == config.to_dict()
    return "accepted"
