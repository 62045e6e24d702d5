/* Overview, system metrics, config, media and console. */
function dot(run) {
  return el("span", { class: "dot", color: run.color, "aria-hidden": "true" });
}

const STATES = { finished: "finished", failed: "failed", unfinished: "no end recorded" };

function stateBadge(name, code) {
  return el("span", { class: `tag ${name}` }, name === "failed" && code !== null && code !== undefined ? `failed (exit code ${code})` : STATES[name]);
}

function uploaded(run) {
  return run.writers.filter((writer) => writer.uploaded).length;
}

function uploadText(run) {
  if (uploaded(run) === run.writers.length) return "yes";
  if (!uploaded(run)) return "no";
  return `${uploaded(run)} of ${several(run.writers.length, "file")}`;
}

function problemsOf(run) {
  const found = run.writers.flatMap((writer) => writer.problems.map((problem) => (run.writers.length > 1 ? `${writer.name}: ${problem}` : problem)));
  return [...found, ...run.notes.map((note) => `Not shown: ${note}`)];
}

function showNotices() {
  const found = [];
  if (report.unreadable.length) found.push(el("details", { class: "notice" }, el("summary", {}, `${several(report.unreadable.length, "file")} could not be read`), el("ul", {}, report.unreadable.map((reason) => el("li", {}, reason)))));
  const missing = report.runs.filter((run) => uploaded(run) < run.writers.length);
  if (missing.length) found.push(el("p", { class: "notice" }, `${several(missing.length, "run")} not, or not wholly, uploaded: `, el("code", {}, `dist-wandb sync ${report.directories.join(" ")}`)));
  fill(byId("notices"), found);
}

function showSystem() {
  const names = namesOf("bySystem").filter(matches);
  dropCards((card) => card.kind === "system");
  const grid = el("div", { class: "grid" });
  for (const name of names.slice(0, 100)) {
    const card = chartCard(name, () => metricContent(name, "bySystem"), () => metricRows(name, "bySystem"));
    card.kind = "system";
    grid.append(card.figure);
  }
  const open = byId("system-body").querySelector("details");
  const group = el("details", { open: open ? open.open : true, class: "group" }, el("summary", {}, el("h3", {}, "By node and rank", el("span", { class: "count" }, String(names.length)))), grid);
  fill(byId("system-body"), names.length ? group : el("p", { class: "empty" }, "No system metric was recorded, or none matches the search."));
}

const configState = { differing: false };

function showConfig() {
  const runs = shownRuns().slice(0, MOST_COLUMNS);
  let count = 0;
  const rows = [];
  const add = (name, of, isOfWriters = false) => {
    const values = runs.map(of);
    const differs = new Set(values).size > 1 || isOfWriters;
    count += differs;
    if (configState.differing && !differs) return;
    rows.push({ cells: [[el("span", {}, name, differs ? el("span", { class: "tag warn" }, "differs") : ""), name], ...values], mark: differs ? "differs" : "" });
  };
  add("started (UTC)", (run) => (run.started || "").replace("T", " ").slice(0, 19));
  add("duration", (run) => asTime(duration(run)));
  for (const part of ["facts", "config"]) {
    const names = new Set(runs.flatMap((run) => Object.keys(run[part])));
    for (const name of part === "config" ? [...names].sort() : names) add(name, (run) => own(part)(run, name) || "", runs.some((run) => run.differing.includes(name)));
  }
  const only = el("input", { id: "only-differing", type: "checkbox", checked: configState.differing, onchange: (event) => { configState.differing = event.target.checked; showConfig(); byId("only-differing").focus(); } });
  const columns = [{ heading: "name" }, ...runs.map((run) => ({ heading: run.name }))];
  const controls = el("div", { class: "row controls" }, el("label", {}, only, ` only differing values (${count})`), notAll(runs));
  fill(byId("config-body"), runs.length ? [controls, tableOf("Facts and config of the shown runs", columns, rows.slice(0, 1000))] : el("p", { class: "empty" }, "No run is shown."));
}

/* Says which of the shown runs a section has, if not all. */
function notAll(runs) {
  const count = shownRuns().length;
  return runs.length < count ? el("span", {}, `The first ${runs.length} of the ${count} shown runs.`) : null;
}

function showMedia() {
  const parts = [];
  for (const run of shownRuns()) {
    if (!run.images.length && !run.tables.length) continue;
    parts.push(el("h3", {}, dot(run), run.name));
    for (const table of run.tables) {
      const shown = table.rows.length < table.total ? `, the first ${table.rows.length} of ${table.total} rows` : "";
      parts.push(el("details", { open: run.tables.length < 4, class: "group" }, el("summary", {}, el("h4", {}, `${table.name} at ${number(table.step)}${shown}`)), tableOf(`Table ${table.name}`, table.columns.map((heading) => ({ heading })), table.rows.map((cells) => ({ cells })))));
    }
    if (run.images.length) {
      const pictures = run.images.map((image) => {
        const text = `${image.name} at ${number(image.step)}${image.caption ? `: ${image.caption}` : ""}`;
        return el("figure", { class: "picture" }, el("img", { src: image.source, alt: text, width: image.width, height: image.height, loading: "lazy" }), el("figcaption", {}, text));
      });
      parts.push(el("div", { class: "gallery" }, pictures));
    }
  }
  fill(byId("media-body"), parts.length ? parts : el("p", { class: "empty" }, "No table or image was logged, or none can be shown."));
}

const consoleState = { run: null, writer: null, query: "" };

function showConsole() {
  const runs = shownRuns().filter((run) => run.console.length);
  const run = runs.find((one) => one.index === consoleState.run) || runs[0];
  if (!run) {
    fill(byId("console-body"), el("p", { class: "empty" }, "No console output was recorded."));
    return;
  }
  const out = run.console.find((one) => one.writer === consoleState.writer) || run.console[0];
  const text = el("pre", { tabindex: "0", role: "region", "aria-label": `Console of ${out.writer}` });
  const note = el("p", { class: "summary", role: "status" });
  const filter = () => {
    const wanted = consoleState.query.toLowerCase();
    const lines = out.lines.filter((line) => line.toLowerCase().includes(wanted));
    text.textContent = lines.join("\n");
    note.textContent = `${several(lines.length, "line")}${wanted ? ` of ${out.lines.length}` : ""}${out.dropped ? `; ${out.dropped} earlier lines are not in the report` : ""}.`;
  };
  const runChoice = el("select", { id: "console-run", onchange: (event) => { consoleState.run = Number(event.target.value); showConsole(); byId("console-run").focus(); } }, options(runs.map((one) => [String(one.index), one.name]), String(run.index)));
  const writerChoice = el("select", { id: "console-writer", onchange: (event) => { consoleState.writer = event.target.value; showConsole(); byId("console-writer").focus(); } }, options(run.console.map((one) => [one.writer, one.writer]), out.writer));
  const search = el("input", { id: "console-search", type: "search", value: consoleState.query, oninput: (event) => { consoleState.query = event.target.value; filter(); } });
  filter();
  fill(byId("console-body"), el("div", { class: "row controls" }, runs.length > 1 ? el("label", {}, "Run ", runChoice) : null, el("label", {}, "Rank ", writerChoice), el("label", {}, "Filter ", search)), note, text);
  text.scrollTop = text.scrollHeight;
}
