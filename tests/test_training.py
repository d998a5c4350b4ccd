"""Training: the recipe, ToSTTrainer, the fused loss, PEFT, metrics and Accelerate's configuration files."""

import inspect
import json
import logging
import math

import pytest
import run_clm
import torch
from conftest import randomize
from datasets import Dataset
from scripts import EXAMPLES
from text_runs import token_ids, train, training_args
from transformers import AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainingArguments

import tost_hf
from tost_hf import ToSTConfig, ToSTForCausalLM, ToSTTrainer, ToSTTrainingArguments, ToSTVisionTrainer
from tost_hf.model.base_tost import AUTO_MAPS
from tost_hf.training.metrics import Accuracy, perplexity


# The recipe ----------------------------------------------------------------------------------------------------------


def test_defaults_that_differ_from_transformers(tmp_path):
    ours, theirs = (
        arguments(str(tmp_path), use_cpu=True).to_dict() for arguments in (ToSTTrainingArguments, TrainingArguments)
    )
    changed = {name: ours[name] for name in theirs if ours[name] != theirs[name] and name != "logging_dir"}
    assert changed == {"learning_rate": 6e-4, "weight_decay": 0.1, "adam_beta2": 0.95, "logging_nan_inf_filter": False}


def test_recipe_of_the_paper(tmp_path):
    recipe, options = EXAMPLES / "recipes/text_pretraining.yaml", ["--output_dir", tmp_path, "--use_cpu"]
    classes = run_clm.ModelArguments, run_clm.DataTrainingArguments, ToSTTrainingArguments
    arguments = [recipe, *options, "--dataset_name", "x", "--max_steps", 1000, "--bf16", "false"]
    _, data, args = run_clm.parse_args(list(map(str, arguments)), *classes)
    assert (args.learning_rate, args.weight_decay, args.max_grad_norm) == (6e-4, 0.1, 1.0)
    assert (args.adam_beta1, args.adam_beta2, args.total_batch_size, data.block_size) == (0.9, 0.95, 480, 1024)
    assert (args.warmup_steps, args.lr_scheduler_type, args.lr_scheduler_kwargs) == (
        2000,
        "cosine_with_min_lr",
        {"min_lr_rate": 0.1},
    )
    assert (args.max_steps, args.bf16) == (1000, False)  # options after the file take precedence


@pytest.mark.parametrize("devices, steps", [(1, 8), (2, 4), (8, 1)])
def test_total_batch_size_sets_the_accumulation(tmp_path, tiny_model, devices, steps):
    args = ToSTTrainingArguments(str(tmp_path), use_cpu=True, total_batch_size=480, per_device_train_batch_size=60)
    args.set_gradient_accumulation(devices)
    assert args.gradient_accumulation_steps == steps
    args = ToSTTrainingArguments(str(tmp_path), use_cpu=True, total_batch_size=24)
    assert ToSTTrainer(tiny_model, args).args.gradient_accumulation_steps == 3  # the default batch size per device is 8


@pytest.mark.parametrize("total, devices", [(480, 7), (480, 16)])
def test_indivisible_total_batch_sizes(tmp_path, total, devices):
    args = ToSTTrainingArguments(str(tmp_path), use_cpu=True, total_batch_size=total, per_device_train_batch_size=60)
    with pytest.raises(ValueError, match="multiple"):
        args.set_gradient_accumulation(devices)


def test_total_batch_size_excludes_other_accumulation(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="auto_find_batch_size"):
        ToSTTrainingArguments(str(tmp_path), use_cpu=True, total_batch_size=24, auto_find_batch_size=True)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")  # DeepSpeed needs the accumulation before the trainer exists
    with pytest.raises(ValueError, match="contradicts"):
        ToSTTrainingArguments(str(tmp_path), use_cpu=True, total_batch_size=24, gradient_accumulation_steps=5)


