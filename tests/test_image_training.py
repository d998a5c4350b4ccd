"""Training on images: the recipes and ToSTVisionTrainer."""

import pytest
import run_image_classification as script
import torch
from image_runs import digit_examples, make_trainer, tiny_vision_model, training_args
from safetensors.torch import load_file
from scripts import EXAMPLES
from torch.nn import functional as F

from tost_hf import ToSTForImageClassification
from tost_hf.training.trainer_vision import ToSTVisionTrainer, ToSTVisionTrainingArguments


# The recipes ---------------------------------------------------------------------------------------------------------


def parse(recipe: str, *args) -> ToSTVisionTrainingArguments:
    classes = script.ModelArguments, script.DataTrainingArguments, ToSTVisionTrainingArguments
    recipe_file = EXAMPLES / f"recipes/{recipe}.yaml"
    required_args = ["--dataset_name", "x", "--output_dir", "out", "--use_cpu"]
    return script.parse_args(list(map(str, [recipe_file, *required_args, *args])), *classes)[2]


def test_pretraining_recipe():
    args = parse("image_pretraining", "--bf16", "false")
    assert (args.num_train_epochs, args.weight_decay, args.adam_epsilon, args.max_grad_norm) == (400, 0.05, 1e-8, 0)
    assert (args.adam_beta1, args.adam_beta2, args.label_smoothing_factor, args.total_batch_size) == (0.9, 0.999, 0.1, 2048)
    assert args.learning_rate == pytest.approx(5e-4 * 2048 / 512)
    assert (args.mixup, args.cutmix, args.random_erasing, args.repeated_augmentation) == (0.8, 1.0, 0.25, 3)
    assert (args.rand_augment_operations, args.rand_augment_magnitude, args.rand_augment_std) == (2, 27, 1.5)
    assert (args.ema_decay, args.rand_augment_probability) == (0.99996, 0.5)
    assert args.get_warmup_steps(4000) == 50  # 5 epochs of 400


def test_finetuning_recipe():
    args = parse("image_finetuning", "--bf16", "false", "--weight_decay", "0.3")
    assert (args.num_train_epochs, args.weight_decay, args.learning_rate) == (200, 0.3, 1e-4)
    assert (args.total_batch_size, args.lr_scheduler_type, args.get_warmup_steps(1000)) == (256, "cosine", 0)
    assert (args.rand_augment_operations, args.rand_augment_magnitude, args.rand_augment_std) == (2, 14, 0)
    assert (args.rand_augment_probability, args.repeated_augmentation) == (1, 1)
    assert not any((args.mixup, args.cutmix, args.random_erasing, args.label_smoothing_factor, args.ema_decay))


@pytest.mark.parametrize("name, value", [("mixup", -0.1), ("rand_augment_magnitude", 31)])
def test_impossible_arguments(tmp_path, name, value):
    with pytest.raises(ValueError, match=name):
        ToSTVisionTrainingArguments(str(tmp_path), use_cpu=True, **{name: value})


def test_learning_rate(tmp_path):
    recipe = parse("image_pretraining", "--bf16", "false")
    names = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs")
    trainer = make_trainer(tmp_path, **{name: getattr(recipe, name) for name in names}, warmup_steps=4)
    trainer.create_optimizer_and_scheduler(20)
    rates = []
    for _ in range(20):
        rates.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert rates[0] == pytest.approx(1e-6) and max(rates) == pytest.approx(2e-3, rel=0.01)
    assert rates[-1] == pytest.approx(1e-5, rel=0.01)


@pytest.mark.parametrize("attention_type, name", [("tssa", "temp"), ("xca", "temperature")])
def test_parameter_groups(tmp_path, attention_type, name):
    model = tiny_vision_model(attention_type=attention_type)
    decay_names = make_trainer(tmp_path, model).get_decay_parameter_names(model)
    expected = [
        key for key, value in model.named_parameters() if value.ndim >= 2 and not key.endswith((f".{name}", "class_token"))
    ]
    assert decay_names == expected
    assert any(key.endswith(f".{name}") for key, _ in model.named_parameters())


# Trainer -------------------------------------------------------------------------------------------------------------


def test_loss_and_label_smoothing(tmp_path):
    """Labels are smoothed in training but not in evaluation; soft labels are accepted."""
    model = tiny_vision_model().eval()
    trainer = make_trainer(tmp_path, model, label_smoothing_factor=0.1)
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 2, 1])}
    logits = model(batch["pixel_values"]).logits
    assert trainer.compute_loss(model, dict(batch)).item() == pytest.approx(F.cross_entropy(logits, batch["labels"]).item())
    model.train()
    logits = model(batch["pixel_values"]).logits
    smoothed = F.cross_entropy(logits, batch["labels"], label_smoothing=0.1)
    assert trainer.compute_loss(model, dict(batch)).item() == pytest.approx(smoothed.item())
    soft_labels = F.one_hot(batch["labels"], 3) * 0.7 + F.one_hot(batch["labels"].flip(0), 3) * 0.3
    expected = -((0.9 * soft_labels + 0.1 / 3) * logits.log_softmax(-1)).sum(-1).mean()
    assert trainer.compute_loss(model, batch | {"labels": soft_labels}).item() == pytest.approx(expected.item(), rel=1e-5)
    assert model.config.problem_type in (None, "single_label_classification")


