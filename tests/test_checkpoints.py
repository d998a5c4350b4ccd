"""Resuming from the newest complete checkpoint, skipped checkpoints, and training that stops at a NaN loss."""

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
from safetensors.torch import load_file
from transformers import TrainingArguments

from tost_hf import ToSTForCausalLM, ToSTTrainer
from tost_hf.training.checkpoints import choose_checkpoint


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}


def make_text_trainer(folder: Path, **changes) -> ToSTTrainer:
    model = randomize(ToSTForCausalLM(small_config(num_hidden_layers=3)))
    args = text_runs.training_args(folder, **(SAVING | changes))
    return ToSTTrainer(model, args, train_dataset=text_runs.token_ids(32))


def make_image_trainer(folder: Path, **changes) -> ToSTTrainer:
    return image_runs.make_trainer(folder, **(SAVING | {"ema_decay": 0.6} | changes))


@pytest.fixture(scope="module")
def run(request, tmp_path_factory):
    """A function that makes trainers with the same weights, and the output folder of a run with checkpoints 2, 4 and 6."""
    make = make_image_trainer if getattr(request, "param", "text") == "images" else make_text_trainer
    folder = tmp_path_factory.mktemp("run")
    make(folder).train()
    return make, folder / "out"


for_text_and_images = pytest.mark.parametrize("run", ["text", "images"], indirect=True)


@pytest.fixture
def make(run, tmp_path):
    """A function that makes trainers; its keywords change the training arguments."""
    return partial(run[0], tmp_path)


@pytest.fixture
def output_dir(run, tmp_path) -> Path:
    """A copy of the run's output folder."""
    return shutil.copytree(run[1], tmp_path / "out")


@pytest.mark.parametrize(
    "name",
    ["optimizer.pt", "trainer_state.json", "model.safetensors"],
)
def test_incomplete_checkpoint_is_skipped(make, output_dir, caplog, name):
    (output_dir / "checkpoint-6" / name).unlink()
    assert choose_checkpoint(make(), True) == choose_checkpoint(make(), None) == str(output_dir / "checkpoint-4")
    assert name in caplog.text
    with pytest.raises(ValueError, match=name):
        make().train(resume_from_checkpoint=str(output_dir / "checkpoint-6"))


@pytest.mark.parametrize("run", ["images"], indirect=True)
def test_empty_and_cut_files_are_reported(make, output_dir):
    """As a full disk or a power failure leaves them, although `trainer_state.json` is written last."""
    folder, trainer = output_dir / "checkpoint-6", make()
    names = ["config.json", "ema/model.safetensors", "model.safetensors", "optimizer.pt"]
    names += ["rng_state.pth", "scheduler.pt", "trainer_state.json"]
    for name in names:
        content = (folder / name).read_bytes()
        for size in (0, len(content) // 2, len(content) - 2):
            (folder / name).write_bytes(content[:size])
            with pytest.raises(ValueError, match=f"incomplete: {name} is cut off"):
                choose_checkpoint(trainer, str(folder))
            assert choose_checkpoint(trainer, True) == str(output_dir / "checkpoint-4")
        (folder / name).write_bytes(content)
    assert choose_checkpoint(trainer, True) == str(folder)


def test_checkpoint_is_incomplete_while_it_is_overwritten(make, output_dir, monkeypatch):
    """A run that resumes from an earlier checkpoint is killed while it overwrites a later one."""

    def raise_interrupt(*args):
        raise KeyboardInterrupt

    trainer = make()
    monkeypatch.setattr(torch, "save", raise_interrupt)  # of the optimizer, after the weights
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=str(output_dir / "checkpoint-2"))
    assert choose_checkpoint(make(), True) == str(output_dir / "checkpoint-6")
    assert not (output_dir / "checkpoint-4/trainer_state.json").exists()


@for_text_and_images
def test_resuming_from_an_earlier_checkpoint_is_bit_equal(make, output_dir):
    expected = {path: load_file(path) for path in (output_dir / "checkpoint-6").rglob("*.safetensors")}
    (output_dir / "checkpoint-6/optimizer.pt").unlink()
    make().train(resume_from_checkpoint=True)
    for path, weights in expected.items():
        assert all(torch.equal(value, weights[name]) for name, value in load_file(path).items())
    make().train(resume_from_checkpoint=str(output_dir / "checkpoint-6"))  # it is complete again


def test_resume_from_checkpoint_values(make, output_dir, tmp_path):
    checkpoint = str(output_dir / "checkpoint-2")
    assert choose_checkpoint(make(), checkpoint) == checkpoint
    assert choose_checkpoint(make(), "false") is choose_checkpoint(make(), False) is None
    with pytest.raises(FileNotFoundError, match="exist"):
        choose_checkpoint(make(), str(tmp_path / "elsewhere"))
    empty = make(output_dir=str(tmp_path / "empty"))
    assert choose_checkpoint(empty, None) is None
    for start in (lambda: choose_checkpoint(empty, "True"), lambda: empty.train(resume_from_checkpoint=True)):
        with pytest.raises(FileNotFoundError, match="complete"):
            start()


