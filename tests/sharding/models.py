"""Small models of every family whose tensors are split in the tests, in float64, each with one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def build(name: str) -> Built:
    """A model in training mode with random weights everywhere (libraries start some at zero, which hides errors)."""
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model.train(), args, kwargs


def _tokens(model: nn.Module, vocabulary: int, rows: int = 2, length: int = 8, ignored: int = 3) -> Built:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, vocabulary, (rows, length), generator=generator)
    labels = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels[0, :ignored] = -100
    return model, (), {"input_ids": ids, "labels": labels}


def _causal(name: str, **config: Any) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        common = {
            "vocab_size": 40,
            "attn_implementation": "sdpa",
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
        }
        made = transformers.AutoConfig.for_model(name, **{**common, **config})
        return _tokens(transformers.AutoModelForCausalLM.from_config(made).double(), made.vocab_size)

    return build


_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def mixtral(implementation: str = "batched_mm", dtype: torch.dtype = torch.float64) -> Built:
    """Mixtral with one of the library's ways to run experts."""
    import transformers

    config = transformers.MixtralConfig(
        **_LLAMA,
        vocab_size=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation=implementation,
    )
    return _tokens(transformers.MixtralForCausalLM(config).to(dtype), 40)


def _bert() -> Built:
    import transformers

    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=50,  # no multiple of 4: padded
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model, args, kwargs = _tokens(transformers.BertForMaskedLM(config).double(), 40)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    return model, args, {**kwargs, "attention_mask": mask}


def _t5() -> Built:
    import transformers

    config = transformers.T5Config(
        vocab_size=40,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return _tokens(transformers.T5ForConditionalGeneration(config).double(), 40)


def _images(build: Callable[[], nn.Module], size: int = 32, rows: int = 4) -> Callable[[], Built]:
    def built() -> Built:
        generator = torch.Generator().manual_seed(6)
        images = torch.randn(rows, 3, size, size, generator=generator, dtype=torch.float64)
        return build().double(), (images,), {}

    return built


def _vit() -> nn.Module:
    import torchvision

    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=12
    )


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=12, **options)

    return build


def _resnet() -> nn.Module:
    import torchvision

    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=12)


def _mobilenet() -> nn.Module:
    import torchvision

    return torchvision.models.MobileNetV2(
        num_classes=12,
        width_mult=0.5,
        inverted_residual_setting=[[1, 8, 1, 1], [4, 16, 2, 2]],
        dropout=0.0,
    )


class Lstm(nn.Module):
    """A small language model over one LSTM layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 40)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(ids))
        return self.head(states)


def _lstm() -> Built:
    ids = torch.randint(0, 40, (4, 6), generator=torch.Generator().manual_seed(7))
    return Lstm().double(), (ids,), {}


class Recommender(nn.Module):
    """Embedding tables and dense features, joined by pairwise dot products, as in DLRM."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(size, 8) for size in (40, 24, 16)])
        self.bottom = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, offset=-1)
        return self.top(torch.cat([x, products[:, rows, columns]], dim=1)).squeeze(1)


def _recommender() -> Built:
    generator = torch.Generator().manual_seed(8)
    dense = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    sparse = torch.randint(0, 16, (4, 3), generator=generator)
    return Recommender().double(), (dense, sparse), {}


MODELS: dict[str, Callable[[], Built]] = {
    "gpt2": _causal(
        "gpt2",
        vocab_size=41,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "llama": _causal("llama", **_LLAMA),
    "bert": _bert,
    "t5": _t5,
    "mixtral": mixtral,
    "phi3": _causal("phi3", **_LLAMA, resid_pdrop=0.0, embd_pdrop=0.0),
    "vit": _images(_vit),
    "swin": _images(
        _timm(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            patch_size=2,
            window_size=4,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 4),
            drop_path_rate=0.0,
        )
    ),
    "convnext": _images(_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), drop_path_rate=0.0)),
    "resnet": _images(_resnet),
    "mobilenet": _images(_mobilenet),
    "lstm": _lstm,
    "recommender": _recommender,
}
