"""A Hugging Face model under the control loop. It is created from a configuration, so nothing is downloaded."""

import torch
from torch.utils.data import StackDataset
from transformers import BertConfig, BertForSequenceClassification

from triaccel_ray import BatchConfig, ControlConfig, ControlLoop


def texts(count: int) -> StackDataset:
    """Returns random texts of 16 words out of 24, labeled by whether they contain word 7."""
    ids = torch.randint(24, (count, 16))
    return StackDataset(input_ids=ids, labels=(ids == 7).any(1).long())  # the names of the model's arguments


def right(outputs, batch) -> torch.Tensor:
    """Returns 1 for each text that the model classifies correctly, else 0."""
    return (outputs.logits.argmax(1) == batch["labels"]).float()


torch.manual_seed(0)
train, held_out = texts(4000), texts(500)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = BertForSequenceClassification(BertConfig(vocab_size=24, max_position_embeddings=16, num_labels=2, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
config = ControlConfig(every_steps=20, batch=BatchConfig(start=32, maximum=64))

loop = ControlLoop(model, optimizer, lambda outputs, batch: outputs.loss, train, config=config)
for _ in range(4):
    stats = loop.train_epoch()
    print(f"epoch {stats.epoch}: loss {stats.loss:.3f}, batch {loop.plan.batch_size}")
judged = loop.evaluate(held_out, {"right": right})
print(f"right about held-out texts: {100 * judged.metrics['right']:.1f} %")
loop.close()
