"""Distillation of image classifiers: the loss, the teacher's labels and input, the trainer and the script with a teacher."""

import numpy as np
import pytest
import run_image_classification as script
import torch
from image_runs import NAMES, digit_examples, digit_pictures, tiny_teacher, tiny_vision_model, training_args
from PIL import Image as PILImage
from safetensors.torch import load_file
from scripts import losses
from torch.nn import functional as F
from transformers import ViTImageProcessorPil

from tost_hf.image_processing import make_image_processor
from tost_hf.training.distillation import ImageTeacher, distillation_loss
from tost_hf.training.trainer_vision import ToSTVisionTrainer


def make_student(**changes):
    return tiny_vision_model(id2label=dict(enumerate(NAMES)), label2id={name: i for i, name in enumerate(NAMES)}, **changes)


def make_trainer(tmp_path, teacher, model=None, **changes) -> ToSTVisionTrainer:
    args = training_args(tmp_path, **{"distillation_type": "soft"} | changes)
    return ToSTVisionTrainer(model or make_student(), args, train_dataset=digit_examples(), teacher_model=teacher)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.exp() / x.exp().sum(-1, keepdim=True)


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_gradient_of_soft_distillation(tau):
    """That of tau^2 KL(teacher || student): tau (student's distribution - teacher's), of the mean over the batch."""
    logits, teacher_logits = torch.randn(2, 5, 4).unbind()
    logits.requires_grad_()
    loss = distillation_loss(logits, teacher_logits, "soft", tau)
    p, q = softmax(teacher_logits / tau), softmax(logits / tau)
    assert loss.item() == pytest.approx(tau**2 * (p * (p / q).log()).sum(-1).mean().item(), rel=1e-5)
    loss.backward()
    torch.testing.assert_close(logits.grad, tau * (q - p).detach() / 5)


@pytest.mark.parametrize("distillation_type", ["soft", "hard"])
def test_gradients_of_the_trainer(tmp_path, distillation_type):
    """Of all the student's parameters, with soft labels as of Mixup and with label smoothing."""
    options = {"distillation_alpha": 0.3, "distillation_tau": 2.0, "label_smoothing_factor": 0.1}
    teacher = tiny_teacher()
    trainer = make_trainer(tmp_path, teacher, distillation_type=distillation_type, **options)
    model = trainer.model.train()
    images = torch.randn(4, 3, 16, 16)
    soft_labels = F.one_hot(torch.tensor([0, 1, 2, 1]), 3) * 0.7 + F.one_hot(torch.tensor([1, 2, 1, 0]), 3) * 0.3
    trainer.compute_loss(model, {"pixel_values": images, "labels": soft_labels}).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.zero_grad()
    logits, teacher_logits = model(images).logits, teacher(images).logits
    expected = 0.7 * -((0.9 * soft_labels + 0.1 / 3) * softmax(logits).log()).sum(-1).mean()
    if distillation_type == "soft":
        p, q = softmax(teacher_logits / 2), softmax(logits / 2)
        expected += 0.3 * 4 * (p * (p / q).log()).sum(-1).mean()
    else:
        expected += 0.3 * -softmax(logits).log()[range(4), teacher_logits.argmax(-1)].mean()
    expected.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_the_teacher_stays_as_it_was(tmp_path):
    """In evaluation mode, without gradients, and outside the optimizer, the model and its checkpoints."""
    teacher = tiny_teacher().train()
    state = {name: value.clone() for name, value in teacher.state_dict().items()}
    trainer = make_trainer(tmp_path, teacher, mixup=0.5, save_strategy="steps", save_steps=4)
    trainer.train()
    assert all(torch.equal(value, state[name]) for name, value in teacher.state_dict().items())
    assert not any(module.training for module in teacher.modules())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    optimized = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert optimized == {id(parameter) for parameter in trainer.model.parameters()}
    saved = load_file(tmp_path / "out/checkpoint-4/model.safetensors")
    assert saved.keys() == make_student().state_dict().keys()


def test_labels_are_matched_by_name():
    student, teacher = make_student(), tiny_teacher(NAMES[::-1])
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(ImageTeacher(teacher, student.config)(images), teacher(images).logits.flip(-1))


