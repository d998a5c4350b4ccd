"""Streams of text: dealt out to processes and workers, packed without waste, and gone on with exactly."""

import bz2
import gzip
import json
import lzma
import re
import shutil
from collections import Counter
from functools import partial
from itertools import islice

import datasets
import prepare_tokens
import pytest
import run_clm
import texts
from datasets import Dataset
from packaging.version import Version
from scripting import load_rows
from scripts import EXAMPLES, command_line, launch, losses
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from tost_hf.training import token_shards
from tost_hf.training.streams import PLACE, PackedStream, StreamCollator, collate_blocks


BLOCK = 8
FILES, ROWS = 6, 40
LENGTHS = {number: 1 + number * 7 % 23 for number in range(FILES * ROWS)}  # tokens of each document


def encode(texts: list[str]) -> list[int]:
    """As many tokens as a document is long, each of them its number."""
    return [int(number) for text in texts for number in [text] * LENGTHS[int(text)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same documents as files of several kinds."""
    folder = tmp_path_factory.mktemp("files")
    for file in range(FILES):
        rows = Dataset.from_dict({"text": [str(number) for number in range(file * ROWS, (file + 1) * ROWS)]})
        for ending, compression in (("gz", "gzip"), ("bz2", "bz2"), ("xz", "xz")):
            rows.to_json(folder / f"{file}.jsonl.{ending}", compression=compression)
        rows.to_parquet(folder / f"{file}.parquet", batch_size=16)
    return folder


def make(folder, kind: str, held_out: int = 0, **options) -> PackedStream:
    files = sorted(str(path) for path in folder.glob(f"*.{kind}"))
    rows = load_rows(texts.LOADERS[texts.ending(files[0])], data_files=files, split="train", streaming=True)
    if held_out:
        rows = texts.hold_out(rows, held_out)[0]
    return PackedStream(rows, encode, "text", BLOCK, **options)


@pytest.mark.parametrize("kind, shuffle_buffer", [("jsonl.gz", 0), ("jsonl.xz", 0), ("parquet", 5)])
def test_each_document_once_per_epoch_over_two_processes_with_two_workers(folder, kind, shuffle_buffer):
    seen = Counter()
    for process in range(2):
        stream = make(folder, kind, shuffle_buffer=shuffle_buffer, epochs=1)
        stream.deal(process, processes=2, workers=2)
        loader = DataLoader(stream, batch_size=4, num_workers=2, collate_fn=StreamCollator(collate_blocks))
        seen.update(token for batch in loader for token in batch["input_ids"].flatten().tolist())
    lost = Counter(LENGTHS) - seen
    assert not seen - Counter(LENGTHS) and lost.total() < 4 * BLOCK  # less than a block per worker, and nothing twice
    assert len(seen) > len(LENGTHS) - 4 * BLOCK


def test_what_is_left_over_begins_the_next_epoch(folder):
    tokens = [token for block in islice(make(folder, "parquet"), 1000) for token in block["input_ids"].tolist()]
    whole = encode([str(number) for number in LENGTHS])
    assert tokens == (whole * 4)[: len(tokens)] and len(tokens) > 2 * len(whole)


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "jsonl.bz2"])
@pytest.mark.parametrize("shuffle_buffer, held_out", [(0, 0), (50, 0), (7, 30)])
def test_goes_on_from_every_place(folder, monkeypatch, kind, shuffle_buffer, held_out):
    """Also within a buffer, in the second epoch, and by way of JSON."""
    monkeypatch.setattr("tost_hf.training.streams.RECORDS_PER_BATCH", 16)
    new = partial(make, folder, kind, held_out, shuffle_buffer=shuffle_buffer, seed=3)
    blocks = list(islice(new(), 900))
    expected = [block["input_ids"].tolist() for block in blocks]
    assert blocks[-1][PLACE][1] >= 2  # the third epoch
    assert shuffle_buffer == 0 or expected[:400] != sorted(expected[:400])
    for number in range(0, 890, 37):
        stream = new()
        stream.record(json.dumps(blocks[number][PLACE]))
        again = new()
        again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        found = [block["input_ids"].tolist() for block in islice(again, 10)]
        assert found == expected[number + 1 : number + 11], number


STREAMED = {"streaming": True, "shuffle_buffer": 10, "max_steps": 14, "save_strategy": "steps", "save_steps": 7}


def go_on_from_step_7(output_dir) -> None:
    shutil.rmtree(output_dir / "checkpoint-14")
    (output_dir / "trainer_state.json").unlink()


@pytest.mark.slow
def test_a_checkpoint_holds_the_place_in_the_stream(tmp_path, clm_args, text_parts, text_folder):
    """Which is in the second epoch; what would change the stream is refused."""
    args = partial(clm_args, **STREAMED, train_file=text_parts, gradient_accumulation_steps=2)
    run_clm.main(args())
    whole = losses(tmp_path / "out")
    state = json.loads((tmp_path / "out/checkpoint-7/stream_0.json").read_text())
    assert state["places"][0][0] == 1 and len(whole) == 14
    go_on_from_step_7(tmp_path / "out")
    run_clm.main(args())
    assert losses(tmp_path / "out") == whole

    go_on_from_step_7(tmp_path / "out")
    shutil.copytree(text_parts, tmp_path / "more")
    shutil.copy(tmp_path / "more/0.jsonl.gz", tmp_path / "more/4.jsonl.gz")
    for changes, sentence in (
        ({"block_size": 16}, "block_size was 32 and is 16"),
        ({"train_file": tmp_path / "more"}, "files was 4 and is 5"),
        ({"dataloader_num_workers": 2}, "workers was 1 and is 2"),
        ({"add_eos_token": False}, "eos_token was 0 and is None"),
        ({"seed": 3}, "seed was 42 and is 3"),
    ):
        with pytest.raises(ValueError, match=sentence):
            run_clm.main(args(**changes))
    run_clm.main(args(seed=3, ignore_data_skip=True))
    again = losses(tmp_path / "out")
    assert again[:7] == whole[:7] and len(again) == 14 and again[7:] != whole[7:]
    (tmp_path / "out/checkpoint-14/stream_0.json").unlink()
    with pytest.raises(ValueError, match=re.escape("stream_0.json")):
        run_clm.main(args(resume_from_checkpoint=tmp_path / "out/checkpoint-14"))


@pytest.mark.parametrize("streaming", [False, True], ids=["plain", "streaming"])
def test_replaced_text_is_rejected_on_resume(tmp_path, clm_args, text_folder, streaming):
    """Of the same name, and even the same size; a file moved elsewhere is still the same."""
    text = (text_folder / "train.txt").read_text(encoding="utf-8")[:9000]
    (tmp_path / "train.txt").write_text(text, encoding="utf-8")
    common = {"train_file": tmp_path / "train.txt", "save_strategy": "steps", "save_steps": 1}
    args = partial(clm_args, **common, streaming=streaming or None)
    run_clm.main(args(max_steps=2))
    for changed in (text[:-1] + "#", text + "\n# more"):
        (tmp_path / "train.txt").write_text(changed, encoding="utf-8")
        with pytest.raises(ValueError, match=r"that the checkpoint was trained on: train\.txt differ.*--ignore_data_skip"):
            run_clm.main(args(max_steps=3))
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved/train.txt").write_text(text, encoding="utf-8")
    run_clm.main(args(max_steps=3, train_file=tmp_path / "moved/train.txt"))
    run_clm.main(args(max_steps=4, ignore_data_skip=True))
    assert len(losses(tmp_path / "out")) == 4
    with pytest.raises(ValueError, match="differ"):  # the other text is on record now
        run_clm.main(args(max_steps=5, train_file=tmp_path / "moved/train.txt"))


@pytest.mark.slow
def test_two_processes_with_two_workers_go_on(tmp_path, clm_args, text_parts):
    args = clm_args(**STREAMED, train_file=text_parts, dataloader_num_workers=2, use_cpu=None)
    launch(EXAMPLES / "run_clm.py", tmp_path, args, processes=2)
    whole = losses(tmp_path / "out")
    go_on_from_step_7(tmp_path / "out")
    with pytest.raises(ValueError, match="processes was 2 and is 1"):
        run_clm.main([*args, "--use_cpu"])
    launch(EXAMPLES / "run_clm.py", tmp_path, args, processes=2)
    assert losses(tmp_path / "out") == whole and len(whole) == 14


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"max_steps": None, "num_train_epochs": 1}, "give --max_steps with --streaming"),
        ({"max_train_samples": 3}, "--max_steps ends a run with --streaming"),
        ({"shuffle_buffer": -1}, "--shuffle_buffer must be at least 0"),
        ({"dataloader_num_workers": 5}, "5 readers (--dataloader_num_workers of every process) cannot share 4 files"),
        ({"text_column": "body"}, "has no column 'body' but: text"),
        ({"train_file": "OTHER"}, "has no column 'text' but a, b"),
        ({"train_file": "NUMBERS"}, "holds no text but values such as 1"),
        ({"train_file": "MIXED"}, "must be of one kind to be read together, not of several: json, text"),
        ({"train_file": "EMPTY"}, "is empty"),
        ({"train_file": "NONE"}, "has no text files"),
        ({"train_file": "x*.jsonl"}, "No text file is called 'x*.jsonl'"),
        ({"train_file": "DAMAGED"}, "cannot be read"),
        ({"train_file": "DAMAGED LATER", "dataloader_num_workers": 2}, "cannot be read on"),
        ({"train_file": "ZSTANDARD"}, "is not installed: pip install zstandard."),
        ({"train_file": "WORDLESS", "dataloader_num_workers": 2}, "There is no text in 1 files of the 2"),
    ],
)
def test_bad_input(tmp_path, clm_args, text_parts, monkeypatch, changes, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(texts, "find_spec", lambda package: None)
    good = json.dumps({"text": "import os, sys\n" * 40}) + "\n"
    folders = {
        "OTHER": {"a.jsonl": '{"a": "x", "b": "y"}\n'},
        "NUMBERS": {"a.jsonl": '{"text": 1}\n'},
        "MIXED": {"a.jsonl": good, "b.txt": "x"},
        "EMPTY": {"a.jsonl": good, "b.jsonl": ""},
        "NONE": {"a.docx": "x"},
        "DAMAGED": {"a.jsonl": good, "b.jsonl": good + '{"text": '},
        "DAMAGED LATER": {"a.jsonl": good * 1100, "b.jsonl": good + '{"text": '},
        "ZSTANDARD": {"a.jsonl.zst": good},
        "WORDLESS": {"a.jsonl": good, "b.jsonl": '{"text": ""}\n'},
    }
    for name, contents in folders.get(changes.get("train_file"), {}).items():
        (tmp_path / changes["train_file"]).mkdir(exist_ok=True)
        (tmp_path / changes["train_file"] / name).write_text(contents)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(sentence)) as caught:
        run_clm.main(clm_args(**{"streaming": True, "train_file": text_parts, "max_steps": 9, **changes}))
    assert "Traceback" not in str(caught.value)


OLD_DATASETS = Version(datasets.__version__) < Version("5")
DEEP = pytest.param("deep", marks=pytest.mark.skipif(OLD_DATASETS, reason="datasets 4 reads deeply nested records"))


@pytest.mark.parametrize("ending", ["gz", "xz", "bz2", DEEP])
def test_damaged_compression_and_deep_json(prepare, tmp_path, clm_args, ending):
    """Damaged at the beginning, which is read before training, or further on."""
    good = (json.dumps({"text": "import os, sys\n" * 40}) + "\n").encode() * 300
    if ending == "deep":
        damaged = b'{"text": "a", "b": ' + b"[" * 900 + b"]" * 900 + b"}\n"
        first, later = damaged, good * 5 + damaged  # some 4,000 levels further on crash Arrow itself
    else:
        content = {"gz": gzip, "xz": lzma, "bz2": bz2}[ending].compress(good * 10)
        content = bytearray(content)
        content[len(content) // 2] ^= 255
        first, later = content[:30], content
    for damaged in (first, later):
        file = tmp_path / ("damaged.jsonl" + f".{ending}" * (ending != "deep"))
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="cannot be read"):
            run_clm.main(clm_args(streaming=True, train_file=file, max_steps=2000))
        with pytest.raises(ValueError, match="cannot be read"):
            prepare(train_file=file, num_shards=1)
        with pytest.raises(ValueError, match="cannot be read"):
            run_clm.main(clm_args(train_file=file))


# Tokens prepared once ------------------------------------------------------------------------------------------------


@pytest.fixture
def prepare(text_folder, text_parts, tmp_path):
    def prepare(**changes):
        values = {"tokenizer_name": text_folder / "tokenizer", "train_file": text_parts, "block_size": 32, "num_shards": 2}
        prepare_tokens.main(command_line(values | {"output_dir": tmp_path / "tokens"} | changes))
        return tmp_path / "tokens"

    return prepare


def test_prepared_tokens_are_trained_on(prepare, tmp_path, clm_args, text_folder, text_parts):
    folder = prepare(num_proc=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokens"]
    found = [row["input_ids"].tolist() for row in token_shards.load_prepared(folder)]
    tokenizer = AutoTokenizer.from_pretrained(text_folder / "tokenizer")
    documents = load_rows("json", data_files=f"{text_parts}/*.gz", split="train", cache_dir=str(tmp_path / "cache"))["text"]
    tokens = sum(len(texts.encode([document], tokenizer, 0)) for document in documents)
    assert tokens - 2 * 32 < 32 * len(found) <= tokens  # less than a block lost per file
    assert sorted(path.name for path in folder.iterdir()) == [
        "tokens-00000-of-00002.arrow",
        "tokens-00001-of-00002.arrow",
        "tokens.json",
    ]
    run_clm.main(clm_args(train_file=folder, max_steps=None, num_train_epochs=2, validation_file=None, do_eval=True))
    held_out = max(1, len(found) * 5 // 100)
    assert len(losses(tmp_path / "out")) == 2 * -(-(len(found) - held_out) // 4)


def test_preparing_goes_on_with_what_is_missing(prepare, tmp_path, text_parts):
    whole = {path.name: path.read_bytes() for path in prepare().iterdir()}
    shutil.move(tmp_path / "tokens", tmp_path / "tokens.partial")
    (tmp_path / "tokens.partial/tokens-00001-of-00002.arrow").unlink()
    kept = (tmp_path / "tokens.partial/tokens-00000-of-00002.arrow").stat().st_mtime_ns
    with pytest.raises(ValueError, match=r"begun with other settings \(block_size was 32 and is 16\)"):
        prepare(block_size=16)
    shutil.copytree(text_parts, tmp_path / "others")
    shutil.move(tmp_path / "others/0.jsonl.gz", tmp_path / "others/9.jsonl.gz")
    with pytest.raises(ValueError, match=r"begun with other settings \(the text files differ\)"):
        prepare(train_file=tmp_path / "others")
    assert {path.name: path.read_bytes() for path in prepare().iterdir()} == whole
    assert (tmp_path / "tokens/tokens-00000-of-00002.arrow").stat().st_mtime_ns == kept


def test_bad_tokens(prepare, tmp_path, clm_args, text_parts):
    folder = prepare()
    with pytest.raises(FileExistsError, match="tokens exists"):
        prepare()
    with pytest.raises(ValueError, match="is prepared already"):
        prepare(train_file=folder, output_dir=tmp_path / "more")
    with pytest.raises(ValueError, match="shorter than one block of 100000 tokens"):
        prepare(block_size=100_000, output_dir=tmp_path / "more")
    with pytest.raises(ValueError, match="Give --output_dir"):
        prepare(output_dir=None)
    with pytest.raises(ValueError, match="--streaming is for text"):
        run_clm.main(clm_args(train_file=folder, streaming=True))
    with pytest.raises(ValueError, match="are in blocks of 32, not 16: use --block_size 32"):
        run_clm.main(clm_args(train_file=folder, block_size=16))
    settings = folder / "tokens.json"
    for old, new, sentence in (('"tokenizer": "', '"tokenizer": "0', "by another tokenizer"), ("{", "", "is damaged")):
        settings.write_text(settings.read_text().replace(old, new, 1))
        with pytest.raises(ValueError, match=sentence):
            run_clm.main(clm_args(train_file=folder))
    prepare(output_dir=tmp_path / "torn")
    (tmp_path / "torn/tokens-00001-of-00002.arrow").write_bytes(b"torn")
    with pytest.raises(ValueError, match="are damaged"):
        run_clm.main(clm_args(train_file=tmp_path / "torn"))
