"""What each process of test_parallel_context.py computes: a model on whole texts, and the same one context-parallel."""

import copy

import torch
import torch.distributed as dist
from conftest import randomize, small_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import tost_hf
from tost_hf.parallel import local_tokens, parallelize


LENGTH = 21  # shards of 6, 5, 5 and 5 tokens
OPTIONS = {
    "published": {},
    "decay per head": {"forgetting": "head"},
    "decay per token": {"forgetting": "token", "max_position_embeddings": None},
    "convolution": {"conv_kernel": 4},
    "wide convolution": {"conv_kernel": 12},
    "all": {"forgetting": "token", "conv_kernel": 4, "use_bias": True, "tie_word_embeddings": False},
}


def a_mask():
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[0, :9] = mask[1, 13:] = mask[2, 4:9] = mask[2, 11] = 0  # whole shards are padding
    return mask


def sequences(*starts_of_texts):
    starts = torch.zeros(3, LENGTH, dtype=torch.long)
    for index, tokens in enumerate(starts_of_texts):
        starts[index, list(tokens)] = 1
    return starts.cumsum(1)


TEXTS = {
    "plain": lambda: {},
    "padded": lambda: {"attention_mask": a_mask()},
    "packed": lambda: {"seq_idx": sequences([1, 2, 3, 11], [6, 12, 18], [])},  # at the start of a shard, too
    "packed and padded": lambda: {"seq_idx": sequences([7, 16], [5], [6, 11]), "attention_mask": a_mask()},
    "restarting positions": lambda: {"position_ids": torch.cat([torch.arange(8), torch.arange(13)]).repeat(3, 1)},
}


def a_model(dtype=torch.float64, **options):
    return randomize(tost_hf.ToSTForCausalLM(small_config(**options))).to(dtype)


