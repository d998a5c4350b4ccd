"""Test cases of test_parallel_context.py, run in each process: a context-parallel model against the model in one process."""

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
HYBRID = ["linear_attention", "full_attention"]
OPTIONS = {
    "published": {},
    "decay per head": {"decay_type": "head"},
    "decay per token": {"decay_type": "token", "position_embedding_type": "none"},
    "convolution": {"conv_kernel": 4},
    "wide convolution": {"conv_kernel": 12},
    "hybrid": {"layer_types": HYBRID, "decay_type": "token", "position_embedding_type": "none", "num_key_value_heads": 2},
    "sliding window": {"layer_types": ["linear_attention", "sliding_attention"], "sliding_window": 8},
    "all": {"decay_type": "token", "conv_kernel": 4, "use_bias": True, "tie_word_embeddings": False},
}
EVERY_LAYOUT = ("all", "hybrid", "sliding window")


def make_mask():
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[0, :9] = mask[1, 13:] = mask[2, 4:9] = mask[2, 11] = 0  # some shards are all padding
    return mask


def make_seq_idx(*sequence_starts):
    starts = torch.zeros(3, LENGTH, dtype=torch.long)
    for index, positions in enumerate(sequence_starts):
        starts[index, list(positions)] = 1
    return starts.cumsum(1)


LAYOUTS = {
    "plain": lambda: {},
    "padded": lambda: {"attention_mask": make_mask()},
    "packed": lambda: {"seq_idx": make_seq_idx([1, 2, 3, 11], [6, 12, 18], [])},  # 6 and 11 are also the start of a shard
    "packed and padded": lambda: {"seq_idx": make_seq_idx([7, 16], [5], [6, 11]), "attention_mask": make_mask()},
    "restarting positions": lambda: {"position_ids": torch.cat([torch.arange(8), torch.arange(13)]).repeat(3, 1)},
}


def make_model(dtype=torch.float64, **options):
    return randomize(tost_hf.ToSTForCausalLM(small_config(**options))).to(dtype)


