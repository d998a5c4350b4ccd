"""Resuming: the newest complete checkpoint, what is skipped and why, and training that stops when its loss is NaN."""

import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import image_runs
import pytest
import text_runs
import torch
from conftest import randomize, small_config
from safetensors.torch import load_file, save_file
from scripts import launch
from torch.distributed import checkpoint as distributed_checkpoint
from transformers import TrainingArguments

from tost_hf import ToSTForCausalLM, ToSTTrainer
from tost_hf.training.checkpoints import begin_manifest, choose_checkpoint, write_manifest


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}


def make_text_trainer(folder: Path, **changes) -> ToSTTrainer:
    model = randomize(ToSTForCausalLM(small_config(num_hidden_layers=3)))
    args = text_runs.training_args(folder, **(SAVING | changes))
    return ToSTTrainer(model, args, train_dataset=text_runs.token_rows(32))


def make_image_trainer(folder: Path, **changes) -> ToSTTrainer:
    return image_runs.make_trainer(folder, **(SAVING | {"ema_decay": 0.6} | changes))


MAKERS = {"text": make_text_trainer, "images": make_image_trainer}


@pytest.fixture(scope="module", params=MAKERS)
def run(request, tmp_path_factory):
    """A maker of trainers, all with the same weights, and the folder of a run with checkpoints 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("run")
    MAKERS[request.param](folder).train()
    return MAKERS[request.param], folder / "out"


@pytest.fixture
def make(run, tmp_path):
    """Makes trainers; keywords change their arguments."""
    return partial(run[0], tmp_path)


@pytest.fixture
def trained(run, tmp_path) -> Path:
    """A copy of the run's output folder."""
    return shutil.copytree(run[1], tmp_path / "out")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def zero_the_end(file: Path) -> None:
    """What a power failure leaves: the file's length is there, its content not."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


class Foreign:
    """Code that a pickle can be made to run."""

    def __reduce__(self):
        return os.system, ("touch ran",)


def foreign_pickle(file: Path) -> None:
    torch.save({"state": Foreign()}, file)


def empty(file: Path) -> None:
    file.write_bytes(b"")


DAMAGES = [
    ("optimizer.pt", Path.unlink, "is missing"),
    ("trainer_state.json", Path.unlink, "is missing"),
    ("ema/model.safetensors", Path.unlink, "is missing"),
    ("model.safetensors", cut, "is damaged"),
    ("scheduler.pt", cut, "is damaged"),
    ("config.json", empty, "is damaged"),
    *((name, zero_the_end, "is damaged") for name in ("optimizer.pt", "trainer_state.json")),  # of the same size
    *((name, foreign_pickle, "is damaged") for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth")),
]


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "no manifest"])
@pytest.mark.parametrize("name, damage, what", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_by_name(make, trained, caplog, name, damage, what, manifest):
    if not (trained / "checkpoint-6" / name).exists():
        pytest.skip("EMA weights are for images")
    if not manifest:
        for file in trained.glob("*/manifest.json"):
            file.unlink()
    damage(trained / "checkpoint-6" / name)
    assert choose_checkpoint(make(), True) == choose_checkpoint(make(), None) == str(trained / "checkpoint-4")
    assert re.search(rf"{trained}/checkpoint-6: .*{name} {what}" if manifest else f"{trained}/checkpoint-6", caplog.text)
    with pytest.raises(ValueError, match=r"checkpoint-6' is incomplete: .*Name another one"):
        make().train(resume_from_checkpoint=str(trained / "checkpoint-6"))
    assert not Path("ran").exists()


def test_the_manifest_lists_names_and_sizes_and_detects_what_no_setting_asks_for(make, trained):
    folder = trained / "checkpoint-6"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    found = {file.relative_to(folder).as_posix(): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    found.pop("manifest.json")
    assert files == {name: size for name, size in found.items() if name != "README.md"}
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"incomplete: manifest\.json is damaged"):
        choose_checkpoint(make(), str(folder))
    write_manifest(folder)
    (folder / "training_args.bin").write_bytes(b"")
    (folder / "notes.txt").write_text("new files do no harm")
    with pytest.raises(ValueError, match=r"incomplete: training_args\.bin is damaged \(0 bytes instead of [0-9]+\)\. Name"):
        choose_checkpoint(make(), str(folder))


def test_going_on_after_damage_is_bit_equal(make, trained):
    expected = {path: load_file(path) for path in (trained / "checkpoint-6").rglob("*.safetensors")}
    cut(trained / "checkpoint-6/optimizer.pt")
    make().train(resume_from_checkpoint=True)
    for path, weights in expected.items():
        assert all(torch.equal(value, weights[name]) for name, value in load_file(path).items())
    make().train(resume_from_checkpoint=str(trained / "checkpoint-6"))  # it is whole again


def test_folders_of_other_names_are_left_alone(make, trained, caplog):
    for name in ("checkpoint-20-old", "checkpoint-", "checkpoint-x", "my-checkpoint-30"):
        shutil.copytree(trained / "checkpoint-4", trained / name)
    (trained / "checkpoint-99").touch()
    assert choose_checkpoint(make(), None) == str(trained / "checkpoint-6") and "Skipped" not in caplog.text
    make(max_steps=8, save_total_limit=1).train(resume_from_checkpoint=True)
    found = {path.name for path in trained.glob("*checkpoint-*")}
    assert found == {"checkpoint-8", "checkpoint-20-old", "checkpoint-", "checkpoint-x", "my-checkpoint-30", "checkpoint-99"}


def test_what_to_go_on_from(make, tmp_path, monkeypatch):
    assert choose_checkpoint(make(), None) is None
    for wanted in (True, "true", "True"):
        with pytest.raises(FileNotFoundError, match="no complete checkpoint in"):
            choose_checkpoint(make(), wanted)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint in"):
        make().train(resume_from_checkpoint=True)
    make().train()
    checkpoint = str(tmp_path / "out/checkpoint-2")
    assert choose_checkpoint(make(), checkpoint) == checkpoint
    assert choose_checkpoint(make(), "false") is choose_checkpoint(make(), False) is None
    with pytest.raises(FileNotFoundError, match="does not exist"):
        choose_checkpoint(make(), str(tmp_path / "elsewhere"))


def test_a_run_killed_in_its_first_save_starts_afresh(make, trained, caplog):
    """But one whose finished checkpoints are all damaged does not: what is left of them would be overwritten."""
    for step in (2, 4):
        shutil.rmtree(trained / f"checkpoint-{step}")
    (trained / "checkpoint-6/optimizer.pt").unlink()
    with pytest.raises(ValueError, match=r"None of the checkpoints can be resumed from.*optimizer.pt is missing.*afresh"):
        choose_checkpoint(make(), None)
    begin_manifest(trained / "checkpoint-6")
    assert choose_checkpoint(make(), None) is None
    assert re.search("checkpoint-6: it was not saved to the end; optimizer.pt is missing", caplog.text)
    for name in ("manifest.json", "trainer_state.json"):
        (trained / "checkpoint-6" / name).unlink()
    assert choose_checkpoint(make(), None) is None


def test_what_the_settings_need(make, tmp_path):
    """Without the optimizer a run would go on, but not as it was."""
    make(save_only_model=True).train()
    checkpoint = str(tmp_path / "out/checkpoint-6")
    assert choose_checkpoint(make(save_only_model=True), True) == checkpoint
    with pytest.raises(ValueError, match=r"incomplete: optimizer\.pt is missing; rng_state\.pth is missing; scheduler\.pt is"):
        choose_checkpoint(make(), checkpoint)
    trainer = make()
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match=r"scaler\.pt is missing"):
        choose_checkpoint(trainer, checkpoint)


def test_a_checkpoint_of_several_processes(make, trained, caplog):
    """Its random states are of no use to one process, and the other way round: that is said."""
    folder = trained / "checkpoint-6"
    for process in range(2):
        shutil.copy(folder / "rng_state.pth", folder / f"rng_state_{process}.pth")
    (folder / "rng_state.pth").unlink()
    write_manifest(folder)
    assert choose_checkpoint(make(), True) == str(folder)
    assert "saved by another number of processes" in caplog.text


def test_shards(make, trained):
    folder = trained / "checkpoint-6"
    weights = load_file(folder / "model.safetensors")
    shards = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(weights)}
    for shard in set(shards.values()):
        save_file({name: weights[name] for name in weights if shards[name] == shard}, folder / shard, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    write_manifest(folder)
    make().train(resume_from_checkpoint=str(folder))
    cut(folder / "model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors is damaged"):
        choose_checkpoint(make(), str(folder))


def test_a_checkpoint_of_another_model_is_refused(make, trained):
    trainer = make()
    name = next(name for name, _ in trainer.model.named_parameters())
    file = trained / "checkpoint-6/model.safetensors"
    weights = load_file(file)
    for changed in ({**weights, name: torch.zeros(2, 3)}, {key: value for key, value in weights.items() if key != name}):
        save_file(changed, file, {"format": "pt"})
        write_manifest(trained / "checkpoint-6")
        with pytest.raises(ValueError, match=rf"checkpoint-6 is of another model: {name} is (2 x 3|missing) there and"):
            trainer.train(resume_from_checkpoint=True)


# Sharded training: the files as accelerate and DeepSpeed lay them out --------------------------------------------------


def distributed(folder: Path) -> None:
    distributed_checkpoint.save({"x": torch.ones(3)}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("layout", ["one file", "a file per process", "distributed"])
def test_fsdp_layouts(make, trained, layout):
    folder = trained / "checkpoint-6"
    for name in ("optimizer.pt", "model.safetensors"):
        (folder / name).unlink()
    for name in ("pytorch_model_fsdp", "optimizer"):
        if layout == "distributed":
            distributed(folder / f"{name}_0")
        else:
            torch.save({"x": torch.ones(3)}, folder / (f"{name}.bin" if layout == "one file" else f"{name}_0_rank0.bin"))
    write_manifest(folder)
    trainer = make()
    trainer.is_fsdp_enabled = True
    assert choose_checkpoint(trainer, True) == str(folder)
    part = next(folder.glob("optimizer*"))
    (cut if part.is_file() else shutil.rmtree)(part)
    with pytest.raises(ValueError, match="optimizer"):
        choose_checkpoint(trainer, str(folder))


def test_deepspeed_layout(make, trained):
    folder = trained / "checkpoint-6"
    (folder / "optimizer.pt").unlink()
    (folder / "latest").write_text("global_step6")
    (folder / "global_step6").mkdir()
    for name in ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save({"x": torch.ones(3)}, folder / "global_step6" / name)
    write_manifest(folder)
    trainer = make()
    trainer.is_deepspeed_enabled = True
    assert choose_checkpoint(trainer, True) == str(folder)
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    write_manifest(folder)
    with pytest.raises(ValueError, match="another number of processes than the 1 of today, each with its part of DeepSpeed's"):
        choose_checkpoint(trainer, True)
    cut(folder / "global_step6" / name)
    with pytest.raises(ValueError, match=r"global_step6/bf16_zero.* is damaged"):
        choose_checkpoint(trainer, str(folder))
    (folder / "latest").unlink()
    with pytest.raises(ValueError, match=r"latest is missing"):
        choose_checkpoint(trainer, str(folder))


@pytest.mark.parametrize("length", [{"max_steps": 6}, {"max_steps": 5}, {"max_steps": -1, "num_train_epochs": 0.5}], ids=str)
def test_a_finished_run_resumed_trains_no_step(make, trained, length):
    """Nor one that was made shorter."""
    trainer = make(**length)
    assert trainer.train(resume_from_checkpoint=True).global_step == 6
    found = trainer.model.state_dict()
    assert all(
        torch.equal(found[name], value) for name, value in load_file(trained / "checkpoint-6/model.safetensors").items()
    )


# A loss that is no number ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("filtered", [False, True])
def test_training_stops_when_the_loss_is_no_number(make, tmp_path, monkeypatch, bad, filtered):
    """Before it is logged, and before anything is saved or deleted; whatever transformers' own filter hides."""
    trainer = make(logging_nan_inf_filter=filtered, save_total_limit=1, save_steps=1, max_steps=9)
    compute_loss, calls = trainer.compute_loss, []

    def spoiled(*args, **kwargs):
        calls.append(None)
        loss = compute_loss(*args, **kwargs)
        return loss * bad if len(calls) == 4 else loss

    monkeypatch.setattr(trainer, "compute_loss", spoiled)
    with pytest.raises(FloatingPointError, match=r"NaN or infinite after step 3, by step 4\..*checkpoint is .*checkpoint-3\."):
        trainer.train()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-3"]
    assert [entry["step"] for entry in trainer.state.log_history] == [1, 2, 3]
    make(save_steps=1).train(resume_from_checkpoint=True)


