"""Pushes of the trainers: what each strategy uploads, resuming from the Hub, and a push that fails."""

import json
import subprocess
import sys
import time

import pytest
from hub_clients import save_tokenizer
from huggingface_hub import ModelCard
from scripts import EXAMPLES, command_line
from transformers import Trainer

import tost_hf
from tost_hf.model.base_tost import code_files


TRAIN = """
import inspect
import json
from datasets import Dataset
from transformers import AutoTokenizer, default_data_collator
output_dir, tokenizer, changes = argv
torch.manual_seed(0)
torch.set_num_threads(1)
config = tost_hf.ToSTConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                            max_position_embeddings=32, layer_scale_init_value=0.3)
ids = torch.randint(97, (64, 16), generator=torch.Generator().manual_seed(3)).tolist()
changes = json.loads(changes)
resume = changes.pop("resume", None)
trainer = tost_hf.ToSTTrainer(
    tost_hf.ToSTForCausalLM(config),
    tost_hf.ToSTTrainingArguments(**{
        "output_dir": output_dir, "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 0.01,
        "logging_steps": 1, "disable_tqdm": True, "use_cpu": True, "push_to_hub": True, "hub_always_push": True, **changes}),
    train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
    processing_class=AutoTokenizer.from_pretrained(tokenizer),
    data_collator=default_data_collator,
)
trainer.train(resume_from_checkpoint=resume)
trainer.push_to_hub(license="apache-2.0", language="en", tags="small", dataset_tags=["me/numbers", "TEXT_FOLDER"])
"""
DOWNLOAD_CHECKPOINT = """
from huggingface_hub import snapshot_download
print(snapshot_download(argv[0], allow_patterns="last-checkpoint/*", local_dir=argv[1]))
"""
MODEL = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md", *code_files("tost")}


def test_gitignore_of_the_output_folder_is_extended(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, *args, **kwargs: None)  # it connects to the Hub
    trainer = tost_hf.ToSTTrainer(tiny_model, tost_hf.ToSTTrainingArguments(str(tmp_path), use_cpu=True))
    (tmp_path / ".gitignore").write_text("secrets/\n*.log")
    for _ in range(2):
        trainer.init_hf_repo()
    assert (tmp_path / ".gitignore").read_text() == "secrets/\n*.log\ntraining_args.bin\n"


@pytest.fixture
def train(hub, clients, tmp_path):
    save_tokenizer(tmp_path / "tokenizer")
    return lambda output_dir, **changes: clients.run(
        TRAIN, output_dir, tmp_path / "tokenizer", json.dumps(changes), token=hub.token
    )


@pytest.mark.parametrize(
    ("strategy", "state_folders"),
    [("end", set()), ("every_save", set()), ("checkpoint", {"last-checkpoint"}), ("all_checkpoints", {"checkpoint-2"})],
)
def test_strategies(hub, train, tmp_path, strategy, state_folders):
    """Every commit has the source files, the last one the card; training state is uploaded as the strategy says."""
    repo = f"tost/{strategy.replace('_', '-')}"
    (tmp_path / "out").mkdir()
    (tmp_path / "out/README.md").write_text("---\nlicense: mit\n---\n# Earlier run\n")
    train(tmp_path / "out", hub_model_id=repo, hub_strategy=strategy).check()
    commits = hub.commits(repo)[:-1]  # without the one that creates the repository
    assert (len(commits) == 1) == (strategy == "end")
    for commit in commits:
        files = hub.files(repo, commit)
        assert set(files) >= MODEL and "auto_map" in json.loads(files["config.json"])
        assert not any("training_args" in name or "manifest" in name for name in files)
    last_folders = {name.rpartition("/")[0] for name in files if name.endswith("optimizer.pt")}
    folders = {name.rpartition("/")[0] for name in hub.files(repo) if name.endswith("optimizer.pt")}
    assert last_folders <= state_folders <= folders
    card = ModelCard(hub.files(repo)["README.md"].decode())
    assert card.data.license == "apache-2.0" and {"tost", "small"} <= set(card.data.tags)
    assert card.data.language == ["en"] and card.data.datasets == ["me/numbers"] and "Earlier run" not in card.text
    assert hub.files(repo)["model.safetensors"] == (tmp_path / "out/model.safetensors").read_bytes()


