/* Charts are drawn when they come near the viewport, and drawn again after a change. */
const PLOT_OPTIONS = { displayModeBar: false, responsive: true, doubleClick: "reset", scrollZoom: false };
const FIRST_CARDS = 24;
const cards = new Set();
const near = new Set();

const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) near.add(entry.target.card);
      else near.delete(entry.target.card);
      if (entry.isIntersecting && entry.target.card.stale) drawSoon(entry.target.card);
    }
  },
  { rootMargin: "300px" },
);

/* Draws one chart at a time, so that the page stays responsive. */
const waiting = new Set();
let isDrawing = false;

function drawSoon(card) {
  waiting.add(card);
  if (isDrawing) return;
  isDrawing = true;
  const next = () => {
    const [first] = waiting;
    isDrawing = first !== undefined;
    if (!isDrawing) return;
    waiting.delete(first);
    if (first.stale && cards.has(first)) draw(first);
    setTimeout(next);
  };
  setTimeout(next);
}

function draw(card) {
  card.stale = false;
  const { traces, layout, summary } = card.content();
  card.plot.setAttribute("aria-label", `${card.title}. ${summary} Arrow keys read points, plus and minus zoom, 0 resets.`);
  card.summary.textContent = summary;
  Plotly.react(card.plot, traces, { ...baseLayout(), ...layout, xaxis: { ...axis(), ...layout.xaxis }, yaxis: { ...axis(), ...layout.yaxis } }, PLOT_OPTIONS);
  if (card.table.open) fillData(card);
}

function refresh() {
  for (const card of cards) card.stale = true;
  for (const card of near) drawSoon(card);
}

function baseLayout() {
  return {
    autosize: true,
    margin: { l: 52, r: 12, t: 6, b: 38 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 11, color: css("--muted") },
    showlegend: false,
    hovermode: "closest",
    hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { color: css("--text") } },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
  };
}

function axis() {
  return { gridcolor: css("--grid"), zerolinecolor: css("--grid"), linecolor: css("--line"), tickcolor: css("--line"), automargin: true, exponentformat: "power", title: { standoff: 6 } };
}

/* A card with one plot: `content` returns traces, layout and summary; `rows` returns the data as a table. */
function chartCard(title, content, rows, height) {
  const plot = el("div", { class: "plot", tabindex: "0", role: "img", "aria-label": title });
  if (height) plot.style.height = `${height}px`;
  const summary = el("p", { class: "summary" });
  const body = el("div");
  const table = el("details", { class: "data" }, el("summary", {}, "Data", quiet(` of ${title}`)), body);
  const figure = el("figure", { class: "card" });
  const card = { title, plot, summary, table, body, figure, content, rows, stale: true };
  const save = el("button", { type: "button", class: "small", onclick: () => savePicture(card) }, "PNG", quiet(` of ${title}`));
  const widen = el(
    "button",
    {
      type: "button",
      class: "small",
      "aria-pressed": "false",
      onclick: () => {
        const wide = figure.classList.toggle("wide");
        widen.setAttribute("aria-pressed", String(wide));
        Plotly.Plots.resize(plot);
      },
    },
    "Wide",
    quiet(` chart of ${title}`),
  );
  figure.append(el("figcaption", {}, el("h4", { title }, title), el("span", { class: "buttons" }, save, widen)), plot, summary, table);
  plot.card = card;
  plot.addEventListener("keydown", (event) => steer(card, event));
  table.addEventListener("toggle", () => table.open && fillData(card));
  cards.add(card);
  watcher.observe(plot);
  return card;
}

/* Saves a chart as PNG, with a title and, of several runs, their legend. */
function savePicture(card) {
  if (card.stale || !card.plot.data) draw(card);
  const { clientWidth: width, clientHeight: height } = card.plot;
  const named = card.plot.data.filter((trace) => trace.meta).length;
  const size = { width: width + (named > 1 ? 220 : 0), height: Math.max(height + 40, 80 + 19 * named) };
  const data = card.plot.data.map((trace) => ({ ...trace, showlegend: Boolean(trace.meta) }));
  const title = { text: forPlotly(card.title), font: { size: 13, color: css("--text") } };
  const margin = { ...card.plot.layout.margin, t: 40 };
  Plotly.downloadImage({ data, layout: { ...card.plot.layout, ...size, title, margin, showlegend: named > 1, paper_bgcolor: css("--panel") } }, { format: "png", scale: 2, ...size, filename: card.title.replace(/[^\w.-]+/g, "_").slice(0, 80) });
}

function fillData(card) {
  const { columns, rows, note } = card.rows();
  fill(card.body, note ? el("p", { class: "summary" }, note) : null, tableOf(`Data of ${card.title}`, columns, rows));
}

