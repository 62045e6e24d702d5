"""Exchange of tables and images.

In the rounds they are series without numbers, like metrics. The rounds show which ranks have logged one, and when all
have. Then the ranks exchange their numbers of items and bytes, and compute the same shares of the limits
(`payloads.gathers.fair`). Each rank sends the first items of its share to the primary, which alone needs memory
for them, in pieces of 1 MiB. Each piece may take `peer_timeout`, so a slow network is not mistaken for a dead rank.
Numbers wait meanwhile. Everything is sent over the exchange's group. If a rank dies or is late, the row is marked, as
with numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, cast

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.attachments import NOT_SENT, Attachment
from dist_wandb.exchange.protocol.calls import Key, Series
from dist_wandb.exchange.transport import Group
from dist_wandb.job.ranges import named
from dist_wandb.payloads.cells import Part
from dist_wandb.payloads.framing import framed, unframed
from dist_wandb.payloads.gathers import Encoded, Gathered, Kind, decoded, differ, fair, whole
from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER

_MOST_SHARES = 10  # maximum number of shares in a message
_MOST_BYTES = 64 * 2**20  # maximum bytes that all ranks together send in an exchange


class FusedGathers(Attachment):
    """One rank's part in merging tables and images. All tables fit together, and all images."""

    kinds: tuple[Kind, ...] = ("table", "images")
    not_merged = "that could not be put together"

    def series(self, name: str, value: Gathered, known: Iterable[str] = ()) -> str:  # noqa: ARG002  # an `Attachment`
        self._warn_of_replaced(name, value)
        return Series(name, value.kind).text

    def _warn_of_replaced(self, name: str, value: Gathered) -> None:
        if value.replaced:
            self._notices.warn(
                f"replaced {name}",
                f"{name!r} on rank {self._rank} has values that are not sent to the primary "
                f"({', '.join(value.replaced)}). Cells have their repr instead; boxes and masks of a wandb.Image are "
                "left out.",
            )

    def alone(self, name: str, value: Gathered) -> dict[str, Any]:
        self._warn_of_replaced(name, value)
        parts = [value.part(self._rank)]
        self._warn_of_cuts(name, value.kind, parts)
        found = whole(value.kind, parts)
        return {} if found is None else {name: found}

    def keep(self, key: Key, value: Gathered) -> None:
        try:
            encoded = value.encoded().within(_MOST_BYTES)  # more is never sent
            self._contributions.add(key, encoded, encoded.size)
        except Exception as error:  # noqa: BLE001  # an error of a value must not end the exchange
            self._lost[NOT_SENT] += 1
            self._notices.warn(
                f"encode {key.name}", f"{key.series.name!r} on rank {self._rank} cannot be sent: {error!r}"
            )

    def _exchange(self, keys: Sequence[Key], group: Group) -> None:
        mine = [self._contributions.get(key) for key in keys]
        told = group.tally(json.dumps([*map(_amount, mine)]).encode())
        by_rank = {rank: self._amounts(text, len(keys)) for text, ranks in told.items() for rank in ranks}
        amounts = [by_rank[rank] for rank in sorted(by_rank)]
        shares = [
            fair([count for count, _, _ in column], max(limit for *_, limit in column))
            for column in zip(*amounts, strict=True)
        ]
        room = fair([size for rank in amounts for _, size, _ in rank], _MOST_BYTES)[group.rank * len(keys) :]
        sent = [
            b"" if own is None else own.within(size, share[group.rank]).as_bytes(self._rank)
            for own, share, size in zip(mine, shares, room, strict=False)
        ]
        received = [self._apart(bytes(data), len(keys)) for data in group.collect(framed(*sent))]
        if self._merges and received:
            for key, *blobs in zip(keys, *received, strict=True):
                self.values[key] = self._whole(key, [blob for blob in blobs if blob])
        elif self._merges:  # into a run of its own: the first rank's has the value
            for key, column in zip(keys, zip(*amounts, strict=True), strict=True):
                self.values[key] = {}, sum(map(any, column))

    def _amounts(self, text: bytes, number: int) -> list[list[int]]:
        """Return a rank's amounts for each cell; zeros if they are malformed, with the same result on all ranks."""
        try:
            amounts = json.loads(text)
            if len(amounts) == number and all(_is_amount(amount) for amount in amounts):
                return list(amounts)
        except (ValueError, TypeError, RecursionError):
            pass
        self._notices.warn(
            "amounts",
            f"a rank sent {len(text)} bytes that are not amounts of tables and images. Its tables and images are left "
            "out. Install the same version of dist_wandb on all ranks.",
        )
        return [[0, 0, 0]] * number

    def _apart(self, data: bytes, number: int) -> list[bytes]:
        try:
            parts = unframed(data)
        except ConfigurationError as error:  # malformed
            self._notices.warn("apart", str(error))
            parts = []
        return parts if len(parts) == number else [b""] * number

    def _whole(self, key: Key, blobs: Sequence[bytes]) -> tuple[dict[str, Any], int]:
        name, kind = key.series.name, cast("Kind", key.series.kind)
        try:
            parts = sorted((decoded(kind, blob) for blob in blobs), key=lambda part: part.rank)
            self._warn_of_cuts(name, kind, parts)
            value = whole(kind, parts)
        except Exception as error:  # noqa: BLE001  # an error of received bytes must not end the exchange
            self._lost[self.not_merged] += 1
            self._notices.warn(
                f"whole {name}", f"{name!r} could not be put together from the parts of the ranks: {error!r}"
            )
            return {}, len(blobs)
        return {} if value is None else {name: value}, len(blobs)

    def _warn_of_cuts(self, name: str, kind: Kind, parts: Sequence[Part]) -> None:
        what = "rows" if kind == "table" else "images"
        if differ(parts):
            self._notices.warn(
                f"columns {name}",
                f"ranks logged {name!r} with different columns. They are matched by name, and filled with None.",
            )
        kept, total = sum(len(part.items) for part in parts), sum(part.total for part in parts)
        if kept < total:
            self._notices.warn(
                f"cut {name}",
                f"{name!r} has {kept:,} of {total:,} {what} ({_shares(parts)}): that is the limit for all ranks "
                f"together, or {_MOST_BYTES // 2**20} MiB. See the argument limit. Further cuts are not reported.",
            )


def _shares(parts: Sequence[Part]) -> str:
    alike: dict[tuple[int, int], list[int]] = {}
    for part in parts:
        alike.setdefault((len(part.items), part.total), []).append(part.rank)
    shares = [
        f"{kept} of {total} of {'each of ' if len(ranks) > 1 else ''}{named(ranks)}"
        for (kept, total), ranks in alike.items()
    ]
    return ", ".join([*shares[:_MOST_SHARES], *(["..."] if len(shares) > _MOST_SHARES else [])])


def _amount(own: Encoded | None) -> tuple[int, int, int]:
    """Return a rank's number of items for a cell, their bytes, and its limit for the items of all ranks."""
    return (0, 0, 0) if own is None else (len(own.items), own.size, own.limit)


def _is_amount(amount: Any) -> bool:
    parts = isinstance(amount, list) and len(amount) == len(_amount(None))
    return parts and all(type(part) is int and 0 <= part < LARGEST_EXACT_INTEGER for part in amount)
