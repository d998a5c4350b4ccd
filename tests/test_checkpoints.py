"""Resuming: the newest complete checkpoint, what is skipped and why; training stops when its loss is NaN."""

import json
import os
import pickle
import re
import shutil
from functools import partial
from pathlib import Path

import image_runs
import pytest
import sharded_cases
import text_runs
import torch
from conftest import randomize, small_config
from processes import run_cases
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as distributed_checkpoint
from transformers import TrainingArguments

from tost_hf import ToSTForCausalLM, ToSTTrainer
from tost_hf.training import callbacks, checkpoints
from tost_hf.training.callbacks import TrainingFilesCallback
from tost_hf.training.checkpoints import begin_manifest, choose_checkpoint, write_manifest


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}


def make_text_trainer(folder: Path, **changes) -> ToSTTrainer:
    model = randomize(ToSTForCausalLM(small_config(num_hidden_layers=3)))
    args = text_runs.training_args(folder, **(SAVING | changes))
    return ToSTTrainer(model, args, train_dataset=text_runs.token_ids(32))


def make_image_trainer(folder: Path, **changes) -> ToSTTrainer:
    return image_runs.make_trainer(folder, **(SAVING | {"ema_decay": 0.6} | changes))


@pytest.fixture(scope="module")
def run(request, tmp_path_factory):
    """A maker of trainers, all with the same weights, and the folder of a run with checkpoints 2, 4 and 6."""
    make = make_image_trainer if getattr(request, "param", "text") == "images" else make_text_trainer
    folder = tmp_path_factory.mktemp("run")
    make(folder).train()
    return make, folder / "out"


text_and_images = pytest.mark.parametrize("run", ["text", "images"], indirect=True)


@pytest.fixture
def make(run, tmp_path):
    """Makes trainers; keywords change their arguments."""
    return partial(run[0], tmp_path)


@pytest.fixture
def trained(run, tmp_path) -> Path:
    """A copy of the run's output folder."""
    return shutil.copytree(run[1], tmp_path / "out")


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def zero_the_end(file: Path) -> None:
    """As after a power failure: the file has its length, but not its content."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


def flip_a_bit(file: Path) -> None:
    """In the middle, where neither the size nor either end shows it."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


class Foreign:
    """Code that a pickle can be made to run."""

    def __reduce__(self):
        return os.system, ("touch ran",)


def foreign_pickle(file: Path) -> None:
    torch.save({"state": Foreign()}, file)


def without_manifests(trained: Path) -> None:
    for file in trained.glob("*/manifest.json"):
        file.unlink()


MANIFESTS = [
    *("{", "[]", "null", '{"files": []}', '{"files": null}', '{"files": "x"}'),
    '{"files": {"optimizer.pt": [5, "x"]}}',
    '{"files": {"optimizer.pt": {"size": Infinity, "sha256": ""}}}',
    "[" * 100_000,
]


@pytest.mark.parametrize(
    "name, damage, problem",
    [
        ("optimizer.pt", Path.unlink, "is missing"),
        ("trainer_state.json", Path.unlink, "is missing"),
        ("model.safetensors", truncate, "is damaged"),
        ("config.json", lambda file: file.write_bytes(b""), "is damaged"),
        ("optimizer.pt", zero_the_end, "is damaged"),
        ("optimizer.pt", flip_a_bit, "is damaged"),
        ("model.safetensors", flip_a_bit, "is damaged"),
        ("rng_state.pth", foreign_pickle, "is damaged"),
        *(("manifest.json", partial(Path.write_text, data=content), "is damaged") for content in MANIFESTS),
    ],
)
def test_damaged_checkpoint_is_skipped(make, trained, caplog, name, damage, problem):
    damage(trained / "checkpoint-6" / name)
    assert choose_checkpoint(make(), True) == choose_checkpoint(make(), None) == str(trained / "checkpoint-4")
    assert re.search(rf"{trained}/checkpoint-6: .*{name} {problem}", caplog.text)
    with pytest.raises(ValueError, match=r"checkpoint-6' is incomplete: .*Name another one"):
        make().train(resume_from_checkpoint=str(trained / "checkpoint-6"))


