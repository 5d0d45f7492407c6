"""`python -m benchmarks.architectures` trains small timm and transformers models with AMP in BF16 and with the loop.

Both see the same batches, without dropout, on a GPU if there is one. A line says how many layers the loop found, by how
much the epochs' mean losses differ at most (relative, of losses below 0.05 absolute over 0.05), and the loop's faults.
Differences of up to a fifth are rounding, amplified by batch normalization over few samples. AMP differs as much from
itself if weights change by 0.01 %. It fails if the loop cannot train a model that AMP trains.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import StackDataset, default_collate

from benchmarks.processes import parser_of, print_all, run_apart
from triaccel_ray import BatchConfig, ControlConfig, ControlLoop, CurvatureConfig
from triaccel_ray.data.sampler import epoch_order
from triaccel_ray.model.pytree import map_tensors

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 32, 8, 3
VOCABULARY, NUM_TOKENS, NUM_CLASSES = 64, 16, 2
EXPECTED_FAULTS = ("precision_refused", "not_a_layer")

_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BLOCKS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_BERT = {
    **_TOKENS, **_BLOCKS, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "num_labels": NUM_CLASSES,
}  # fmt: skip
_LLAMA = {**_TOKENS, **_BLOCKS, "max_position_embeddings": 64, "num_key_value_heads": 1}
_HEADED = {**_LLAMA, "head_dim": 16}
_MAMBA = {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
_VIT = {**_BLOCKS, "image_size": 32, "patch_size": 8, "num_labels": NUM_CLASSES}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_BART = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0,
}  # fmt: skip
_SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "drop_path_rate": 0.0}

TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Albert": ("SequenceClassification", {**_BERT, "embedding_size": 16, "classifier_dropout_prob": 0.0}),
    "Bert": ("SequenceClassification", _BERT),
    "DebertaV2": ("SequenceClassification", {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "Electra": ("SequenceClassification", {**_BERT, "embedding_size": 16}),
    "Longformer": ("SequenceClassification", {**_BERT, "attention_window": 4}),
    "ModernBert": ("SequenceClassification", {**_BERT, "cls_token_id": 1, "sep_token_id": 2}),
    "Bloom": ("CausalLM", {**_TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "Falcon": ("CausalLM", {**_TOKENS, **_BLOCKS}),
    "Gemma2": ("CausalLM", _HEADED),
    "GPT2": ("LMHeadModel", {**_TOKENS, **_GPT2}),
    "GPTNeoX": ("CausalLM", {**_TOKENS, **_BLOCKS}),
    "GptOss": ("CausalLM", {**_HEADED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Llama": ("CausalLM", _LLAMA),
    "Mamba": ("CausalLM", _MAMBA),
    "Mamba2": ("CausalLM", {**_MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8}),
    "Mistral": ("CausalLM", {**_LLAMA, "sliding_window": 8}),
    "Mixtral": ("CausalLM", {**_LLAMA, "num_local_experts": 4}),
    "OPT": ("CausalLM", {**_TOKENS, **_BLOCKS, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "Phi3": ("CausalLM", _LLAMA),
    "Qwen3": ("CausalLM", _HEADED),
    "Qwen3Moe": ("CausalLM", {**_HEADED, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}),
    "Rwkv": ("CausalLM", {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 32}),
    "Bart": ("ConditionalGeneration", {**_TOKENS, **_BART, "decoder_start_token_id": 2}),
    "T5": ("ConditionalGeneration", {**_TOKENS, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
                                     "dropout_rate": 0.0, "decoder_start_token_id": 0}),
    "Beit": ("ImageClassification", {**_VIT, "drop_path_rate": 0.0}),
    "ConvNext": ("ImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 2}),
    "ResNet": ("ImageClassification", {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]}),
    "Swin": ("ImageClassification", {**_SWIN, "image_size": 32, "patch_size": 4, "num_labels": NUM_CLASSES}),
    "ViT": ("ImageClassification", _VIT),
}  # fmt: skip
"""Prefix of a model's and its configuration's class -> suffix of the model's class, options of the configuration."""


