"""Your own model and tensors under the control loop: `python examples/own_model.py`. Takes seconds on a CPU."""

import torch
from torch import nn

from triaccel_ray import BatchConfig, ControlConfig, ControlLoop


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random points, labeled by whether their first two coordinates have equal signs: no linear problem."""
    points = torch.randn(count, 10)
    return points, (points[:, 0] * points[:, 1] > 0).long()


torch.manual_seed(0)
train, held_out = samples(6000), samples(1000)
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
config = ControlConfig(every_steps=20, batch=BatchConfig(start=64, maximum=128))

loop = ControlLoop(model, optimizer, nn.functional.cross_entropy, train, config=config, epochs=10)
for _ in range(10):
    stats = loop.train_epoch()
    levels = sorted(set(loop.plan.precision.values()))
    print(f"epoch {stats.epoch}: loss {stats.loss:.3f}, batch {loop.plan.batch_size}, layers in {', '.join(levels)}")
print(f"accuracy on held-out samples: {loop.evaluate(held_out).metrics['accuracy']:.1f} %")
loop.close()  # restores the model's original form, with its trained weights
