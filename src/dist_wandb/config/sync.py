"""The config of a run, on all ranks: compared at the start, told by the primary, read everywhere.

Only the job's store is used, so nobody waits for a rank that may never come, but for those who ask for it: a rank that
reads the config of a run which another rank opens, and ranks with ``config_sync="check"``.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from dist_wandb.config.text import ConfigText
from dist_wandb.errors import ConfigurationError, RendezvousError
from dist_wandb.runs import job_arguments, null_run, run_config, run_metadata, wandb_process
from dist_wandb.settings.config_values import (
    comparable,
    differences,
    given_values,
    is_plain,
    listed,
    shown,
    told,
    without_ranks,
)
from dist_wandb.settings.config_withheld import MISSING, Known, filled, withheld, without_notes, without_secrets
from dist_wandb.settings.plan import tells_job, unit_run_id
from dist_wandb.store.timed_caller import STORE_PATIENCE, TimedCaller, briefly
from dist_wandb.user_lines import users_line, warn

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun
    from dist_wandb.settings.options import Options
    from dist_wandb.settings.plan import RunPlan
    from dist_wandb.store.job_store import JobStore
    from dist_wandb.topology.model import Topology

_log = logging.getLogger("dist_wandb")

# Keys in the job's store
_GIVEN, _VERDICT, _DIFFERS, _REFUSED = "config/given", "config/verdict", "config/differs", "config/refused"
_SALT = "config/salt"
_LEAST_PATIENCE = 0.5  # seconds that the store gets to answer
_PATIENCE = 1.0  # seconds that a write waits for another thread to have looked at the store
_CONFIG_SYNC = "_dist_wandb_config_sync"  # on wandb's config, in its instance's namespace, not among its values


class ConfigSync:
    """One rank's part in having one config on all ranks.

    Args:
        options: The checked arguments of the door.
        topology: Who this rank is, among several.
        config: What this rank was given as `config`, without what W&B is to leave out.

    Attributes:
        rank: This rank, for messages.
        knows_of_end: Whether this rank has no run, and has seen that the user finished the one that it logs to.
    """

    def __init__(self, options: Options, topology: Topology, config: object) -> None:
        self._sync = options.config_sync
        self._heartbeat = options.limits.heartbeat
        self._timeout = options.limits.join_timeout
        # The session's thread looks as well: a store that has stalled must not make it look dead to the other ranks.
        self._patience = max(_LEAST_PATIENCE, min(STORE_PATIENCE, options.limits.peer_timeout / 2))
        self._topology = topology
        self.rank = topology.global_rank
        self._run_mode = options.run_mode
        self._given = given_values(config)
        self._salt = secrets.token_hex(16)  # of digests that this rank tells
        self._made: tuple[str, dict[str, Any], dict[str, list[str]]] | None = None  # with which salt what was made
        self._opened_at = users_line()
        self._has_compared = self._sync == "off" or tells_job(topology)
        self._has_told_given = self._sync == "off" or not tells_job(topology)
        self._find: Callable[[], JobStore | None] = lambda: None
        self._has_ended: Callable[[], bool] = lambda: False
        self._replace_run: Callable[[AnyRun, Exception], None] | None = None
        self._job_store: JobStore | None = None
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._is_looking = self._is_over = False
        self._next_look = 0.0
        self._warned: set[str] = set()
        self._refused: set[str] = set()  # names whose values W&B cannot hold, as has been said
        self._run: AnyRun = null_run.NullRun()
        self._config: Any = None  # that of this rank's run
        self._facts: dict[str, Any] = {}  # what the followed rank told of its run last
        self._is_resumed = False
        self._tells: tuple[str, ...] = ()
        self._follows: str | None = None
        self._completes = False  # what is followed adds to what this rank has; otherwise it replaces it
        self._imposed: list[str] = []  # names whose values are a sweep's, which win over what any rank was given
        self._own: set[str] = set(self._given)  # names that this rank set itself, other than all do
        self._from_primary: set[str] = set()  # names of this rank's run that were set by following
        self._seen: dict[str, Any] = {}  # what the followed rank told last, as it told it
        self._is_known = self._gave_up = False
        self.knows_of_end = False
        self._shown = Known()
        self._written: set[str] = set()  # names that were written on this rank, which has no run
        self._text = ConfigText()  # of that of this rank's run, as it is told
        self._noticed: deque[str] = deque()  # names that were written since it was brought up to date
        self._told_facts: dict[str, Any] = {}
        self._version = 0  # how often it was told
        self._seen_version = 0  # of what is followed
        self._has_told = False

    # At the start

    def reach_by(self, find: Callable[[], JobStore | None]) -> None:
        """Say how the job's store is found, which may be there later than this rank's session."""
        self._find = find

    def ended_by(self, has_ended: Callable[[], bool]) -> None:
        """Say how to find out whether the leading rank has ended this session, so that nobody waits for its config."""
        self._has_ended = has_ended

    def on_lost(self, replace_run: Callable[[AnyRun, Exception], None]) -> None:
        """Say what is to be done if wandb's own process is found gone: it has to `attach` the run's replacement."""
        self._replace_run = replace_run

    def has_lost_run(self, error: Exception) -> bool:
        """Whether wandb could not write a value because its own process is gone."""
        return wandb_process.has_lost_service(self._run, error)

    def rescue(self, values: Mapping[str, Any], config: object, error: Exception) -> None:
        """Write values that `config` could not take, as wandb's own process is gone, into what replaces the run."""
        if self._replace_run is None:
            raise error
        if self._config is config:  # otherwise somebody else has replaced its run meanwhile
            self._replace_run(self._run, error)
        if self._config is not None:
            _plainly_update(self._config, values)

    def compare(self) -> None:
        """Tell what this rank was given; with ``config_sync="check"``, agree with all ranks whether that is the same.

        Raises:
            ConfigurationError: It is not, and it has to be: on all ranks.
            RendezvousError: It has to be the same, but there is no way to find out.
        """
        if self._sync == "check" and self._topology.world_size > 1:
            self._check(self._beside())
        else:
            self.look(at_once=True)

    def _check(self, job_store: JobStore | None) -> None:
        if job_store is None:
            raise RendezvousError(
                f"config_sync='check' compares the configs of all ranks, but rank {self.rank} has no store through "
                "which to reach them. Call init_process_group first, or start the job with torchrun."
            )
        self._salt = job_store.claim(_SALT, self._salt)  # the same on all ranks, for rank 0 to compare with each other
        job_store.publish_own(_GIVEN, self._told_given())
        self._has_told_given = True
        verdict = self._pass_verdict(job_store) if tells_job(self._topology) else self._await_verdict(job_store)
        if verdict["differences"]:
            raise ConfigurationError(
                f"config_sync='check', but the ranks were given different configs: {listed(verdict['differences'])}. "
                "Give all ranks the same, or pass config_sync='warn'."
            )

    def _pass_verdict(self, job_store: JobStore) -> Any:
        """Compare what all ranks said, as far as they come in time."""
        try:
            given = dict(enumerate(job_store.wait_get_all(_GIVEN)))
        except RendezvousError:
            keys = {rank: f"{_GIVEN}/{rank}" for rank in range(self._topology.world_size)}
            given = {rank: job_store.try_get(key) for rank, key in keys.items() if job_store.has([key])}
            missing = ", ".join(str(rank) for rank in keys if rank not in given)
            warn(
                f"config_sync='check' waited {self._timeout:g} s, but rank {missing} did not come: its config is not "
                "compared. Open the run on all ranks, or pass config_sync='warn', which does not wait.",
                self._opened_at,
            )
        main = self._topology.main_rank
        values = {rank: told_by["values"] for rank, told_by in given.items()}
        found = [text for rank in values for text in differences(values[rank], rank, values[main], main)]
        return job_store.claim(_VERDICT, {"differences": found})

    def _await_verdict(self, job_store: JobStore) -> Any:
        try:
            return job_store.wait_get(_VERDICT, f"rank {self._topology.main_rank}")
        except RendezvousError:  # whoever comes later finds this one, so that all go on, or none
            return job_store.claim(_VERDICT, {"differences": []})

    def completed(self, init_arguments: Mapping[str, Any], plan: RunPlan, unit: str) -> Mapping[str, Any]:
        """The arguments of `wandb.init` for another writer of a shared run: what its primary has, if it has told."""
        if not plan.has_writers or plan.primary:
            return init_arguments
        record = self._peek(_config_key(unit))
        if record is None:
            return init_arguments
        return {**init_arguments, "config": self._filled(json.loads(record["values"]))}

    def _filled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What a primary has told of its config, with secrets of this rank's own."""
        found = {name: filled(value, self._given.get(name, MISSING)) for name, value in values.items()}
        return {name: value for name, value in found.items() if value is not MISSING}

    def takeable(self, init_arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of `wandb.init`, without values of `config` that it would raise over.

        Args:
            init_arguments: Keyword arguments of `wandb.init`.

        Returns:
            The same object where wandb takes all of it; otherwise a copy in which such values are replaced by their
            repr, with a warning.
        """
        config = init_arguments.get("config")
        values = given_values(config)
        chosen = job_arguments.chosen_config(init_arguments)
        refused = [name for name, value in chosen.items() if not (is_plain(value) or run_config.can_hold(value))]
        is_wandbs_kind = not isinstance(config, (Mapping, ConfigView)) or (
            isinstance(config, dict) and all(isinstance(name, str) for name in config)
        )
        if not refused and is_wandbs_kind:
            return init_arguments
        self.warn_of_refused(refused)
        taken = {name: shown(value) if name in refused else value for name, value in values.items()}
        return {**init_arguments, "config": taken}

    def warn_of_refused(self, names: Iterable[str]) -> None:
        """Say once in the job that values of these names are written as text."""
        new = [name for name in names if name not in self._refused]
        self._refused.update(new)
        listing = listed([repr(name) for name in new])
        if new and self._is_first_to_say(f"{_REFUSED}/{listing}"):
            warn(
                f"W&B cannot hold these values of the config on rank {self.rank}, so their repr is written: {listing}. "
                "Pass text, numbers, lists and dicts.",
                users_line() or self._opened_at,
            )

    def _is_first_to_say(self, what: str) -> bool:
        """Whether no other rank says the same; of what cannot be found out, every rank does."""
        with suppress(RendezvousError):
            job_store = self._reach() if self._may_meet() else None
            return job_store is None or job_store.claim(what, self.rank) == self.rank
        return True

    def attach(self, run: AnyRun, plan: RunPlan, unit: str) -> None:
        """Begin to tell, to follow or to show the config, as this rank's part is.

        Args:
            run: This rank's run, or a `NullRun`, which gets a config that can be read.
            plan: What this rank does with W&B.
            unit: Name of its unit.
        """
        leads_job, leads_unit = tells_job(self._topology), plan.announces
        job_key = _config_key("")  # that of the only unit, or, beside those of all nodes, of the whole job
        self._tells = (_config_key(unit),) if leads_unit else ()
        if leads_job and unit:
            self._tells += (job_key,)
        if not leads_job:
            self._follows = job_key if leads_unit else _config_key(unit)
        self._completes = leads_unit or plan.run_mode == "new"
        if isinstance(run, null_run.NullRun):
            run.show_config(ConfigView(self))
            run.show_metadata(self.facts, unit_run_id(plan) if plan.base_id is not None else None)
        else:
            self._run = run
            self._config = getattr(run, "config", None)  # a stand-in for a run, in somebody's tests, may have none
            self._is_resumed = bool(getattr(run, "resumed", False))
            if getattr(run, "sweep_id", None):
                self._imposed = self._not_given(given_values(self._config))
            _watch(self._config, self)
        self._text, self._has_told = ConfigText(given=self._given), False
        self.look(at_once=True, whole=True)

    # While it lasts

    def look(self, *, at_once: bool = False, whole: bool = False) -> None:
        """Tell others what is new here, and take over what is new elsewhere. Never waits for a rank.

        Args:
            at_once: Whether to do so now. Otherwise it is done once in a heartbeat.
            whole: Whether to look into all values. Otherwise into those that were written, and into a few of those
                that may have changed inside: this is done on a thread whose rounds others wait for.
        """
        now = time.monotonic()
        if not (at_once or now >= self._next_look) or not self._may_meet():
            return
        if self._lock.acquire(timeout=_PATIENCE if at_once else 0.0):
            try:
                if not self._is_looking:
                    self._next_look = now + self._heartbeat
                    self._do_all(whole=whole)
            finally:
                self._lock.release()

    def _do_all(self, *, whole: bool) -> None:
        self._is_looking = True  # to read and write the config on the way does not begin this again
        try:
            self._tell_given()
            self._compare_with_first()
            self._follow()
            self._look_for_end()
            self._tell(whole=whole)
        except RendezvousError as error:  # the store is gone, and mostly the job with it
            _log.debug("dist_wandb: the config of rank %d cannot be told or looked up: %s", self.rank, error)
        except Exception:  # noqa: BLE001  # the training must not suffer
            if "look" not in self._warned:
                self._warned.add("look")
                _log.exception("dist_wandb: rank %d could not bring its config up to date", self.rank)
        finally:
            self._is_looking = False

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Look now, and take over nothing meanwhile: what is written depends on what is there."""
        self.look(at_once=True)
        if self._lock.acquire(timeout=_PATIENCE):
            was_looking, self._is_looking = self._is_looking, True
            try:
                yield
            finally:
                self._is_looking = was_looking
                self._lock.release()
            self.look(at_once=True)
        else:  # another thread waits for a store that has stalled
            yield

    def catch_up(self) -> None:
        """Look now, but do not wait long for a store whose host has stalled."""
        if self._may_meet():
            briefly(lambda: self.look(at_once=True, whole=True), None, _PATIENCE)

    def _may_meet(self) -> bool:
        """Whether there are other ranks to ask: not in a fork either, where the connection is the parent's."""
        return self._topology.world_size > 1 and not self._is_over and os.getpid() == self._pid

    def let_go(self) -> None:
        """Tell and take over nothing any more, and leave the run's config as it was found."""
        self._is_over = True
        self._job_store, self._find = None, lambda: None  # its connection would last until Python looks for circles
        if self._config is not None:
            _unwatch(self._config, self)

    def _reach(self) -> JobStore | None:
        if self._job_store is None:
            self._job_store = self._beside(TimedCaller(self._patience))
        return self._job_store

    def _beside(self, caller: TimedCaller | None = None) -> JobStore | None:
        found = self._find()
        return None if found is None else found.beside("config_sync", caller)

    def _peek(self, key: str) -> Any | None:
        job_store = self._reach()
        return None if job_store is None else job_store.try_get(key)

    def _told_given(self) -> dict[str, Any]:
        """What this rank was given, for others to compare."""
        return {"salt": self._salt, "values": self._compared(self._salt)}

    def _compared(self, salt: str) -> dict[str, list[str]]:
        values, made = self._comparable(salt)
        return without_ranks(values, made, salt)

    def _comparable(self, salt: str) -> tuple[dict[str, Any], dict[str, list[str]]]:
        """What this rank was given, without secrets, and what others need to compare theirs with it."""
        if self._made is None or self._made[0] != salt:
            values = without_secrets(self._given)
            self._made = salt, values, comparable(values, salt)
        return self._made[1:]

    def _tell_given(self) -> None:
        job_store = None if self._has_told_given else self._reach()
        if job_store is not None:
            job_store.publish_own(_GIVEN, self._told_given())
            self._has_told_given = True

    def _compare_with_first(self) -> None:
        first = None if self._has_compared else self._peek(f"{_GIVEN}/{self._topology.main_rank}")
        if first is None:
            return
        self._has_compared = True
        main = self._topology.main_rank
        mine = differences(self._compared(first["salt"]), self.rank, first["values"], main)
        if self._sync == "warn" and self._run_mode == "new":  # its ranks have runs of their own for that
            return
        if mine and self._is_first_to_say(_DIFFERS):
            more = " Further ranks may differ, too." if self._topology.world_size > 2 else ""  # noqa: PLR2004
            warn(
                f"The ranks were given different configs: {listed(mine)}.{more} The config of a run is that "
                "of its primary. config_sync='check' makes this an error, 'off' silences it.",
                self._opened_at,
                may_raise=False,  # it is a matter of time on which thread this is found out
            )

    def _tell(self, *, whole: bool) -> None:
        if not self._tells or self._config is None:
            return
        facts = run_metadata.metadata_of(self._run)
        if self._renew_text(whole=whole) or facts != self._told_facts:
            self._told_facts, self._has_told = facts, False
        job_store = None if self._has_told else self._reach()
        if job_store is None:
            return
        record = {"values": str(self._text), "imposed": self._imposed, "facts": facts}
        for key in self._tells:
            if not self._version:
                job_store.publish(_given_key(key), {"salt": self._salt, "digests": self._digests(self._salt)})
            job_store.publish(key, record)
            job_store.publish(_version_key(key), self._version + 1)  # last: who sees it finds the rest
        self._version += 1
        self._has_told = True

    def _renew_text(self, *, whole: bool) -> bool:
        """Bring the text of the config up to date; whether it is another one."""
        config, names = self._config, set[str]()
        while self._noticed:
            names.add(self._noticed.popleft())
        if whole or not isinstance(config, _Watching) or any(name not in config for name in names):
            return self._text.renew(given_values(config))
        is_new = self._text.renew({name: config[name] for name in names if not name.startswith("_")})
        return self._text.glance(config.__getitem__) or is_new

    def _digests(self, salt: str) -> dict[str, str]:
        return {name: digest for name, (_, digest) in self._comparable(salt)[1].items()}

    def _not_given(self, values: Mapping[str, Any]) -> list[str]:
        """Names of values that are not as this rank was given them."""
        now, given = comparable(values), comparable(self._given)
        return [name for name in now if name not in given or now[name][1] != given[name][1]]

    def _follow(self) -> None:
        if self._follows is None:
            return
        version = self._peek(_version_key(self._follows))
        if version is None or (self._is_known and version == self._seen_version):
            return
        given = {} if self._is_known else self._peek(_given_key(self._follows))
        record = self._peek(self._follows)
        if record is not None and given is not None:
            self._take_over(record, given)
            self._seen_version = version

    def _take_over(self, record: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        values: dict[str, Any] = json.loads(record["values"])
        if not self._is_known:
            theirs = given.get("digests", {})
            mine = self._digests(given["salt"]) if theirs else {}
            self._own -= {name for name, digest in theirs.items() if mine.get(name) == digest}
            self._own |= self._of_earlier_starts(values)
        kept = self._own - set(record["imposed"]) if self._completes else set()
        changed = [name for name in values if name not in self._seen or self._seen[name] != values[name]]
        new = {name: self._with_own(name, values[name]) for name in changed if name not in kept}
        self._seen, self._is_known = values, True
        self._facts = run_metadata.from_json(record["facts"])
        if self._config is None:
            self._show(values, new)
            return
        here = given_values(self._config)
        due = {
            name: value
            for name, value in new.items()
            if value is not MISSING and (name not in here or told(here[name]) != told(value))
        }
        if due:
            self._noticed.extend(due)
            self._from_primary |= due.keys()
            _plainly_update(self._config, due)

    def _with_own(self, name: str, value: Any) -> Any:
        """What the followed rank has told of a value; secrets in it as this rank was given them."""
        return filled(value, self._given.get(name, MISSING))

    def _show(self, values: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Have values read here that are new; those of secrets that this rank cannot know are not there."""
        hidden = (self._shown.hidden - new.keys()) | {name for name, value in new.items() if value is MISSING}
        now = {name: value for name, value in self._shown.items() if name not in hidden or name in self._written}
        now.update({name: value for name, value in new.items() if value is not MISSING})
        order = [*values, *(name for name in now if name not in values)]
        self._shown = Known({name: now[name] for name in order if name in now}, frozenset(hidden))

    def tell_of_end(self) -> None:
        """Tell the ranks without a run that the user finished this rank's."""
        job_store = self._reach() if self._may_meet() else None
        if job_store is not None:
            for key in self._tells:
                job_store.publish(_end_key(key), 1)

    def _look_for_end(self) -> None:
        if self._config is None and self._follows is not None and not self.knows_of_end:
            job_store = self._reach()
            self.knows_of_end = job_store is not None and job_store.has([_end_key(self._follows)])

    def _of_earlier_starts(self, told_first: Mapping[str, Any]) -> set[str]:
        """Names that a run which goes on holds with another value than the followed rank's does."""
        if self._config is None or not self._is_resumed:
            return set()
        mine = given_values(self._config)
        return {
            name
            for name in mine.keys() & told_first.keys()
            if without_notes(told(withheld(name, mine[name]))) != without_notes(told_first[name])
        }

    # What users do

    def read(self, name: str | None = None) -> Mapping[str, Any]:
        """The config of the primary's run, on a rank without one.

        Args:
            name: What is looked for: if it is not known yet, the primary is asked again.

        Returns:
            Values by name, a heartbeat old at most. As long as the primary has told none, what this rank was given.
        """
        if not self._is_known and not self._gave_up and name not in self._shown:
            self._wait_for_primary()
        self.look()
        if self._is_known and name is not None and name not in self._shown:
            self.look(at_once=True)
        return self._shown if self._is_known else Known({**self._given, **self._shown})

    def known(self) -> dict[str, Any]:
        """The config as far as it is known on a rank without a run. Waits for nobody."""
        return dict(self._shown) if self._is_known else {**self._given, **self._shown}

    def _wait_for_primary(self) -> None:
        if self._follows is None or not self._may_meet():
            return
        why = "there is no store of the job yet through which to ask its primary"
        with suppress(RendezvousError):
            job_store = self._reach()
            if job_store is not None:
                why = f"its primary did not open its run within {self._timeout:g} s"
                try:
                    job_store.wait_get(_version_key(self._follows), "its primary", 0.0 if self._has_ended() else None)
                finally:
                    self._gave_up = True  # if it did not come; otherwise the config is known now
                self.look(at_once=True)
                return
        if "wait" not in self._warned:
            self._warned.add("wait")
            warn(
                f"The config of the run was read on rank {self.rank}, but {why}. Until it does, rank {self.rank} "
                "reads the values that it was given itself.",
                users_line() or self._opened_at,
            )

    def facts(self) -> Mapping[str, Any]:
        """What is known of the primary's run, on a rank without one, by the names that a `wandb.Run` has for it.

        Returns:
            Values by name, a heartbeat old at most. Waits for the primary as `read` does; nothing, if it never comes.
        """
        if not self._is_known and not self._gave_up:
            self._wait_for_primary()
        self.look()
        return self._facts

    def write(self, values: Mapping[str, Any]) -> None:
        """Keep what was written on a rank without a run, for this rank alone, until the primary tells another value."""
        self.look(at_once=True)
        self._shown.update(values)
        self._written.update(values)

    def before_write(self) -> None:
        """Take over what is older than what is about to be written."""
        if self._follows is not None:
            self.look(at_once=True)

    def after_write(self, names: Iterable[str]) -> None:
        """Remember whose values these are, and tell them."""
        self._own.update(names)
        self._from_primary.difference_update(names)
        self.after_change(names)

    def after_change(self, names: Iterable[str]) -> None:
        """Tell values of these names, whoever has set them."""
        self._noticed.extend(names)
        self.look(at_once=True)

    def before_read(self, name: str | None = None) -> None:
        """Bring the config of this rank's own run up to date, where another rank may have set it."""
        if self._follows is not None:
            self.look(at_once=name is not None)

    def may_change(self, name: str) -> bool:
        """Whether a value may be changed without asking, as it is not this rank that set it."""
        return name in self._from_primary


def _config_key(unit: str) -> str:
    return f"config/of/{unit}"


def _given_key(config_key: str) -> str:
    return f"{config_key}/given"


def _version_key(config_key: str) -> str:
    return f"{config_key}/version"


def _end_key(config_key: str) -> str:
    return f"{config_key}/is over"


class Source(Protocol):
    """Where a `ConfigView` has its values from."""

    def read(self, name: str | None = None) -> Mapping[str, Any]:
        """All values; `name` is the one that is looked for."""

    def write(self, values: Mapping[str, Any]) -> None:
        """Keep values for this rank."""


class ConfigView:
    """The config of a run that another rank has opened.

    It reads as wandb's own `Config` does, by attribute and by item. What the primary has, also what it sets later,
    shows here within a heartbeat; a name that is not there yet is looked for at once. The first read waits up to
    `join_timeout` for the primary to open its run. What is written here does not reach the run: it shows on this rank,
    until the primary sets another value for that name.

    Args:
        source: Where the values come from, such as this rank's part in the config sync.

    Example:
        Two ranks, ``run_mode="auto"``::

            run = dist_wandb.init(config={"lr": 0.1})
            run.config.lr, run.config["lr"], dict(run.config)  # rank 0 and rank 1: 0.1, 0.1, {"lr": 0.1}
    """

    __slots__ = ("_source",)
    _source: Source

    def __init__(self, source: Source) -> None:
        object.__setattr__(self, "_source", source)

    def __getitem__(self, name: str) -> Any:
        return self._source.read(name)[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # protocols like copy and pickle must see that they are not implemented
            raise AttributeError(name)
        values = self._source.read(name)
        if name in values:
            return values[name]
        why = values.why_not(name) if isinstance(values, Known) else name
        raise AttributeError(f"the config of the run has no {name!r}" if why == name else why)

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __setattr__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __delitem__(self, name: str) -> None:
        """Accept: wandb's own cannot delete either."""

    def __contains__(self, name: object) -> bool:
        return name in self._source.read(str(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __bool__(self) -> bool:
        return True  # as wandb's own

    def __repr__(self) -> str:
        return str(self.as_dict())

    def __reduce__(self) -> tuple[Any, ...]:
        return _Frozen, (self.as_dict(),)

    def keys(self) -> list[str]:
        """The names."""
        return list(self._source.read())

    def values(self) -> list[Any]:
        """The values."""
        return list(self._source.read().values())

    def items(self) -> list[tuple[str, Any]]:
        """Names and values."""
        return list(self._source.read().items())

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name`; `default` where there is none."""
        return self._source.read(name).get(name, default)

    def as_dict(self) -> dict[str, Any]:
        """Values by name."""
        return dict(self._source.read())

    def update(self, values: Any = None, *_args: Any, **_kwargs: Any) -> None:
        """Keep values for this rank."""
        self._source.write(given_values(values))

    def setdefaults(self, values: Any = None) -> None:
        """Keep values of names that are not there, for this rank."""
        new = given_values(values)
        known = self._source.read()
        self._source.write({name: value for name, value in new.items() if name not in known})

    def update_locked(self, values: Any = None, *_args: Any, **_kwargs: Any) -> None:
        """Keep values for this rank."""
        self.update(values)

    def merge_locked(self, values: Any = None, *_args: Any, **_kwargs: Any) -> None:
        """Keep values for this rank."""
        self.update(values)

    def persist(self) -> None:
        """Accept: there is nothing to be sent from here."""


class _Frozen(dict[str, Any]):
    """A `ConfigView` in a process that it was pickled into, or a copy of it: what was known then."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the config of the run has no {name!r}") from None

    def as_dict(self) -> dict[str, Any]:
        """Values by name."""
        return dict(self)


# wandb tells nobody when the user changes a run's config, and raises over values that it cannot hold. So as long as a
# session is open, the config object of its run gets a class derived from its own, which notices and does not raise. It
# stays the same object and a wandb.Config, and gets its own class back when the session ends.


def _watch(config: Any, config_sync: ConfigSync) -> None:
    if not run_config.is_wandb_config(config):  # that of a stand-in for a run: what changes is noticed later then
        return
    with suppress(TypeError):  # so it would be if wandb made its config in a way that this does not go with
        if not isinstance(config, _Watching):
            object.__setattr__(config, "__class__", _watching_kind(type(config)))
        object.__setattr__(config, _CONFIG_SYNC, config_sync)


def _unwatch(config: Any, config_sync: ConfigSync) -> None:
    if isinstance(config, _Watching) and config.__dict__.get(_CONFIG_SYNC) is config_sync:
        object.__setattr__(config, "__class__", type(config).__mro__[2])
        object.__delattr__(config, _CONFIG_SYNC)


def _plainly_update(config: Any, values: Mapping[str, Any]) -> None:
    """Write values without noticing it."""
    above: Any = super(_Watching, config) if isinstance(config, _Watching) else config
    above.update(dict(values), allow_val_change=True)


class _Watching:
    """What is put before the class of wandb's config."""

    def _config_sync_of(self) -> ConfigSync:
        config_sync: ConfigSync = self.__dict__[_CONFIG_SYNC]
        return config_sync

    def update(self, d: Any, allow_val_change: bool | None = None) -> None:
        base: Any = super()
        self._write(d, lambda values, free: base.update(values, allow_val_change=free or allow_val_change))

    def setdefaults(self, d: Any) -> None:
        base: Any = super()
        with self._config_sync_of().undisturbed():
            values = given_values(d)
            self.update({name: values[name] for name in values if not base.__contains__(name)} if values else d)

    def __setitem__(self, name: str, value: Any) -> None:
        base: Any = super()

        def write(values: Any, free: bool) -> None:
            if free:
                base.update(values, allow_val_change=True)
            else:
                base.__setitem__(name, value)

        self._write({name: value}, write)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def _write(self, given: Any, write: Callable[[Any, bool], None]) -> None:
        """Write values; those that this rank did not set itself also where wandb would refuse to change them."""
        config_sync = self._config_sync_of()
        config_sync.before_write()
        values = given_values(given)
        free = {name: value for name, value in values.items() if config_sync.may_change(name)}
        rest = {name: value for name, value in values.items() if name not in free}
        if free:
            self._write_part(free, lambda part: write(part, True))
        if rest or not free:
            self._write_part(rest or given, lambda part: write(part, False))
        config_sync.after_write(values)

    def _write_part(self, values: Any, write: Callable[[Any], None]) -> None:
        if not self._is_written(values, write):
            several = len(values) > 1
            refused = [name for name in values if not (several and self._is_written({name: values[name]}, write))]
            _plainly_update(self, {name: shown(values[name]) for name in refused})
            self._config_sync_of().warn_of_refused(refused)

    def _is_written(self, values: Any, write: Callable[[Any], None]) -> bool:
        """Write values; whether wandb can hold all of them. What it refuses for other reasons, the user is to know."""
        config_sync = self._config_sync_of()
        try:
            write(values)
        except Exception as error:
            if config_sync.has_lost_run(error):
                config_sync.rescue(given_values(values), self, error)
                return True
            if run_config.is_wandb_error(error) or not isinstance(values, dict):
                raise
            return False
        return True

    def update_locked(self, d: Any, *args: Any, **kwargs: Any) -> None:
        base: Any = super()
        base.update_locked(d, *args, **kwargs)
        self._config_sync_of().after_change(given_values(d))

    def merge_locked(self, d: Any, *args: Any, **kwargs: Any) -> None:
        base: Any = super()
        base.merge_locked(d, *args, **kwargs)
        self._config_sync_of().after_change(given_values(d))

    def __getitem__(self, name: str) -> Any:
        base: Any = super()
        self._before_read(name)
        return base.__getitem__(name)

    def __contains__(self, name: object) -> bool:
        base: Any = super()
        self._before_read(name)
        return bool(base.__contains__(name))

    def get(self, *args: Any) -> Any:
        base: Any = super()
        self._before_read(args[0] if args else None)
        return base.get(*args)

    def keys(self) -> Any:
        base: Any = super()
        self._config_sync_of().before_read()
        return base.keys()

    def items(self) -> Any:
        base: Any = super()
        self._config_sync_of().before_read()
        return base.items()

    def __len__(self) -> int:
        return len(self.keys())  # wandb's own has none, a `ConfigView` has

    def __bool__(self) -> bool:
        return True  # as wandb's own, which has no length

    def _before_read(self, name: Any) -> None:
        base: Any = super()
        config_sync = self._config_sync_of()
        config_sync.before_read()
        if not base.__contains__(name) and not str(name).startswith("_"):
            config_sync.before_read(name)


_watching_kinds: dict[Any, Any] = {}


def _watching_kind(kind: Any) -> Any:
    if kind not in _watching_kinds:
        _watching_kinds[kind] = type(kind.__name__, (_Watching, kind), {"__module__": kind.__module__})
    return _watching_kinds[kind]
