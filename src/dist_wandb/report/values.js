"use strict";
/* The report's data, and the formatting of numbers and names. Data from files is text, never HTML. */
const report = JSON.parse(document.getElementById("data").textContent);
const PALETTE = ["#3b7ddd", "#d9822b", "#2a9d74", "#c4527a", "#8a63d2", "#a58a00", "#1f9fb4", "#d0503f", "#6f8f2f", "#7a6a5a"];
const FEW_RANKS = 12;

report.runs.forEach((run, index) => {
  run.index = index;
  run.color = PALETTE[index % PALETTE.length];
  run.byName = new Map(run.charts.map((chart) => [chart.name, chart]));
  run.bySystem = new Map(run.system.map((chart) => [chart.name, chart]));
});

const state = {
  query: "",
  shown: new Set(report.runs.slice(0, 10).map((run) => run.index)),
  smoothing: 0,
  logX: false,
  logY: false,
  ranksAs: "auto",
};

function shownRuns() {
  return report.runs.filter((run) => state.shown.has(run.index));
}

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
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