def test_manifest_with_a_name_that_no_file_can_have(make, trained, caplog):
    listed = {"x" * 300: {"size": 1, "sha256": ""}}
    (trained / "checkpoint-6/manifest.json").write_text(json.dumps({"files": listed}))
    assert choose_checkpoint(make(), True) == str(trained / "checkpoint-4")
    assert f"checkpoint-6: {'x' * 300} is missing" in caplog.text


def test_files_are_hashed_once(make, trained, monkeypatch):
    """By a script that chooses a checkpoint before it trains from it."""
    hashed, sha256 = [], checkpoints.sha256
    monkeypatch.setattr(checkpoints, "sha256", lambda file: hashed.append(file.name) or sha256(file))
    trainer = make()
    trainer.train(choose_checkpoint(trainer, True))
    assert sorted(hashed) == sorted(json.loads((trained / "checkpoint-6/manifest.json").read_text())["files"])


def test_checkpoint_without_manifest(make, trained):
    """Complete if it has the state that Trainer writes last."""
    without_manifests(trained)
    assert choose_checkpoint(make(), True) == str(trained / "checkpoint-6")
    (trained / "checkpoint-6/optimizer.pt").unlink()
    (trained / "checkpoint-4/trainer_state.json").unlink()
    assert choose_checkpoint(make(), True) == str(trained / "checkpoint-2")


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", "trainer_state.json"])
@pytest.mark.parametrize(
    "damage", [lambda file: file.write_bytes(b""), truncate, lambda file: file.write_bytes(pickle.dumps(Foreign()))]
)
def test_damaged_file_without_manifest(make, trained, caplog, name, damage):
    without_manifests(trained)
    damage(trained / "checkpoint-6" / name)
    assert choose_checkpoint(make(), True) == str(trained / "checkpoint-4")
    assert f"{name} is damaged" in caplog.text


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_foreign_pickle_is_not_run(make, trained, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    without_manifests(trained)
    foreign_pickle(trained / "checkpoint-6" / name)
    with pytest.raises(ValueError, match=rf"(?s){name.partition('.')[0]}.* of {trained}/checkpoint-6 .*posix\.system"):
        make(max_steps=8).train(resume_from_checkpoint=True)
    assert not Path("ran").exists()


def test_manifest(make, trained):
    """It has the sizes of all files, also of those that no setting asks for."""
    folder = trained / "checkpoint-6"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    del sizes["manifest.json"]
    assert {name: saved["size"] for name, saved in files.items()} == sizes
    (folder / "notes.txt").write_text("new files do no harm")
    assert choose_checkpoint(make(), str(folder)) == str(folder)
    truncate(folder / "training_args.bin")
    with pytest.raises(ValueError, match=r"incomplete: training_args\.bin is damaged"):
        choose_checkpoint(make(), str(folder))


@text_and_images
def test_resuming_after_damage_is_bit_equal(make, trained):
    expected = {path: load_file(path) for path in (trained / "checkpoint-6").rglob("*.safetensors")}
    truncate(trained / "checkpoint-6/optimizer.pt")
    make().train(resume_from_checkpoint=True)
    for path, weights in expected.items():
        assert all(torch.equal(value, weights[name]) for name, value in load_file(path).items())
    make().train(resume_from_checkpoint=str(trained / "checkpoint-6"))  # it is complete again


def test_folders_of_other_names_are_left_alone(make, trained, caplog):
    for name in ("checkpoint-20-old", "checkpoint-", "checkpoint-x", "my-checkpoint-30"):
        shutil.copytree(trained / "checkpoint-4", trained / name)
    (trained / "checkpoint-99").touch()
    assert choose_checkpoint(make(), None) == str(trained / "checkpoint-6") and "Skipped" not in caplog.text
    make(max_steps=8, save_total_limit=1).train(resume_from_checkpoint=True)
    found = {path.name for path in trained.glob("*checkpoint-*")}
    assert found == {"checkpoint-8", "checkpoint-20-old", "checkpoint-", "checkpoint-x", "my-checkpoint-30", "checkpoint-99"}


def test_values_of_resume_from_checkpoint(make, trained, tmp_path):
    checkpoint = str(trained / "checkpoint-2")
    assert choose_checkpoint(make(), checkpoint) == checkpoint
    assert choose_checkpoint(make(), "false") is choose_checkpoint(make(), False) is None
    with pytest.raises(FileNotFoundError, match="does not exist"):
        choose_checkpoint(make(), str(tmp_path / "elsewhere"))
    empty = make(output_dir=str(tmp_path / "empty"))
    assert choose_checkpoint(empty, None) is None
    for start in (lambda: choose_checkpoint(empty, "True"), lambda: empty.train(resume_from_checkpoint=True)):
        with pytest.raises(FileNotFoundError, match="no complete checkpoint in"):
            start()


def test_run_killed_in_its_first_save_starts_afresh(make, trained, caplog):
    """But one whose finished checkpoints are all damaged does not: what is left of them would be overwritten."""
    for step in (2, 4):
        shutil.rmtree(trained / f"checkpoint-{step}")
    (trained / "checkpoint-6/optimizer.pt").unlink()
    with pytest.raises(ValueError, match=r"None of the checkpoints can be resumed from.*optimizer.pt is missing.*afresh"):
        choose_checkpoint(make(), None)
    begin_manifest(trained / "checkpoint-6")
    assert choose_checkpoint(make(), None) is None
    assert re.search("checkpoint-6: optimizer.pt is missing; saving was not completed", caplog.text)
    for name in ("manifest.json", "trainer_state.json"):
        (trained / "checkpoint-6" / name).unlink()
    assert choose_checkpoint(make(), None) is None


def test_required_files_depend_on_the_settings(make, tmp_path):
    """Without the optimizer a run would continue, but not as it was."""
    make(save_only_model=True).train()
    checkpoint = str(tmp_path / "out/checkpoint-6")
    assert choose_checkpoint(make(save_only_model=True), True) == checkpoint
    with pytest.raises(ValueError, match=r"optimizer\.pt is missing; rng_state.*\.pth is missing; scheduler\.pt is missing"):
        choose_checkpoint(make(), checkpoint)
    trainer = make()
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match=r"scaler\.pt is missing"):
        choose_checkpoint(trainer, checkpoint)


