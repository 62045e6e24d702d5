"use strict";
/* The report's data, and the formatting of numbers and names. Data from files is text, never HTML. */
const report = JSON.parse(document.getElementById("data").textContent);
/* Each color is as far as possible from those before it (in OKLab), and visible on light and dark panels. */
const PALETTE = ["#3b7ddd", "#d9822b", "#2a9d74", "#c4527a", "#8a63d2", "#f695ee", "#68552f", "#5fcf28", "#3fc0f2", "#e829e1", "#471ff5", "#0e5e8a", "#940aa1", "#c3b4ad", "#b01003", "#7d7784", "#057918", "#a196f1", "#fe7b90", "#f90330", "#83456d", "#aa5f04", "#8d13f4", "#48cba1", "#9ea73c", "#ce70c7", "#5d48b1", "#fb2c9c", "#e7ad01", "#7a8201"];
const CLOCK = "_timestamp"; // of W&B; here in minutes since the start of a run
const MOST_SHOWN = 60;
const MOST_COLUMNS = 30; // runs beside each other
const FEW_RANKS = 12;

report.runs.forEach((run, index) => {
  run.index = index;
  run.between = new Map();
  run.facts = { id: run.run_id, project: run.project || "", group: run.group || "", ...run.facts };
  run.byName = new Map(run.charts.map((chart) => [chart.name, chart]));
  run.bySystem = new Map(run.system.map((chart) => [chart.name, chart]));
});

const state = {
  query: "",
  filter: "",
  groupBy: -1,
  means: true,
  axis: "",
  withDeviations: false,
  shown: new Set(report.runs.slice(0, PALETTE.length).map((run) => run.index)),
  smoothing: 0,
  logX: false,
  logY: false,
  ranksAs: "auto",
};

/* How the x axes of a run turn into each other: all are known by W&B's step. */
function interpolated(xs, ys) {
  return (x) => {
    let [low, high] = [0, xs.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle + 1;
      else high = middle;
    }
    if (!low) return ys[0];
    const at = low - 1;
    return low === xs.length || xs[at] === x ? ys[at] : ys[at] + ((ys[low] - ys[at]) * (x - xs[at])) / (xs[low] - xs[at]);
  };
}

function stepOf(run, axis) {
  if (axis === "_step") return (x) => x;
  const line = Object.hasOwn(run.axes, axis) ? run.axes[axis] : null;
  if (!line) return null;
  const order = line.y.map((_, at) => at).sort((one, other) => line.y[one] - line.y[other] || one - other);
  return interpolated(order.map((at) => line.y[at]), order.map((at) => line.x[at]));
}

/* A function that turns positions on one axis into those on another; `null` if the run does not know them. */
function between(run, from, to) {
  if (!to || from === to) return (x) => x;
  const key = `${from}\n${to}`;
  if (!run.between.has(key)) {
    run.between.set(key, null); // also ends a circle
    run.between.set(key, to === "_step" ? stepOf(run, from) : through(run, from, to));
  }
  return run.between.get(key);
}

function through(run, from, to) {
  const known = Object.hasOwn(run.axes, to) ? { axis: "_step", line: run.axes[to] } : run.byName.get(to);
  if (!known || !known.line) return null;
  const first = between(run, from, known.axis);
  const onto = interpolated(known.line.x, known.line.y);
  return first && ((x) => onto(first(x)));
}

function pointsOf(chart) {
  return Math.max(...[chart.line, ...Object.values(chart.ranks)].map((line) => (line ? line.x.length : 0)));
}

function shownRuns() {
  return report.runs.filter((run) => state.shown.has(run.index));
}

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value === "string") return value;
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
  return String(Number(value.toPrecision(5)));
}

function percent(share) {
  return `${Math.round(share * 100)} %`;
}

function several(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

function matches(name) {
  const text = name.toLowerCase();
  return state.query.toLowerCase().split(/\s+/).every((part) => text.includes(part));
}

/* Plotly interprets some tags and entities in texts, so they are escaped. */
function forPlotly(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function faded(color, share) {
  const parts = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  return `rgba(${parts.join(",")},${share})`;
}

function rankColor(place, count) {
  return count <= PALETTE.length ? PALETTE[place % PALETTE.length] : `hsl(${Math.round((place * 300) / count)},55%,50%)`;
}

/* The exponential moving average of W&B's charts, without its initial bias. */
function smoothed(values, weight) {
  let last = 0;
  let bias = 1;
  return values.map((value) => {
    last = last * weight + (1 - weight) * value;
    bias *= weight;
    return last / (1 - bias);
  });
}

function median(values) {
  const sorted = values.filter((value) => value !== null).sort((one, other) => one - other);
  if (!sorted.length) return null;
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function mean(values) {
  const found = values.filter((value) => value !== null);
  return found.length ? found.reduce((sum, value) => sum + value, 0) / found.length : null;
}
