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
  figure.append(el("figcaption", {}, el("h4", { title }, title), widen), plot, summary, table);
  plot.card = card;
  plot.addEventListener("keydown", (event) => steer(card, event));
  table.addEventListener("toggle", () => table.open && fillData(card));
  cards.add(card);
  watcher.observe(plot);
  return card;
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
    announce(`${trace.meta}: ${number(trace.y[at.point])} at ${number(trace.x[at.point])}`);
  } else return;
  event.preventDefault();
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
  const hover = "%{y:.5g} at %{x}<extra>%{fullData.name}</extra>";
  if (chart.band && state.ranksAs !== "none" && !lines) {
    const edge = { type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
    traces.push({ ...edge, x: chart.band[0].x, y: chart.band[0].y, name: `${name} smallest` });
    traces.push({ ...edge, x: chart.band[1].x, y: chart.band[1].y, name: `${name} largest`, fill: "tonexty", fillcolor: faded(run.color, 0.22) });
  }
  if (lines) {
    ranks.forEach(([rank, line], place) => {
      const color = alone ? rankColor(place, ranks.length) : run.color;
      const y = state.smoothing ? smoothed(line.y, state.smoothing) : line.y;
      const title = alone ? rank : `${run.name} · ${rank}`;
      traces.push({ type: "scatter", mode: line.x.length === 1 ? "markers" : "lines", x: line.x, y, name: forPlotly(title), meta: title, line: { width: 1.2, color }, marker: { color }, opacity: ranks.length > FEW_RANKS ? 0.4 : 0.85, hovertemplate: hover });
    });
  }
  if (chart.line && !(lines && chart.axis === "minutes")) {
    const mode = chart.line.x.length === 1 ? "markers" : "lines";
    const color = lines && alone ? css("--text") : run.color;
    if (state.smoothing) traces.push({ type: "scatter", mode, x: chart.line.x, y: chart.line.y, name, line: { width: 1, color: faded(run.color, 0.3) }, hoverinfo: "skip" });
    const y = state.smoothing ? smoothed(chart.line.y, state.smoothing) : chart.line.y;
    traces.push({ type: "scatter", mode, x: chart.line.x, y, name, meta: run.name, line: { width: 1.8, color }, marker: { color }, hovertemplate: hover });
  }
  return traces;
}

function metricContent(name, which) {
  const found = shownRuns().map((run) => [run, run[which].get(name)]).filter(([, chart]) => chart);
  const traces = found.flatMap(([run, chart]) => tracesOf(run, chart, found.length === 1));
  const shapes = found.flatMap(([run, chart]) => (which === "byName" && chart.axis !== "_step" ? degradedShapes(run) : []));
  const words = found.slice(0, 3).map(([run, chart]) => {
    const ranks = Object.keys(chart.ranks).length;
    const of = found.length > 1 ? `${run.name}: ` : "";
    const gaps = chart.gaps ? `, ${chart.gaps} NaN or infinite` : "";
    return `${of}last ${number(chart.last)}, min ${number(chart.least)}, max ${number(chart.most)}${ranks ? `, ${several(ranks, "line")}` : ""}${gaps}.`;
  });
  if (found.length > 3) words.push(`And ${found.length - 3} more runs.`);
  const layout = {
    shapes,
    xaxis: { title: { text: forPlotly(found.length ? found[0][1].axis : "") }, type: state.logX ? "log" : "linear" },
    yaxis: { type: state.logY ? "log" : "linear" },
  };
  return { traces, layout, summary: words.join(" ") || "Not in the shown runs." };
}

function degradedShapes(run) {
  return run.degraded.spans.slice(0, 50).map(([from, to]) => ({ type: "rect", xref: "x", yref: "paper", x0: from, x1: to, y0: 0, y1: 1, layer: "below", fillcolor: "rgba(230,150,0,0.15)", line: { width: 1, color: "rgba(230,150,0,0.35)" } }));
}

function metricRows(name, which) {
  const found = shownRuns().map((run) => [run, run[which].get(name)]).filter(([, chart]) => chart);
  const rows = [];
  const columns = [{ heading: "run" }, { heading: found.length ? found[0][1].axis : "x", numeric: true }, { heading: "value", numeric: true }, { heading: "min", numeric: true }, { heading: "max", numeric: true }];
  for (const [run, chart] of found.slice(0, 20)) {
    const lines = chart.line ? [[run.name, chart.line]] : Object.entries(chart.ranks).slice(0, 64).map(([rank, line]) => [`${run.name} · ${rank}`, line]);
    for (const [title, line] of lines) {
      const step = Math.max(1, Math.ceil((line.x.length * lines.length * found.length) / 400));
      const spread = chart.line && chart.band && chart.band.every((edge) => edge.x.length === line.x.length);
      for (let at = 0; at < line.x.length; at += step) {
        rows.push({ cells: [title, line.x[at], line.y[at], spread ? chart.band[0].y[at] : null, spread ? chart.band[1].y[at] : null] });
      }
    }
  }
  const thinned = found.some(([, chart]) => chart.thinned);
  const note = thinned ? "The charts have fewer points than were logged; smallest and largest values are kept." : "";
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

function showCharts() {
  const names = namesOf("byName");
  const found = names.filter(matches);
  const kept = new Set();
  const parts = [];
  for (const [prefix, all] of grouped(found)) {
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
  dropCards((card) => card.kind === "metric" && !kept.has(card));
  const empty = names.length ? "No metric of the shown runs matches the search." : "No metric was logged, or no run is shown.";
  fill(byId("chart-sections"), parts.length ? parts : el("p", { class: "empty" }, empty));
  byId("chart-count").textContent = found.length === names.length ? String(names.length) : `${found.length} of ${names.length}`;
}
