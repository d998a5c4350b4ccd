"""run_clm.py: configuration, tokenizer, packed blocks, resuming; called in this process and launched as by users."""

import json
import math
import re
import sys
from itertools import chain

import pytest
import run_classification
import run_clm
import scripting
import texts
import torch
import training_runs
from conftest import randomize, small_config
from datasets import Dataset
from scripts import EXAMPLES, launch, losses
from text_runs import EOS, TINY, token_ids, training_args
from transformers import AutoTokenizer

from tost_hf import ToSTForCausalLM, ToSTTrainer, ToSTTrainingArguments


RUN_CLM = EXAMPLES / "run_clm.py"


# run_clm.py, launched as by users ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_accelerate_launch_with_one_and_two_processes(tmp_path, clm_args):
    """The same global batch gives the same losses, and they fall."""
    common = {"max_steps": 20, "use_cpu": None, "do_eval": True, "eval_on_start": True, "max_eval_samples": 24}
    one = clm_args(**common, per_device_train_batch_size=8, output_dir=tmp_path / "one", report_to="tensorboard")
    two = clm_args(**common, per_device_train_batch_size=4, output_dir=tmp_path / "two")
    assert "float32, on cpu" in launch(RUN_CLM, tmp_path, one, processes=1)
    assert launch(RUN_CLM, tmp_path, two, processes=2).count("float32, on 2 processes, cpu") == 1

    one_losses, two_losses = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one_losses) == 20 and one_losses[-1] < one_losses[0] - 1
    torch.testing.assert_close(one_losses, two_losses, rtol=0, atol=1e-4)
    assert list((tmp_path / "one").rglob("events.out.tfevents.*"))
    for folder in ("one", "two"):
        results = json.loads((tmp_path / folder / "eval_results.json").read_text())
        history = json.loads((tmp_path / folder / "trainer_state.json").read_text())["log_history"]
        assert results["perplexity"] == pytest.approx(math.exp(results["eval_loss"]), rel=1e-4)
        assert results["perplexity"] < history[0]["eval_perplexity"] / 2  # history[0] is of before training
        assert 0 < results["eval_accuracy"] < 1


# run_clm.py, in this process -----------------------------------------------------------------------------------------


def test_folder_takes_precedence_over_a_preset(tmp_path, monkeypatch, tiny_config):
    monkeypatch.chdir(tmp_path)
    tiny_config.save_pretrained("tost-base")
    assert run_clm.load_config(run_clm.ModelArguments(config_name="tost-base")).hidden_size == tiny_config.hidden_size


STATISTICS, SLIDING = "tssa", "sliding_attention"
OVERRIDES = [  # arguments, --config_overrides, the expected fields
    (
        {},
        "n_embd=64,num_attention_heads=2,position_embedding_type=none,layer_norm_eps=1e-6,use_bias=True",
        {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 2}
        | {"position_embedding_type": "none", "layer_norm_eps": 1e-6, "use_bias": True},
    ),
    ({"model_type": "gpt2"}, "n_layer=3", {"model_type": "gpt2", "num_hidden_layers": 3}),
    ({"config_name": "tost-base"}, "decay_type=token,conv_kernel=4", {"decay_type": "token", "conv_kernel": 4}),
    ({"config_name": "tost-plus-base"}, "decay_type=none,conv_kernel=null", {"decay_type": "none", "conv_kernel": None}),
    ({"config_name": "tost-hybrid-base"}, "n_layer=5", {"layer_types": [*[STATISTICS] * 3, SLIDING, STATISTICS]}),
    (
        {"config_name": "tost-hybrid-base"},
        'rope_parameters={"rope_theta":5e5,"rope_type":"default"}',
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    ),
    (
        {"config_name": "tost-base"},
        f"n_layer=2,layer_types=[{SLIDING},{STATISTICS}],sliding_window=8",
        {"layer_types": [SLIDING, STATISTICS], "sliding_window": 8},
    ),
    (
        {},
        'id2label={"0": "Cat", "1": "New York"},architectures=[ToSTModel]',
        {"id2label": {0: "Cat", 1: "New York"}, "architectures": ["ToSTModel"]},
    ),
    ({}, "id2label={'0': 'Cat', '1': None}", {"id2label": {0: "Cat", 1: None}}),
]


