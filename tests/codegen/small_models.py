"""Small configurations of real models, with example inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _tokens(rows: int = 2, length: int = 8) -> torch.Tensor:
    return torch.randint(0, 64, (rows, length))


def _with_labels(model: nn.Module, length: int = 8) -> Example:
    tokens = _tokens(length=length)
    return model, (), {"input_ids": tokens, "labels": tokens}


def gpt2(dropout: float = 0.1) -> Example:
    config = hf.GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=32, use_cache=False, bos_token_id=1, eos_token_id=1,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return _with_labels(hf.GPT2LMHeadModel(config))


def llama() -> Example:
    config = hf.LlamaConfig(
        num_hidden_layers=4, hidden_size=64, intermediate_size=96, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=64, use_cache=False,
    )  # fmt: skip
    return _with_labels(hf.LlamaForCausalLM(config))


def bert() -> Example:
    config = hf.BertConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=64
    )
    model, args, kwargs = _with_labels(hf.BertForMaskedLM(config))
    return model, args, kwargs | {"attention_mask": torch.ones_like(kwargs["input_ids"])}


def t5(dropout: float = 0.1) -> Example:
    config = hf.T5Config(
        num_layers=2, num_decoder_layers=2, d_model=32, d_kv=8, d_ff=48, num_heads=4, vocab_size=64, use_cache=False,
        decoder_start_token_id=0, dropout_rate=dropout,
    )  # fmt: skip
    return _with_labels(hf.T5ForConditionalGeneration(config))


def albert() -> Example:
    config = hf.AlbertConfig(
        num_hidden_layers=4, hidden_size=32, embedding_size=16, intermediate_size=48, num_attention_heads=4,
        vocab_size=64,
    )  # fmt: skip
    return _with_labels(hf.AlbertForMaskedLM(config))


def mixtral() -> Example:
    config = hf.MixtralConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    return _with_labels(hf.MixtralForCausalLM(config))


def resnet() -> Example:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 2, 1, 1], num_classes=10), (torch.randn(2, 3, 32, 32),), {}


def densenet() -> Example:
    from torchvision.models import DenseNet

    model = DenseNet(8, (2, 2, 2), 16, num_classes=10, drop_rate=0.1)
    return model, (torch.randn(2, 3, 32, 32),), {}


def vit() -> Example:
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", depth=3, embed_dim=32, num_heads=4, img_size=32, patch_size=8, num_classes=10,
        drop_path_rate=0.2,
    )  # fmt: skip
    return model, (torch.randn(2, 3, 32, 32),), {}


def swin() -> Example:
    import timm

    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4),
        num_classes=10, drop_path_rate=0.2,
    )  # fmt: skip
    return model, (torch.randn(2, 3, 32, 32),), {}


class UNet(nn.Module):
    """Two levels down and up with batch norm, a skip at each level, and a mask that the last stage needs."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._block(3, 8), self._block(8, 16)])
        self.middle = self._block(16, 32)
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.join = nn.ModuleList([self._block(32, 16), self._block(16, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.mean(1, keepdim=True) > 0
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join, skip in zip(self.up, self.join, reversed(skips), strict=True):
            x = join(torch.cat([skip, up(x)], 1))
        return self.head(x).masked_fill(mask, 0.0)


def unet() -> Example:
    return UNet(), (torch.randn(2, 3, 16, 16),), {}


class Columns(nn.Module):
    """Writes columns that a list of integers names, and rows that a mask does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        chosen = torch.tensor([3, 0, 5])
        z = y.clone()
        z[:, chosen] = 0.5
        z[x[:, 0] > 0] = 1.0
        return self.down(z) + y[:, chosen].sum()


def columns() -> Example:
    return Columns(), (torch.randn(4, 8),), {}


def in_double(example: Example) -> Example:
    """The same in float64, so that a comparison sees small faults."""
    model, args, kwargs = example

    def change(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return model.double(), tuple(map(change, args)), {k: change(v) for k, v in kwargs.items()}


MODELS: dict[str, Callable[[], Example]] = {
    f.__name__: f for f in (gpt2, llama, bert, t5, albert, mixtral, resnet, densenet, vit, swin, unet)
}
# Models that draw no random numbers: their operations may run in any legal order.
DETERMINISTIC: dict[str, Callable[[], Example]] = {
    "gpt2": lambda: gpt2(0.0),
    "llama": llama,
    "t5": lambda: t5(0.0),
    "resnet": resnet,
    "unet": unet,
    "columns": columns,
}