def a_batch(texts: str, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    batch = TEXTS[texts]() | {"input_ids": torch.randint(0, 97, (3, LENGTH), generator=generator)}
    labels = batch["input_ids"].masked_fill(batch.get("attention_mask", torch.ones(1)) == 0, -100)
    return batch | {"labels": labels}


def gradients(model):
    return {name: param.grad.clone() for name, param in model.named_parameters()}


def averaged_gradients(model):
    """Gradients, averaged over all processes."""
    grads = gradients(model)
    for grad in grads.values():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return grads


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest absolute difference, relative to the largest absolute value of `y`; 0 for empty tensors."""
    return (x - y).abs().max().item() / max(y.abs().max().item(), 1e-30) if y.numel() else 0.0


def compare(model, batch, mesh, grads=averaged_gradients, wrap=lambda model: model, whole_batches=None):
    """Errors of outputs, loss and gradients of a context-parallel model."""
    whole_batches = [batch] if whole_batches is None else whole_batches
    alone = copy.deepcopy(model)
    losses = []
    for other in whole_batches:
        loss = alone(**other).loss / len(whole_batches)
        loss.backward()
        losses.append(loss.item())
    with torch.no_grad():
        whole = copy.deepcopy(alone)(**batch)
    parallel = wrap(parallelize(model, mesh))
    out = parallel(**batch)
    out.loss.backward()
    shard = local_tokens(LENGTH, mesh)
    errors = {"loss": relative_error(out.loss.detach(), whole.loss)}
    if out.logits is not None:
        real = batch.get("attention_mask", torch.ones(3, LENGTH)).bool()[:, shard]
        errors["outputs"] = relative_error(out.logits.detach()[real], whole.logits[:, shard][real])
    found = grads(parallel)
    expected = gradients(alone)
    errors["gradients"] = max(
        relative_error(found[name.removeprefix("module.")], grad) if name in found else 1.0 for name, grad in expected.items()
    )
    return errors


def cp_mesh(cp: int):
    """A mesh of replicas, each of `cp` processes."""
    return init_device_mesh("cpu", (dist.get_world_size() // cp, cp), mesh_dim_names=("dp", "cp"))["cp"]


def equality(cp: int, options: str, texts: str, dtype=torch.float64):
    return compare(a_model(dtype, **OPTIONS[options]), a_batch(texts), cp_mesh(cp))


def gradients_of_ddp(model):
    return {name.removeprefix("module."): grad for name, grad in gradients(model).items()}


def gradients_of_shards(model):
    return {name: param.grad.full_tensor() for name, param in model.named_parameters()}


def apply_fsdp(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def replicas(wrap, grads):
    """dp 2 x cp 2: every replica reads another batch."""
    own = dist.get_rank() // 2
    batches = [a_batch("plain", seed) for seed in range(2)]
    return compare(a_model(**OPTIONS["all"]), batches[own], cp_mesh(2), grads, wrap, batches)


def checkpointed():
    model = a_model(**OPTIONS["all"])
    model.gradient_checkpointing_enable()
    return compare(model.train(), a_batch("packed and padded"), cp_mesh(4))


def fused():
    model = a_model(torch.float32).train()
    model.fuse_linear_cross_entropy = True
    return compare(model, a_batch("padded"), cp_mesh(4))


def embedded():
    """Embedded tokens in place of ids, a given number of items, tuples returned, positional arguments."""
    model, batch = a_model(**OPTIONS["all"]), a_batch("packed")
    ids, labels = batch.pop("input_ids"), batch["labels"]
    items = torch.tensor(50)
    alone = copy.deepcopy(model)(ids, num_items_in_batch=items, **batch).loss
    parallelize(model, cp_mesh(4))
    embeds = model.get_input_embeddings()(ids)
    given = {"seq_idx": batch["seq_idx"], "num_items_in_batch": items}
    loss, *_ = model(inputs_embeds=embeds, labels=labels, return_dict=False, **given)
    same = model(ids, None, None, None, None, labels, **given).loss
    return {"loss": max(relative_error(loss, alone), relative_error(same, alone))}


class CountBytes(TorchDispatchMode):
    """Records the bytes and collectives of a process."""

    def __init__(self):
        super().__init__()
        self.calls, self.sent = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__ and "wrap" not in func.__name__:
            self.calls += 1
            self.sent += args[0].nbytes
        return func(*args, **(kwargs or {}))


def communication():
    """Numbers of collectives and bytes, forward and backward, for texts of two lengths."""
    answer = {}
    for options in ("published", "decay per token", "convolution"):
        model = parallelize(a_model(torch.float32, **OPTIONS[options] | {"max_position_embeddings": None}), cp_mesh(4)).model
        counts = []
        for length in (64, 1024):
            with CountBytes() as forward:
                hidden = model(torch.zeros(1, length, dtype=torch.long)).last_hidden_state
            with CountBytes() as backward:
                hidden.sum().backward()
            counts.append((forward.calls, forward.sent, backward.calls, backward.sent))
        answer[options] = counts
    return answer


def comparisons():
    """The forward passes that compare the batches of the processes, of 205 in training."""
    model, tokens = parallelize(a_model(), cp_mesh(4)), torch.zeros(1, 4, dtype=torch.long)
    all_gather, compared = dist.all_gather, []
    try:
        for number in range(205):
            dist.all_gather = lambda *args, number=number, **kwargs: (compared.append(number), all_gather(*args, **kwargs))
            with torch.no_grad():
                model(tokens)
    finally:
        dist.all_gather = all_gather
    return compared


def with_torchs_own():
    batch = a_batch("plain")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        with context_parallel(mesh, buffers=[ids := torch.zeros(1, 64, dtype=torch.long)], buffer_seq_dims=[1]):
            a_model()(ids)
    finally:
        assert a_model()(**batch).loss.isfinite()  # and not after it


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def errors_of_misuse():
    """Error messages: found, and how each should begin."""
    mesh, ids = cp_mesh(4), torch.zeros(1, 9, dtype=torch.long)
    model, unused = parallelize(a_model(), mesh), parallelize(a_model(), mesh)
    kinds = ["tost_causal_statistics", "full_attention"]
    encoder = tost_hf.ToSTModel(small_config(is_causal=False))
    classifier = tost_hf.ToSTForSequenceClassification(small_config())
    different = "ValueError: The processes that share a text were given different batches"
    cases = [
        (lambda: parallelize(a_model(layer_types=kinds), mesh), "ValueError: parallelize does not support layers of full"),
        (lambda: parallelize(encoder, mesh), "ValueError: parallelize does not support encoders"),
        (lambda: parallelize(classifier, mesh), "TypeError: parallelize takes"),
        (lambda: parallelize(model, mesh), "ValueError: The model is context-parallel"),
        (lambda: parallelize(a_model(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))), "ValueError: "),
        (lambda: model(ids[:, :3]), "ValueError: A text of 3 tokens cannot be sharded"),
        (lambda: model(ids, past_key_values=tost_hf.ToSTCache(model.config)), "ValueError: A context-parallel model has no"),
        (lambda: model.generate(ids, max_new_tokens=2), "ValueError: A context-parallel model has no cache"),
        (lambda: model(ids, logits_to_keep=1), "ValueError: A context-parallel model computes the logits of all tokens"),
        (lambda: model(torch.zeros(1, 129, dtype=torch.long)), "IndexError: Position 128 is past the end"),
        (lambda: model(ids, labels=ids[:, :5]), "ValueError: labels must have the shape of the tokens"),
        (lambda: parallelize(a_model(), None), "TypeError: parallelize takes a torch DeviceMesh"),
        (lambda: unused(ids.index_fill(1, torch.tensor(5), dist.get_rank() // 3)), f"{different}: input_ids differ"),
        (lambda: unused(ids[:, : 9 - dist.get_rank() % 2]), f"{different}: input_ids differ"),
        (lambda: unused(ids, attention_mask=ids if dist.get_rank() else None), f"{different}: attention_mask differ"),
        (lambda: model.eval()(ids + dist.get_rank()), f"{different}: input_ids differ"),  # the first in evaluation
        (with_torchs_own, "ValueError: torch's context_parallel shards texts for softmax attention"),
    ]
    return [(error_of(call), message) for call, message in cases]


CASES = {
    f"{kind}, {options}, {texts}": (equality, cp, options, texts, dtype)
    for kind, cp, dtype in (("cp 4", 4, torch.float64), ("cp 2", 2, torch.float64), ("cp 4 float32", 4, torch.float32))
    for options in OPTIONS
    for texts in TEXTS
    if (texts == "packed and padded" and (kind == "cp 4" or options == "all")) or (kind == "cp 4" and options == "all")
} | {
    "dp 2 x cp 2, DistributedDataParallel": (replicas, DistributedDataParallel, gradients_of_ddp),
    "dp 2 x cp 2, fully_shard": (replicas, apply_fsdp, gradients_of_shards),
    "cp 4, gradient checkpointing": (checkpointed,),
    "cp 4 float32, fused loss": (fused,),
    "cp 4, embedded tokens": (embedded,),
}


def run(name: str):
    others = {
        "communication": (communication,),
        "errors": (errors_of_misuse,),
        "comparisons": (comparisons,),
    }
    function, *arguments = (CASES | others)[name]
    return function(*arguments)
