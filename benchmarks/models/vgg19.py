"""VGG19 on 32x32 images: cheap convolutions, then fully connected layers with 86% of the weights.

Configuration E, without batch norm, with the classifier of the ImageNet model: the features
are pooled to 7x7, which for a 32x32 image (1x1 after five halvings) means repeated 49 times.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIGURATION_E = ((64,) * 2, (128,) * 2, (256,) * 4, (512,) * 4, (512,) * 4)


class VGG(nn.Module):
    def __init__(self, stages, pooled: int, hidden: int, classes: int, dropout: float):
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in stages:
            for width in stage:
                layers += [nn.Conv2d(channels, width, kernel_size=3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(pooled)
        self.classifier = nn.Sequential(
            nn.Linear(channels * pooled * pooled, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )
        for module in self.modules():  # without batch norm, torch's default makes signals vanish
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """images: (batch, 3, height, width), labels: (batch,). Returns the mean cross entropy."""
        x = self.pool(self.features(images))
        return F.cross_entropy(self.classifier(x.flatten(1)), labels)


def build(
    stages=CONFIGURATION_E,
    pooled: int = 7,
    hidden: int = 4096,
    classes: int = 10,
    dropout: float = 0.5,
):
    """``stages``: the widths of the convolutions between one 2x2 max pool and the next."""
    return VGG(stages, pooled, hidden, classes, dropout)


def inputs(size: int = 256, image: int = 32, classes: int = 10):
    return torch.randn(size, 3, image, image), torch.randint(classes, (size,))


def optimizer(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def model():
    return build()


def batch():
    return inputs()


def tiny():
    return build(stages=((6,), (9, 9)), pooled=2, hidden=48, classes=11, dropout=0.0)


def tiny_batch():
    return inputs(size=12, image=4, classes=11)


def tiny_dropout():
    return build(stages=((6,), (9, 9)), pooled=2, hidden=48, classes=11, dropout=0.2)


tiny_dropout_batch = tiny_batch


RACE_STAGES = tuple(tuple(width // 4 for width in stage) for stage in CONFIGURATION_E)


def race():
    """All 16 convolutions at a quarter of the width; the classifier has 71 % of the weights."""
    return build(stages=RACE_STAGES, pooled=5, hidden=768, dropout=0.0)


def race_batch():
    return inputs(size=256)


race_x4 = race


def race_x4_batch():
    return inputs(size=4 * 256)


race_tiny, race_tiny_batch = tiny, tiny_batch