def test_parameter_groups(tmp_path, tiny_config):
    tiny_config.num_hidden_layers, tiny_config.use_bias = 1, True
    model = ToSTForCausalLM(tiny_config)
    trainer = ToSTTrainer(model, training_args(tmp_path))
    decayed, not_decayed = trainer.create_optimizer().param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], not_decayed["weight_decay"]) == (0.1, 0.0)
    assert {names[id(p)] for p in decayed["params"]} == {
        "model.embed_tokens.weight",
        "model.embed_positions.weight",
        "model.layers.0.self_attn.in_proj.weight",
        "model.layers.0.self_attn.out_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    }
    assert {names[id(p)] for p in not_decayed["params"]} == set(names.values()) - {names[id(p)] for p in decayed["params"]}
    assert model.model.layers[0].self_attn.temp.ndim == 2  # so its name, not its shape, excludes it from decay


def test_trainer_without_arguments_has_the_recipe_of_the_authors(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert isinstance(ToSTTrainer(tiny_model).args, ToSTTrainingArguments)


needs_fused_loss = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="this PyTorch has no fused loss"
)


@needs_fused_loss
@pytest.mark.parametrize("wrapper", ["LoRA", "hook", "replaced forward", "another layer", "bias"])
def test_fused_loss_of_a_wrapped_head(tiny_config, wrapper, caplog):
    """Loss and gradients are correct: a wrapped head falls back to the unfused loss, a Linear layer with bias is fused."""
    model = ToSTForCausalLM(tiny_config).train()
    head, tokens = model.lm_head, torch.arange(1, 17).reshape(1, 16)
    if wrapper == "LoRA":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False))
    elif wrapper == "hook":
        head.register_forward_hook(lambda module, inputs, output: output * 2)
    elif wrapper == "replaced forward":  # as Accelerate does
        head.forward = lambda x: torch.nn.Linear.forward(head, x) * 2
    elif wrapper == "another layer":
        model.lm_head = torch.nn.Sequential(head, torch.nn.Tanh())
        model.lm_head.weight = head.weight
    else:
        head.bias = torch.nn.Parameter(torch.linspace(0, 5, head.out_features))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = model(tokens, labels=tokens).loss
    gradients = torch.autograd.grad(expected, parameters)
    next(m for m in model.modules() if isinstance(m, ToSTForCausalLM)).fuse_linear_cross_entropy = True
    logging.Logger.warning_once.cache_clear()  # transformers adds the method
    for _ in range(2):
        loss = model(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), gradients, rtol=1e-4, atol=1e-6)
    assert caplog.text.count("fuse_linear_cross_entropy is ignored") == (wrapper != "bias")


@needs_fused_loss
def test_model_init_with_fused_loss(tmp_path, tiny_config):
    models = []
    args = training_args(tmp_path, fuse_linear_cross_entropy=True, max_steps=1)

    def model_init():
        models.append(ToSTForCausalLM(tiny_config))
        return models[-1]

    ToSTTrainer(model_init=model_init, args=args, train_dataset=token_ids(8)).train()
    assert len(models) == 2 and all(model.fuse_linear_cross_entropy for model in models)


@needs_fused_loss
def test_fused_loss(tmp_path, tiny_config):
    """Equal training losses up to rounding; logits only in evaluation; disabled by default."""
    train_losses = {}
    for fused in (False, True):
        torch.manual_seed(0)
        model = ToSTForCausalLM(tiny_config)
        args = training_args(tmp_path, fuse_linear_cross_entropy=fused, gradient_accumulation_steps=2)
        trainer = ToSTTrainer(model, args, train_dataset=token_ids(40), eval_dataset=token_ids(4))
        train_losses[fused] = train(trainer)
        tokens = torch.arange(1, 17).reshape(1, 16)
        labels = tokens.masked_fill(tokens < 5, -100)
        assert (model.train()(tokens, labels=labels).logits is None) == fused
        assert model.eval()(tokens, labels=labels).logits is not None
        assert "eval_loss" in trainer.evaluate()
    torch.testing.assert_close(torch.tensor(train_losses[True]), torch.tensor(train_losses[False]), rtol=2e-4, atol=2e-4)
    model.train()
    fused_loss = model(tokens, labels=labels).loss
    fused_grads = torch.autograd.grad(fused_loss, list(model.parameters()))
    model.fuse_linear_cross_entropy = False
    plain_loss = model(tokens, labels=labels).loss
    torch.testing.assert_close(fused_loss, plain_loss)
    torch.testing.assert_close(fused_grads, torch.autograd.grad(plain_loss, list(model.parameters())), rtol=1e-4, atol=1e-6)
    shift_labels = torch.arange(2, 18).reshape(1, 16).masked_fill(tokens % 3 == 0, 7)
    for options in ({"ignore_index": 9}, {"shift_labels": shift_labels}, {"shift_labels": shift_labels, "ignore_index": 7}):
        losses = []
        for fused in (False, True):
            model.fuse_linear_cross_entropy = fused
            losses.append(model(tokens, labels=tokens, num_items_in_batch=torch.tensor(11), **options).loss)
        torch.testing.assert_close(losses[1], losses[0])
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        training_args(tmp_path, fuse_linear_cross_entropy=True, label_smoothing_factor=0.1)


