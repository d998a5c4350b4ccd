"""Damaged and hostile checkpoints: `tost-hf convert` rejects them with an error message, quickly, and writes nothing."""

import io
import os
import pickle
import random
import resource
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch

from tost_hf.cli import main
from tost_hf.convert import convert_from_original, convert_to_original


FIXTURES = Path(__file__).parent / "fixtures"
LANGUAGE = FIXTURES / "lm_bias.pt"
WHOLE = LANGUAGE.read_bytes()
WTE, GAMMA = "transformer.wte.weight", "transformer.h.0.gamma1"


def nested(levels):
    """A list that is small in memory and endless in print."""
    value = ["x"]
    for _ in range(levels):
        value = [value, value]
    return value


def saved(change):
    """The bytes of the language fixture after `change(contents)`."""
    contents = torch.load(LANGUAGE, weights_only=True)
    change(contents)
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    return buffer.getvalue()


def with_tensor(tensor, name=GAMMA):
    return lambda: saved(lambda contents: contents["model"].update({name: tensor}))


def with_setting(**settings):
    return lambda: saved(lambda contents: contents["model_args"].update(settings))


def rezipped(compress=zipfile.ZIP_STORED, **members):
    """The fixture's archive with other members, or compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(LANGUAGE) as old, zipfile.ZipFile(buffer, "w", compress) as new:
        for name in old.namelist():
            new.writestr(name, members.pop(name.rsplit("/", 1)[-1].replace(".", "_"), old.read(name)))
    return buffer.getvalue()


HOSTILE = {
    "one number repeated 1e11 times": (with_tensor(torch.zeros(1).expand(10**11, 32), WTE), "they repeat what is stored"),
    "one storage in every tensor": (
        lambda: saved(lambda contents: contents["model"].update(dict.fromkeys(map(str, range(2000)), contents["model"][WTE]))),
        "they repeat what is stored",
    ),
    "a sparse tensor of 1e18 numbers": (
        with_tensor(torch.sparse_coo_tensor(torch.zeros(2, 1), torch.ones(1), (10**9, 10**9)), WTE),
        "not a dense tensor",
    ),
    "a tensor without numbers": (with_tensor(torch.zeros(32, device="meta")), "not a dense tensor"),
    "a quantised tensor": (with_tensor(torch.quantize_per_tensor(torch.zeros(32), 0.1, 0, torch.qint8)), "not a dense tensor"),
    "float8": (with_tensor(torch.zeros(32).to(torch.float8_e4m3fn)), r"dtype torch.float8_e4m3fn; .* ask for shape"),
    "no dimensions": (with_tensor(torch.tensor(1.0), WTE), "must have 2 dimensions"),
    "an empty dimension": (with_tensor(torch.zeros(0, 32), WTE), "vocab_size=96, but the tensors say vocab_size=0"),
    "a name of a megabyte": (with_tensor(torch.zeros(1), "x\n" * 2**19), "has 'x"),
    "a name that is no text": (with_tensor(torch.zeros(1), (1, 2)), "a name that is not text but tuple"),
    "2,000 layers": (
        lambda: saved(
            lambda contents: contents["model"].update({f"transformer.h.{i}.gamma1": torch.zeros(1) for i in range(2000)})
        ),
        "n_layer=2, but the tensors say n_layer=2000",
    ),
    "an endless setting": (
        with_setting(n_layer=nested(60)),
        "n_layer of model_args must be a number or a short text",
    ),
    "a tensor as setting": (with_setting(dropout=torch.zeros(3)), "dropout of model_args must be a number"),
    "a long setting": (with_setting(TSSA="x" * 10**6), "TSSA of model_args must be a number or a short text"),
    "a number of a million digits": (with_setting(vocab_size=10**1_000_000), "torch.load can read"),
    "NaN as setting": (with_setting(dropout=float("nan")), "hidden_dropout must be at least 0 and below 1, got nan"),
    "compressed": (lambda: rezipped(zipfile.ZIP_DEFLATED), "is a compressed archive"),
    "100 MB of zeros, compressed": (lambda: rezipped(zipfile.ZIP_DEFLATED, data_pkl=bytes(10**8)), "is a compressed archive"),
    "an archive without its index": (lambda: rezipped(data_pkl=b""), "is not a checkpoint that torch.load can read"),
    "an archive of something else": (lambda: rezipped(data_pkl=pickle.dumps([1], 2)), "not a checkpoint of the authors' code"),
    "a call of eval": (
        lambda: b"cbuiltins\neval\n(S'1'\ntR.",
        "cannot be loaded without eval, which could run any code",
    ),
}


@pytest.mark.parametrize("make, message", HOSTILE.values(), ids=HOSTILE)
def test_hostile_checkpoints_are_rejected(make, message, tmp_path):
    checkpoint = tmp_path / "ckpt.pt"
    checkpoint.write_bytes(make())
    tracemalloc.start()
    start = time.monotonic()
    with pytest.raises(ValueError, match=message) as caught:
        convert_from_original(checkpoint, tmp_path / "model")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.monotonic() - start < 20 and peak < 100 * 2**20
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000 and str(checkpoint) in str(caught.value)
    assert os.listdir(tmp_path) == ["ckpt.pt"]


def test_fuzzed_bytes(tmp_path):
    """Bytes of a checkpoint changed, cut, repeated and moved, with a fixed seed."""
    chance, rejected = random.Random(0), 0
    for trial in range(120):
        data = bytearray(WHOLE)
        place = chance.randrange(len(data))
        if trial % 4 == 0:
            for _ in range(1 + trial // 4):
                data[chance.randrange(len(data))] = chance.randrange(256)
        elif trial % 4 == 1:
            del data[place : place + chance.randrange(1, 2000)]
        elif trial % 4 == 2:
            data[place:place] = data[place : place + chance.randrange(1, 2000)]
        else:
            data[:2000] = bytes(chance.sample(list(data[:2000]), 2000))
        (tmp_path / "ckpt.pt").write_bytes(data)
        try:
            convert_from_original(tmp_path / "ckpt.pt", tmp_path / f"model{trial}")
        except ValueError as error:
            rejected += 1
            assert "ckpt.pt" in str(error) and "\n" not in str(error)
            assert not (tmp_path / f"model{trial}").exists()
    assert 60 < rejected <= 120


def test_non_regular_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(ValueError, match=f"{path} is not a file; name the checkpoint"):
            convert_from_original(path, tmp_path / "model")


@pytest.mark.parametrize(
    "content", ["[]", "5", '"tost"', "{", "", "[" * 10**5, '{"model_type": ["tost"]}', '{"model_type": "x"}']
)
def test_wrong_configurations_of_folders(content, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json'? (is not|must hold)|holds a model of type") as caught:
        convert_to_original(tmp_path / "model", tmp_path / "ckpt.pt")
    assert "\n" not in str(caught.value) and not (tmp_path / "ckpt.pt").exists()


def test_full_disk(tmp_path, tiny_model, capsys):
    """No file can grow past 20 kB: the libraries meet an error as on a full disk."""
    tiny_model.save_pretrained(tmp_path / "source")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    causes = {"model": "File too large", "ckpt.pt": "is the disk full?"}  # which torch.save does not tell
    for source, target in ((LANGUAGE, "model"), (tmp_path / "source", "ckpt.pt")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            assert main(["convert", str(source), str(tmp_path / target)]) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("tost-hf: error: ") and causes[target] in error and str(tmp_path) in error
    assert os.listdir(tmp_path) == ["source"]
