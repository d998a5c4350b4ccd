"""Conversion of the authors' checkpoints: language models, and errors of both kinds."""

import os
import shutil

import pytest
import torch
from authors_checkpoints import (
    FIXTURES,
    add_prefix,
    assert_same_bits,
    read_checkpoint,
    relative_error,
    remove,
    replace,
    to_dtype,
    write_changed,
)
from conftest import small_config, small_vision_config
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tost_hf import ToSTConfig, ToSTForCausalLM, ToSTForImageClassification
from tost_hf.convert import convert_from_original, convert_to_original


BIAS, P8 = FIXTURES / "lm_bias.pt", FIXTURES / "vision_p8_tokensnorm_off.pth"
CHECKPOINT_NAMES = ["lm_nobias", "lm_bias"]
TOLERANCES = [(torch.float64, 1e-10), (torch.float32, 1e-4)]


def load_golden(name):
    return load_file(FIXTURES / f"{name}.golden.safetensors")


def strip_prefix(state):
    return {name.removeprefix("_orig_mod."): tensor for name, tensor in state.items()}


@pytest.fixture(scope="module", params=CHECKPOINT_NAMES)
def converted_folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / request.param
    assert convert_from_original(FIXTURES / f"{request.param}.pt", folder) == folder
    return request.param, folder