def make_batch(layout: str, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    batch = LAYOUTS[layout]() | {"input_ids": torch.randint(0, 97, (3, LENGTH), generator=generator)}
    labels = batch["input_ids"].masked_fill(batch.get("attention_mask", torch.ones(1)) == 0, -100)
    return batch | {"labels": labels}


def gradients(model):
    return {name: param.grad.clone() for name, param in model.named_parameters()}


def average_gradients(model):
    """The gradients averaged over all processes."""
    grads = gradients(model)
    for grad in grads.values():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return grads


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    """The maximum absolute difference divided by the maximum absolute value of `y`; 0 for empty tensors."""
    return (x - y).abs().max().item() / max(y.abs().max().item(), 1e-30) if y.numel() else 0.0


def compare(model, batch, mesh, get_gradients=average_gradients, wrap=lambda model: model, all_batches=None):
    """Relative errors of loss, outputs and gradients of a context-parallel model."""
    all_batches = [batch] if all_batches is None else all_batches
    reference = copy.deepcopy(model)
    losses = []
    for other in all_batches:
        loss = reference(**other).loss / len(all_batches)
        loss.backward()
        losses.append(loss.item())
    with torch.no_grad():
        expected = copy.deepcopy(reference)(**batch)
    parallel = wrap(parallelize(model, mesh))
    out = parallel(**batch)
    out.loss.backward()
    shard = local_tokens(LENGTH, mesh)
    errors = {"loss": relative_error(out.loss.detach(), expected.loss)}
    if out.logits is not None:
        is_token = batch.get("attention_mask", torch.ones(3, LENGTH)).bool()[:, shard]
        errors["outputs"] = relative_error(out.logits.detach()[is_token], expected.logits[:, shard][is_token])
    actual_grads = get_gradients(parallel)
    expected_grads = gradients(reference)
    errors["gradients"] = max(
        relative_error(actual_grads[name.removeprefix("module.")], grad) if name in actual_grads else 1.0
        for name, grad in expected_grads.items()
    )
    return errors


def cp_mesh(cp: int):
    """The context-parallel dimension of a mesh with `cp` processes per replica."""
    return init_device_mesh("cpu", (dist.get_world_size() // cp, cp), mesh_dim_names=("dp", "cp"))["cp"]


def compare_context_parallel(cp: int, options: str, layout: str, dtype=torch.float64):
    return compare(make_model(dtype, **OPTIONS[options]), make_batch(layout), cp_mesh(cp))


def ddp_gradients(model):
    return {name.removeprefix("module."): grad for name, grad in gradients(model).items()}


def fsdp_gradients(model):
    return {name: param.grad.full_tensor() for name, param in model.named_parameters()}


def apply_fsdp(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def compare_replicas(wrap, get_gradients):
    """dp 2 x cp 2: every replica has its own batch."""
    replica = dist.get_rank() // 2
    batches = [make_batch("plain", seed) for seed in range(2)]
    return compare(make_model(**OPTIONS["all"]), batches[replica], cp_mesh(2), get_gradients, wrap, batches)


def compare_checkpointing(options: str):
    model = make_model(**OPTIONS[options])
    model.gradient_checkpointing_enable()
    return compare(model.train(), make_batch("packed and padded"), cp_mesh(4))


def compare_fused_loss():
    model = make_model(torch.float32).train()
    model.fuse_linear_cross_entropy = True
    return compare(model, make_batch("padded"), cp_mesh(4))


def compare_inputs_embeds():
    """inputs_embeds in place of input_ids, num_items_in_batch, return_dict=False, positional arguments."""
    model, batch = make_model(**OPTIONS["all"]), make_batch("packed")
    ids, labels = batch.pop("input_ids"), batch["labels"]
    num_items = torch.tensor(50)
    expected = copy.deepcopy(model)(ids, num_items_in_batch=num_items, **batch).loss
    parallelize(model, cp_mesh(4))
    embeds = model.get_input_embeddings()(ids)
    kwargs = {"seq_idx": batch["seq_idx"], "num_items_in_batch": num_items}
    loss, *_ = model(inputs_embeds=embeds, labels=labels, return_dict=False, **kwargs)
    positional_loss = model(ids, None, None, None, None, labels, **kwargs).loss
    return {"loss": max(relative_error(loss, expected), relative_error(positional_loss, expected))}


class CommunicationCounter(TorchDispatchMode):
    """Counts the collectives of a process and the bytes they send."""

    def __init__(self):
        super().__init__()
        self.calls, self.sent = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__ and "wrap" not in func.__name__:
            self.calls += 1
            self.sent += args[0].nbytes
        return func(*args, **(kwargs or {}))


def count_communication():
    """Numbers of collectives and bytes, forward and backward, for sequences of two lengths."""
    counts_by_option = {}
    for options in ("published", "decay per token", "convolution"):
        model = parallelize(
            make_model(torch.float32, **OPTIONS[options] | {"position_embedding_type": "none"}), cp_mesh(4)
        ).model
        counts = []
        for length in (64, 1024):
            with CommunicationCounter() as forward:
                hidden_states = model(torch.zeros(1, length, dtype=torch.long)).last_hidden_state
            with CommunicationCounter() as backward:
                hidden_states.sum().backward()
            counts.append((forward.calls, forward.sent, backward.calls, backward.sent))
        counts_by_option[options] = counts
    return counts_by_option


def find_compared_steps():
    """The steps, of 205 in training, in which the processes compare their batches."""
    model, tokens = parallelize(make_model(), cp_mesh(4)), torch.zeros(1, 4, dtype=torch.long)
    all_gather, compared_steps = dist.all_gather, []
    try:
        for step in range(205):
            dist.all_gather = lambda *args, step=step, **kwargs: (compared_steps.append(step), all_gather(*args, **kwargs))
            with torch.no_grad():
                model(tokens)
    finally:
        dist.all_gather = all_gather
    return compared_steps


def run_torch_context_parallel():
    batch = make_batch("plain")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        with context_parallel(mesh, buffers=[ids := torch.zeros(1, 64, dtype=torch.long)], buffer_seq_dims=[1]):
            make_model()(ids)
    finally:
        assert make_model()(**batch).loss.isfinite()  # works again outside of context_parallel


def get_error(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def get_misuse_errors():
    """Pairs of an error message and the start that is expected of it."""
    mesh, ids = cp_mesh(4), torch.zeros(1, 9, dtype=torch.long)
    model, unused_model = parallelize(make_model(), mesh), parallelize(make_model(), mesh)
    dynamic_rope = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}
    flex_model = make_model(**OPTIONS["hybrid"])
    flex_model.config._attn_implementation = "flex_attention"
    encoder = tost_hf.ToSTModel(small_config(is_causal=False))
    classifier = tost_hf.ToSTForSequenceClassification(small_config())
    different_batches = "ValueError: The processes that share a sequence received different batches"
    cases = [
        (
            lambda: parallelize(make_model(**OPTIONS["hybrid"], rope_parameters=dynamic_rope), mesh),
            "ValueError: parallelize does not support rope_type 'dynamic'",
        ),
        (lambda: parallelize(flex_model, mesh), "ValueError: parallelize does not support attn_implementation="),
        (lambda: parallelize(encoder, mesh), "ValueError: parallelize does not support encoders"),
        (lambda: parallelize(classifier, mesh), "TypeError: parallelize expects"),
        (lambda: parallelize(model, mesh), "ValueError: The model is context-parallel"),
        (lambda: parallelize(make_model(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))), "ValueError: "),
        (lambda: model(ids[:, :3]), "ValueError: A sequence of 3 tokens cannot be sharded"),
        (lambda: model(ids, past_key_values=tost_hf.ToSTCache(model.config)), "ValueError: A context-parallel model has no"),
        (lambda: model.generate(ids, max_new_tokens=2), "ValueError: A context-parallel model has no cache"),
        (lambda: model(ids, logits_to_keep=1), "ValueError: A context-parallel model computes the logits of all tokens"),
        (lambda: model(torch.zeros(1, 129, dtype=torch.long)), "IndexError: Position 128 is past the end"),
        (lambda: model(ids, labels=ids[:, :5]), "ValueError: labels must have the shape of the tokens"),
        (lambda: parallelize(make_model(), None), "TypeError: parallelize expects a torch DeviceMesh"),
        (
            lambda: unused_model(ids.index_fill(1, torch.tensor(5), dist.get_rank() // 3)),
            f"{different_batches}: input_ids differ",
        ),
        (lambda: unused_model(ids[:, : 9 - dist.get_rank() % 2]), f"{different_batches}: input_ids differ"),
        (
            lambda: unused_model(ids, attention_mask=ids if dist.get_rank() else None),
            f"{different_batches}: attention_mask differ",
        ),
        (lambda: model.eval()(ids + dist.get_rank()), f"{different_batches}: input_ids differ"),  # the first evaluation step
        (run_torch_context_parallel, "ValueError: torch's context_parallel shards sequences for softmax attention"),
    ]
    return [(get_error(call), message) for call, message in cases]


CASES = {
    f"{kind}, {options}, {layout}": (compare_context_parallel, cp, options, layout, dtype)
    for kind, cp, dtype in (("cp 4", 4, torch.float64), ("cp 2", 2, torch.float64), ("cp 4 float32", 4, torch.float32))
    for options in OPTIONS
    for layout in LAYOUTS
    if (layout == "packed and padded" and (kind == "cp 4" or options in EVERY_LAYOUT))
    or (kind == "cp 4" and options in EVERY_LAYOUT)
} | {
    "dp 2 x cp 2, DistributedDataParallel": (compare_replicas, DistributedDataParallel, ddp_gradients),
    "dp 2 x cp 2, fully_shard": (compare_replicas, apply_fsdp, fsdp_gradients),
    "cp 4, gradient checkpointing": (compare_checkpointing, "all"),
    "cp 4, hybrid, gradient checkpointing": (compare_checkpointing, "hybrid"),
    "cp 4 float32, fused loss": (compare_fused_loss,),
    "cp 4, embedded tokens": (compare_inputs_embeds,),
}


def run(name: str):
    others = {
        "communication": (count_communication,),
        "errors": (get_misuse_errors,),
        "comparisons": (find_compared_steps,),
    }
    function, *arguments = (CASES | others)[name]
    return function(*arguments)