def test_ema_weights_are_averaged_and_evaluated(tmp_path):
    trainer = make_trainer(tmp_path, ema_decay=0.6)
    expected = {}

    def update_expected(model):
        for name, value in model.state_dict().items():
            expected[name] = (
                value.clone() if name not in expected else torch.lerp(expected[name].double(), value.double(), 0.4)
            )

    update_parameters = trainer.ema.update_parameters
    trainer.ema.update_parameters = lambda model: (update_parameters(model), update_expected(model))
    trainer.train()
    for name, value in trainer.ema.module.state_dict().items():
        if value.is_floating_point():  # all but BatchNorm's counters
            torch.testing.assert_close(value, expected[name].to(value.dtype), msg=name)

    trained_state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    metrics = trainer.evaluate()
    batch = trainer.data_collator([trainer.eval_dataset[i] for i in range(12)])
    with torch.no_grad():
        for prefix, model in (("eval", trainer.model), ("eval_ema", trainer.ema.module)):
            assert metrics[f"{prefix}_loss"] == pytest.approx(model.eval()(**batch).loss.item(), rel=1e-5)
    assert metrics["eval_loss"] != metrics["eval_ema_loss"]
    assert all(torch.equal(value, trained_state[name]) for name, value in trainer.model.state_dict().items())


def test_ema_weights_are_saved_and_restored(tmp_path):
    trainer = make_trainer(tmp_path, ema_decay=0.6, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model()
    ema_state = trainer.ema.module.state_dict()
    for folder in (tmp_path / "out", tmp_path / "out/checkpoint-4"):
        saved = ToSTForImageClassification.from_pretrained(folder, subfolder="ema").state_dict()
        assert all(torch.equal(value, ema_state[name]) for name, value in saved.items())
        assert not torch.equal(load_file(folder / "model.safetensors")["classifier.weight"], saved["classifier.weight"])
        assert "use_cache" not in (folder / "config.json").read_text()  # Trainer sets it in the configuration of any model

    resumed = make_trainer(tmp_path, ema_decay=0.6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    for name, value in resumed.ema.module.state_dict().items():
        assert torch.equal(value, ema_state[name]), name

    (tmp_path / "out/checkpoint-2/ema/model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"ema/model\.safetensors is missing"):
        make_trainer(tmp_path, ema_decay=0.6).train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))


def test_best_model_has_the_ema_weights_of_its_step(tmp_path):
    """A learning rate at which the loss rises after the first step."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = make_trainer(tmp_path, ema_decay=0.6, learning_rate=0.3, load_best_model_at_end=True, **options)
    trainer.train()
    step = trainer.state.best_global_step
    assert step < trainer.state.global_step
    trainer.save_model()
    best = tmp_path / f"out/checkpoint-{step}"
    for name in ("model.safetensors", "ema/model.safetensors"):
        actual, expected = (load_file(folder / name) for folder in (tmp_path / "out", best))
        assert actual.keys() == expected.keys() and all(torch.equal(actual[key], expected[key]) for key in expected), name
    [logged] = [x["eval_ema_loss"] for x in trainer.state.log_history if x["step"] == step and "eval_ema_loss" in x]
    assert trainer.evaluate()["eval_ema_loss"] == pytest.approx(logged)


def test_frozen_batch_norm(tmp_path):
    for freeze in (False, True):
        model = tiny_vision_model()
        initial_buffers = {name: value.clone() for name, value in model.named_buffers()}
        make_trainer(tmp_path, model, freeze_batch_norm=freeze).train()
        unchanged = [torch.equal(value, initial_buffers[name]) for name, value in model.named_buffers()]
        assert len(unchanged) == 6 and all(unchanged) == freeze and any(unchanged) == freeze


def test_model_init_is_prepared_for_training(tmp_path):
    """The model has SyncBatchNorm layers, and the EMA weights are those of the trained model."""
    args = training_args(tmp_path, sync_batch_norm=True, ema_decay=0.5, max_steps=1)
    trainer = ToSTVisionTrainer(model_init=lambda: tiny_vision_model(), args=args, train_dataset=digit_examples())
    initial_ema = trainer.ema
    trainer.train()
    norms = trainer.model.tost.embeddings.patch_embeddings.norms
    assert all(isinstance(norm, torch.nn.SyncBatchNorm) for norm in norms)
    assert trainer.ema is not initial_ema and trainer.ema.n_averaged == 1


def test_sync_batch_norm_converts_the_stem(tmp_path, monkeypatch):
    model = tiny_vision_model()
    names = list(model.state_dict())
    trainer = make_trainer(tmp_path, model, sync_batch_norm=True)
    norms = trainer.model.tost.embeddings.patch_embeddings.norms
    assert len(norms) == 2 and all(isinstance(norm, torch.nn.SyncBatchNorm) for norm in norms)
    assert list(trainer.model.state_dict()) == names
    trainer.save_model()
    loaded = ToSTForImageClassification.from_pretrained(tmp_path / "out")
    assert all(type(norm) is torch.nn.BatchNorm2d for norm in loaded.tost.embeddings.patch_embeddings.norms)

    monkeypatch.setattr(ToSTVisionTrainingArguments, "world_size", 2)
    with pytest.raises(ValueError, match="sync_batch_norm needs an accelerator"):
        make_trainer(tmp_path, sync_batch_norm=True)