def test_push_in_progress_is_not_overwritten(hub, train, tmp_path, monkeypatch):
    """Weights are copied to the output folder, from which the previous push may still be uploading."""

    def delay_upload(request: str) -> None:  # the client has hashed the file and does not send it yet
        if "/objects/batch" in request:
            time.sleep(0.5)

    monkeypatch.setattr(hub, "faults", [delay_upload])
    train(tmp_path / "out", hub_model_id="tost/delayed", hub_strategy="every_save").check()
    pushed = [hub.files("tost/delayed", commit)["model.safetensors"] for commit in hub.commits("tost/delayed")[:-1]]
    assert pushed[1:] == [(tmp_path / f"out/checkpoint-{step}/model.safetensors").read_bytes() for step in (4, 2)]


def test_rejected_push(hub, train, tmp_path):
    hub.create("tost/rejected")
    with hub.fail("POST", "/tost/rejected/commit/", status=403):
        run = train(tmp_path / "out", hub_model_id="tost/rejected", hub_strategy="end")
    assert run.status != 0 and "403" in run.output and hub.files("tost/rejected") == {}


@pytest.mark.slow
def test_resume_from_last_checkpoint(hub, clients, train, tmp_path):
    """In a new folder, from the files on the Hub: the same losses as without interruption."""
    options = {"lr_scheduler_type": "constant", "warmup_steps": 0, "hub_strategy": "checkpoint"}
    train(tmp_path / "uninterrupted", hub_model_id="tost/uninterrupted", max_steps=6, **options).check()
    options |= {"hub_model_id": "tost/resumed"}
    train(tmp_path / "first", **options).check()
    # not into the output folder, which is pushed completely
    clients.run(DOWNLOAD_CHECKPOINT, "tost/resumed", tmp_path / "downloaded").check()
    resume = str(tmp_path / "downloaded/last-checkpoint")
    train(tmp_path / "second", max_steps=6, resume=resume, **options).check()
    resumed, uninterrupted = (
        json.loads(hub.files(f"tost/{name}")["last-checkpoint/trainer_state.json"]) for name in ("resumed", "uninterrupted")
    )
    assert resumed["global_step"] == uninterrupted["global_step"] == 6
    assert [entry["loss"] for entry in resumed["log_history"]] == [entry["loss"] for entry in uninterrupted["log_history"]]


@pytest.mark.slow
def test_run_clm_pushes(hub, tmp_path):
    """`run_clm.py --push_to_hub` in a subprocess."""
    save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "train.txt").write_text("import os\n" * 400)
    arguments = {
        "config_name": "tost-base",
        "config_overrides": "n_layer=2,n_embd=32,n_head=4,n_positions=32,vocab_size=320",
        "tokenizer_name": tmp_path / "tokenizer",
        "train_file": tmp_path / "train.txt",
        "block_size": 32,
        "max_steps": 3,
        "save_strategy": "no",
        "output_dir": tmp_path / "out",
        **dict.fromkeys(("use_cpu", "do_train", "push_to_hub"), True),
        "hub_model_id": "tost/clm",
        "hub_token": hub.token,
    }
    command = [sys.executable, str(EXAMPLES / "run_clm.py"), *command_line(arguments)]
    environment = hub.environment(tmp_path / "home", hub.token, ACCELERATE_USE_CPU="true")
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert set(hub.files("tost/clm")) >= MODEL
    card = ModelCard(hub.files("tost/clm")["README.md"].decode())
    assert card.data.pipeline_tag == "text-generation"
    assert "python examples/run_clm.py \\\n    --config_name tost-base" in card.text
    assert not any(hub.token.encode() in data for data in hub.files("tost/clm").values())
