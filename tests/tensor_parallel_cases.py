"""Test cases of test_tensor_parallel.py, run in each process: a tensor-parallel model against the model in one process."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import randomize, small_config
from context_cases import LAYOUTS, LENGTH, OPTIONS, get_error, make_batch, relative_error
from transformers.distributed import DistributedConfig

import tost_hf


VOCABULARY = 100  # the oldest supported transformers shards only multiples of the number of processes
HYBRID = ["tssa", "full_attention"]
MODELS = OPTIONS | {
    "uneven vocabulary": {"vocab_size": 98, "max_position_embeddings": 64},
    "uneven MLP": {"intermediate_size": 51},
    "one head": {"num_attention_heads": 1},
    "two groups of keys": {"layer_types": HYBRID, "num_key_value_heads": 1},
}
INDIVISIBLE = ["one head", "two groups of keys"]


def get_folder(name: str) -> Path:
    return Path(os.environ["TOST_TEST_MODELS"], name.replace(" ", "_"))


def save_models() -> None:
    """Writes the models that the processes load."""
    for name, options in MODELS.items():
        config = small_config(**({"vocab_size": VOCABULARY} | options))
        randomize(tost_hf.ToSTForCausalLM(config)).save_pretrained(get_folder(name))
    encoder = tost_hf.ToSTForMaskedLM(small_config(vocab_size=VOCABULARY, is_causal=False, mask_token_id=3))
    randomize(encoder).save_pretrained(get_folder("encoder"))


def load(name: str, tp: bool, dtype=torch.float64, model_class=tost_hf.ToSTForCausalLM):
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    load_options = {"distributed_config": DistributedConfig(tp_plan="auto")} if tp else {}
    return model_class.from_pretrained(get_folder(name), dtype=dtype, **load_options)


def gather_full_tensor(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def compare_tensor_parallel(name: str, layout: str, dtype=torch.float64, model_class=tost_hf.ToSTForCausalLM):
    batch = make_batch(layout)
    reference, parallel = (load(name, tp, dtype, model_class) for tp in (False, True))
    expected, actual = reference(**batch), parallel(**batch)
    expected.loss.backward()
    actual.loss.backward()
    is_token = batch.get("attention_mask", torch.ones(3, LENGTH)).bool()
    grads = {name: gather_full_tensor(param.grad) for name, param in parallel.named_parameters()}
    return {
        "loss": relative_error(actual.loss.detach(), expected.loss.detach()),
        "outputs": relative_error(actual.logits.detach()[is_token], expected.logits.detach()[is_token]),
        "gradients": max(relative_error(grads[name], param.grad) for name, param in reference.named_parameters()),
        "heads": 4 // parallel.model.layers[0].self_attn.temp.to_local().shape[0],
    }


def compare_generation(name: str):
    """Compares greedy search, beam search and logits after cached tokens, with and without tensor parallelism."""
    prompt = torch.randint(0, 97, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    results = []
    for tp in (False, True):
        model = load(name, tp).eval()
        kwargs = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
        cache = tost_hf.ToSTCache(model.config)
        with torch.no_grad():
            model(prompt, past_key_values=cache, attention_mask=mask)
            longer_mask = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1)
            logits = model(prompt[:, :3], past_key_values=cache, attention_mask=longer_mask).logits
        greedy, beams = model.generate(prompt, **kwargs), model.generate(prompt, num_beams=3, **kwargs)
        results.append((greedy, beams, logits))
    (greedy, beams, logits), (tp_greedy, tp_beams, tp_logits) = results
    return {
        "greedy": torch.equal(greedy, tp_greedy),
        "beams": torch.equal(beams, tp_beams),
        "logits": relative_error(tp_logits, logits),
    }


def compare_saved(name: str):
    """Saves a tensor-parallel model, loads it in one process and compares it with the original."""
    model = load(name, True, torch.float32)
    saved_folder = get_folder(f"{name} saved over {dist.get_world_size()}")
    model.save_pretrained(saved_folder)
    dist.barrier()
    loaded, expected = (tost_hf.ToSTForCausalLM.from_pretrained(path) for path in (saved_folder, get_folder(name)))
    is_equal = all(torch.equal(x, y) for x, y in zip(loaded.parameters(), expected.parameters()))
    return {
        "same": is_equal,
        "config": (saved_folder / "config.json").read_text() == (get_folder(name) / "config.json").read_text(),
    }


def get_loading_error(name: str):
    return get_error(lambda: load(name, True))


def run(name: str):
    kind, model, *layouts = name.split(", ")
    if kind == "generated":
        return compare_generation(model)
    if kind == "saved":
        return compare_saved(model)
    if kind == "error":
        return get_loading_error(model)
    dtype = torch.float32 if kind == "float32" else torch.float64
    return compare_tensor_parallel(
        model, layouts[0], dtype, tost_hf.ToSTForMaskedLM if model == "encoder" else tost_hf.ToSTForCausalLM
    )


EQUAL = [
    *(f"equal, {model}, packed and padded" for model in [*OPTIONS, "encoder", "uneven vocabulary", "uneven MLP"]),
    *(f"equal, all, {layout}" for layout in LAYOUTS if layout != "packed and padded"),
    "float32, all, padded",
]
NAMES = [*EQUAL, "generated, published", "generated, all", "generated, hybrid", "saved, all"]