@pytest.mark.parametrize("arguments, overrides, expected", OVERRIDES)
def test_config_overrides(arguments, overrides, expected):
    config = run_clm.load_config(run_clm.ModelArguments(**arguments, config_overrides=overrides))
    assert {key: getattr(config, key) for key in expected} == expected


def test_vocabulary_and_special_tokens_match_the_tokenizer(text_folder):
    tokenizer = AutoTokenizer.from_pretrained(text_folder / "tokenizer")
    model = run_clm.load_model(run_clm.ModelArguments(), small_config(vocab_size=100), tokenizer)
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == 320  # 300, rounded up to a multiple of 64
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id is None
    args = run_clm.ModelArguments(dtype="bfloat16")
    model = run_clm.load_model(args, small_config(vocab_size=1000), tokenizer)
    assert model.config.vocab_size == 1000 and model.dtype == torch.bfloat16


def test_larger_tokenizer_resizes_a_pretrained_model(tmp_path, text_folder, tiny_model):
    tiny_model.save_pretrained(tmp_path / "model")
    args = run_clm.ModelArguments(model_name_or_path=str(tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(text_folder / "tokenizer")
    model = run_clm.load_model(args, run_clm.load_config(args), tokenizer)
    assert model.config.vocab_size == 320
    assert torch.equal(model.get_input_embeddings().weight[:97], tiny_model.get_input_embeddings().weight)


def load_blocks(text_folder, file, block_size=8, **options):
    data_args = texts.DataTrainingArguments(train_file=str(file), validation_split_percentage=0, **options)
    tokenizer = AutoTokenizer.from_pretrained(text_folder / "tokenizer")
    dataset = texts.load_splits(run_clm.ModelArguments(cache_dir=str(file.parent / "cache")), data_args)["train"]
    return list(texts.prepare_blocks("train", dataset, tokenizer, block_size, None, data_args)), tokenizer


def decode(blocks, tokenizer) -> str:
    return tokenizer.decode(list(chain.from_iterable(block["input_ids"] for block in blocks)))


def test_text_file_is_packed_without_loss(tmp_path, text_folder):
    text = (text_folder / "train.txt").read_text(encoding="utf-8")[:5000]
    (tmp_path / "excerpt.txt").write_text(text, encoding="utf-8")
    blocks, tokenizer = load_blocks(text_folder, tmp_path / "excerpt.txt")
    assert all(len(block["input_ids"]) == 8 for block in blocks)
    decoded = decode(blocks, tokenizer)
    assert text.startswith(decoded) and len(decoded) > len(text) - 80
    tokens = list(chain.from_iterable(block["input_ids"] for block in blocks))
    assert tokens == tokenizer(text)["input_ids"][: len(tokens)]  # not those of single lines, whose white space differs


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_each_record_of_other_formats_ends_with_eos(tmp_path, text_folder, ending):
    dataset = Dataset.from_dict({"text": ["import os\n", "", "x = 1"], "other": [1, 2, 3]})
    file = tmp_path / f"examples.{ending}"
    {"csv": dataset.to_csv, "parquet": dataset.to_parquet, "jsonl": dataset.to_json}[ending](str(file))
    blocks, tokenizer = load_blocks(text_folder, file, block_size=2)
    decoded = decode(blocks, tokenizer)
    assert ("import os\n" + EOS + "x = 1" + EOS).startswith(decoded) and len(decoded) > 20
    blocks, tokenizer = load_blocks(text_folder, file, block_size=2, add_eos_token=False)
    assert EOS not in decode(blocks, tokenizer)


def test_held_out_examples_are_not_in_the_training_set():
    dataset = Dataset.from_dict({"text": [str(index) for index in range(200)]})
    for variant in (dataset, dataset.to_iterable_dataset()):
        training, held_out = ([example["text"] for example in subset] for subset in texts.hold_out(variant, 5))
        assert 5 <= len(held_out) <= 15 and sorted(training + held_out) == sorted(dataset["text"])


def test_evaluation_only_with_arguments_from_a_file(tmp_path, text_folder, tiny_config):
    """A JSON file; the recipes of the other scripts are YAML."""
    tiny_config.vocab_size = 320
    model = randomize(ToSTForCausalLM(tiny_config)).eval()
    model.save_pretrained(tmp_path / "model")
    arguments = {
        "model_name_or_path": str(tmp_path / "model"),
        "tokenizer_name": str(text_folder / "tokenizer"),
        "validation_file": str(text_folder / "validation.txt"),
        "cache_dir": str(tmp_path / "cache"),
        "output_dir": str(tmp_path / "out"),
        "block_size": 16,
        "max_eval_samples": 10,
        "do_eval": True,
        "use_cpu": True,
        "report_to": "none",
    }
    (tmp_path / "arguments.json").write_text(json.dumps(arguments))
    run_clm.main([str(tmp_path / "arguments.json")])
    results = json.loads((tmp_path / "out/eval_results.json").read_text())

    tokenizer = AutoTokenizer.from_pretrained(text_folder / "tokenizer")
    tokens = tokenizer((text_folder / "validation.txt").read_text(encoding="utf-8"))["input_ids"]
    ids = torch.tensor(tokens[:160]).view(10, 16)
    with torch.no_grad():
        expected = model(ids, labels=ids)
    is_correct = expected.logits[:, :-1].argmax(-1) == ids[:, 1:]
    assert results["eval_loss"] == pytest.approx(expected.loss.item(), abs=1e-4)
    assert results["perplexity"] == pytest.approx(math.exp(expected.loss.item()), rel=1e-4)
    assert results["eval_accuracy"] == pytest.approx(is_correct.float().mean().item())
    assert results["eval_samples"] == 10


GPT2 = {"config_name": None, "model_type": "gpt2", "max_steps": None, "num_train_epochs": 1, "max_train_samples": 16}
GPT2["config_overrides"] = "n_layer=1,n_embd=16,n_head=2,n_positions=32,vocab_size=320"
STREAM = {"streaming": True, "max_steps": 4, "do_eval": True, "max_eval_samples": 8, "validation_file": None}


@pytest.mark.parametrize("changes", [GPT2, STREAM], ids=["GPT-2", "stream"])
def test_restarting_a_finished_run_trains_no_step(tmp_path, clm_args, monkeypatch, changes):
    """Whether all files exist or the run was killed after its last checkpoint."""
    args = clm_args(**{"save_strategy": "steps", "save_steps": 2, "dataloader_num_workers": 0, **changes})
    out = tmp_path / "out"
    run_clm.main(args)
    names = ("model.safetensors", "train_results.json", "run_arguments.json")
    weights, results, run_arguments = ((out / name).read_bytes() for name in names)
    monkeypatch.setattr(sys, "argv", ["run_clm.py", "--another", "command"])
    for killed in (False, True):
        if killed:
            for name in ("model.safetensors", "trainer_state.json"):
                (out / name).unlink()
        run_clm.main(args)
        assert (out / "model.safetensors").read_bytes() == weights
        assert (out / "train_results.json").read_bytes() == results
        assert (out / "run_arguments.json").read_bytes() == run_arguments  # of the command that trained it
        assert json.loads((out / "trainer_state.json").read_text())["global_step"] == len(losses(out)) == 4
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert "do_eval" not in changes or json.loads((out / "eval_results.json").read_text())["perplexity"] > 1


@pytest.mark.parametrize("args, limit", [([], 2), (["--load_best_model_at_end"], 3), (["--save_total_limit", "0"], 0)])
def test_checkpoints_that_are_kept(args, limit):
    options = ["--output_dir", "out", "--use_cpu", "--eval_strategy", "steps", "--save_strategy", "steps", *args]
    assert scripting.parse_args(options, ToSTTrainingArguments)[0].save_total_limit == limit


def test_memory_of_a_step_is_extrapolated(tmp_path, tiny_config):
    """What autograd saves for four texts, from 64 tokens of one."""
    model, dataset = ToSTForCausalLM(tiny_config), token_ids(4, length=128)
    ids, sizes = torch.tensor(dataset["input_ids"]), {}

    def record(x):
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        output = model(ids, labels=ids)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = sum(size for pointer, size in sizes.items() if pointer not in parameters) + 8 * output.logits.numel()
    trainer = ToSTTrainer(model, training_args(tmp_path), train_dataset=dataset)
    estimate = training_runs.estimate_memory(trainer, ids.numel())
    assert estimate == pytest.approx(12 * model.num_parameters() + saved, rel=0.03)


def test_long_documents_are_tokenized_in_small_batches():
    for characters, size in ((1_000_000, 3), (100, 1000)):
        dataset = Dataset.from_dict({"text": ["x" * characters] * 16})
        assert texts.choose_batch_size("train", dataset) == size
        assert texts.choose_batch_size("train", dataset.to_iterable_dataset()) == size


def test_record_of_a_resumed_run(tmp_path, clm_args, monkeypatch):
    """All commands, such as another with more steps; and from which step on its loss and time were measured."""
    commands = []
    for max_steps in (2, 4):
        args = clm_args(save_strategy="steps", save_steps=2, max_steps=max_steps)
        monkeypatch.setattr(sys, "argv", [str(RUN_CLM), *args])
        commands.append(scripting.recorded_command(sys.argv))
        run_clm.main(args)
    recorded = json.loads((tmp_path / "out/run_arguments.json").read_text())["command"]
    assert recorded.splitlines() == commands
    card = (tmp_path / "out/README.md").read_text()
    [loss] = re.findall(r"\| train loss \(from step 2 on\) \| (.*) \|", card)
    assert float(loss) == pytest.approx(sum(losses(tmp_path / "out")[2:]) / 2, abs=1e-4)
    assert "| train runtime (from step 2 on) |" in card and "| global step | 4 |" in card


def test_preset_with_options_is_trained_and_loaded(tmp_path, clm_args):
    """Without position embeddings, so that block_size is not limited."""
    overrides = TINY.replace("n_positions=32", "n_positions=null").replace("n_layer=2", "n_layer=4")
    run_clm.main(clm_args(config_name="tost-hybrid-base", config_overrides=overrides, do_eval=True, block_size=200))
    history = losses(tmp_path / "out")
    assert len(history) == 3 and history[-1] < history[0]
    config = ToSTForCausalLM.from_pretrained(tmp_path / "out").config
    assert (config.decay_type, config.conv_kernel, config.layer_types[3]) == ("token", 4, SLIDING)
    card = (tmp_path / "out/README.md").read_text()
    assert "goes beyond the paper" in card


def test_hub_token_is_not_recorded(tmp_path, clm_args, monkeypatch):
    """Neither in the recorded command nor in the files of a run."""
    secret = f"hf_{'x' * 34}"
    for spelling in (f"--hub_token {secret}", f"--hub_tok {secret}", f"--hub-token={secret}"):
        recorded = scripting.recorded_command(["/somewhere/run_clm.py", *clm_args(), *spelling.split()])
        assert recorded.startswith("python examples/run_clm.py --config_name tost-base --config_overrides n_layer=2")
        assert secret not in recorded
    arguments = [*clm_args(max_steps=1), "--token", secret]
    monkeypatch.setattr(sys, "argv", ["/somewhere/run_clm.py", *arguments])
    run_clm.main(arguments)
    for file in ("run_arguments.json", "README.md"):
        text = (tmp_path / "out" / file).read_text()
        assert "python examples/run_clm.py" in text and secret not in text


def test_sequences_have_a_limit_where_positions_have_tables(tokenizer):
    for position_embedding_type, limit in ("learned", 128), ("none", None):
        config = small_config(position_embedding_type=position_embedding_type)
        assert run_classification.choose_max_length(None, config, tokenizer) == limit
        assert run_clm.choose_block_size(None, config) == (limit or 1024)
    assert run_clm.choose_block_size(20_000, config) == 20_000
