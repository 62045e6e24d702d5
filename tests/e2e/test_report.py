"""The report in a browser: headless Chromium opens the page that `dist-wandb report` has written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, chromium
from PIL import Image
from record_files import definition, end, header, run, write_run
from report_runs import environment, history, printed, reduced_run, shared_run, sweep

from dist_wandb.cli import main

EVIL = "</script><script>window.hacked=1</script><img src=http://127.0.0.1:9/x onerror=window.hacked=1><b>&amp;{}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with chromium() as page:
        yield page


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of jobs with four ranks: a run with a slow rank, a run without one, and a shared run."""
    top = tmp_path_factory.mktemp("few")
    reduced_run(top / "runs", "alike", slow=None)
    reduced_run(top / "runs", "slow", slow=2, lr=0.05, seed=3)
    shared_run(top / "runs", "together", slow=1, steps=50)
    return written(top)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a run of 256 ranks, and of a shared run with more writers than can be told apart as lines."""
    top = tmp_path_factory.mktemp("many")
    reduced_run(top / "runs", "big", ranks=256, slow=137, steps=60)
    shared_run(top / "runs", "together", ranks=20, slow=11, steps=30)
    return written(top)


@pytest.fixture(scope="module")
def thirty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of 30 runs of a sweep."""
    top = tmp_path_factory.mktemp("thirty")
    sweep(top / "runs")
    return written(top)


def written(top: Path) -> Path:
    page = top / "report.html"
    assert main(["report", str(top / "runs"), "-o", str(page)]) == 0
    return page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """A page without errors and requests."""
    browser.errors.clear()
    browser.requests.clear()
    browser.size(1280, 900)
    browser.prefer("light")
    yield browser
    assert browser.requests == []
    assert browser.errors == []


def texts(page: Page, selector: str) -> list[str]:
    found: list[str] = page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)")
    return found


def type_in(page: Page, field: str, text: str) -> None:
    page.run(
        f"{{const one = document.getElementById({field!r}); one.value = {text!r};"
        " one.dispatchEvent(new Event('input'))}"
    )


def shown_charts(page: Page) -> list[str]:
    return texts(page, "#charts .card h4")


def choose(page: Page, selector: str, value: str) -> None:
    """Choose an option as a user does: set its value, and send the change event."""
    page.run(
        f"{{const one = document.querySelector({selector!r}); one.value = {json.dumps(value)};"
        " one.dispatchEvent(new Event('change', {bubbles: true}))}"
    )


def choose_run(page: Page, selector: str, name: str) -> None:
    choose(page, selector, str(page.run(f"report.runs.find((run) => run.name === {name!r}).index")))