def test_sharded_weights(make, trained):
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
    truncate(folder / "model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors is damaged"):
        choose_checkpoint(make(), str(folder))


def test_checkpoint_of_another_model_is_rejected(make, trained):
    trainer = make()
    name = next(name for name, _ in trainer.model.named_parameters())
    file = trained / "checkpoint-6/model.safetensors"
    weights = load_file(file)
    missing = {key: value for key, value in weights.items() if key != name}
    for changed, reason in ((weights | {name: torch.zeros(2, 3)}, "size mismatch for"), (missing, "Error.* in loading.*")):
        save_file(changed, file, {"format": "pt"})
        write_manifest(trained / "checkpoint-6")
        with pytest.raises(ValueError, match=rf"(?s)checkpoint-6 is of another model: .*{reason} {name}.* --output_dir"):
            trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("hashed", [True, False])
def test_training_files_are_identified(tmp_path, monkeypatch, hashed):
    """By all their bytes; where those are too many, by size and time."""
    monkeypatch.setattr(callbacks, "MAX_HASHED_BYTES", 10**6 if hashed else 0)
    file = tmp_path / "train.txt"
    file.write_bytes(bytes(300_000))
    os.utime(file, (1, 1))
    before = TrainingFilesCallback([str(tmp_path)]).files
    flip_a_bit(file)
    if hashed:
        os.utime(file, (1, 1))
    assert TrainingFilesCallback([str(file)]).files != before
    flip_a_bit(file)
    os.utime(file, (2, 2) if hashed else (1, 1))
    assert TrainingFilesCallback([str(file)]).files == before


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
            distributed_checkpoint.save({"x": torch.ones(3)}, checkpoint_id=folder / f"{name}_0", no_dist=True)
        else:
            torch.save({"x": torch.ones(3)}, folder / (f"{name}.bin" if layout == "one file" else f"{name}_0_rank0.bin"))
    write_manifest(folder)
    trainer = make()
    trainer.is_fsdp_enabled = True
    assert choose_checkpoint(trainer, True) == str(folder)
    part = next(folder.glob("optimizer*"))
    (truncate if part.is_file() else shutil.rmtree)(part)
    with pytest.raises(ValueError, match="optimizer"):
        choose_checkpoint(trainer, str(folder))


