"""When a rank asks where the others are: after a limit without a sign, by the rules of "auto"."""

from __future__ import annotations

from dist_wandb.session.stalls.watcher import Clock


def test_auto_is_ten_times_the_longest_pause_and_at_least_300_seconds() -> None:
    clock = Clock("auto", 0.0)
    clock.hear(1700.0)  # the start is no pause
    assert clock.limit() == 300.0
    clock.hear(1720.0)
    assert clock.limit() == 300.0
    clock.hear(1780.0)
    assert clock.limit() == 600.0
    clock.hear(1781.0)
    assert clock.limit() == 600.0


def test_auto_tells_a_minute_before_the_watchdog() -> None:
    clock = Clock("auto", 0.0)
    clock.hear(1.0)
    clock.hear(101.0)
    clock.watchdog = 600.0
    assert clock.limit() == 540.0
    assert clock.limit(3) == 540.0
    given = Clock(900.0, 0.0)
    given.hear(1.0)
    given.watchdog = 600.0
    assert given.limit() == 900.0  # as the user wants


def test_the_limit_is_the_users_once_there_was_a_sign_and_a_slow_job_is_told_after_three() -> None:
    clock = Clock(20.0, 0.0)
    assert clock.limit() == 1800.0  # a slow start
    assert clock.hear(1.0) == 1.0
    assert (clock.limit(), clock.due()) == (20.0, 21.0)
    clock.look_later(21.0)
    assert clock.due() == 31.0
    clock.look_later(21.0, 15.0)  # another rank has asked
    assert clock.due() == 36.0
    assert clock.limit(3) == 60.0


def test_a_sign_gives_the_length_of_the_stall_and_nothing_of_it_is_left() -> None:
    clock = Clock(20.0, 0.0)
    clock.hear(1.0)
    clock.is_told, clock.has_answered, clock.told_in = True, True, "file"
    clock.look_later(400.0, 100.0)
    assert clock.hear(0.5) == 0.0  # an old one
    assert clock.is_told
    assert clock.hear(413.0) == 412.0
    assert [clock.is_told, clock.has_answered, clock.told_in, clock.due()] == [False, False, None, 433.0]


def test_a_suspension_is_no_pause() -> None:
    clock = Clock("auto", 0.0)
    clock.hear(1.0)
    clock.begin(5000.0)
    clock.hear(5001.0)
    assert clock.limit() == 300.0
