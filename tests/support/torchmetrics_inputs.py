"""Tiny inputs for the metrics of torchmetrics, of every kind that some metric takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

CLASSES = 3
SIZES = (6, 4, 5, 3)  # numbers of samples in the batches


class Draw:
    """The random generator of a batch: the same in each test.

    Args:
        turn: Index of the batch.
    """

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
        """Integers below a bound."""
        return torch.randint(high, shape, generator=self._generator)

    def choices(self, items: Sequence[str]) -> list[str]:
        """Return as many items as the batch has samples."""
        return [items[index] for index in self.integers(len(items), self.n).tolist()]


Inputs = Callable[[Draw], tuple[Any, ...]]


def scores(draw: Draw) -> tuple[Tensor, Tensor]:
    """Of two classes."""
    return draw.uniform(draw.n), draw.integers(2, draw.n)


def class_scores(draw: Draw) -> tuple[Tensor, Tensor]:
    """Of several classes."""
    return draw.uniform(draw.n, CLASSES).softmax(-1), draw.integers(CLASSES, draw.n)


def label_scores(draw: Draw) -> tuple[Tensor, Tensor]:
    """Of several labels."""
    return draw.uniform(draw.n, CLASSES), draw.integers(2, draw.n, CLASSES)


def long_scores(draw: Draw) -> tuple[Tensor, Tensor]:
    """Of two classes, with a further dimension."""
    return draw.uniform(draw.n, 5), draw.integers(2, draw.n, 5)


def long_class_scores(draw: Draw) -> tuple[Tensor, Tensor]:
    """Of several classes, with a further dimension."""
    return draw.uniform(draw.n, CLASSES, 5).softmax(1), draw.integers(CLASSES, draw.n, 5)


def long_label_scores(draw: Draw) -> tuple[Tensor, Tensor]:
    """Of several labels, with a further dimension."""
    return draw.uniform(draw.n, CLASSES, 5), draw.integers(2, draw.n, CLASSES, 5)


@cache
def ignoring(inputs: Inputs) -> Inputs:
    """Inputs some of whose targets are -1."""

    def drawn(draw: Draw) -> tuple[Any, ...]:
        preds, target = inputs(draw)
        return preds, target.masked_fill(draw.uniform(*target.shape) < 0.2, -1)

    return drawn


def one_hot_maps(draw: Draw) -> tuple[Tensor, Tensor]:
    """Segmentations, a plane for each class."""
    return draw.integers(2, draw.n, CLASSES, 6, 6), draw.integers(2, draw.n, CLASSES, 6, 6)


def index_maps(draw: Draw) -> tuple[Tensor, Tensor]:
    """Segmentations as numbers of classes."""
    return draw.integers(CLASSES, draw.n, 6, 6), draw.integers(CLASSES, draw.n, 6, 6)


def floats(draw: Draw) -> tuple[Tensor, Tensor]:
    """Predictions near their targets."""
    target = draw.normal(draw.n)
    return target + 0.3 * draw.normal(draw.n), target


def positives(draw: Draw) -> tuple[Tensor, Tensor]:
    """The same, all positive."""
    target = draw.uniform(draw.n) + 0.5
    return target * (0.8 + 0.4 * draw.uniform(draw.n)), target


def wide_floats(draw: Draw) -> tuple[Tensor, Tensor]:
    """Predictions of two numbers for each sample."""
    target = draw.normal(draw.n, 2)
    return target + 0.3 * draw.normal(draw.n, 2), target


def distributions(draw: Draw) -> tuple[Tensor, Tensor]:
    """Probabilities of classes."""
    return draw.normal(draw.n, CLASSES).softmax(-1), draw.normal(draw.n, CLASSES).softmax(-1)


def log_distributions(draw: Draw) -> tuple[Tensor, Tensor]:
    """Logarithms of probabilities."""
    return draw.normal(draw.n, CLASSES).log_softmax(-1), draw.normal(draw.n, CLASSES).log_softmax(-1)


def labels(draw: Draw) -> tuple[Tensor, Tensor]:
    """Two numbers of classes for each sample."""
    return draw.integers(CLASSES, draw.n), draw.integers(CLASSES, draw.n)


def clusters(draw: Draw) -> tuple[Tensor, Tensor]:
    """Points, and the cluster of each."""
    return draw.normal(draw.n, 2), torch.arange(draw.n) % 2


def signals(draw: Draw) -> tuple[Tensor, Tensor]:
    """Sounds of two speakers, and processed versions of them."""
    target = draw.normal(draw.n, 2, 50)
    return target + 0.3 * draw.normal(draw.n, 2, 50), target


def spectra(draw: Draw) -> tuple[Tensor, Tensor]:
    """Complex spectra."""
    return draw.normal(draw.n, 9, 5, 2), draw.normal(draw.n, 9, 5, 2)


def images(draw: Draw, size: int = 24, channels: int = 3) -> tuple[Tensor, Tensor]:
    """Images, and processed versions of them."""
    target = draw.uniform(draw.n, channels, size, size)
    return (target + 0.1 * draw.uniform(draw.n, channels, size, size)).clamp(0, 1), target


def pansharpened(draw: Draw) -> tuple[Tensor, dict[str, Tensor]]:
    """Images of high resolution, and their sources."""
    low, high = draw.uniform(draw.n, 3, 8, 8), draw.uniform(draw.n, 3, 16, 16)
    return draw.uniform(draw.n, 3, 16, 16), {"ms": low, "pan": high, "pan_lr": high[..., ::2, ::2]}


def generated(draw: Draw) -> tuple[Tensor, bool]:
    """Images that are real or not, alternating between batches."""
    return draw.integers(256, draw.n, 3, 8, 8).to(torch.uint8), draw.turn % 2 == 0


def panoptic(draw: Draw) -> tuple[Tensor, Tensor]:
    """Categories and instances."""
    return (
        torch.stack([draw.integers(2, draw.n, 4, 4), draw.integers(2, draw.n, 4, 4)], -1),
        torch.stack([draw.integers(2, draw.n, 4, 4), draw.integers(2, draw.n, 4, 4)], -1),
    )


def queries(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """Documents: score, relevance, and query."""
    return draw.uniform(draw.n), draw.integers(2, draw.n), draw.integers(3, draw.n)


SENTENCES = ("the cat sat on a mat", "a dog ran over there", "it rains", "nobody saw the cat")


def sentences(draw: Draw) -> tuple[list[str], list[str]]:
    """Sentences, and one reference for each."""
    return draw.choices(SENTENCES), draw.choices(SENTENCES)


def translations(draw: Draw) -> tuple[list[str], list[list[str]]]:
    """Sentences, and two references for each."""
    return draw.choices(SENTENCES), [
        list(pair) for pair in zip(draw.choices(SENTENCES), draw.choices(SENTENCES), strict=True)
    ]


def answers(draw: Draw) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Answers to questions."""
    given, right = draw.choices(SENTENCES), draw.choices(SENTENCES)
    return (
        [{"prediction_text": text, "id": str(index)} for index, text in enumerate(given)],
        [{"answers": {"answer_start": [0], "text": [text]}, "id": str(index)} for index, text in enumerate(right)],
    )