def test_evaluation_does_not_change_the_training(tmp_path, tiny_config):
    """Its DataLoader draws a seed, from which dropout would continue."""
    tiny_config.hidden_dropout = 0.5

    def final_weights(**changes) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model, data = ToSTForCausalLM(tiny_config), token_ids(24)
        train(ToSTTrainer(model, training_args(tmp_path, **changes), train_dataset=data, eval_dataset=data))
        return model.state_dict()

    expected = final_weights()
    for name, weight in final_weights(eval_strategy="steps", eval_steps=1, eval_on_start=True).items():
        assert torch.equal(weight, expected[name]), name


def test_arguments_that_libraries_would_warn_of(tmp_path, recwarn):
    """Pinned memory where there is no GPU, and the name of activation checkpointing that transformers deprecates."""
    args = ToSTTrainingArguments(str(tmp_path), gradient_checkpointing=True)
    assert args.gradient_checkpointing and not [w for w in recwarn if "gradient_checkpointing" in str(w.message)]
    assert args.dataloader_pin_memory == torch.accelerator.is_available()


@pytest.mark.parametrize("argument", ["model", "model_init"])
def test_use_cache_is_saved_as_before_training(tmp_path, tiny_config, argument):
    """In checkpoints and after an interruption, too; Trainer sets it to False. Training computes no cache."""
    caches = []

    def interrupt(module, args, output):
        caches.append(output.past_key_values)
        if len(caches) == 4:
            raise KeyboardInterrupt

    def make_model():
        model = ToSTForCausalLM(tiny_config)
        model.register_forward_hook(interrupt)
        return model

    args = training_args(tmp_path, save_strategy="steps", save_steps=2)
    trainer = ToSTTrainer(
        **{argument: make_model() if argument == "model" else make_model}, args=args, train_dataset=token_ids(8)
    )
    trainer.save_model(str(tmp_path / "start"))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.save_model(str(tmp_path / "end"))
    assert caches == [None] * 4 and trainer.model.config.use_cache
    for name in ("start", "out/checkpoint-2", "end"):
        assert json.loads((tmp_path / name / "config.json").read_text())["use_cache"] is True


