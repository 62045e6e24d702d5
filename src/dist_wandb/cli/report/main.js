/* The list of runs, the controls, and the first drawing. */
const SECTIONS = [["overview", "Overview"], ["compare", "Compare"], ["charts", "Charts"], ["ranks", "Ranks"], ["system", "System"], ["config", "Facts and config"], ["media", "Tables and images"], ["console", "Console"]];

function showRuns() {
  const groups = new Map();
  for (const run of filteredRuns()) {
    const key = groupOf(run);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(run);
  }
  const parts = [...groups].map(([key, runs]) =>
    el("fieldset", {}, el("legend", {}, key, el("span", { class: "count" }, String(runs.length))),
      runs.map((run) => {
        const [on, off] = [() => highlight(run), () => highlight(null)];
        return el("label", { class: "run", title: run.run_id, onmouseenter: on, onmouseleave: off, onfocusin: on, onfocusout: off }, showBox([run], run.name), dot(run), el("span", { class: "run-name" }, run.name), run.state === "finished" ? null : el("span", { class: `tag ${run.state}` }, run.state), run.degraded.rows ? el("span", { class: "tag warn" }, "degraded") : null);
      }),
    ),
  );
  fill(byId("runs"), parts);
}

/* Draws what depends on which runs are shown. The runs table and the list keep their boxes, and so the focus. */
function showAll() {
  const runs = shownRuns();
  for (const box of document.querySelectorAll(".show-run")) box.follow();
  for (const count of document.querySelectorAll(".run-count")) count.textContent = `${runs.length} of ${report.runs.length} shown${runs.length === MOST_SHOWN ? ", the most at once" : ""}`;
  fill(byId("legend"), runs.map((run) => el("li", {}, dot(run), run.name)));
  showCharts();
  showRanks();
  showSystem();
  showConfig();
  showMedia();
  showConsole();
  refresh();
}

function later(wait, action) {
  let timer = null;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, wait);
  };
}

/* Shows or hides runs; not more than `MOST_SHOWN`, so that the page stays fast. */
function show(runs, isShown) {
  for (const run of runs) {
    if (!isShown) state.shown.delete(run.index);
    else if (state.shown.size < MOST_SHOWN) state.shown.add(run.index);
  }
  showAll();
}

/* Draws all that depends on the filter, the groups and the colors. */
function showEverything() {
  byId("of-groups").hidden = !groupField();
  colorRuns();
  showRuns();
  showOverview();
  showCompare();
  showAll();
}

function setTheme(choice) {
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  refresh();
}

function start() {
  byId("where").textContent = report.directories.join(", ");
  byId("made").textContent = `Made ${report.made.replace("T", " ").slice(0, 19)} UTC by dist-wandb ${report.version}. This file makes no network requests.`;
  fill(byId("nav"), SECTIONS.filter(([id]) => id !== "compare" || report.runs.length >= FEWEST_POINTS).map(([id, text]) => el("li", {}, el("a", { href: `#${id}` }, text))));
  byId("search").addEventListener("input", later(120, () => { state.query = byId("search").value; showOverview(); showCharts(); showSystem(); announce(byId("chart-count").textContent); }));
  byId("smoothing").addEventListener("input", () => { state.smoothing = Number(byId("smoothing").value); byId("smoothing-value").textContent = byId("smoothing").value; redraw(); });
  byId("log-x").addEventListener("change", (event) => { state.logX = event.target.checked; refresh(); });
  byId("log-y").addEventListener("change", (event) => { state.logY = event.target.checked; refresh(); });
  byId("ranks-as").addEventListener("change", (event) => { state.ranksAs = event.target.value; refresh(); });
  byId("theme").addEventListener("change", (event) => setTheme(event.target.value));
  byId("all-runs").addEventListener("click", () => show(filteredRuns(), true));
  byId("no-runs").addEventListener("click", () => show(filteredRuns(), false));
  byId("run-filter").addEventListener("input", later(120, () => { state.filter = byId("run-filter").value; showRuns(); showOverview(); announce(several(filteredRuns().length, "run")); }));
  byId("group-by").addEventListener("change", (event) => { state.groupBy = Number(event.target.value); showEverything(); });
  byId("means").addEventListener("change", (event) => { state.means = event.target.checked; refresh(); });
  byId("x-axis").addEventListener("change", (event) => { state.axis = event.target.value; refresh(); });
  byId("with-deviations").addEventListener("change", (event) => { state.withDeviations = event.target.checked; showCharts(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select, textarea");
    if (event.key === "/" && !typing) {
      event.preventDefault();
      byId("search").focus();
    } else if (event.key === "Escape" && event.target.type === "search") {
      event.target.value = "";
      event.target.dispatchEvent(new Event("input"));
    }
  });
  if (matchMedia("(max-width: 800px)").matches) byId("runs-panel").open = false;
  showNotices();
  fill(byId("group-by"), options([["-1", "nothing"], ...[...settings, ...facts].map((field, place) => [String(place), field.name])], "-1"));
  showAxes();
  showEverything();
  document.documentElement.dataset.ready = "yes";
}

const redraw = later(60, refresh);
start();
