"""Tiny inputs for the metrics of torchmetrics, of every kind that some metric takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

CLASSES = 3
SIZES = (6, 4, 5, 3)  # numbers of samples in the batches


class Draw:
    """The random generator of a batch: the same in each test."""

    def __init__(self, turn: int) -> None:
        self.turn = turn
        self.n = SIZES[turn]
        self._generator = torch.Generator().manual_seed(turn)

    def uniform(self, *shape: int) -> Tensor:
        """Numbers between 0 and 1."""
        return torch.rand(*shape, generator=self._generator)

    def normal(self, *shape: int) -> Tensor:
        """Normally distributed numbers."""
        return torch.randn(*shape, generator=self._generator)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self._generator)

    def choices(self, items: Sequence[str]) -> list[str]:
        """Return as many items as the batch has samples."""
        return [items[index] for index in self.integers(len(items), self.n).tolist()]


Inputs = Callable[[Draw], tuple[Any, ...]]
SENTENCES = ("the cat sat on a mat", "a dog ran over there", "it rains", "nobody saw the cat")


def floats(draw: Draw) -> tuple[Any, ...]:
    target = draw.normal(draw.n)
    return target + 0.3 * draw.normal(draw.n), target


def positives(draw: Draw) -> tuple[Any, ...]:
    target = draw.uniform(draw.n) + 0.5
    return target * (0.8 + 0.4 * draw.uniform(draw.n)), target


def wide_floats(draw: Draw) -> tuple[Any, ...]:
    target = draw.normal(draw.n, 2)
    return target + 0.3 * draw.normal(draw.n, 2), target


def signals(draw: Draw) -> tuple[Any, ...]:
    target = draw.normal(draw.n, 2, 50)
    return target + 0.3 * draw.normal(draw.n, 2, 50), target


def images(draw: Draw, size: int = 24, channels: int = 3) -> tuple[Any, ...]:
    target = draw.uniform(draw.n, channels, size, size)
    return (target + 0.1 * draw.uniform(draw.n, channels, size, size)).clamp(0, 1), target


def pansharpened(draw: Draw) -> tuple[Any, ...]:
    low, high = draw.uniform(draw.n, 3, 8, 8), draw.uniform(draw.n, 3, 16, 16)
    return draw.uniform(draw.n, 3, 16, 16), {"ms": low, "pan": high, "pan_lr": high[..., ::2, ::2]}


def answers(draw: Draw) -> tuple[Any, ...]:
    given, right = draw.choices(SENTENCES), draw.choices(SENTENCES)
    return (
        [{"prediction_text": text, "id": str(index)} for index, text in enumerate(given)],
        [{"answers": {"answer_start": [0], "text": [text]}, "id": str(index)} for index, text in enumerate(right)],
    )


def gapped(draw: Draw) -> tuple[Any, ...]:
    values = draw.normal(draw.n)
    values[0] = torch.nan
    return (values,)


def ratings(draw: Draw) -> tuple[Any, ...]:
    counts = draw.integers(3, draw.n)
    return (torch.stack([counts, 1 - counts.clamp(max=1), 3 - counts - (1 - counts.clamp(max=1))], -1),)


def tasks(draw: Draw) -> tuple[Any, ...]:
    (preds, target), (numbers, wanted) = INPUTS["scores"](draw), floats(draw)
    return {"kind": preds, "value": numbers}, {"kind": target, "value": wanted}


class Features(torch.nn.Module):
    """Four features of an image, in place of those of a network that is downloaded."""

    num_features = 4

    def forward(self, images: Tensor) -> Tensor:
        return images.float().flatten(2).std(-1).repeat(1, 2)[:, : self.num_features] * torch.tensor([1.0, 2, 3, 4])


INPUTS: dict[str, Inputs] = {
    "scores": lambda draw: (draw.uniform(draw.n), draw.integers(2, draw.n)),
    "class_scores": lambda draw: (draw.uniform(draw.n, CLASSES).softmax(-1), draw.integers(CLASSES, draw.n)),
    "label_scores": lambda draw: (draw.uniform(draw.n, CLASSES), draw.integers(2, draw.n, CLASSES)),
    "long_scores": lambda draw: (draw.uniform(draw.n, 5), draw.integers(2, draw.n, 5)),
    "long_class_scores": lambda draw: (draw.uniform(draw.n, CLASSES, 5).softmax(1), draw.integers(CLASSES, draw.n, 5)),
    "long_label_scores": lambda draw: (draw.uniform(draw.n, CLASSES, 5), draw.integers(2, draw.n, CLASSES, 5)),
    "one_hot_maps": lambda draw: (draw.integers(2, draw.n, CLASSES, 6, 6), draw.integers(2, draw.n, CLASSES, 6, 6)),
    "index_maps": lambda draw: (draw.integers(CLASSES, draw.n, 6, 6), draw.integers(CLASSES, draw.n, 6, 6)),
    "distributions": lambda draw: (draw.normal(draw.n, CLASSES).softmax(-1), draw.normal(draw.n, CLASSES).softmax(-1)),
    "labels": lambda draw: (draw.integers(CLASSES, draw.n), draw.integers(CLASSES, draw.n)),
    "clusters": lambda draw: (draw.normal(draw.n, 2), torch.arange(draw.n) % 2),
    "spectra": lambda draw: (draw.normal(draw.n, 9, 5, 2), draw.normal(draw.n, 9, 5, 2)),
    "generated": lambda draw: (draw.integers(256, draw.n, 3, 8, 8).to(torch.uint8), draw.turn % 2 == 0),
    "panoptic": lambda draw: (
        torch.stack([draw.integers(2, draw.n, 4, 4), draw.integers(2, draw.n, 4, 4)], -1),
        torch.stack([draw.integers(2, draw.n, 4, 4), draw.integers(2, draw.n, 4, 4)], -1),
    ),
    "queries": lambda draw: (draw.uniform(draw.n), draw.integers(2, draw.n), draw.integers(3, draw.n)),
    "sentences": lambda draw: (draw.choices(SENTENCES), draw.choices(SENTENCES)),
    "translations": lambda draw: (
        draw.choices(SENTENCES),
        [list(pair) for pair in zip(draw.choices(SENTENCES), draw.choices(SENTENCES), strict=True)],
    ),
    "tokens": lambda draw: (draw.uniform(draw.n, 5, CLASSES), draw.integers(CLASSES, draw.n, 5)),
    "points": lambda draw: (draw.normal(draw.n, 8, 2), draw.normal(draw.n, 8, 2)),
    "faces": lambda draw: (draw.normal(draw.n, 10, 3), draw.normal(draw.n, 10, 3)),
    "numbers": lambda draw: (draw.normal(draw.n),),
    "one_number": lambda draw: (draw.normal(1)[0],),
    "groups": lambda draw: (*INPUTS["scores"](draw), torch.arange(draw.n) % 2),
    "segments": lambda draw: (draw.normal(draw.n, 3), draw.normal(draw.n)),
    "square": lambda draw: images(draw, 48),
    "gray": lambda draw: images(draw, 24, 1),
    "rated": lambda draw: (draw.uniform(draw.n, CLASSES, 4),),
    "wide": lambda draw: (draw.uniform(draw.n, 2), draw.integers(2, draw.n, 2)),
    "graded": lambda draw: (draw.uniform(draw.n), draw.integers(3, draw.n)),
    "ratios": lambda draw: (draw.uniform(draw.n, 4), draw.uniform(draw.n, 4)),
    "wide_positives": lambda draw: (draw.uniform(draw.n, 2), draw.uniform(draw.n, 2)),
    "plain_images": lambda draw: images(draw)[:1],
    "plain_generated": lambda draw: (INPUTS["generated"](draw)[0],),
    "weighted": lambda draw: (draw.normal(draw.n), draw.uniform(draw.n)),
    "floats": floats,
    "positives": positives,
    "wide_floats": wide_floats,
    "signals": signals,
    "images": images,
    "pansharpened": pansharpened,
    "answers": answers,
    "gapped": gapped,
    "ratings": ratings,
    "tasks": tasks,
}