def test_padding_token_of_the_tokenizer(tmp_path, tiny_config, text_folder):
    """It is set before training, which would warn of the difference."""
    tokenizer = AutoTokenizer.from_pretrained(text_folder / "tokenizer")
    tokenizer.pad_token = tokenizer.eos_token
    model = ToSTForCausalLM(tiny_config)
    ToSTTrainer(model, training_args(tmp_path), train_dataset=token_ids(4), processing_class=tokenizer)
    assert model.config.pad_token_id == model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_trainer_equals_a_training_loop(tmp_path, tiny_config):
    """50 AdamW steps against a loop that implements the recipe: groups, clipping, warm-up, cosine to a minimum."""
    steps, batch, rate, warmup = 50, 4, 0.01, 5
    dataset = token_ids(steps * batch)
    model, reference = (randomize(ToSTForCausalLM(tiny_config)) for _ in range(2))
    args = training_args(
        tmp_path, max_steps=steps, learning_rate=rate, warmup_steps=warmup, train_sampling_strategy="sequential"
    )
    actual = train(ToSTTrainer(model, args, train_dataset=dataset))

    no_decay_names = ("norm.weight", "temp", "denom_bias", "layer_scale")
    decayed = [p for name, p in reference.named_parameters() if not name.endswith(no_decay_names) and "layernorm" not in name]
    not_decayed = [p for name, p in reference.named_parameters() if all(p is not q for q in decayed)]
    assert len(decayed) == 2 + 4 * tiny_config.num_hidden_layers
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": not_decayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8)
    expected = []
    for step, ids in enumerate(torch.tensor(dataset["input_ids"]).split(batch)):
        progress = (step - warmup) / (steps - warmup)
        scale = step / warmup if step < warmup else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate * scale
        loss = torch.nn.functional.cross_entropy(reference(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert abs(actual[-1] - actual[0]) > 0.1


PUBLIC_METHODS = {"call_model_init", "compute_loss", "compute_loss_context_manager", "create_model_card", "create_optimizer"}
PUBLIC_METHODS |= {"evaluate", "evaluation_loop", "get_decay_parameter_names", "get_eval_dataloader", "get_test_dataloader"}
PUBLIC_METHODS |= {"get_total_train_batch_size", "get_train_dataloader", "init_hf_repo", "prediction_step", "save_model"}
PUBLIC_METHODS |= {"create_accelerator_and_postprocess", "set_initial_training_values", "train"}


def test_trainers_override_public_methods_only():
    """Of transformers' Trainer, whose private ones change without notice; one that is renamed would not be called."""
    ours = {name for cls in (ToSTTrainer, ToSTVisionTrainer) for name in vars(cls) if not name.startswith("__")}
    assert ours & set(dir(Trainer)) == PUBLIC_METHODS and PUBLIC_METHODS <= vars(Trainer).keys()


# The models in the Trainer -------------------------------------------------------------------------------------------


def test_gradients_are_deterministic():
    """With two threads and tensors large enough for both; resumed runs repeat their losses only with equal gradients."""
    sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 12}
    config = ToSTConfig(**sizes, max_position_embeddings=512, bos_token_id=None, eos_token_id=None)
    model, ids = randomize(ToSTForCausalLM(config)), torch.randint(50, (16, 512))

    def compute_gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, others = compute_gradients(), [compute_gradients() for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert {name for other in others for name in other if not torch.equal(other[name], first[name])} == set()


@pytest.mark.parametrize("trainer_class", [Trainer, ToSTTrainer])
def test_label_smoothing_shifts_the_labels(tmp_path, tiny_config, trainer_class):
    """Trainer looks up the class name in a mapping of transformers that `register` does not fill."""
    losses = []
    for smoothing in (0.0, 1e-9):
        model = randomize(ToSTForCausalLM(tiny_config))
        args = training_args(tmp_path, max_steps=1, label_smoothing_factor=smoothing)
        losses += train(trainer_class(model, args, train_dataset=token_ids(4)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_packed_training_equals_padded_training(tmp_path, tiny_config):
    generator = torch.Generator().manual_seed(4)
    ids = [torch.randint(97, (length,), generator=generator).tolist() for length in (5, 17, 9, 12, 3, 20, 8, 11)]
    dataset = Dataset.from_dict({"input_ids": ids, "labels": ids})

    def pad(features):
        length = max(len(feature["input_ids"]) for feature in features)
        padding = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        features = [feature | {"attention_mask": [1] * len(feature["input_ids"])} for feature in features]
        return {k: torch.tensor([f[k] + [padding[k]] * (length - len(f[k])) for f in features]) for k in padding}

    results = []
    for collator in (pad, DataCollatorWithFlattening()):
        model = randomize(ToSTForCausalLM(tiny_config))
        args = training_args(tmp_path, max_steps=4)
        results.append(train(ToSTTrainer(model, args, train_dataset=dataset, data_collator=collator)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)
    assert results[0][0] != results[0][-1]


def test_trainer_keeps_the_sequence_numbers_of_packed_documents(tmp_path, tiny_config):
    """Trainer would remove the column, which is not in the signature of `forward`."""
    ids = torch.randint(97, (4, 24), generator=torch.Generator().manual_seed(4)).tolist()
    packed = Dataset.from_dict({"input_ids": ids, "labels": [[-100, *row[1:12], -100, *row[13:]] for row in ids]})
    packed = packed.add_column("seq_idx", [[0] * 12 + [1] * 12] * 4)
    halves = [row[start : start + 12] for row in ids for start in (0, 12)]
    losses = []
    for dataset, size in ((packed, 4), (Dataset.from_dict({"input_ids": halves, "labels": halves}), 8)):
        model = randomize(ToSTForCausalLM(tiny_config))
        args = training_args(tmp_path, max_steps=1, per_device_train_batch_size=size)
        if "seq_idx" in dataset.column_names:
            for datasets in ({"train_dataset": dataset}, {"eval_dataset": dataset}, {"eval_dataset": {"packed": dataset}}):
                with pytest.raises(ValueError, match=r"column seq_idx.*remove_unused_columns=False"):
                    ToSTTrainer(model, args, **datasets)
            args.remove_unused_columns = False
        losses += train(ToSTTrainer(model, args, train_dataset=dataset))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


HEADS = [reference.partition(".")[2] for name, reference in AUTO_MAPS["tost"].items() if name.startswith("AutoModelFor")]


@pytest.mark.parametrize("name", HEADS)
def test_heads_name_the_inputs_that_data_sets_have(name):
    """Trainer removes other columns."""
    parameters = inspect.signature(getattr(tost_hf, name).forward).parameters
    assert {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "kwargs"} <= set(parameters)


def test_lora(tmp_path, tiny_model):
    """Only the adapters are trained; test_adapters.py tests PEFT itself."""
    peft = pytest.importorskip("peft")
    base = {name: parameter.clone() for name, parameter in tiny_model.named_parameters()}
    adapted = peft.get_peft_model(
        tiny_model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["in_proj", "out_proj"])
    )
    results = train(ToSTTrainer(adapted, training_args(tmp_path, max_steps=20), train_dataset=token_ids(8)))
    assert results[-1] < results[0] - 0.1
    for name, parameter in adapted.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, base[name.removeprefix("base_model.model.").replace(".base_layer", "")])


# Metrics and launcher files ------------------------------------------------------------------------------------------


def test_metrics():
    result = Accuracy().compute(predictions=[5, 7, 9, 1], references=[5, 8, 9, -100])
    assert result == {"accuracy": pytest.approx(2 / 3)}
    metric = Accuracy()
    metric.add_batch(predictions=[1, 2], references=[1, 3])
    metric.add_batch(predictions=[4], references=[4])
    assert metric.compute() == {"accuracy": pytest.approx(2 / 3)}
    assert math.isnan(Accuracy().compute(predictions=[1], references=[-100])["accuracy"])
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert perplexity(1e6) == math.inf and math.isnan(perplexity(math.nan))


@pytest.mark.parametrize(
    "file, kind", [("fsdp2.yaml", "FSDP"), ("deepspeed_zero2.yaml", "DEEPSPEED"), ("multi_node.yaml", "MULTI_GPU")]
)
def test_accelerate_files(file, kind):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(EXAMPLES / "accelerate" / file))
    assert config.distributed_type == kind and config.mixed_precision == "bf16"
    flags = vars(launch_command_parser().parse_args(["script.py"]))
    assert set(config.fsdp_config) | set(config.deepspeed_config) <= set(flags)  # every key is an option of accelerate
    if kind == "FSDP":
        assert config.fsdp_config["fsdp_version"] == 2
        assert [config.fsdp_config["fsdp_transformer_layer_cls_to_wrap"]] == ToSTForCausalLM._no_split_modules
