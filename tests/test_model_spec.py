"""Models are found by the names people use, with inputs they accept; a wrong name is answered with a right one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForMaskedLM

from autopart.errors import AutopartError, CaptureError, InputFileError, UsageError
from autopart.inputs import find_inputs
from autopart.model_spec import load, parse

USER_FILE = """
import torch
from torch import nn

def make(width=4):
    return nn.Linear(width, 3), (torch.zeros(8, width),), {}

def with_one_tensor():
    return nn.Linear(3, 3), torch.zeros(2, 3)

def model_alone():
    return nn.Linear(3, 3)

def reads_its_weights():
    layer = nn.Linear(3, 3)
    layer.weight.sum().item()
    return layer, torch.zeros(2, 3)

def fails():
    raise KeyError("no such layer")

def number():
    return 3
"""


@pytest.fixture
def user_file(tmp_path: Path) -> str:
    path = tmp_path / "my [red] model?.py"
    path.write_text(USER_FILE)
    return str(path)


@pytest.mark.parametrize(
    ("spec", "class_name", "parameters"),
    [
        # Counts that the models' authors state.
        ("hf:gpt2", "GPT2LMHeadModel", 124_439_808),
        ("hf:t5", "T5ForConditionalGeneration", 60_506_624),
        (
            "hf:LlamaForCausalLM?hidden_size=4096&intermediate_size=14336&num_hidden_layers=32"
            "&num_attention_heads=32&num_key_value_heads=8&vocab_size=128256",
            "LlamaForCausalLM",
            8_030_261_248,
        ),
        ("torchvision:resnet50", "ResNet", 25_557_032),
        ("torchvision:densenet121", "DenseNet", 7_978_856),
        ("timm:vit_base_patch16_224", "VisionTransformer", 86_567_656),
        ("timm:swin_tiny_patch4_window7_224", "SwinTransformer", 28_288_354),
        ("zoo:vit-b16", "VisionTransformer", 86_567_656),
        ("zoo:unet", "UNet", 31_037_698),
        ("torchvision.models:resnet18", "ResNet", 11_689_512),
    ],
)
def test_a_spec_builds_the_model_it_names_without_memory(spec: str, class_name: str, parameters: int) -> None:
    loaded = load(spec)
    assert type(loaded.model).__name__ == class_name
    assert sum(p.numel() for p in loaded.model.parameters()) == parameters
    assert {p.device.type for p in loaded.model.parameters()} == {"meta"}
    tensors = [*loaded.args, *(v for v in loaded.kwargs.values() if isinstance(v, torch.Tensor))]
    assert tensors and all(t.device.type == "meta" and t.shape[0] == 32 for t in tensors)


def test_a_model_type_means_the_head_it_is_trained_with() -> None:
    heads = {
        "bert": "BertForMaskedLM",
        "bart": "BartForConditionalGeneration",
        "whisper": "WhisperForConditionalGeneration",
        "clip": "CLIPModel",
        "vit": "ViTForImageClassification",
    }
    assert {name: type(load(f"hf:{name}").model).__name__ for name in heads} == heads


def test_options_reach_config_and_inputs_and_entries_that_follow_others_follow() -> None:
    loaded = load("hf:t5?num_layers=2&d_model=64&d_kv=16&num_heads=4&batch=4&seq=16")
    assert loaded.model.config.num_decoder_layers == 2
    assert loaded.kwargs["input_ids"].shape == (4, 16)
    nested = load("hf:clip?text_config.num_hidden_layers=1&vision_config.num_hidden_layers=2")
    assert len(nested.model.text_model.encoder.layers) == 1
    assert len(nested.model.vision_model.encoder.layers) == 2
    without = load("hf:gpt2?n_layer=1&labels=0")
    assert set(without.kwargs) == {"input_ids"}
    other_head = load("hf:gpt2?n_layer=1&class=GPT2ForSequenceClassification&pad_token_id=0&batch=2")
    assert other_head.kwargs["labels"].shape == (2,)


def test_a_local_directory_with_a_config_is_a_model(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64)).config.save_pretrained(tmp_path)
    loaded = load(f"hf:{tmp_path}?vocab_size=65")
    assert loaded.model.config.n_embd == 32
    assert loaded.model.config.vocab_size == 65


def test_real_weights_depend_on_the_seed_alone_and_the_global_random_state_is_left_alone() -> None:
    spec = "zoo:gpt?vocabulary=64&context=16&width=16&heads=2&layers=1&batch=2&seq=8"
    before = torch.get_rng_state()
    first, second, other = load(spec, meta=False), load(spec, meta=False), load(spec, meta=False, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    same = [torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True)]
    assert all(same) and torch.equal(first.args[0], second.args[0])
    assert not torch.equal(first.model.head.weight, other.model.head.weight)


def test_a_function_of_a_file_gives_a_model_and_its_inputs(user_file: str) -> None:
    loaded = load(f"{user_file}:make?width=5")
    assert isinstance(loaded.model, nn.Linear) and loaded.args[0].shape == (8, 5)
    assert load(f"{user_file}:with_one_tensor").args[0].shape == (2, 3)


def test_a_model_that_reads_its_weights_is_built_with_real_ones_and_says_so(user_file: str) -> None:
    loaded = load(f"{user_file}:reads_its_weights")
    assert loaded.model.weight.device.type == "cpu"
    assert "real weights" in loaded.notes[0] and "item()" in loaded.notes[0]


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("gpt2", UsageError, ["hf:gpt2"]),
        ("", UsageError, ["FILE.py:FUNCTION"]),
        ("::", UsageError, ["FILE.py:FUNCTION"]),
        ("hf:gtp2", UsageError, ["'gtp2'", "gpt2"]),
        ("hff:gpt2", UsageError, ["hf:"]),
        ("hf:gpt2?n_layers=2", UsageError, ["GPT2Config", "n_layer "]),
        ("hf:gpt2?n_layer=two", UsageError, ["n_layer", "int"]),
        ("hf:gpt2?n_layer", UsageError, ["key=value"]),
        ("hf:gpt2?n_layer=1&n_layer=2", UsageError, ["twice"]),
        ("hf:gpt2?class=Gpt2Model", UsageError, ["GPT2Model"]),
        ("hf:gpt2?class=BertModel", UsageError, ["BertConfig"]),
        ("hf:gpt2?n_head=7", UsageError, ["n_head", "divisible"]),
        ("hf:gpt2?batch=0", UsageError, ["batch"]),
        ("hf:llava", UsageError, ["pixel_values", "processor"]),
        ("timm:resnet5O", UsageError, ["timm:resnet50"]),
        ("timm:resnet18?foo=3", UsageError, ["foo"]),
        ("torchvision:resnet5", UsageError, ["torchvision:resnet50"]),
        ("torchvision:fasterrcnn_resnet50_fpn", UsageError, ["images, targets"]),
        ("zoo:unett", UsageError, ["zoo:unet"]),
        ("zoo:unet?colour=1", UsageError, ["colour"]),
        ("no_such_package.models:make", UsageError, ["no_such_package"]),
        ("torch.nn:Linear", CaptureError, ["in_features"]),
        ("nowhere/model.py:make", InputFileError, ["nowhere/model.py"]),
    ],
)
def test_a_wrong_spec_is_answered_with_what_to_change(spec: str, error: type[AutopartError], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        load(spec)
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        ("mak", UsageError, ["make?"]),
        ("number", UsageError, ["int", "(model, args, kwargs)"]),
        ("model_alone", UsageError, ["Linear", "(input)", "example_inputs"]),
        ("fails", CaptureError, ["no such layer", "?.py:20"]),
    ],
)
def test_a_fault_in_the_users_function_names_it(
    user_file: str, function: str, error: type[AutopartError], words: list[str]
) -> None:
    with pytest.raises(error) as raised:
        load(f"{user_file}:{function}")
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_a_file_that_cannot_be_imported_is_a_bad_file(tmp_path: Path) -> None:
    for name, text, words in (
        ("syntax", "def make(:", "line 1"),
        ("imports", "import no_such_module", "no_such_module"),
        ("binary", "\0", "cannot be imported"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(InputFileError, match=words):
            load(f"{tmp_path / name}.py:make")
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(InputFileError, match="cannot be read"):
        load(f"hf:{tmp_path}")


def test_a_question_mark_in_a_path_is_not_an_option() -> None:
    assert parse("a?b/m.py:make").name == "a?b/m.py:make"
    assert parse("a?b/m.py:make?x=1&y=[2,3]&z=true&t=text").options == {"x": 1, "y": [2, 3], "z": True, "t": "text"}


def test_inputs_of_a_users_own_instance_are_found_and_the_model_returns_its_loss() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=40))
    args, kwargs = find_inputs(model, batch=3)
    assert args == () and kwargs["input_ids"].shape == (3, 40) and kwargs["use_cache"] is False
    assert model(**kwargs).loss.isfinite()


def test_positions_that_begin_after_the_padding_index_are_not_overrun() -> None:
    config = RobertaConfig(
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=64,
        max_position_embeddings=40,
    )
    model = RobertaForMaskedLM(config)
    _, kwargs = find_inputs(model, batch=2)
    assert kwargs["input_ids"].shape == (2, 38)
    kwargs["input_ids"].clamp_(min=2)  # no padding, hence every position is used
    assert model(**kwargs).loss.isfinite()


def test_a_stored_config_of_an_unknown_type_is_a_bad_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(InputFileError):
        load(f"hf:{tmp_path}")