def test_a_loss_that_nobody_logs_is_found_at_the_end(make, tmp_path):
    trainer = make(logging_strategy="no", save_strategy="no", learning_rate=1e30, warmup_steps=0, max_grad_norm=0)
    with pytest.raises(FloatingPointError, match="there is no checkpoint"):
        trainer.train()


def test_a_gradient_that_is_no_number_is_not_saved(make, tmp_path, monkeypatch):
    trainer = make(save_steps=1)
    parameter = next(trainer.model.parameters())
    parameter.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(FloatingPointError, match="after step 0, by step 1"):
        trainer.train()
    assert not list((tmp_path / "out").glob("checkpoint-*"))


ONE_PROCESS_SEES_NAN = """
import re
import sys
import torch
from scripting import run
import text_runs
from tost_hf import ToSTConfig, ToSTForCausalLM, ToSTTrainer, ToSTTrainingArguments

def main():
    args = ToSTTrainingArguments(sys.argv[1], max_steps=6, save_strategy="steps", save_steps=1, logging_steps=1,
                                 per_device_train_batch_size=4, disable_tqdm=True, report_to="none")
    config = ToSTConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    trainer = ToSTTrainer(ToSTForCausalLM(config), args, train_dataset=text_runs.token_rows(64))
    compute_loss = trainer.compute_loss

    def spoiled(*args, **kwargs):  # its value, not its gradient
        bad = trainer.state.global_step == 3 and trainer.args.process_index == 1
        return compute_loss(*args, **kwargs) + torch.tensor(float("nan") if bad else 0.0)

    trainer.compute_loss = spoiled
    trainer.train()

run(main)
"""