function dropCards(isDropped) {
  for (const card of [...cards].filter(isDropped)) {
    watcher.unobserve(card.plot);
    near.delete(card);
    cards.delete(card);
    if (card.plot.data) Plotly.purge(card.plot);
  }
}

/* Keyboard control: left and right move along a line, up and down to another line. */
function steer(card, event) {
  const traces = card.plot.data;
  if (!traces || event.ctrlKey || event.metaKey || event.altKey) return;
  const read = traces.map((trace, place) => [trace, place]).filter(([trace]) => trace.meta && trace.x.length);
  const key = event.key;
  if (key === "+" || key === "=" || key === "-" || key === "0") {
    if (key === "0") Plotly.relayout(card.plot, { "xaxis.autorange": true, "yaxis.autorange": true });
    else {
      const [from, to] = card.plot.layout.xaxis.range.map(Number);
      const by = ((to - from) / 4) * (key === "-" ? -2 : 1);
      Plotly.relayout(card.plot, { "xaxis.range": [from + by, to - by] });
    }
  } else if (read.length && ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(key)) {
    const at = card.at || { line: 0, point: -1 };
    const turn = key === "ArrowUp" ? -1 : key === "ArrowDown" ? 1 : 0;
    at.line = (at.line + turn + read.length) % read.length;
    const [trace, place] = read[at.line];
    at.point = Math.max(0, Math.min(trace.x.length - 1, at.point + (key === "ArrowLeft" ? -1 : key === "ArrowRight" ? 1 : 0)));
    card.at = at;
    Plotly.Fx.hover(card.plot, [{ curveNumber: place, pointNumber: at.point }]);
    announce(`${trace.meta.title}: ${trace.told ? trace.told[at.point] : `${number(trace.y[at.point])} at ${number(trace.x[at.point])}`}`);
  } else return;
  event.preventDefault();
}

/* Fades all lines but those of one run; `null` ends that. */
function highlight(run) {
  for (const card of near) {
    for (const line of card.plot.querySelectorAll(".scatterlayer .trace")) {
      const { meta } = line.__data__[0].trace;
      line.style.opacity = !run || (meta && meta.runs.includes(run.index)) ? "" : "0.12";
    }
  }
}

function showsLines(chart) {
  const count = Object.keys(chart.ranks).length;
  if (!count || state.ranksAs === "none" || state.ranksAs === "band") return false;
  return state.ranksAs === "lines" || count <= FEW_RANKS;
}

