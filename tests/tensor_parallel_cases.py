"""What each process of test_tensor_parallel.py computes: a saved model as a whole, and the same one tensor-parallel."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import randomize, small_config
from context_cases import LENGTH, OPTIONS, TEXTS, a_batch, error_of, relative_error
from transformers.distributed import DistributedConfig

import tost_hf


VOCABULARY = 100  # the lowest transformers shards only what the number of processes divides
HYBRID = ["tost_causal_statistics", "full_attention"]
MODELS = OPTIONS | {
    "hybrid": {"layer_types": HYBRID, "num_key_value_heads": 4, "max_position_embeddings": None},
    "uneven vocabulary": {"vocab_size": 98, "max_position_embeddings": 64},
    "uneven MLP": {"intermediate_size": 51},
    "unnormalised scores": {"normalize_scores": False},
    "one head": {"num_attention_heads": 1},
    "two groups of keys": {"layer_types": HYBRID, "num_key_value_heads": 1},
}
INDIVISIBLE = ["one head", "two groups of keys"]


def folder_of(name: str) -> Path:
    return Path(os.environ["TOST_TEST_MODELS"], name.replace(" ", "_"))


def save_models() -> None:
    """Writes the models that the processes load."""
    for name, options in MODELS.items():
        config = small_config(**({"vocab_size": VOCABULARY} | options))
        randomize(tost_hf.ToSTForCausalLM(config)).save_pretrained(folder_of(name))
    encoder = tost_hf.ToSTForMaskedLM(small_config(vocab_size=VOCABULARY, is_causal=False, mask_token_id=3))
    randomize(encoder).save_pretrained(folder_of("encoder"))


def load(name: str, tp: bool, dtype=torch.float64, kind=tost_hf.ToSTForCausalLM):
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    how = {"distributed_config": DistributedConfig(tp_plan="auto")} if tp else {}
    return kind.from_pretrained(folder_of(name), dtype=dtype, **how)


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def equality(name: str, texts: str, dtype=torch.float64, kind=tost_hf.ToSTForCausalLM):
    batch = a_batch(texts)
    alone, parallel = (load(name, tp, dtype, kind) for tp in (False, True))
    expected, found = alone(**batch), parallel(**batch)
    expected.loss.backward()
    found.loss.backward()
    real = batch.get("attention_mask", torch.ones(3, LENGTH)).bool()
    grads = {name: whole(param.grad) for name, param in parallel.named_parameters()}
    return {
        "loss": relative_error(found.loss.detach(), expected.loss.detach()),
        "outputs": relative_error(found.logits.detach()[real], expected.logits.detach()[real]),
        "gradients": max(relative_error(grads[name], param.grad) for name, param in alone.named_parameters()),
        "heads": 4 // parallel.model.layers[0].self_attn.temp.to_local().shape[0],
    }


def generated(name: str):
    """Tokens of greedy and beam search, and logits after several cached tokens, with and without tensor parallelism."""
    prompt = torch.randint(0, 97, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    answers = []
    for tp in (False, True):
        model = load(name, tp).eval()
        kwargs = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
        cache = tost_hf.ToSTCache(model.config)
        with torch.no_grad():
            model(prompt, past_key_values=cache, attention_mask=mask)
            more = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1)
            logits = model(prompt[:, :3], past_key_values=cache, attention_mask=more).logits
        greedy, beams = model.generate(prompt, **kwargs), model.generate(prompt, num_beams=3, **kwargs)
        answers.append((greedy, beams, logits))
    (greedy, beams, logits), (tp_greedy, tp_beams, tp_logits) = answers
    return {
        "greedy": torch.equal(greedy, tp_greedy),
        "beams": torch.equal(beams, tp_beams),
        "logits": relative_error(tp_logits, logits),
    }


def saved(name: str):
    """A tensor-parallel model, saved and loaded whole again."""
    model = load(name, True, torch.float32)
    target = folder_of(f"{name} saved over {dist.get_world_size()}")
    model.save_pretrained(target)
    dist.barrier()
    again, expected = (tost_hf.ToSTForCausalLM.from_pretrained(path) for path in (target, folder_of(name)))
    same = all(torch.equal(x, y) for x, y in zip(again.parameters(), expected.parameters()))
    return {"same": same, "config": (target / "config.json").read_text() == (folder_of(name) / "config.json").read_text()}


def error_of_loading(name: str):
    return error_of(lambda: load(name, True))


def run(name: str):
    kind, model, *texts = name.split(", ")
    if kind == "generated":
        return generated(model)
    if kind == "saved":
        return saved(model)
    if kind == "error":
        return error_of_loading(model)
    dtype = torch.float32 if kind == "float32" else torch.float64
    return equality(model, texts[0], dtype, tost_hf.ToSTForMaskedLM if model == "encoder" else tost_hf.ToSTForCausalLM)


EQUAL = [
    *(f"equal, {model}, packed and padded" for model in [*OPTIONS, "encoder", "hybrid", "uneven vocabulary", "uneven MLP"]),
    *(f"equal, all, {texts}" for texts in TEXTS if texts != "packed and padded"),
    "float32, all, padded",
]
NAMES = [*EQUAL, "generated, published", "generated, all", "generated, hybrid", "saved, all"]
