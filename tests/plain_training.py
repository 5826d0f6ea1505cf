"""Train the model of a model file by plain torch on one device."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import torch

from hap.capture.model_file import load_model_file


def plain_losses(path: str | Path, steps: int) -> list[float]:
    """Return the losses of that many steps; ``batches`` begins at step 0, and the seed is 0."""
    file = load_model_file(str(path))
    torch.manual_seed(0)
    model, losses = file.model(), list[float]()
    optimizer = file.optimizer(model.parameters())
    for batch in islice(file.batches(0), steps):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
