/* The table of all runs, and what compares them: config against metrics. */
const compareState = { x: null, y: null, sorting: { by: null, down: false } };
const FEWEST_POINTS = 5;
const MOST_SETTINGS = 12;
const MOST_METRICS = 6;
const LOWER = /loss|error|perplexity|ppl|(^|[/_])(err|mse|mae|rmse|wer|cer|nll|fid)($|[/_])/i;
const HIGHER = /acc|auc|precision|recall|reward|score|bleu|rouge|success|return|(^|[/_])(f1|map|iou|psnr|ssim)($|[/_])/i;
const OF_VALIDATION = /val|test|eval|dev/i;
const OF_PROGRESS = /(^|[/_])(lr|learning_rate|epoch|step|global_step)([/_-]|$)/i;

/* A sort key of metrics: losses first, those of validation before others, timings and deviations last. */
function importance(name) {
  if (/(^|[/_])(time|timing|straggler|throughput)|^dist_wandb\//i.test(name)) return 8;
  if (OF_PROGRESS.test(name)) return 7;
  return (/loss/i.test(name) ? 0 : LOWER.test(name) || HIGHER.test(name) ? 2 : 4) + (OF_VALIDATION.test(name) ? 0 : 1) + (name.endsWith("/std") ? 2 : 0);
}

function byImportance(names) {
  return [...names].sort((one, other) => importance(one) - importance(other));
}

/* What differs between the runs: each with a name and a function that returns a run's value, `null` if it has none. */
function differing(kind, names, of) {
  return names
    .map((name) => ({ kind, name, heading: name, of: (run) => asNumber(of(run, name)) }))
    .filter((field) => new Set(report.runs.map(field.of)).size > 1);
}

function asNumber(text) {
  if (text === undefined || text === null || text === "") return null;
  const value = Number(text);
  return Number.isFinite(value) ? value : text;
}

function namesIn(part) {
  const alike = (run) => Object.keys(run[part]).filter((name) => !run.differing.includes(name));
  return [...new Set(report.runs.flatMap(alike))].sort((one, other) => one.localeCompare(other, undefined, { numeric: true }));
}

const own = (part) => (run, name) => (Object.hasOwn(run[part], name) ? run[part][name] : null);
const settings = differing("config", namesIn("config"), own("config"));
const facts = [...differing("fact", ["state", "mode"], (run, name) => run[name]), ...differing("fact", namesIn("facts").filter((name) => name !== "id"), own("facts"))];

function duration(run) {
  return Object.hasOwn(run.axes, CLOCK) ? run.axes[CLOCK].y.at(-1) : null;
}

function asTime(minutes) {
  if (minutes === null) return "";
  const seconds = Math.round(minutes * 60);
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  return parts[0] ? `${parts[0]} h ${parts[1]} min` : parts[1] ? `${parts[1]} min ${parts[2]} s` : `${parts[2]} s`;
}

/* The last value of a metric, and the best one if its name says which that is. */
function metricFields(name) {
  const best = LOWER.test(name) ? ["min", "least"] : HIGHER.test(name) ? ["max", "most"] : null;
  const field = (heading, part) => ({ kind: "metric", name, heading, of: (run) => (run.byName.has(name) ? run.byName.get(name)[part] : null) });
  const isCurve = report.runs.some((run) => run.byName.has(name) && pointsOf(run.byName.get(name)) > 1);
  return [field(name, "last"), ...(best && isCurve ? [field(`${name} ${best[0]}`, best[1])] : [])];
}

function metricNames(runs) {
  const names = [...new Set(runs.flatMap((run) => [...run.byName.keys()]))];
  return byImportance(names.filter((name) => !isDeviation(name, names)));
}

function isDeviation(name, names) {
  return name.endsWith("/std") && names.includes(name.slice(0, -4));
}

function groupOf(run) {
  const field = groupField();
  if (!field) return [run.project || "no project", run.group].filter(Boolean).join(" / ");
  const value = field.of(run);
  return `${field.name}: ${value === null ? "–" : typeof value === "number" ? number(value) : value}`;
}

function groupField() {
  return [...settings, ...facts][state.groupBy] || null;
}

/* All runs of a group have one color. */
function colorRuns() {
  const groups = [...new Set(report.runs.map(groupOf))];
  report.runs.forEach((run, index) => {
    const place = groupField() ? groups.indexOf(groupOf(run)) : index;
    run.color = PALETTE[place % PALETTE.length];
    run.dash = ["solid", "dash", "dot", "dashdot"][Math.floor(place / PALETTE.length) % 4];
  });
}

function filteredRuns() {
  const parts = state.filter.toLowerCase().split(/\s+/);
  return report.runs.filter((run) => {
    const text = [run.name, run.state, ...Object.values(run.facts), ...settings.map((field) => `${field.name}=${field.of(run)}`)].join("\n").toLowerCase();
    return parts.every((part) => text.includes(part));
  });
}

function showBox(runs, name) {
  const isShown = () => runs.every((run) => state.shown.has(run.index));
  const box = el("input", { type: "checkbox", class: "show-run", "aria-label": `Show ${name}`, onchange: () => show(runs, box.checked) });
  box.follow = () => (box.checked = isShown());
  box.follow();
  return box;
}

function showOverview() {
  const runs = filteredRuns();
  const names = metricNames(runs).filter((name) => !state.query || matches(name));
  const metrics = names.slice(0, MOST_METRICS).flatMap(metricFields);
  const fields = [...settings.slice(0, MOST_SETTINGS), ...metrics];
  const columns = [
    ["run", (run) => [el("span", { class: "one-line", title: run.name }, showBox([run], run.name), dot(run), run.name), run.name]],
    ["state", (run) => [stateBadge(run.state, (run.writers.find((writer) => writer.exit_code) || {}).exit_code), run.state]],
    ["slowest rank", slowestCell],
    ...fields.map((field) => [field.heading, (run) => field.of(run), field.kind]),
    ["duration", (run) => [asTime(duration(run)), duration(run)], "time"],
    ["ranks", (run) => [ranksOf(run), ranksOf(run) > 1 ? ranksOf(run) : null]],
    ["mode", (run) => run.mode],
    ["rows", (run) => run.rows],
    ["degraded rows", (run) => (run.degraded.rows ? [el("span", { class: "tag warn" }, `${several(run.degraded.rows, "row")}, up to ${several(run.degraded.most, "rank")} missing`), run.degraded.rows] : null)],
    ["uploaded", (run) => [uploadText(run), uploaded(run) / run.writers.length]],
    ["started (UTC)", (run) => [el("span", { class: "one-line" }, (run.started || "").replace("T", " ").slice(0, 16)), run.started || ""]],
    ["tags", (run) => run.facts.tags || ""],
    ["notes", notesCell],
  ].map(([heading, of, kind]) => ({ heading, kind, cells: runs.map(of) }));
  const key = (cell) => (Array.isArray(cell) ? cell[1] : cell);
  const isFull = (column) => column.cells.some((cell) => ![null, "", -1].includes(key(cell)));
  const shown = columns.filter((column, place) => !place || isFull(column));
  const rows = runs.map((run, place) => ({ cells: shown.map((column) => column.cells[place]), group: groupField() ? groupOf(run) : null, run }));
  const heads = shown.map(({ heading, kind, cells }) => ({ heading, kind, numeric: cells.every((cell) => cell === null || typeof key(cell) === "number" || key(cell) === null) && heading !== "slowest rank" }));
  const group = (text, members) => el("span", {}, showBox(members.map((row) => row.run), text), dot(members[0].run), text, el("span", { class: "count" }, String(members.length)));
  const more = [];
  if (names.length > MOST_METRICS) more.push(`${MOST_METRICS} of ${names.length} metrics; the search at the top picks others`);
  if (settings.length > MOST_SETTINGS) more.push(`${MOST_SETTINGS} of ${settings.length} values of the config that differ`);
  const table = runs.length ? tableOf("Runs", heads, rows, { sorting: compareState.sorting, group }) : el("p", { class: "empty" }, "No run matches the filter.");
  fill(byId("overview-body"), table, more.length ? el("p", { class: "summary" }, `Columns: ${more.join("; ")}.`) : null);
}

function ranksOf(run) {
  return run.world || run.writers.length;
}

function slowestCell(run) {
  const slow = outstanding(run);
  if (!slow) return [run.slowest.length && report.runs.some(outstanding) ? "none stands out" : "", -1];
  return [el("span", { class: "finding" }, el("span", { class: "tag bad" }, slow.who), ` ${slow.name}, ${percent(slow.share)} of rows, +${amount(slow)}`), slow.ranks[0]];
}

function notesCell(run) {
  const problems = problemsOf(run);
  const more = problems.length ? el("details", {}, el("summary", {}, several(problems.length, "problem")), el("ul", {}, problems.slice(0, 50).map((text) => el("li", {}, text)))) : null;
  return [el("div", {}, run.facts.notes ? el("span", { class: "one-line", title: run.facts.notes }, run.facts.notes) : null, more), `${run.facts.notes || ""}${problems.length || ""}`];
}

/* Config against metric: a scatter, and parallel coordinates of all that differs. */
function showCompare() {
  const metrics = metricNames(report.runs).slice(0, 200).flatMap((name) => metricFields(name).reverse());
  const time = { name: "duration", heading: "duration in minutes", of: duration };
  const xs = [...settings, ...facts, time, ...metrics];
  const ys = [...metrics, time];
  const find = (all, heading, first) => all.find((field) => field.heading === heading) || first;
  const distinct = (field) => (settings.includes(field) && scaleOf(field, report.runs) && !/seed/i.test(field.name) ? new Set(report.runs.map(field.of)).size : 0);
  const x = find(xs, compareState.x, [...xs].sort((one, other) => distinct(other) - distinct(one))[0]);
  const y = find(ys, compareState.y, ys[0]);
  const chosen = (id, all, field) =>
    el("select", { id, onchange: (event) => { compareState[id.slice(-1)] = event.target.value; showCompare(); byId(id).focus(); } }, options(all.map((one) => [one.heading, one.heading]), field.heading));
  dropCards((card) => card.kind === "compare");
  byId("compare").hidden = report.runs.length < FEWEST_POINTS;
  if (byId("compare").hidden) return;
  const lines = [...settings.slice(0, 8), y];
  const cards = [chartCard(`${y.heading} by ${x.heading}`, () => scatterContent(x, y), () => fieldRows([x, y]), 300)];
  if (settings.length > 1) cards.push(chartCard(`Config and ${y.heading}`, () => parallelContent(lines), () => fieldRows(lines), 300));
  for (const card of cards) card.kind = "compare";
  fill(byId("compare-body"), el("div", { class: "row controls" }, el("label", {}, "x ", chosen("compare-x", xs, x)), el("label", {}, "y ", chosen("compare-y", ys, y))), el("div", { class: "grid pair" }, cards.map((card) => card.figure)));
}

function fieldRows(fields) {
  return { columns: ["run", ...fields.map((field) => field.heading)].map((heading, place) => ({ heading, numeric: place > 0 })), rows: shownRuns().map((run) => ({ cells: [run.name, ...fields.map((field) => field.of(run))] })) };
}

function describe(run, fields) {
  return fields.map((field) => `${field.heading} ${number(field.of(run))}`).join(", ");
}

/* Whether a field is better on a logarithmic axis; `null` if it is not numeric. */
function scaleOf(field, runs) {
  const values = runs.map(field.of).filter((value) => value !== null);
  if (values.some((value) => typeof value !== "number")) return null;
  return values.length > 1 && Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) >= 50 ? "log" : "linear";
}