# Equality with the authors' code --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", TOLERANCES)
def test_logits_loss_and_memberships(converted_folder, dtype, tolerance):
    name, folder = converted_folder
    expected = load_golden(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        output = model(
            expected["input_ids"],
            labels=expected["targets"],
            shift_labels=expected["targets"],  # the authors' targets are shifted already
            output_memberships=True,
        )
    assert relative_error(output.logits, expected["logits"]) < tolerance
    assert relative_error(torch.stack(output.memberships), expected["membership"]) < tolerance
    # transformers computes every loss in float32
    assert relative_error(output.loss, expected["loss"]) < max(tolerance, 1e-6)
    loss = torch.nn.functional.cross_entropy(output.logits.double().flatten(0, 1), expected["targets"].flatten())
    assert relative_error(loss, expected["loss"]) < tolerance


# Round trips ----------------------------------------------------------------------------------------------------------


def test_round_trip(converted_folder, tmp_path):
    name, folder = converted_folder
    assert {file.name for file in folder.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")  # tied: stored once
    assert ToSTConfig.from_pretrained(folder).eos_token_id is None  # GPT-2's end-of-text is not in these vocabularies
    original = read_checkpoint(FIXTURES / f"{name}.pt")
    assert convert_to_original(folder, tmp_path / "ckpt.pt") == tmp_path / "ckpt.pt"
    contents = read_checkpoint(tmp_path / "ckpt.pt")
    assert_same_bits(contents["model"], strip_prefix(original["model"]))
    assert contents["model_args"] == original["model_args"]
    assert contents["iter_num"] == 0 and isinstance(contents["best_val_loss"], torch.Tensor) and contents["config"] == {}
    assert os.listdir(tmp_path) == ["ckpt.pt"]
    # wte and lm_head are one tensor, as in the authors' files
    assert contents["model"]["lm_head.weight"].data_ptr() == contents["model"]["transformer.wte.weight"].data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_is_preserved(tmp_path, dtype):
    source = write_changed(tmp_path / "ckpt.pt", to_dtype(dtype), BIAS)
    folder = convert_from_original(source, tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == dtype
    convert_to_original(folder, tmp_path / "back.pt")
    assert_same_bits(read_checkpoint(tmp_path / "back.pt")["model"], read_checkpoint(source)["model"])


def test_sharded_folder_converts(tiny_model, tmp_path):
    tiny_model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    checkpoint = convert_to_original(tmp_path / "model", tmp_path / "ckpt.pt")
    reloaded = AutoModelForCausalLM.from_pretrained(convert_from_original(checkpoint, tmp_path / "again"))
    assert_same_bits(reloaded.state_dict(), tiny_model.state_dict())


@pytest.mark.parametrize("prefix", ["", "module._orig_mod."])
def test_prefixes_are_stripped(tmp_path, prefix):
    source = write_changed(tmp_path / "ckpt.pt", lambda contents: {"model": add_prefix(contents, prefix)}, BIAS)
    convert_to_original(convert_from_original(source, tmp_path / "model"), tmp_path / "back.pt")
    assert_same_bits(read_checkpoint(tmp_path / "back.pt")["model"], read_checkpoint(BIAS)["model"])


def test_sizes_are_inferred_from_the_tensors(tmp_path):
    source = write_changed(tmp_path / "ckpt.pt", lambda contents: {"model": contents["model"]}, BIAS)
    config = ToSTConfig.from_pretrained(convert_from_original(source, tmp_path / "model"))
    sizes = (config.n_layer, config.n_head, config.n_embd, config.n_positions, config.vocab_size, config.use_bias)
    assert sizes == (2, 2, 32, 32, 96, True)


def test_dropout_and_end_of_text(tmp_path):
    config = ToSTConfig(vocab_size=50304, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=4)
    config.hidden_dropout = config.attention_dropout = config.embedding_dropout = 0.1
    ToSTForCausalLM(config).save_pretrained(tmp_path / "model")
    checkpoint = convert_to_original(tmp_path / "model", tmp_path / "ckpt.pt")
    assert read_checkpoint(checkpoint)["model_args"]["dropout"] == 0.1
    reloaded_config = ToSTConfig.from_pretrained(convert_from_original(checkpoint, tmp_path / "again"))
    assert reloaded_config.to_dict() == ToSTConfig.from_pretrained(tmp_path / "model").to_dict()


def test_untied_checkpoint_becomes_an_untied_model(tmp_path, caplog):
    embeddings = read_checkpoint(BIAS)["model"]["transformer.wte.weight"]

    def untie(contents):
        contents["model"]["lm_head.weight"] = 2 * embeddings

    source = write_changed(tmp_path / "ckpt.pt", untie, BIAS)
    model = AutoModelForCausalLM.from_pretrained(convert_from_original(source, tmp_path / "model"))
    assert "lm_head differs from wte" in caplog.text
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.lm_head.weight, 2 * embeddings)
    assert torch.equal(model.model.embed_tokens.weight, embeddings)


# Errors ---------------------------------------------------------------------------------------------------------------


def update(settings, **values):
    """Changes `model_args`, a dict, or `args`, a Namespace."""
    return lambda contents: getattr(contents[settings], "__dict__", contents[settings]).update(values)


H0 = "transformer.h.0."
INVALID = {
    "GPT-2 attention": (BIAS, remove(H0 + "attn.temp"), r"lacks transformer\.h\.0\.attn\.temp"),
    "missing key": (BIAS, remove("transformer.h.1.mlp.c_fc.bias"), r"lacks transformer\.h\.1\.mlp\.c_fc\.bias"),
    "missing embedding": (BIAS, remove("transformer.wte.weight"), r"lacks transformer\.wte\.weight"),
    "unknown leaf": (BIAS, replace(H0 + "ln_1.other", torch.zeros(2)), r"has .*ln_1\.other"),
    "other layer count": (BIAS, update("model_args", n_layer=3), "n_layer"),
    "tensor of another size": (BIAS, replace("transformer.h.1.gamma2", torch.zeros(31)), "gamma2"),
    "integers": (BIAS, replace(H0 + "gamma1", torch.zeros(32, dtype=torch.long)), "int64"),
    "NaN": (BIAS, replace(H0 + "gamma1", torch.full((32,), torch.nan)), "NaN"),
    "impossible dropout": (BIAS, update("model_args", dropout=2.0), "dropout"),
    "bare state dict": (BIAS, lambda contents: contents["model"], "authors"),
    "a list": (BIAS, lambda contents: [1, 2], "authors"),
    "XCiT": (P8, replace("blocks.0.local_mp.conv1.weight", torch.zeros(48, 1, 3, 3)), "has blocks.0.local_mp.conv1"),
    "a plain ViT": (P8, lambda contents: {"model": {"cls_token": torch.zeros(1, 1, 8)}}, "lacks blocks.0.attn.qkv.weight"),
    "positions as a Linear": (P8, replace("pos_embeder.token_projection.weight", torch.zeros(48, 64)), r"shape \(48, 64\) "),
    "heads that differ between layers": (P8, replace("blocks.1.attn.temp", torch.zeros(4, 1)), r"shape \(4, 1\)"),
    "counts that are not integers": (P8, replace("patch_embed.proj.0.1.num_batches_tracked", torch.tensor(1.0)), "int64"),
    "image size of another type": (P8, update("args", input_size="large"), "image_size"),
}


@pytest.mark.parametrize("original, change, message", INVALID.values(), ids=INVALID)
def test_invalid_checkpoints(tmp_path, caplog, original, change, message):
    source = write_changed(tmp_path / "ckpt.pt", change, original)
    with pytest.raises(ValueError, match=message) as exc_info:
        convert_from_original(source, tmp_path / "model")
    assert str(source) in str(exc_info.value)
    assert "\n" not in str(exc_info.value) or isinstance(exc_info.value.__cause__, StrictDataclassError)
    assert os.listdir(tmp_path) == ["ckpt.pt"]  # nothing half-written
    assert "lm_head differs" not in caplog.text


class RunsCode:
    """Creates a folder when it is unpickled without restrictions."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickle_with_code(tmp_path):
    torch.save(read_checkpoint(BIAS) | {"config": RunsCode(str(tmp_path / "ran"))}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="code"):
        convert_from_original(tmp_path / "evil.pt", tmp_path / "model")
    assert os.listdir(tmp_path) == ["evil.pt"]


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pt"):
        convert_from_original(tmp_path / "nowhere.pt", tmp_path / "model")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        convert_to_original(tmp_path / "nowhere", tmp_path / "ckpt.pt")
    with pytest.raises(FileNotFoundError, match=r"no config.json"):
        convert_to_original(tmp_path, tmp_path / "ckpt.pt")


UNSUPPORTED = {
    "position-free": (small_config, {"position_embedding_type": "none"}),
    "untied": (small_config, {"tie_word_embeddings": False}),
    "activation": (small_config, {"hidden_act": "relu"}),
    "epsilon": (small_config, {"layer_norm_eps": 1e-6}),
    "MLP width": (small_config, {"intermediate_size": 48}),
    "several dropouts": (small_config, {"embedding_dropout": 0.5}),
    "an option": (small_config, {"decay_type": "head"}),
    "epsilon of images": (small_vision_config, {"layer_norm_eps": 1e-5}),
    "attention dropout of images": (small_vision_config, {"attention_dropout": 0.1}),
}


@pytest.mark.parametrize("make_config, fields", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_models(tmp_path, make_config, fields):
    model_class = ToSTForCausalLM if make_config is small_config else ToSTForImageClassification
    model_class(make_config(**fields)).save_pretrained(tmp_path / "model")
    [(name, value)] = fields.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        convert_to_original(tmp_path / "model", tmp_path / "ckpt.pt")
    assert os.listdir(tmp_path) == ["model"]


def test_existing_outputs_require_overwrite(converted_folder, tmp_path):
    name, folder = converted_folder
    checkpoint, target = FIXTURES / f"{name}.pt", tmp_path / "model"
    target.mkdir()
    convert_from_original(checkpoint, target)  # an empty folder is accepted
    (target / "tokenizer.json").write_text("{}")
    (target / "model-00001-of-00002.safetensors").write_text("old")
    (target / "model.safetensors").write_text("old")
    with pytest.raises(FileExistsError, match="not empty"):
        convert_from_original(checkpoint, target)
    assert (target / "model.safetensors").read_text() == "old"
    convert_from_original(checkpoint, target, overwrite=True)
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {file.name for file in target.iterdir()} == files
    AutoModelForCausalLM.from_pretrained(target)

    file = tmp_path / "ckpt.pt"
    file.write_text("old")
    with pytest.raises(FileExistsError, match=r"ckpt.pt exists"):
        convert_to_original(folder, file)
    assert file.read_text() == "old"
    convert_to_original(folder, file, overwrite=True)
    assert read_checkpoint(file)["model_args"]["TSSA"]
    with pytest.raises(FileExistsError, match="is a file"):
        convert_from_original(checkpoint, file)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        convert_to_original(folder, target)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_that_are_read_are_not_overwritten(converted_folder, tmp_path, name):
    folder = shutil.copytree(converted_folder[1], tmp_path / "model")
    content, link = (folder / name).read_bytes(), tmp_path / "link"
    link.symlink_to(folder)
    for target in (folder / name, link / name):
        with pytest.raises(ValueError, match="is read"):
            convert_to_original(folder, target, overwrite=True)
    assert (folder / name).read_bytes() == content
    convert_to_original(folder, folder / "ckpt.pt")
