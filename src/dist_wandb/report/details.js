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
  if (missing.length) found.push(el("p", { class: "notice" }, `${several(missing.length, "run")} not, or not wholly, uploaded: `, el("code", {}, `dist-wandb sync ${report.directory}`)));
  fill(byId("notices"), found);
}

function showOverview() {
  const rows = shownRuns().map((run) => {
    const slow = outstanding(run);
    const problems = problemsOf(run);
    const degraded = run.degraded.rows ? el("span", { class: "tag warn" }, `${several(run.degraded.rows, "row")}, up to ${several(run.degraded.most, "rank")} missing`) : "none";
    const more = problems.length ? el("details", {}, el("summary", {}, several(problems.length, "note")), el("ul", {}, problems.slice(0, 50).map((text) => el("li", {}, text)))) : "";
    return {
      cells: [
        [el("span", { class: "one-line" }, dot(run), run.name), run.name],
        [stateBadge(run.state, (run.writers.find((writer) => writer.exit_code) || {}).exit_code), run.state],
        [slow ? el("span", { class: "finding" }, el("span", { class: "tag bad" }, `rank ${slow.rank}`), ` ${slow.name}, ${percent(slow.share)} of rows, +${amount(slow)}`) : run.slowest.length ? "none stands out" : "", slow ? slow.rank : -1],
        run.world || run.writers.length,
        run.mode,
        run.rows,
        [degraded, run.degraded.rows],
        [uploadText(run), uploaded(run)],
        [el("span", { class: "one-line" }, (run.started || "").replace("T", " ").slice(0, 16)), run.started || ""],
        [more, problems.length],
      ],
    };
  });
  const columns = ["run", "state", "slowest rank", "ranks", "mode", "rows", "degraded rows", "uploaded", "started (UTC)", "notes"].map((heading, place) => ({ heading, numeric: place === 3 || place === 5 }));
  fill(byId("overview-body"), rows.length ? tableOf("Shown runs", columns, rows) : el("p", { class: "empty" }, "No run is shown. Select runs in the list."));
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
  const runs = shownRuns().slice(0, 12);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
  let count = 0;
  const rows = [];
  for (const name of names) {
    const values = runs.map((run) => (Object.hasOwn(run.config, name) ? run.config[name] : ""));
    const differs = new Set(values).size > 1 || runs.some((run) => run.differing.includes(name));
    count += differs;
    if (configState.differing && !differs) continue;
    rows.push({ cells: [[el("span", {}, name, differs ? el("span", { class: "tag warn" }, "differs") : ""), name], ...values], mark: differs ? "differs" : "" });
  }
  const only = el("input", { id: "only-differing", type: "checkbox", checked: configState.differing, onchange: (event) => { configState.differing = event.target.checked; showConfig(); byId("only-differing").focus(); } });
  const columns = [{ heading: "name" }, ...runs.map((run) => ({ heading: run.name }))];
  const controls = el("div", { class: "row controls" }, el("label", {}, only, ` only differing values (${count})`));
  fill(byId("config-body"), names.length ? [controls, tableOf("Config of the shown runs", columns, rows.slice(0, 1000))] : el("p", { class: "empty" }, "No config was recorded."));
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