@pytest.mark.slow
def test_all_processes_stop_when_one_sees_no_number(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(ONE_PROCESS_SEES_NAN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    printed = launch(tmp_path / "train.py", tmp_path, [str(tmp_path / "out")], processes=2, fails=True)
    assert printed.count("train.py: error: The loss or its gradient became NaN or infinite after step 3, by step 4.") == 2
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (1, 2, 3)}
    (tmp_path / "out/checkpoint-3/rng_state_1.pth").write_bytes(b"")  # only the second process needs it
    (tmp_path / "out/checkpoint-2/optimizer.pt").unlink()
    resume = ONE_PROCESS_SEES_NAN.replace("trainer.train()", "trainer.train(True)").replace("if bad else", "if None else")
    (tmp_path / "train.py").write_text(resume + "print('went on')")
    printed = launch(tmp_path / "train.py", tmp_path, [str(tmp_path / "out")], processes=2)
    assert printed.count("went on") == 2 and printed.count("{'loss'") == 5  # from step 1


def test_plain_arguments_are_guarded_too(tmp_path, tiny_config):
    args = TrainingArguments(tmp_path, max_steps=3, learning_rate=1e30, use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = ToSTTrainer(ToSTForCausalLM(tiny_config), args, train_dataset=text_runs.token_rows(32))
    with pytest.raises(FloatingPointError):
        trainer.train()
