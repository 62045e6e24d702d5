/* The list of runs, the controls, and the first drawing. */
const SECTIONS = [["overview", "Overview"], ["charts", "Charts"], ["ranks", "Ranks"], ["system", "System"], ["config", "Config"], ["media", "Tables and images"], ["console", "Console"]];

function showRuns() {
  const groups = new Map();
  for (const run of report.runs) {
    const key = [run.project || "no project", run.group].filter(Boolean).join(" / ");
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(run);
  }
  const parts = [...groups].map(([key, runs]) =>
    el("fieldset", {}, el("legend", {}, key, el("span", { class: "count" }, String(runs.length))),
      runs.map((run) => {
        const box = el("input", { type: "checkbox", checked: state.shown.has(run.index), onchange: (event) => { if (event.target.checked) state.shown.add(run.index); else state.shown.delete(run.index); showAll(); } });
        return el("label", { class: "run", title: run.run_id }, box, dot(run), el("span", { class: "run-name" }, run.name), run.state === "finished" ? null : el("span", { class: `tag ${run.state}` }, run.state), run.degraded.rows ? el("span", { class: "tag warn" }, "degraded") : null);
      }),
    ),
  );
  fill(byId("runs"), parts);
  byId("run-count").textContent = String(report.runs.length);
}

function showAll() {
  showOverview();
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

function choose(all) {
  state.shown = new Set(all ? report.runs.slice(0, 50).map((run) => run.index) : []);
  showRuns();
  showAll();
}

function setTheme(choice) {
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  refresh();
}

function start() {
  byId("where").textContent = report.directory;
  byId("made").textContent = `Made ${report.made.replace("T", " ").slice(0, 19)} UTC by dist-wandb ${report.version}. This file makes no network requests.`;
  fill(byId("nav"), SECTIONS.map(([id, text]) => el("li", {}, el("a", { href: `#${id}` }, text))));
  byId("search").addEventListener("input", later(120, () => { state.query = byId("search").value; showCharts(); showSystem(); announce(byId("chart-count").textContent); }));
  byId("smoothing").addEventListener("input", () => { state.smoothing = Number(byId("smoothing").value); byId("smoothing-value").textContent = byId("smoothing").value; redraw(); });
  byId("log-x").addEventListener("change", (event) => { state.logX = event.target.checked; refresh(); });
  byId("log-y").addEventListener("change", (event) => { state.logY = event.target.checked; refresh(); });
  byId("ranks-as").addEventListener("change", (event) => { state.ranksAs = event.target.value; refresh(); });
  byId("theme").addEventListener("change", (event) => setTheme(event.target.value));
  byId("all-runs").addEventListener("click", () => choose(true));
  byId("no-runs").addEventListener("click", () => choose(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select, textarea");
    if (event.key === "/" && !typing) {
      event.preventDefault();
      byId("search").focus();
    } else if (event.key === "Escape" && event.target === byId("search")) {
      byId("search").value = "";
      byId("search").dispatchEvent(new Event("input"));
    }
  });
  if (matchMedia("(max-width: 800px)").matches) byId("runs-panel").open = false;
  showNotices();
  showRuns();
  showAll();
  document.documentElement.dataset.ready = "yes";
}

const redraw = later(60, refresh);
start();