@pytest.mark.parametrize("names", [["zero", "one", "TWO"], NAMES[:2], [*NAMES, "three"]])
def test_other_labels(tmp_path, names):
    with pytest.raises(ValueError, match="must have the student's labels") as error_info:
        make_trainer(tmp_path, tiny_teacher(names))
    assert repr((set(names) ^ set(NAMES)).pop()) in str(error_info.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"image_mean": [0.5] * 3, "image_std": [0.25] * 3},
        {"do_normalize": False},
        {"do_rescale": False, "do_normalize": False},
        {"size": {"height": 40, "width": 40}, "resample": 2},
        {"size": {"shortest_edge": 28}, "do_center_crop": True, "crop_size": {"height": 24, "width": 24}},
    ],
)
def test_input_is_that_of_the_teachers_processor(changes):
    """As if the teacher's processor had read the student's crop."""
    picture = digit_pictures(1)[0][0].convert("RGB").resize((16, 16))
    processor, teacher_processor = (
        make_image_processor(16, "squash"),
        ViTImageProcessorPil(
            **{"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3} | changes
        ),
    )
    teacher = ImageTeacher(tiny_teacher(), make_student().config, teacher_processor, processor)
    converted = teacher.convert(processor(picture, return_tensors="pt")["pixel_values"])
    if "crop_size" in changes:  # the crop is the whole input
        teacher_processor = ViTImageProcessorPil(size={"height": 24, "width": 24}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    expected = teacher_processor(picture, return_tensors="pt")["pixel_values"].float()
    torch.testing.assert_close(converted, expected, rtol=0, atol=1e-3 * teacher.format.scale / 255 / teacher.format.std[0])


@pytest.mark.parametrize("resample", PILImage.Resampling)
def test_images_are_resized_as_by_the_teachers_processor(resample):
    """With each of Pillow's filters, to larger and smaller sizes, of which some are not square."""
    teacher, student, generator = tiny_teacher(), make_student(), np.random.default_rng(0)
    for side in (20, 31, 64):
        pixels = generator.integers(0, 256, (2, side, side, 3), np.uint8)
        processor = make_image_processor(side, "squash")
        for size in ({"height": 24, "width": 48}, {"shortest_edge": 33}, {"height": 31, "width": 31}):
            teacher_processor = ViTImageProcessorPil(size=size, resample=resample)
            convert = ImageTeacher(teacher, student.config, teacher_processor, processor).convert
            converted = convert(processor(list(pixels), return_tensors="pt")["pixel_values"])
            expected = teacher_processor(list(pixels), return_tensors="pt")["pixel_values"]
            torch.testing.assert_close(converted, expected, rtol=0, atol=1e-5)


def test_input_is_unchanged_for_equal_processors():
    images = torch.randn(2, 3, 16, 16)
    teacher = ImageTeacher(tiny_teacher(), make_student().config, make_image_processor(16), make_image_processor(16))
    assert teacher.convert(images) is images


def test_arguments_that_contradict_each_other(tmp_path):
    with pytest.raises(ValueError, match="does not suit no teacher_model"):
        make_trainer(tmp_path, None)
    with pytest.raises(ValueError, match="does not suit a teacher_model"):
        make_trainer(tmp_path, tiny_teacher(), distillation_type="none")
    with pytest.raises(ValueError, match="distillation_type must be one of none, soft, hard"):
        make_trainer(tmp_path, tiny_teacher(), distillation_type="Soft")
    with pytest.raises(ValueError, match="distillation_type is for images of one class each"):
        make_trainer(tmp_path, tiny_teacher(), make_student(problem_type="multi_label_classification"))
    with pytest.raises(ValueError, match="student's \\(processing_class\\)"):
        ImageTeacher(tiny_teacher(), make_student().config, make_image_processor(16))


def test_script_resumes_exactly(tmp_path, image_args):
    """With a teacher of other labels' order and other pixels, in a folder; it changes the losses."""
    tiny_teacher(NAMES[::-1]).save_pretrained(tmp_path / "teacher")
    ViTImageProcessorPil(size={"height": 24, "width": 24}).save_pretrained(tmp_path / "teacher")
    options = {"teacher_model_name_or_path": tmp_path / "teacher", "distillation_type": "soft", "ema_decay": 0}
    options |= {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    script.main(image_args(**options))
    script.main(image_args(output_dir=tmp_path / "none", max_steps=4, ema_decay=0))
    assert losses(tmp_path / "out") != losses(tmp_path / "none")
    resumed = {"output_dir": tmp_path / "again", "resume_from_checkpoint": tmp_path / "out/checkpoint-2"}
    script.main(image_args(**options | resumed))
    for name, value in load_file(tmp_path / "out/model.safetensors").items():
        assert torch.equal(value, load_file(tmp_path / "again/model.safetensors")[name]), name
