/* Which rank is slow, when, and by how much: a heat map of rank and time, and a table of the ranks. */
const heatState = { run: null, name: null, relative: true };

function slowestText(run, one) {
  const relative = one.relative === null ? "" : ` (${percent(one.relative)} of the mean)`;
  const who = `${one.who[0].toUpperCase()}${one.who.slice(1)}`;
  if (one.name === "time/straggler_rank") return `${who} held the others up in ${percent(one.share)} of the rows, by ${amount(one)} on average.`;
  return `${who} ${one.ranks.length > 1 ? "have" : "has"} the largest ${one.name} in ${percent(one.share)} of the rows, by ${amount(one)} on average${relative}.`;
}

/* dist_wandb's timings are in seconds; the units of other metrics are unknown. */
function amount(one) {
  return `${number(one.excess)}${one.name.startsWith("time/") ? " s" : ""}`;
}

function outstanding(run) {
  return run.slowest.find((one) => one.stands_out) || null;
}

function heatOf() {
  const runs = shownRuns().filter((run) => run.heat.length);
  const run = runs.find((one) => one.index === heatState.run) || runs.find(outstanding) || runs[0];
  if (!run) return [runs, null, null];
  return [runs, run, run.heat.find((heat) => heat.name === heatState.name) || run.heat[0]];
}

/* Values of single ranks are shown relative to the median of all ranks, because their differences matter. */
function heatValues(heat) {
  if (heat.kind === "excess" || !heatState.relative) return heat.cells;
  const medians = heat.edges.slice(1).map((_, column) => median(heat.cells.map((row) => row[column])));
  return heat.cells.map((row) => row.map((value, column) => (value === null ? null : value - medians[column])));
}

function heatMeaning(heat) {
  if (heat.kind === "excess") return "by how much the slowest rank exceeds the mean of all, per row";
  return heatState.relative ? "how far each rank is above the median of all" : "the mean of each rank's own numbers";
}

function heatContent() {
  const [, run, heat] = heatOf();
  const values = heatValues(heat);
  const flat = values.flat().filter((value) => value !== null);
  const most = flat.reduce((one, other) => Math.max(one, Math.abs(other)), 0);
  const diverges = heat.kind === "value" && heatState.relative;
  const scale = [[0, css("--heat-0")], [0.5, css("--heat-1")], [1, css("--heat-2")]];
  const both = [[0, css("--heat-cold")], [0.5, css("--heat-0")], [1, css("--heat-2")]];
  const middles = heat.edges.slice(1).map((edge, at) => (edge + heat.edges[at]) / 2);
  const many = heat.ranks.length > 24;
  const trace = {
    type: "heatmap",
    x: middles,
    y: heat.ranks.map((_, place) => place),
    z: values,
    text: heat.ranks.map((rank) => middles.map(() => forPlotly(rank))),
    hovertemplate: "%{text}, %{x:.6~g}: %{z:.4g}<extra></extra>",
    colorscale: diverges ? both : scale,
    zmin: diverges ? -most || -1 : undefined,
    zmax: diverges ? most || 1 : undefined,
    colorbar: { thickness: 10, len: 0.9, outlinewidth: 0, tickfont: { color: css("--muted") } },
    hoverongaps: false,
  };
  const ticks = many ? { nticks: 16 } : { tickmode: "array", tickvals: trace.y, ticktext: heat.ranks.map(forPlotly) };
  const layout = {
    xaxis: { title: { text: forPlotly(heat.axis) }, showgrid: false },
    yaxis: { ...ticks, autorange: "reversed", showgrid: false, title: { text: many ? "rank" : "" } },
  };
  const top = heatSums(heat, values).filter(([, sum]) => sum !== null).sort((one, other) => other[1] - one[1]).slice(0, 3);
  const words = top.map(([rank, sum]) => `${rank}: ${number(sum)}`).join(", ");
  return { traces: [trace], layout, summary: `${heat.name} of ${run.name}: ${heatMeaning(heat)}. Largest means: ${words || "none"}.` };
}

function heatSums(heat, values) {
  return heat.ranks.map((rank, place) => [rank, mean(values[place]), values[place].reduce((one, other) => (other !== null && (one === null || other > one) ? other : one), null), place]);
}

function heatRows() {
  const [, , heat] = heatOf();
  const values = heatValues(heat);
  const rows = heatSums(heat, values).map(([rank, sum, most, place]) => {
    const at = values[place].indexOf(most);
    return { cells: [rank, sum, most, most === null ? null : heat.edges[at]] };
  });
  return { columns: [{ heading: "rank" }, { heading: "mean", numeric: true }, { heading: "largest", numeric: true }, { heading: `at ${heat.axis}`, numeric: true }], rows };
}