def test_run_killed_in_its_first_save_starts_afresh(make, output_dir):
    """A run whose checkpoints are all damaged does not, because it would overwrite them."""
    for step in (2, 4):
        shutil.rmtree(output_dir / f"checkpoint-{step}")
    (output_dir / "checkpoint-6/optimizer.pt").unlink()
    with pytest.raises(ValueError, match="afresh"):
        choose_checkpoint(make(), None)
    (output_dir / "checkpoint-6/trainer_state.json").unlink()
    assert choose_checkpoint(make(), None) is None


def test_required_files_depend_on_the_settings(make, tmp_path):
    """Without its optimizer state a run would continue differently."""
    make(save_only_model=True).train()
    checkpoint = str(tmp_path / "out/checkpoint-6")
    assert choose_checkpoint(make(save_only_model=True), True) == checkpoint
    with pytest.raises(ValueError, match="optimizer"):
        choose_checkpoint(make(), checkpoint)


@pytest.mark.parametrize("layout", ["one file", "a file per process"])
def test_fsdp_layouts(make, output_dir, layout):
    folder = output_dir / "checkpoint-6"
    for name in ("optimizer.pt", "model.safetensors"):
        (folder / name).unlink()
    for name in ("pytorch_model_fsdp", "optimizer"):
        torch.save({"x": torch.ones(3)}, folder / (f"{name}.bin" if layout == "one file" else f"{name}_0_rank0.bin"))
    trainer = make()
    trainer.is_fsdp_enabled = True
    assert choose_checkpoint(trainer, True) == str(folder)
    next(folder.glob("optimizer*")).unlink()
    with pytest.raises(ValueError, match="optimizer"):
        choose_checkpoint(trainer, str(folder))


def test_checkpoint_of_another_number_of_processes(make, output_dir, caplog):
    """Its random states cannot be used."""
    folder = output_dir / "checkpoint-6"
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    assert choose_checkpoint(make(), True) == str(folder)
    assert "saved by another number of processes" in caplog.text


def test_resuming_a_finished_run_trains_no_step(make, output_dir):
    """Also with fewer steps than were trained."""
    expected = load_file(output_dir / "checkpoint-6/model.safetensors")
    for length in ({"max_steps": 6}, {"max_steps": 5}, {"max_steps": -1, "num_train_epochs": 0.5}):
        trainer = make(**length)
        assert trainer.train(resume_from_checkpoint=True).global_step == 6
        assert trainer.state.num_train_epochs == 1
        actual = trainer.model.state_dict()
        assert all(torch.equal(actual[name], value) for name, value in expected.items())


# NaN and infinite losses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor, nan_filter", [(float("nan"), False), (float("nan"), True), (float("inf"), False)])
def test_training_stops_at_a_nan_or_infinite_loss(make, tmp_path, monkeypatch, factor, nan_filter):
    """Before it is logged and before checkpoints are saved or deleted, with and without logging_nan_inf_filter."""
    trainer = make(logging_nan_inf_filter=nan_filter, save_total_limit=1, save_steps=1, max_steps=9)
    compute_loss, calls = trainer.compute_loss, []

    def compute_faulty_loss(*args, **kwargs):
        calls.append(None)
        loss = compute_loss(*args, **kwargs)
        return loss * factor if len(calls) == 4 else loss

    monkeypatch.setattr(trainer, "compute_loss", compute_faulty_loss)
    with pytest.raises(FloatingPointError, match=r"NaN or infinite after step 3, by step 4\..*checkpoint is .*checkpoint-3\."):
        trainer.train()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-3"]
    assert [entry["step"] for entry in trainer.state.log_history] == [1, 2, 3]
    make(save_steps=1).train(resume_from_checkpoint=True)


def test_nan_weights_without_logging_raise_at_the_end(tmp_path, tiny_config):
    """With transformers.TrainingArguments."""
    options = {"logging_strategy": "no", "save_strategy": "no", "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    args = TrainingArguments(tmp_path, max_steps=3, learning_rate=1e30, max_grad_norm=0, **options)
    trainer = ToSTTrainer(ToSTForCausalLM(tiny_config), args, train_dataset=text_runs.token_ids(32))
    with pytest.raises(FloatingPointError, match="there is no checkpoint"):
        trainer.train()


def test_nan_gradient_is_not_saved(make, tmp_path):
    trainer = make(save_steps=1)
    parameter = next(trainer.model.parameters())
    parameter.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(FloatingPointError, match="after step 0, by step 1"):
        trainer.train()
    assert not list((tmp_path / "out").glob("checkpoint-*"))


@pytest.mark.slow
def test_all_processes_stop_when_one_has_a_nan_loss(tmp_path, monkeypatch):
    monkeypatch.setenv("TOST_TEST_MODELS", str(tmp_path))
    sharded_cases.save_models()
    for message in run_cases(sharded_cases.train_ddp, ["nan"], 2, tmp_path)["nan"]:
        assert message.startswith(
            "FloatingPointError: The loss or its gradient became NaN or infinite after step 3, by step 4."
        )
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (1, 2, 3)}
    (tmp_path / "checkpoint-3/optimizer.pt").unlink()
    (tmp_path / "checkpoint-2/optimizer.pt").unlink()
    (tmp_path / "store").unlink(missing_ok=True)
    assert run_cases(sharded_cases.train_ddp, ["resume"], 2, tmp_path)["resume"] == [[2, 3, 4, 5, 6]] * 2