def test_the_overview_names_the_slow_rank_and_charts_are_drawn_with_line_band_and_axis(page: Page, few: Path) -> None:
    page.open(few)
    rows = {
        row[0]: row[2]
        for row in page.run(
            "[...document.querySelectorAll('#overview tbody tr')]"
            ".map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
    }
    assert rows["slow"].startswith("rank 2 time/straggler_rank, 100 % of rows")
    assert rows["together"].startswith("rank 1 time/step")
    assert rows["slow"].endswith(" s")
    assert rows["alike"] == "none stands out"
    assert page.run("document.querySelector('#overview .bad').getBoundingClientRect().bottom < innerHeight")
    page.wait("document.querySelectorAll('#charts .main-svg').length >= 2 * 3")
    plot = "[...document.querySelectorAll('#charts .plot')].find((one) => one.card.title === 'train/loss')"
    page.run(f"{plot}.scrollIntoView()")
    page.wait(f"{plot}.data && {plot}.data.length")
    drawn = page.run(f"{plot}.data.map((trace) => [trace.name, trace.x.length, trace.fill || ''])")
    assert ["slow", 200, ""] in drawn
    assert ["slow largest", 200, "tonexty"] in drawn
    assert page.run(f"{plot}.layout.xaxis.title.text") == "global_step"
    assert "alike: last" in page.run(f"{plot}.getAttribute('aria-label')")
    assert "train/loss/max" not in shown_charts(page)


def test_search_by_keyboard_shows_matching_charts(page: Page, few: Path) -> None:
    page.open(few)
    all_of_them = shown_charts(page)
    page.key("/")
    assert page.run("document.activeElement.id") == "search"
    for letter in "LOSS":
        page.key(letter)
    matching = [name for name in all_of_them if "loss" in name]
    page.wait(
        f"document.querySelector('#chart-count').textContent.startsWith('{len(matching)} of ')"
    )  # after the last key
    assert shown_charts(page) == matching != all_of_them
    page.key("Escape")
    page.wait("!document.querySelector('#chart-count').textContent.includes(' of ')")
    assert shown_charts(page) == all_of_them


def test_everything_is_reachable_by_keyboard(page: Page, few: Path) -> None:
    page.open(few)
    page.key("Tab")
    assert page.run("document.activeElement.className") == "skip"
    page.key("Enter")
    page.wait("document.activeElement.id === 'charts'")
    reached = []
    for _ in range(40):
        page.key("Tab")
        reached.append(page.run("document.activeElement.className || document.activeElement.id"))
        if reached[-1].startswith("plot"):
            break
    assert reached[:5] == ["x-axis", "smoothing", "log-x", "log-y", "ranks-as"]
    page.wait("document.activeElement.data")
    page.key("ArrowRight")
    first = page.run("document.getElementById('live').textContent")
    page.key("ArrowRight")
    second = page.run("document.getElementById('live').textContent")
    assert first.endswith("at 0")
    assert second.endswith("at 20")  # losses of validations are first
    page.key("+")
    page.wait("document.activeElement.layout.xaxis.range[0] > 0")
    unnamed = "input:not([aria-label]):not([aria-labelledby]), select"
    assert page.run(f"[...document.querySelectorAll({unnamed!r})].filter((one) => !one.labels.length).length") == 0
    assert page.run("[...document.querySelectorAll('[role=img], [role=region]')].every((one) => one.ariaLabel)")


def test_the_heat_map_switches_between_metrics_and_runs(page: Page, few: Path) -> None:
    page.open(few)
    page.run("document.getElementById('ranks').scrollIntoView()")
    page.wait("document.querySelector('#ranks .main-svg')")
    choose_run(page, "#heat-run", "slow")
    names = texts(page, "#heat-metric option")
    assert names[:3] == ["time/straggler_rank", "time/step", "time/forward"]
    choose(page, "#heat-metric", "time/step")
    page.wait("document.querySelector('#ranks .plot').data")
    assert page.run("document.querySelector('#ranks h4').textContent") == "Ranks and time: time/step"
    means = page.run("document.querySelector('#ranks .plot').data[0].z.map(mean)")
    assert max(range(4), key=means.__getitem__) == 2
    choose_run(page, "#heat-run", "together")
    page.wait("document.querySelector('#ranks .plot').data")
    means = page.run("document.querySelector('#ranks .plot').data[0].z.map(mean)")
    assert means[1] == pytest.approx(0.06, rel=0.1)
    assert all(abs(mean) < 0.01 for rank, mean in enumerate(means) if rank != 1)


def test_smoothing_logarithmic_axes_and_runs_change_the_charts(page: Page, few: Path) -> None:
    page.open(few)
    page.wait("near.size && [...near].every((card) => !card.stale)")
    card = "[...near].find((card) => card.kind === 'metric' && card.plot.data)"
    before = page.run(f"{card}.plot.data.length")
    type_in(page, "smoothing", "0.9")
    page.wait(f"{card}.plot.data.length > {before}")
    page.run("document.getElementById('log-y').click()")
    page.wait(f"{card}.plot.layout.yaxis.type === 'log'")
    page.run("document.getElementById('no-runs').click()")
    assert shown_charts(page) == []
    page.run("document.getElementById('all-runs').click()")
    assert shown_charts(page)


def test_config_media_and_console_are_shown(page: Page, few: Path) -> None:
    page.open(few)
    differing = texts(page, "#config tr.differs th")
    assert {"lrdiffers", "local_rankdiffers"} <= set(differing)
    assert page.run("[...document.querySelectorAll('#media img')].length") == 6
    page.run("document.getElementById('media').scrollIntoView()")
    page.wait("[...document.querySelectorAll('#media img')].every((one) => one.complete && one.naturalWidth > 0)")
    assert "class 1" in texts(page, "#media td")
    choose_run(page, "#console-run", "slow")
    assert "step 0: loss" in texts(page, "#console pre")[0]
    type_in(page, "console-search", "step 19")
    assert len(texts(page, "#console pre")[0].splitlines()) == 11
    assert "12 rows, up to 1 rank missing" in texts(page, "#overview td")
    assert "3 runs not, or not wholly, uploaded" in texts(page, "#notices")[0]


def test_256_ranks_stay_readable(page: Page, many: Path) -> None:
    page.open(many)
    page.run("document.getElementById('ranks').scrollIntoView()")
    page.wait("document.querySelector('#ranks .main-svg')")
    choose_run(page, "#heat-run", "big")
    plot = "document.querySelector('#ranks .plot')"
    page.wait(f"{plot}.data")
    assert page.run(f"[{plot}.data[0].z.length, {plot}.data[0].y.length]") == [256, 256]
    assert page.run(f"{plot}.clientHeight >= 2 * 256 && {plot}.clientHeight <= 900")
    assert "rank 137" in page.run(f"{plot}.getAttribute('aria-label')")
    assert texts(page, "#ranks tr.slow th")[0].startswith("rank 137")
    loss = "[...cards].find((card) => card.title === 'loss').content().traces.map((trace) => trace.name)"
    assert page.run(loss) == ["together smallest", "together largest", "together"]
    choose(page, "#ranks-as", "lines")
    assert len(page.run(loss)) == 21


def test_colors_follow_the_system_and_the_switch_and_on_a_phone_nothing_is_wider_than_the_screen(
    page: Page, few: Path
) -> None:
    page.open(few)
    color = "getComputedStyle(document.body).backgroundColor"
    light = page.run(color)
    page.prefer("dark")
    page.wait(f"{color} !== {light!r}")
    dark = page.run(color)
    choose(page, "#theme", "light")
    assert page.run(color) == light
    choose(page, "#theme", "dark")
    page.prefer("light")
    assert page.run(color) == dark
    page.size(390, 800, mobile=True)
    page.open(few)
    page.wait("document.querySelector('.main-svg')")
    assert page.run("document.documentElement.scrollWidth") <= 390
    assert not page.run("document.getElementById('runs-panel').open")
    assert page.run("document.getElementById('legend').offsetHeight") > 0


def test_texts_of_files_are_shown_and_never_executed(page: Page, tmp_path: Path) -> None:
    values: dict[str, float] = {EVIL: 1.0, f"time/{EVIL}": 2.0, "time/step": 1.0, f"epoch{EVIL}": 0, f"single{EVIL}": 1}
    described = {"display_name": EVIL, "run_group": EVIL, "job_type": EVIL, "notes": EVIL}
    for number in range(5):
        rows = [values, dict.fromkeys(list(values)[:4], 2.0)]
        about = environment(number)
        about.environment.host = about.environment.program = f"{EVIL}{number}"
        records = [
            header(),
            run(f"exp{number}", config={EVIL: f"{EVIL}{number}", "b": number}, **described),
            about,
            definition(axis=f"axis{EVIL}"),
            *(history({**row, "_step": at, f"axis{EVIL}": at}) for at, row in enumerate(rows)),
            printed(f"{EVIL}\n"),
            end(),
        ]
        write_run(tmp_path / "runs" / "<b>", f"exp{number}", records=records)
    page.open(written(tmp_path))
    page.wait("document.querySelectorAll('#compare .main-svg').length >= 4")
    page.run("document.getElementById('charts').scrollIntoView()")
    page.wait("document.querySelector('#charts .main-svg')")
    assert EVIL in shown_charts(page)
    assert f"single{EVIL}" in texts(page, "#charts tbody th")
    for axis in (f"axis{EVIL}", f"epoch{EVIL}"):
        assert axis in texts(page, "#x-axis option")
        choose(page, "#x-axis", axis)
    for chosen in page.run("[...document.querySelectorAll('#group-by option')].map((one) => one.value)"):
        choose(page, "#group-by", chosen)
    page.wait("near.size && [...near].every((card) => !card.stale)")
    assert texts(page, "#console pre") == [EVIL]
    assert EVIL in texts(page, "#runs .run-name")
    assert page.run("window.hacked === undefined")
    assert page.run("document.querySelectorAll('script').length") == 3
    assert page.run("[...document.images].length") == 0


def cells(page: Page, heading: str) -> list[str]:
    """The cells of a column of the runs table."""
    place = texts(page, "#overview thead th").index(heading)
    return texts(page, f"#overview tbody tr > :nth-child({place + 1})")


def test_the_table_of_runs_is_sorted_filtered_and_grouped(page: Page, thirty: Path) -> None:
    page.open(thirty)
    titles = texts(page, "#overview thead th")
    assert titles[:8] == ["run", "state", "batch", "lr", "optim.name", "val/loss", "val/loss min", "train/loss"]
    assert "layers" not in titles, "equal in all runs"
    assert {"test/accuracy", "val/accuracy max", "duration", "tags", "notes"} <= {*titles}
    page.run("[...document.querySelectorAll('.sort')].find((one) => one.textContent === 'val/loss').focus()")
    for is_falling in (False, True):
        page.key("Enter")
        values = [float(text) for text in cells(page, "val/loss")]
        assert values == sorted(values, reverse=is_falling)
    page.run("{const one = document.getElementById('run-filter'); one.focus(); one.value = 'optim.name=adam'}")
    page.key(" ")
    page.wait("document.querySelectorAll('#overview tbody tr').length === 10")
    assert {*cells(page, "optim.name")} == {"adam"}
    page.run("document.getElementById('no-runs').click()")
    assert texts(page, ".run-count") == ["20 of 30 shown"] * 3
    page.wait("near.size && [...near].every((card) => !card.stale)")
    assert "20 of 30 runs" in texts(page, "#compare .summary")[0]
    page.key("Escape")
    page.wait("document.querySelectorAll('#overview tbody tr').length === 30")
    place = texts(page, "#group-by option").index("batch") - 1
    choose(page, "#group-by", str(place))
    groups = texts(page, "#overview .of-group th")
    assert len(groups) == 4
    assert groups[0][:7] == "batch: "
    assert len({*page.run("report.runs.map((run) => run.color)")}) == 4, "a color for each group"
    named = "[...cards].find((card) => card.title === 'val/loss').content().traces.filter((trace) => trace.meta)"
    means = page.run(f"{named}.map((trace) => [trace.meta.runs, trace.y.at(-1)])")
    assert sorted(run for runs, _ in means for run in runs) == sorted(page.run("[...state.shown]"))
    last = page.run("report.runs.map((run) => run.byName.get('val/loss').last)")
    assert [value for _, value in means] == pytest.approx(
        [sum(last[run] for run in runs) / len(runs) for runs, _ in means]
    )
    page.run("document.getElementById('means').click()")
    assert len(page.run(named)) == 20


def test_thirty_runs_have_colors_of_their_own_on_the_chosen_axis(page: Page, thirty: Path) -> None:
    page.open(thirty)
    shown = shown_charts(page)
    assert shown == ["val/loss", "val/accuracy", "train/loss", "train/lr", "time/step"], "losses first"
    assert texts(page, "#charts tbody th") == ["test/accuracy"], "no chart of one value"
    page.run("document.getElementById('with-deviations').click()")
    assert "train/loss/std" in shown_charts(page)
    drawn = "[...cards].find((card) => card.title === 'val/loss').content()"
    colors = page.run(f"{drawn}.traces.map((trace) => trace.line.color)")
    assert len({*colors}) == 30
    assert colors == page.run("[...cards][0].content().traces.map((trace) => trace.marker.color)")
    of_first = f"{drawn}.traces.find((trace) => trace.name === 'sweep-00').x"
    assert page.run(of_first) == [0, 1, 2, 3]
    for axis, expected in {"_step": [9, 19, 29, 39], "global_step": [90, 190, 290, 390]}.items():
        choose(page, "#x-axis", axis)
        assert page.run(of_first) == expected
    choose(page, "#x-axis", "_timestamp")
    assert page.run(of_first) == pytest.approx([step * 3 / 60 for step in (9, 19, 29, 39)])
    assert page.run(f"{drawn}.layout.xaxis.title.text") == "minutes since the start"


def test_config_is_compared_with_a_metric_and_a_chart_is_saved(page: Page, thirty: Path, tmp_path: Path) -> None:
    page.open(thirty)
    choose(page, "#compare-x", "optim.name")
    choose(page, "#compare-y", "val/accuracy max")
    page.wait("document.querySelectorAll('#compare .plot')[1].data")
    scatter, parallel = page.run(
        "[...document.querySelectorAll('#compare .plot')].map((one) => one.data.map((trace) => trace.told))"
    )
    assert len(scatter) == len(parallel) == 30
    assert scatter[-1][0].startswith("optim.name adam, val/accuracy max 0.")
    assert [told.split()[0] for told in parallel[0]] == ["batch", "lr", "optim.name", "val/accuracy"]
    facts = {"s00", "a baseline", "node-0", "8 x NVIDIA H100", "CPython 3.11.7", "5ed799f4fd71", "night"}
    command = "train.py '--api_key=…' --max-tokens 9 --token '…' --lr=0.1"
    assert facts | {command} <= {*texts(page, "#config td")}
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.run("document.querySelector('#compare .buttons button').click()")
    page.wait("new Promise((done) => setTimeout(() => done(true), 1500))")
    (saved,) = tmp_path.glob("*.png")
    with Image.open(saved) as picture:
        assert picture.width > 800
        assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 30


def test_the_policy_prevents_network_access(browser: Page, few: Path) -> None:
    browser.open(few)
    asked = "fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')"
    assert browser.run(asked) == "refused"
    browser.run(
        "{const one = document.createElement('script'); one.text = 'window.hacked = 1'; document.body.append(one)}"
    )
    assert browser.run("window.hacked === undefined")
    violations = [error for error in browser.errors if "Content Security Policy" in error]
    assert len(violations) >= 2
