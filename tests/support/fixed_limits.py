"""Limits of the package that no option changes, made smaller or larger for a test."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from dist_wandb.exchange import attachments, collective, direct, interface, membership, participation, transport, turns
from dist_wandb.exchange.attachments import gathers
from dist_wandb.exchange.membership import generations
from dist_wandb.exchange.protocol import rounds
from dist_wandb.exchange.transport import gloo, tree
from dist_wandb.job import connection, job_identity, timed_caller
from dist_wandb.session import registry, relay, remote_session, sections
from dist_wandb.session.stalls import watcher

ChangeLimits = Callable[..., None]

_PLACES: dict[str, tuple[ModuleType, str]] = {
    # seconds of the exchange
    "apart": (generations, "APART"),
    "forming_more": (gloo, "FORMING_MORE"),
    "last_round": (collective, "_LAST_ROUND"),
    "last_rounds_of_failed": (interface, "_LAST_ROUNDS"),
    "last_wait_for_devices": (collective, "_LAST_WAIT"),
    "last_writes": (interface, "LAST_WRITES"),
    "quiet": (interface, "_QUIET"),
    "standstill": (turns, "_STANDSTILL"),
    "standstill_of_own_rows": (direct, "_STANDSTILL"),
    "term": (membership, "_TERM"),
    # numbers of the exchange
    "fan_out": (transport, "FAN_OUT"),
    "most_bytes": (gathers, "_MOST_BYTES"),
    "most_collected": (gloo, "MOST_COLLECTED"),
    "most_delivered": (attachments, "_MOST_KEPT"),
    "most_gathered": (gloo, "MOST_GATHERED"),
    "most_held": (tree, "_MOST_HELD"),
    "most_kept": (participation, "_MOST_KEPT"),
    "most_together": (tree, "_MOST_TOGETHER"),
    "most_values": (rounds, "MOST_VALUES"),
    "most_waiting": (attachments, "_MOST_WAITING"),
    "new_name_heartbeats": (turns, "NEW_NAME_HEARTBEATS"),
    "piece": (gloo, "PIECE"),
    "serial": (gloo, "SERIAL"),
    # of the job's store
    "idle_threads": (timed_caller, "_KEPT"),
    "least_patience": (connection, "_LEAST_PATIENCE"),
    "optional_layout": (job_identity, "_OPTIONAL_TIMEOUT"),
    "quick_answers": (connection, "_QUICK_TIMEOUT"),
    "silent_store": (watcher, "_SILENT_STORE"),
    "term_of_last_rank": (job_identity, "_TERM"),
    # of a session
    "handshake": (remote_session, "HANDSHAKE"),
    "last_rows_of_children": (relay, "_LAST_ROWS"),
    "most_sections": (sections, "_MOST_WAITING"),
    "retry_after": (remote_session, "_RETRY_AFTER"),
    "sigterm_at_a_time": (registry, "_AT_A_TIME"),
    "sigterm_moment": (registry, "_MOMENT"),
    "stuck": (remote_session, "_STUCK"),
}


def change_limits(patch: pytest.MonkeyPatch, **limits: float) -> None:
    """Change limits, given by their names above, until the patch is undone."""
    for name, value in limits.items():
        patch.setattr(*_PLACES[name], value)