class Logits(nn.Module):
    """A timm model that takes and returns what transformers models do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns the cross entropy."""
        return {"loss": nn.functional.cross_entropy(self.model(pixel_values), labels)}


def model_of(name: str) -> tuple[nn.Module, Any]:
    """Returns a model, and samples that bear the names of its arguments."""
    stacked: Any = StackDataset  # whose annotation takes no tensors
    torch.manual_seed(0)
    ids = torch.randint(4, VOCABULARY, (NUM_SAMPLES, NUM_TOKENS))
    labels = (ids == 7).any(1).long()
    if name not in TRANSFORMERS:
        model = import_module("timm").create_model(name, num_classes=NUM_CLASSES)
        for module in model.modules():
            vars(module).update({key: 0.0 for key in ("p", "drop_prob", "drop_rate") if key in vars(module)})
        images = torch.randn(NUM_SAMPLES, *model.pretrained_cfg["input_size"])
        return Logits(model), stacked(pixel_values=images, labels=labels)
    suffix, options = TRANSFORMERS[name]
    library = import_module("transformers")
    config = getattr(library, f"{name}Config")(**options)
    model = getattr(library, name + suffix if suffix == "LMHeadModel" else f"{name}For{suffix}")(config)
    if suffix == "ImageClassification":
        return model, stacked(pixel_values=torch.randn(NUM_SAMPLES, 3, 32, 32), labels=labels)
    return model, stacked(input_ids=ids, labels=labels if suffix == "SequenceClassification" else ids)


def loss_of(outputs: Any, batch: Any) -> Tensor:
    """Returns the loss that the model computes itself."""
    loss: Tensor = outputs["loss"]
    return loss


def by_amp(model: nn.Module, data: Any, device: str) -> Iterator[float]:
    """Trains with autocast as in PyTorch's tutorial; yields the mean loss of each epoch."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    for epoch in range(NUM_EPOCHS):
        losses = []
        for part in epoch_order(NUM_SAMPLES, seed=0, epoch=epoch).split(BATCH_SIZE):
            batch = map_tensors(lambda each: each.to(device), default_collate([data[int(index)] for index in part]))
            with torch.autocast(device, torch.bfloat16):
                loss = loss_of(model(**batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        yield sum(losses) / len(losses)


def compare(name: str) -> dict[str, Any]:
    """Trains one model in both ways; returns what the loop found, and how much it differs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, data = model_of(name)
    twin = copy.deepcopy(model).to(device)
    expected = list(by_amp(twin, data, device))
    batch = BatchConfig(enabled=False, minimum=BATCH_SIZE, start=BATCH_SIZE, maximum=BATCH_SIZE)
    curvature = CurvatureConfig(every_steps=2, num_samples=BATCH_SIZE)
    config = ControlConfig(every_steps=2, batch=batch, curvature=curvature, revert_slowdowns=False)
    ticks: list[Any] = []
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=1e-3)
    loop = ControlLoop(model, optimizer, loss_of, data, config=config, on_tick=ticks.append)
    found = [loop.train_epoch().loss for _ in range(NUM_EPOCHS)]
    loop.close()
    faults = {f"{fault.kind}: {fault.detail}"[:160] for tick in ticks for fault in tick.observation.faults}
    worst = max(abs(one - other) / max(abs(one), 0.05) for one, other in zip(expected, found, strict=True))
    return {
        "model": name, "layers": len(ticks[0].observation.layers), "differs": round(worst, 4),
        "amp": round(expected[-1], 4), "loop": round(found[-1], 4),
        "faults": sorted(fault for fault in faults if not fault.startswith(EXPECTED_FAULTS)),
    }  # fmt: skip


def main() -> int:
    """Compares the models named on the command line: by default all of transformers here, and timm's for tests."""
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", help="names of timm's models, or prefixes of classes in transformers")
    names = parser.parse_args().names or [*TRANSFORMERS, *import_module("timm").list_models("test_*")]
    return print_all(run_apart(compare, name) for name in names)


if __name__ == "__main__":
    sys.exit(main())