function tracesOf(run, chart, alone) {
  const traces = [];
  const ranks = Object.entries(chart.ranks);
  const lines = showsLines(chart);
  const name = forPlotly(run.name);
  const to = run.bySystem.get(chart.name) === chart ? "" : state.axis;
  const move = between(run, chart.axis, to);
  const xs = (line) => (to ? line.x.map(move) : line.x);
  const hover = "%{y:.5g} at %{x}<extra>%{fullData.name}</extra>";
  if (chart.band && state.ranksAs !== "none" && !lines) {
    const edge = { type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
    traces.push({ ...edge, x: xs(chart.band[0]), y: chart.band[0].y, name: `${name} smallest` });
    traces.push({ ...edge, x: xs(chart.band[1]), y: chart.band[1].y, name: `${name} largest`, fill: "tonexty", fillcolor: faded(run.color, 0.22) });
  }
  if (lines) {
    ranks.forEach(([rank, line], place) => {
      const color = alone ? rankColor(place, ranks.length) : run.color;
      const y = state.smoothing ? smoothed(line.y, state.smoothing) : line.y;
      const title = alone ? rank : `${run.name} · ${rank}`;
      traces.push({ type: "scatter", mode: line.x.length === 1 ? "markers" : "lines", x: xs(line), y, name: forPlotly(title), meta: { title, runs: [run.index] }, line: { width: 1.2, color }, marker: { color }, opacity: ranks.length > FEW_RANKS ? 0.4 : 0.85, hovertemplate: hover });
    });
  }
  if (chart.line && !(lines && chart.axis === "minutes")) {
    const mode = chart.line.x.length === 1 ? "markers" : "lines";
    const color = lines && alone ? css("--text") : run.color;
    if (state.smoothing) traces.push({ type: "scatter", mode, x: xs(chart.line), y: chart.line.y, name, line: { width: 1, color: faded(run.color, 0.3) }, hoverinfo: "skip" });
    const y = state.smoothing ? smoothed(chart.line.y, state.smoothing) : chart.line.y;
    traces.push({ type: "scatter", mode, x: xs(chart.line), y, name, meta: { title: run.name, runs: [run.index] }, line: { width: 1.8, color, dash: run.dash }, marker: { color }, hovertemplate: hover });
  }
  return traces;
}

/* The mean of the runs of each group, and the range of their values, wherever they have been. */
function meansOf(found, to) {
  const groups = new Map();
  for (const [run, chart] of found) {
    if (!chart.line || !chart.line.x.length) continue;
    const line = { run, x: chart.line.x.map(between(run, chart.axis, to)), y: chart.line.y };
    groups.set(groupOf(run), [...(groups.get(groupOf(run)) || []), { ...line, at: interpolated(line.x, line.y) }]);
  }
  return [...groups].flatMap(([title, lines]) => {
    const all = [...new Set(lines.flatMap((line) => line.x))].sort((one, other) => one - other);
    const x = all.filter((_, place) => place % Math.ceil(all.length / 500) === 0 || place === all.length - 1);
    const values = x.map((at) => lines.filter((line) => line.x[0] <= at && at <= line.x.at(-1)).map((line) => line.at(at)));
    const { run } = lines[0];
    const edge = { type: "scatter", mode: "lines", x, line: { width: 0 }, hoverinfo: "skip", name: forPlotly(title) };
    const y = values.map(mean);
    return [
      { ...edge, y: values.map((some) => Math.min(...some)) },
      { ...edge, y: values.map((some) => Math.max(...some)), fill: "tonexty", fillcolor: faded(run.color, 0.15) },
      { ...edge, y: state.smoothing ? smoothed(y, state.smoothing) : y, mode: x.length === 1 ? "markers" : "lines", hoverinfo: undefined, hovertemplate: "%{y:.5g} at %{x}<extra>%{fullData.name}</extra>", meta: { title: `mean of ${title}`, runs: lines.map((line) => line.run.index) }, line: { width: 2, color: run.color, dash: run.dash }, marker: { color: run.color } },
    ];
  });
}

function metricContent(name, which) {
  const having = shownRuns().map((run) => [run, run[which].get(name)]).filter(([, chart]) => chart);
  const to = which === "byName" ? state.axis : "";
  const found = having.filter(([run, chart]) => between(run, chart.axis, to));
  const isMeans = which === "byName" && groupField() && state.means;
  const traces = isMeans ? meansOf(found, to) : found.flatMap(([run, chart]) => tracesOf(run, chart, found.length === 1));
  const shapes = found.flatMap(([run, chart]) => (which === "byName" && !to && chart.axis !== "_step" ? degradedShapes(run) : []));
  const few = found.length > 3 ? [] : found;
  const words = few.map(([run, chart]) => {
    const ranks = Object.keys(chart.ranks).length;
    const of = found.length > 1 ? `${run.name}: ` : "";
    const gaps = chart.gaps ? `, ${chart.gaps} NaN or infinite` : "";
    return `${of}last ${number(chart.last)}, min ${number(chart.least)}, max ${number(chart.most)}${ranks ? `, ${several(ranks, "line")}` : ""}${gaps}.`;
  });
  if (found.length > 3) words.push(extremes(found));
  if (report.runs.length > 1 && found.length < report.runs.length) words.push(`${found.length} of ${report.runs.length} runs.`);
  if (found.length < having.length) words.push(`${several(having.length - found.length, "run")} without this x axis.`);
  const layout = {
    shapes,
    xaxis: { title: { text: forPlotly(axisTitle(found, to)) }, type: state.logX ? "log" : "linear" },
    yaxis: { type: state.logY ? "log" : "linear" },
  };
  return { traces, layout, summary: words.join(" ") || "Not in the shown runs." };
}

function axisTitle(found, to) {
  return to === CLOCK ? "minutes since the start" : to || (found.length ? found[0][1].axis : "x");
}

function extremes(found) {
  const last = found.filter(([, chart]) => chart.last !== null).sort(([, one], [, other]) => one.last - other.last);
  return last.length ? `Last values from ${number(last[0][1].last)} (${last[0][0].name}) to ${number(last.at(-1)[1].last)} (${last.at(-1)[0].name}).` : "";
}

function degradedShapes(run) {
  return run.degraded.spans.slice(0, 50).map(([from, to]) => ({ type: "rect", xref: "x", yref: "paper", x0: from, x1: to, y0: 0, y1: 1, layer: "below", fillcolor: "rgba(230,150,0,0.15)", line: { width: 1, color: "rgba(230,150,0,0.35)" } }));
}

function metricRows(name, which) {
  const to = which === "byName" ? state.axis : "";
  const found = shownRuns().map((run) => [run, run[which].get(name)]).filter(([run, chart]) => chart && between(run, chart.axis, to));
  const rows = [];
  const columns = [{ heading: "run" }, { heading: axisTitle(found, to), numeric: true }, { heading: "value", numeric: true }, { heading: "min", numeric: true }, { heading: "max", numeric: true }];
  for (const [run, chart] of found.slice(0, 20)) {
    const lines = chart.line ? [[run.name, chart.line]] : Object.entries(chart.ranks).slice(0, 64).map(([rank, line]) => [`${run.name} · ${rank}`, line]);
    for (const [title, line] of lines) {
      const move = between(run, chart.axis, to);
      const step = Math.max(1, Math.ceil((line.x.length * lines.length * found.length) / 400));
      const spread = chart.line && chart.band && chart.band.every((edge) => edge.x.length === line.x.length);
      for (let at = 0; at < line.x.length; at += step) {
        rows.push({ cells: [title, move(line.x[at]), line.y[at], spread ? chart.band[0].y[at] : null, spread ? chart.band[1].y[at] : null] });
      }
    }
  }
  const thinned = found.some(([, chart]) => chart.thinned);
  const notes = [thinned && "The charts have fewer points than were logged; smallest and largest values are kept.", found.length > 20 && `The first 20 of ${found.length} runs.`];
  const note = notes.filter(Boolean).join(" ");
  return { columns, rows: rows.slice(0, 1000), note };
}

/* Groups charts by the part of the name before the first slash, as W&B does. */
const openCards = new Map();

function grouped(names) {
  const groups = new Map();
  for (const name of names) {
    const prefix = name.includes("/") ? name.split("/")[0] : "charts";
    if (!groups.has(prefix)) groups.set(prefix, []);
    groups.get(prefix).push(name);
  }
  return groups;
}

function namesOf(which) {
  const names = new Set();
  for (const run of shownRuns()) for (const name of run[which].keys()) names.add(name);
  return [...names];
}

/* The x axes that can be chosen: those of all runs, and metrics that never fall, such as an epoch. */
function showAxes() {
  const rises = ({ y }) => y.length > 1 && y[0] < y.at(-1) && y.every((value, at) => !at || value >= y[at - 1]);
  const isAxis = (chart) => /epoch|step|tokens|samples|iter|batch/i.test(chart.name) && chart.line && rises(chart.line);
  const names = new Set(report.runs.flatMap((run) => [...Object.keys(run.axes), ...run.charts.filter(isAxis).map((chart) => chart.name)]));
  names.delete(CLOCK);
  fill(byId("x-axis"), options([["", "As logged"], ["_step", "Step (_step)"], [CLOCK, "Time (minutes)"], ...[...names].map((name) => [name, name])], state.axis));
}

function singleValues(names) {
  const runs = shownRuns().slice(0, MOST_COLUMNS);
  const rows = names.map((name) => ({ cells: [name, ...runs.map((run) => (run.byName.has(name) ? run.byName.get(name).last : null))] }));
  const columns = [{ heading: "metric" }, ...runs.map((run) => ({ heading: run.name, numeric: true }))];
  return el("details", { class: "group", open: true }, el("summary", {}, el("h3", {}, "Single values", el("span", { class: "count" }, String(names.length)))), notAll(runs), tableOf("Metrics with one value", columns, rows));
}

function showCharts() {
  const all = namesOf("byName");
  const deviations = all.filter((name) => isDeviation(name, all));
  byId("deviations").hidden = !deviations.length;
  const names = byImportance(all.filter((name) => state.withDeviations || !deviations.includes(name)));
  const runs = shownRuns();
  const isCurve = (name) => runs.some((run) => run.byName.has(name) && pointsOf(run.byName.get(name)) > 1);
  const found = names.filter(matches);
  const singles = found.filter((name) => !isCurve(name));
  const kept = new Set();
  const parts = [];
  for (const [prefix, all] of grouped(found.filter(isCurve))) {
    const grid = el("div", { class: "grid" });
    const more = el("button", { type: "button", class: "more" });
    let count = 0;
    const add = () => {
      for (const name of all.slice(count, count + FIRST_CARDS)) {
        const card = openCards.get(name) || chartCard(name, () => metricContent(name, "byName"), () => metricRows(name, "byName"));
        card.kind = "metric";
        openCards.set(name, card);
        if (!cards.has(card)) {
          cards.add(card);
          watcher.observe(card.plot);
          card.stale = true;
        }
        kept.add(card);
        grid.append(card.figure);
      }
      count = Math.min(all.length, count + FIRST_CARDS);
      more.textContent = `Show ${Math.min(FIRST_CARDS, all.length - count)} more of ${all.length - count}`;
      more.hidden = count >= all.length;
    };
    more.addEventListener("click", add);
    add();
    parts.push(el("details", { open: true, class: "group" }, el("summary", {}, el("h3", {}, prefix, el("span", { class: "count" }, String(all.length)))), grid, more));
  }
  if (singles.length) parts.push(singleValues(singles));
  dropCards((card) => card.kind === "metric" && !kept.has(card));
  const empty = names.length ? "No metric of the shown runs matches the search." : "No metric was logged, or no run is shown.";
  fill(byId("chart-sections"), parts.length ? parts : el("p", { class: "empty" }, empty));
  byId("chart-count").textContent = found.length === names.length ? String(names.length) : `${found.length} of ${names.length}`;
}