function showRanks() {
  const [runs, run, heat] = heatOf();
  const parts = [];
  dropCards((card) => card.kind === "heat");
  if (heat) {
    heatState.run = run.index;
    heatState.name = heat.name;
    const runChoice = el("select", { id: "heat-run", onchange: (event) => { heatState.run = Number(event.target.value); showRanks(); byId("heat-run").focus(); } }, options(runs.map((one) => [String(one.index), one.name]), String(run.index)));
    const names = run.heat.map((one) => [one.name, one.name]);
    const nameChoice = el("select", { id: "heat-metric", onchange: (event) => { heatState.name = event.target.value; showRanks(); byId("heat-metric").focus(); } }, options(names, heat.name));
    const relative = el("input", { id: "heat-relative", type: "checkbox", checked: heatState.relative, onchange: (event) => { heatState.relative = event.target.checked; showRanks(); byId("heat-relative").focus(); } });
    parts.push(
      el("div", { class: "row controls" }, runs.length > 1 ? el("label", {}, "Run ", runChoice) : null, el("label", {}, "Metric ", nameChoice), heat.kind === "value" ? el("label", {}, relative, " above the median") : null),
    );
    const height = Math.max(180, Math.min(860, 90 + heat.ranks.length * (heat.ranks.length > 24 ? 2.8 : 22)));
    const heatCard = chartCard(`Ranks and time: ${heat.name}`, heatContent, heatRows, height);
    heatCard.kind = "heat";
    heatCard.figure.classList.add("wide");
    heatCard.figure.querySelector("[aria-pressed]").remove();
    parts.push(el("div", { class: "grid" }, heatCard.figure));
    const named = run.slowest.filter((one) => one.stands_out);
    const small = run.slowest.filter((one) => !one.by_chance);
    const none = small.length ? ["No rank stands out as one that delays the others.", ...small.map((one) => slowestText(run, one))] : ["No rank stands out: the slowest rank changes as expected by chance."];
    const said = run.findings.length ? run.findings.map((one) => `${one[0].toUpperCase()}${one.slice(1)}.`) : named.length ? named.map((one) => slowestText(run, one)) : none;
    if (run.slowest.length) parts.unshift(el("ul", { class: named.length ? "findings alert" : "findings" }, said.slice(0, 4).map((one) => el("li", {}, one))));
  } else parts.push(el("p", { class: "empty" }, "No shown run has values of single ranks. They come from timings, `spread`, or the run modes `shared` and `new`."));
  const several = shownRuns().filter((one) => one !== run && (one.writers.length > 1 || one.heat.length));
  for (const one of [...(run ? [run] : []), ...several].slice(0, 5)) parts.push(rankTable(one, one === run ? heat : one.heat[0] || null));
  if (several.length > 5) parts.push(el("p", { class: "summary" }, "Only 5 runs with several ranks are here. Hide runs to see others."));
  fill(byId("ranks-body"), parts);
}

function rankTable(run, heat) {
  const sums = new Map(heat ? heatSums(heat, heatValues(heat)).map(([rank, sum, most]) => [rank, [sum, most]]) : []);
  const writers = new Map(run.writers.map((writer) => [writer.name, writer]));
  const names = [...new Set([...writers.keys(), ...(heat ? heat.ranks.filter((rank) => !rank.includes(" · ")) : [])])].sort((one, other) => one.localeCompare(other, undefined, { numeric: true }));
  const named = outstanding(run);
  const rows = names.map((name) => {
    const writer = writers.get(name);
    const [sum, most] = sums.get(name) || [null, null];
    const slow = named && named.ranks.some((rank) => name === `rank ${rank}`);
    const cells = [slow ? el("span", {}, name, el("span", { class: "tag bad" }, "slowest")) : name, sum, most];
    if (writer) cells.push(writer.node, writer.label || "", writer.primary ? "primary" : "", stateBadge(writer.state, writer.exit_code), writer.rows, writer.last, writer.uploaded ? "yes" : "no");
    else cells.push(null, "", "", "", null, null, "");
    return { cells: cells.map((cell, place) => (place === 0 ? [cell, name] : place === 6 ? [cell, writer ? writer.state : ""] : cell)), mark: slow ? "slow" : "" };
  });
  const columns = ["rank", heat ? `${heat.name} ${heat.kind === "excess" ? "above the mean of all" : heatState.relative ? "above the median" : "(mean)"}` : "mean", "largest", "node", "label", "role", "state", "rows", "last step", "uploaded"].map((heading, place) => ({ heading, numeric: [1, 2, 3, 7, 8].includes(place) }));
  return el("div", { class: "run-block" }, el("h3", {}, dot(run), run.name), tableOf(`Ranks of ${run.name}`, columns, rows));
}