def tokens(draw: Draw) -> tuple[Tensor, Tensor]:
    """Scores of words."""
    return draw.uniform(draw.n, 5, CLASSES), draw.integers(CLASSES, draw.n, 5)


def points(draw: Draw) -> tuple[Tensor, Tensor]:
    """Clouds of points."""
    return draw.normal(draw.n, 8, 2), draw.normal(draw.n, 8, 2)


def faces(draw: Draw) -> tuple[Tensor, Tensor]:
    """Vertices of speaking faces."""
    return draw.normal(draw.n, 10, 3), draw.normal(draw.n, 10, 3)


def numbers(draw: Draw) -> tuple[Tensor]:
    """Numbers to aggregate."""
    return (draw.normal(draw.n),)


def one_number(draw: Draw) -> tuple[Tensor]:
    """One number to aggregate."""
    return (draw.normal(1)[0],)


def gapped(draw: Draw) -> tuple[Tensor]:
    """Numbers to aggregate, some of which are NaN."""
    values = draw.normal(draw.n)
    values[0] = torch.nan
    return (values,)


def groups(draw: Draw) -> tuple[Any, ...]:
    """Scores of two classes, and the group of each sample."""
    return (*scores(draw), torch.arange(draw.n) % 2)


def segments(draw: Draw) -> tuple[Any, ...]:
    """Predictions of an ensemble for each sample."""
    return draw.normal(draw.n, 3), draw.normal(draw.n)


def square(draw: Draw) -> tuple[Any, ...]:
    """Larger images."""
    return images(draw, 48)


def gray(draw: Draw) -> tuple[Any, ...]:
    """Images of one channel."""
    return images(draw, 24, 1)


def ratings(draw: Draw) -> tuple[Any, ...]:
    """How many of three raters chose each category."""
    counts = draw.integers(3, draw.n)
    return (torch.stack([counts, 1 - counts.clamp(max=1), 3 - counts - (1 - counts.clamp(max=1))], -1),)


def rated(draw: Draw) -> tuple[Any, ...]:
    """Probabilities of categories, of four raters."""
    return (draw.uniform(draw.n, CLASSES, 4),)


def wide(draw: Draw) -> tuple[Any, ...]:
    """Scores of two classes, for two outputs."""
    return draw.uniform(draw.n, 2), draw.integers(2, draw.n, 2)


def tasks(draw: Draw) -> tuple[Any, ...]:
    """Scores of two classes, and numbers, by task."""
    (preds, target), (numbers, wanted) = scores(draw), floats(draw)
    return {"kind": preds, "value": numbers}, {"kind": target, "value": wanted}


def graded(draw: Draw) -> tuple[Any, ...]:
    """Scores, and grades in place of classes."""
    return draw.uniform(draw.n), draw.integers(3, draw.n)


# Networks in place of downloaded ones


class Features(torch.nn.Module):
    """Four features of an image."""

    num_features = 4

    def forward(self, images: Tensor) -> Tensor:
        """The features."""
        return images.float().flatten(2).std(-1).repeat(1, 2)[:, : self.num_features] * torch.tensor([1.0, 2, 3, 4])
