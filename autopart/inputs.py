"""Example inputs for a model that comes without any: from the conventions of transformers, timm and torchvision."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopart.errors import UsageError

DEFAULT_BATCH = 32
DEFAULT_TOKENS = 512
DEFAULT_IMAGE = 224
DEFAULT_SAMPLES = 16000  # one second of sound


def find_inputs(
    model: nn.Module,
    *,
    batch: int = DEFAULT_BATCH,
    seq: int | None = None,
    image: int | None = None,
    labels: bool = True,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One global batch of random inputs for a model of transformers, timm or torchvision.

    Values are always the same ones, in the range, on the device and in the dtype of the model; the global random state
    is left alone.

    Args:
        batch: Rows.
        seq: Tokens in a row of text; default: as many as the model takes, at most 512.
        image: Height and width of images; default: what the model was made for.
        labels: Whether a transformers model gets labels, so that it returns its loss.

    Returns:
        (args, kwargs) of the model's call.

    Raises:
        UsageError: Nothing is known about this model's inputs; says what to pass instead.
    """
    for belongs, make in _FAMILIES:
        if belongs(model):
            return make(model, _Request(model, batch, seq, image, labels))
    raise _unknown(model, "its inputs are not known")


@dataclass(frozen=True)
class _Request:
    """What is asked for, and how tensors are made for this model."""

    model: nn.Module
    batch: int
    seq: int | None
    image: int | None
    labels: bool

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def floats(self, *shape: int) -> Tensor:
        """Normal numbers, one row for each of the batch."""
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        if self.device.type == "meta":
            return torch.empty(self.batch, *shape, dtype=dtype, device="meta")
        values = torch.randn(self.batch, *shape, generator=torch.Generator().manual_seed(0))
        return values.to(self.device, dtype)

    def integers(self, limit: int, *shape: int) -> Tensor:
        """Whole numbers below `limit`, one row for each of the batch."""
        if self.device.type == "meta":
            return torch.empty(self.batch, *shape, dtype=torch.long, device="meta")
        generator = torch.Generator().manual_seed(0)
        return torch.randint(limit, (self.batch, *shape), generator=generator).to(self.device)


# ---------------------------------------------------------------------------------------------- transformers


def _is_transformers(model: nn.Module) -> bool:
    return any(c.__module__.startswith("transformers.") for c in type(model).__mro__)


def _transformers_inputs(model: Any, request: _Request) -> tuple[tuple[Any, ...], dict[str, Any]]:
    takes = inspect.signature(model.forward).parameters
    text = model.config.get_text_config()
    if getattr(model.config, "image_token_id", None) is not None:
        raise _unknown(model, "its text must hold a token for each patch of its images, which its processor puts there")
    kwargs: dict[str, Any] = {}
    for name, make in _TRANSFORMERS_INPUTS.items():
        if name in takes and (name == model.main_input_name or name in _ALONGSIDE):
            kwargs[name] = make(model, request)
    if not kwargs:
        raise _unknown(model, f"its main input is {model.main_input_name!r}")
    kwargs |= _labels(model, request, kwargs) if request.labels else {}
    # From labels a model makes its own decoder inputs, if it knows what they begin with.
    shifts = "labels" in kwargs and getattr(model.config, "decoder_start_token_id", None) is not None
    if model.config.is_encoder_decoder and "decoder_input_ids" in takes and not shifts:
        kwargs["decoder_input_ids"] = request.integers(_vocabulary(model), _decoder_tokens(model, request))
    if "return_loss" in takes and request.labels:
        kwargs["return_loss"] = True
    if "use_cache" in takes and getattr(text, "use_cache", False):
        kwargs["use_cache"] = False  # the cache of keys and values serves generation, not a whole pass
    return (), kwargs


def _vocabulary(model: Any) -> int:
    return model.config.get_text_config().vocab_size


def _token_shape(model: Any, request: _Request) -> tuple[int, ...]:
    tokens = request.seq or min(DEFAULT_TOKENS, _most_tokens(model))
    return (2, tokens) if type(model).__name__.endswith("ForMultipleChoice") else (tokens,)