def test_deepspeed_layout(make, trained):
    folder = trained / "checkpoint-6"
    (folder / "optimizer.pt").unlink()
    (folder / "latest").write_text("global_step6")
    (folder / "global_step6").mkdir()
    torch.save({"x": torch.ones(3)}, folder / "global_step6/zero_optim_states.pt")
    write_manifest(folder)
    trainer = make()
    trainer.is_deepspeed_enabled = True
    assert choose_checkpoint(trainer, True) == str(folder)
    truncate(folder / "global_step6/zero_optim_states.pt")
    (folder / "latest").unlink()
    with pytest.raises(ValueError, match=r"global_step6/zero_optim_states.pt is damaged.*; latest is missing"):
        choose_checkpoint(trainer, str(folder))


def test_checkpoint_of_another_number_of_processes(make, trained, caplog):
    """Its random states are of no use; nor, with DeepSpeed, is its optimizer."""
    folder = trained / "checkpoint-6"
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    (folder / "latest").touch()
    write_manifest(folder)
    trainer = make()
    assert choose_checkpoint(trainer, True) == str(folder)
    assert "saved by another number of processes" in caplog.text
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match="than the 1 of this run, each with its shard of DeepSpeed's optimizer"):
        choose_checkpoint(trainer, True)


def test_finished_run_resumed_trains_no_step(make, trained):
    """Nor one that was made shorter."""
    saved = load_file(trained / "checkpoint-6/model.safetensors")
    for length in ({"max_steps": 6}, {"max_steps": 5}, {"max_steps": -1, "num_train_epochs": 0.5}):
        trainer = make(**length)
        assert trainer.train(resume_from_checkpoint=True).global_step == 6
        found = trainer.model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in saved.items())


# NaN and infinite losses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad, filtered", [(float("nan"), False), (float("nan"), True), (float("inf"), False)])
def test_training_stops_at_a_bad_loss(make, tmp_path, monkeypatch, bad, filtered):
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


def test_bad_weights_without_logging_raise_at_the_end(tmp_path, tiny_config):
    """Also with transformers' own arguments."""
    options = {"logging_strategy": "no", "save_strategy": "no", "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    args = TrainingArguments(tmp_path, max_steps=3, learning_rate=1e30, max_grad_norm=0, **options)
    trainer = ToSTTrainer(ToSTForCausalLM(tiny_config), args, train_dataset=text_runs.token_ids(32))
    with pytest.raises(FloatingPointError, match="there is no checkpoint"):
        trainer.train()


def test_bad_gradient_is_not_saved(make, tmp_path):
    trainer = make(save_steps=1)
    parameter = next(trainer.model.parameters())
    parameter.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(FloatingPointError, match="after step 0, by step 1"):
        trainer.train()
    assert not list((tmp_path / "out").glob("checkpoint-*"))


@pytest.mark.slow
def test_all_processes_stop_when_one_has_a_nan_loss(tmp_path, monkeypatch):
    monkeypatch.setenv("TOST_TEST_MODELS", str(tmp_path))
    sharded_cases.save_model()
    for message in run_cases(sharded_cases.train_ddp, ["nan"], 2, tmp_path)["nan"]:
        assert message.startswith(
            "FloatingPointError: The loss or its gradient became NaN or infinite after step 3, by step 4."
        )
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (1, 2, 3)}
    (tmp_path / "checkpoint-3/rng_state_1.pth").write_bytes(b"")  # only the second process needs it
    (tmp_path / "checkpoint-2/optimizer.pt").unlink()
    (tmp_path / "store").unlink(missing_ok=True)
    assert run_cases(sharded_cases.train_ddp, ["resume"], 2, tmp_path)["resume"] == [[2, 3, 4, 5, 6]] * 2
