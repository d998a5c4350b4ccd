"""TRL's trainers with the path of a saved model: SFT, DPO, KTO, GRPO, distillation, reward models."""

import math

import pytest
import torch
from datasets import Dataset
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel


trl = pytest.importorskip("trl", reason="TRL is not installed (pip install trl)")

DOCUMENTS = ["the heads", "the heads of the model", "share the tokens of the text", "the text"]
PROMPT = {"prompt": "the heads of"}
COMPLETIONS = [PROMPT | {"completion": text} for text in (" the model", " the text and more")]
PREFERENCES = [PROMPT | {"chosen": " the model", "rejected": " text"}] * 4
LABELLED = [PROMPT | {"completion": " the model", "label": True}, PROMPT | {"completion": " text", "label": False}] * 2


@pytest.fixture
def folder(tmp_path, text_model, tokenizer):
    tokenizer.pad_token = tokenizer.eos_token
    text_model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def train(trainer_class, folder, examples, steps=1, options=None, **settings):
    """Trains some steps on batches of all examples; returns the trainer and the loss of each step."""
    config_class = getattr(trl, trainer_class.__name__.replace("Trainer", "Config"))
    settings = {"max_steps": steps, "per_device_train_batch_size": len(examples), "learning_rate": 0.01} | settings
    settings |= {"lr_scheduler_type": "constant", "use_cpu": True, "bf16": False, "report_to": "none"}
    settings |= {"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False}
    args = config_class(output_dir=str(folder / "run"), **settings)
    trainer = trainer_class(str(folder), args=args, train_dataset=Dataset.from_list(examples), **options or {})
    trainer.train()
    return trainer, [step["loss"] for step in trainer.state.log_history if "loss" in step]


def mean_loss(model, sequences: list[list[int]], targets: list[int] | None = None) -> float:
    """Of the last `targets` tokens of each sequence (default: all but the first), one sequence at a time."""
    losses = []
    with torch.no_grad():
        for ids, count in zip(sequences, targets or [len(ids) - 1 for ids in sequences]):
            logits = model(torch.tensor([ids])).logits[0]
            losses.append(F.cross_entropy(logits[-count - 1 : -1], torch.tensor(ids[-count:]), reduction="none"))
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize(
    "packing", [{}, {"packing": True, "packing_strategy": "bfd"}, {"padding_free": True, "max_length": None}], ids=str
)
def test_sft_loss_equals_that_of_unpacked_documents(folder, text_model, tokenizer, packing):
    expected = mean_loss(text_model, [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in DOCUMENTS])
    _, losses = train(trl.SFTTrainer, folder, [{"text": text} for text in DOCUMENTS], **{"max_length": 32} | packing)
    assert losses[0] == pytest.approx(expected, rel=1e-4)


def test_sft_loss_of_completions_only(folder, text_model, tokenizer):
    documents = [example["prompt"] + example["completion"] for example in COMPLETIONS]
    sequences = [[*tokenizer(document).input_ids, tokenizer.eos_token_id] for document in documents]
    targets = [len(tokenizer(example["completion"]).input_ids) + 1 for example in COMPLETIONS]
    expected = mean_loss(text_model, sequences, targets)
    _, losses = train(trl.SFTTrainer, folder, COMPLETIONS, steps=4, completion_only_loss=True)
    assert losses[0] == pytest.approx(expected, rel=1e-4) and losses[-1] < losses[0] - 0.5


def test_dpo_of_a_saved_model(folder):
    trainer, losses = train(trl.DPOTrainer, folder, PREFERENCES, steps=4)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4) and losses[-1] < losses[0] / 2
    assert trainer.state.log_history[3]["rewards/accuracies"] == 1


def test_kto(folder):
    trainer, losses = train(trl.KTOTrainer, folder, LABELLED, steps=4)
    assert losses[-1] < losses[0]
    metrics = trainer.state.log_history[3]
    assert metrics["rewards/chosen"] > metrics["rewards/rejected"]


def test_grpo(folder, text_model, tokenizer):
    """Eight steps of GRPO make the rewarded half of the vocabulary more likely."""
    prompt = torch.tensor([tokenizer(PROMPT["prompt"]).input_ids])

    def rewarded_probability(model) -> float:
        return model.eval()(prompt).logits[0, -1].softmax(-1)[:150].sum().item()

    def reward(completions, completion_ids, **kwargs):
        return [sum(token < 150 for token in ids) / len(ids) for ids in completion_ids]

    initial = rewarded_probability(text_model)
    settings = {"num_generations": 8, "max_completion_length": 8, "steps": 8, "beta": 0.0}
    trainer, _ = train(trl.GRPOTrainer, folder, [PROMPT] * 16, options={"reward_funcs": reward}, **settings)
    assert rewarded_probability(trainer.model) > initial + 0.1


def test_distillation(folder, text_model, tokenizer):
    """From a GPT-2 with the same tokenizer: the student's distribution of the next token approaches the teacher's."""
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "initializer_range": 0.5}
    teacher = GPT2LMHeadModel(GPT2Config(vocab_size=text_model.config.vocab_size, **sizes)).eval()
    prompt = torch.tensor([tokenizer(PROMPT["prompt"]).input_ids])

    def divergence(model) -> float:
        log_probs, teacher_log_probs = (m.eval()(prompt).logits[0, -1].log_softmax(-1) for m in (model, teacher))
        return (log_probs.exp() * (log_probs - teacher_log_probs)).sum().item()

    initial = divergence(text_model)
    options = {"teacher_model": teacher}
    trainer, losses = train(trl.DistillationTrainer, folder, [PROMPT] * 8, 8, options, max_completion_length=8)
    assert divergence(trainer.model) < 0.9 * initial and losses[-1] < losses[0]


def test_reward_model(folder):
    """The head is newly initialized, so the loss starts near log 2."""
    _, losses = train(trl.RewardTrainer, folder, PREFERENCES, steps=4)
    assert losses[-1] < losses[0]