def _most_tokens(model: Any) -> int:
    """How many positions the model has; those of RoBERTa's kind begin after the padding index."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or DEFAULT_TOKENS
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            start = 0 if module.padding_idx is None else module.padding_idx + 1
            limit = min(limit, module.num_embeddings - start)
    return limit


def _decoder_tokens(model: Any, request: _Request) -> int:
    if request.seq:
        return request.seq
    limit = getattr(model.config, "max_target_positions", None) or _most_tokens(model)
    return min(DEFAULT_TOKENS, limit)


def _pixels(model: Any, request: _Request) -> Tensor:
    config = getattr(model.config, "vision_config", model.config)
    size: Any = request.image or getattr(config, "image_size", None) or DEFAULT_IMAGE
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = getattr(config, "num_channels", 3)
    frames = getattr(config, "num_frames", None)
    return request.floats(*(() if frames is None else (frames,)), channels, height, width)


def _sound(model: Any, request: _Request) -> Tensor:
    bins = getattr(model.config, "num_mel_bins", None)
    if bins is not None and hasattr(model.config, "max_length"):
        return request.floats(model.config.max_length, bins)
    return request.floats(request.seq or DEFAULT_SAMPLES)


def _spectrum(model: Any, request: _Request) -> Tensor:
    positions = getattr(model.config, "max_source_positions", None)
    if positions is None:
        raise _unknown(model, "the length of its input features is not in its config")
    return request.floats(model.config.num_mel_bins, 2 * positions)


_TRANSFORMERS_INPUTS: Mapping[str, Callable[[Any, _Request], Tensor]] = {
    "input_ids": lambda model, request: request.integers(_vocabulary(model), *_token_shape(model, request)),
    "pixel_values": _pixels,
    "input_values": _sound,
    "input_features": _spectrum,
}
# Given whenever the model takes them, not only when they are its main input.
_ALONGSIDE = ("pixel_values",)

# Class suffix -> the labels with which it returns its loss. CTC is missing on purpose: its loss picks the labels by
# value, which no capture can follow.
_LABELS: Mapping[str, Callable[[Any, _Request, Mapping[str, Tensor]], dict[str, Tensor]]] = {
    **dict.fromkeys(
        ("ForCausalLM", "LMHeadModel", "ForMaskedLM"),
        lambda model, request, given: {"labels": request.integers(_vocabulary(model), *given["input_ids"].shape[1:])},
    ),
    "ForConditionalGeneration": lambda model, request, given: {
        "labels": request.integers(_vocabulary(model), _decoder_tokens(model, request))
    },
    "ForTokenClassification": lambda model, request, given: {
        "labels": request.integers(model.config.num_labels, *given["input_ids"].shape[1:])
    },
    **dict.fromkeys(
        ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification", "ForVideoClassification"),
        lambda model, request, given: {"labels": request.integers(model.config.num_labels)},
    ),
    **dict.fromkeys(
        ("ForMultipleChoice", "ForNextSentencePrediction"),
        lambda model, request, given: {"labels": request.integers(2)},
    ),
    "ForQuestionAnswering": lambda model, request, given: {
        name: request.integers(given["input_ids"].shape[-1]) for name in ("start_positions", "end_positions")
    },
}


def _labels(model: Any, request: _Request, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for base in type(model).__mro__:
        for suffix, make in _LABELS.items():
            if base.__name__.endswith(suffix):
                return make(model, request, given)
    return {}


# ------------------------------------------------------------------------------------------ timm and torchvision


def _timm_config(model: nn.Module) -> Mapping[str, Any] | None:
    for name in ("pretrained_cfg", "default_cfg"):
        config = getattr(model, name, None)
        if isinstance(config, Mapping) and "input_size" in config:
            return config
    return None


def _timm_inputs(model: nn.Module, request: _Request) -> tuple[tuple[Any, ...], dict[str, Any]]:
    config = _timm_config(model)
    assert config is not None
    channels, height, width = config["input_size"]
    if request.image:
        height = width = request.image
    return (request.floats(getattr(model, "in_chans", channels), height, width),), {}


# Module prefix -> shape of one input; None where a call takes more than one tensor of images.
_TORCHVISION: Mapping[str, tuple[int, ...] | None] = {
    "torchvision.models.detection": None,
    "torchvision.models.optical_flow": None,
    "torchvision.models.video": (3, 16, 112, 112),
    "torchvision.models.segmentation": (3, 256, 256),
    "torchvision.models.inception": (3, 299, 299),
    "torchvision.models": (3, DEFAULT_IMAGE, DEFAULT_IMAGE),
}


def _torchvision_inputs(model: nn.Module, request: _Request) -> tuple[tuple[Any, ...], dict[str, Any]]:
    shape = next(shape for prefix, shape in _TORCHVISION.items() if type(model).__module__.startswith(prefix))
    if shape is None:
        raise _unknown(model, "models of this kind take more than one batch of images")
    size = request.image or getattr(model, "image_size", None)  # vision transformers know theirs
    return (request.floats(*(shape if size is None else (*shape[:-2], size, size))),), {}


_FAMILIES: tuple[tuple[Callable[[nn.Module], bool], Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]], ...] = (
    (_is_transformers, _transformers_inputs),
    (lambda model: _timm_config(model) is not None, _timm_inputs),
    (lambda model: type(model).__module__.startswith("torchvision.models"), _torchvision_inputs),
)


def _unknown(model: nn.Module, reason: str) -> UsageError:
    parameters = inspect.signature(model.forward).parameters
    required = [name for name, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    names = ", ".join(required or list(parameters)[:1])
    return UsageError(
        f"no example inputs for {type(model).__name__}, whose forward takes ({', '.join(parameters)}): {reason}",
        f"Pass one global batch: autopart.partition(model, gpus, example_inputs=({names},)), and keyword arguments\n"
        "as example_kwargs={...}. They may be on torch.device('meta'): only their shapes count.\n"
        "On the command line, name a function that returns (model, args, kwargs).",
    )