function scatterContent(x, y) {
  const runs = shownRuns().filter((run) => x.of(run) !== null && y.of(run) !== null);
  const traces = runs.map((run) => ({ type: "scatter", mode: "markers", x: [x.of(run)], y: [y.of(run)], name: forPlotly(run.name), meta: { title: run.name, runs: [run.index] }, told: [describe(run, [x, y])], text: [forPlotly(describe(run, [x, y]))], hovertemplate: "%{text}<extra>%{fullData.name}</extra>", marker: { color: run.color, size: 9 } }));
  const axis = (field) => ({ title: { text: forPlotly(field.heading) }, type: scaleOf(field, runs) || "category" });
  const sorted = runs.filter((run) => typeof y.of(run) === "number").sort((one, other) => y.of(one) - y.of(other));
  const ends = sorted.length ? [["Lowest", sorted[0]], ["highest", sorted.at(-1)]].map(([word, run]) => `${word} ${y.heading}: ${number(y.of(run))} (${run.name}, ${x.heading} ${number(x.of(run))})`).join(", ") : "";
  return { traces, layout: { xaxis: axis(x), yaxis: axis(y) }, summary: `${runs.length} of ${several(report.runs.length, "run")}. ${ends}${ends ? "." : ""}` };
}

function parallelContent(fields) {
  const runs = shownRuns().filter((run) => fields.at(-1).of(run) !== null);
  const axes = fields.map((field) => {
    const scale = scaleOf(field, runs);
    const known = [...new Set(runs.map(field.of).filter((value) => value !== null))];
    known.sort((one, other) => (scale ? one - other : String(one).localeCompare(String(other), undefined, { numeric: true })));
    const bend = (value) => (!scale ? known.indexOf(value) : scale === "log" ? Math.log(value) : value);
    const [low, high] = [bend(known[0]), bend(known.at(-1))];
    const at = (value) => (value === null ? null : high > low ? (bend(value) - low) / (high - low) : 0.5);
    return { at, marks: known.length <= 6 ? known : [known[0], known.at(-1)] };
  });
  const traces = runs.map((run) => {
    const told = fields.map((field) => describe(run, [field]));
    return { type: "scatter", mode: "lines+markers", x: fields.map((_, place) => place), y: fields.map((field, place) => axes[place].at(field.of(run))), name: forPlotly(run.name), meta: { title: run.name, runs: [run.index] }, told, text: told.map(forPlotly), hovertemplate: "%{text}<extra>%{fullData.name}</extra>", line: { color: run.color, width: 1.3, shape: "spline", smoothing: 0.6, dash: run.dash }, marker: { color: run.color, size: 4 }, opacity: 0.8 };
  });
  const annotations = axes.flatMap(({ at, marks }, place) => marks.map((value) => ({ x: place, y: at(value), text: forPlotly(number(value).slice(0, 16)), showarrow: false, xanchor: place === fields.length - 1 ? "right" : "left", xshift: place === fields.length - 1 ? -5 : 5, font: { size: 10, color: css("--text") }, bgcolor: faded(css("--panel"), 0.75) })));
  const shapes = fields.map((_, place) => ({ type: "line", x0: place, x1: place, y0: 0, y1: 1, line: { width: 1, color: css("--muted") }, layer: "below" }));
  const xaxis = { tickmode: "array", tickvals: fields.map((_, place) => place), ticktext: fields.map((field) => forPlotly(field.heading)), showgrid: false, zeroline: false, range: [-0.15, fields.length - 0.85] };
  return { traces, layout: { annotations, shapes, xaxis, yaxis: { visible: false, range: [-0.06, 1.06] }, margin: { l: 12, r: 12, t: 6, b: 38 } }, summary: `${runs.length} of ${several(report.runs.length, "run")}, one line each; the last axis is the metric.` };
}
