/* Builds elements from text nodes; HTML is never parsed. */
const byId = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "color") made.style.setProperty("--run", value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

function fill(parent, ...children) {
  parent.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

function quiet(text) {
  return el("span", { class: "quiet" }, text);
}

function options(values, chosen) {
  return values.map(([value, text]) => el("option", { value, selected: value === chosen }, text));
}

/* A table with sortable columns. Each column has a heading, and may be numeric; cells are nodes, texts, numbers, or pairs
   [shown, sort key]. `sorting` keeps the choice of a table that is drawn again. Rows with a `group` are below a heading
   that `group` makes, which has the means of the numbers in columns of a kind. */
function tableOf(caption, columns, rows, { sorting = { by: null, down: false }, group = null } = {}) {
  const body = el("tbody");
  const keys = columns.map(({ heading }, place) => `${heading}\n${columns.slice(0, place).filter((other) => other.heading === heading).length}`);
  const value = (cell) => (Array.isArray(cell) ? cell[1] : cell);
  const cellOf = (cell, place) => {
    const shown = Array.isArray(cell) ? cell[0] : cell;
    const content = typeof shown === "number" || shown === null ? number(shown) : shown;
    const attributes = { class: columns[place].numeric ? "numeric" : null };
    return place === 0 ? el("th", { scope: "row", ...attributes }, content) : el("td", attributes, content);
  };
  const rowOf = (row) => el("tr", { class: row.mark || null }, row.cells.map(cellOf));
  const compare = (one, other, place) => {
    const [left, right] = [value(one.cells[place]), value(other.cells[place])];
    if (left === null || right === null) return (left === null) - (right === null);
    return (sorting.down ? -1 : 1) * (typeof left === "number" && typeof right === "number" ? left - right : String(left).localeCompare(String(right), undefined, { numeric: true }));
  };
  const headingOf = (name, members) => ({
    mark: "of-group",
    members,
    cells: columns.map((column, place) => {
      if (place === 0) return [group(name, members), name];
      const found = column.kind && column.numeric ? mean(members.map((row) => value(row.cells[place]))) : null;
      return column.kind === "time" ? [asTime(found), found] : found === null ? ["", null] : found;
    }),
  });
  const update = () => {
    const place = keys.indexOf(sorting.by);
    const inOrder = (all) => (place < 0 ? all : [...all].sort((one, other) => compare(one, other, place)));
    heads.forEach((head, at) => (at === place ? head.setAttribute("aria-sort", sorting.down ? "descending" : "ascending") : head.removeAttribute("aria-sort")));
    const groups = new Map();
    for (const row of group ? rows : []) if (row.group) groups.set(row.group, [...(groups.get(row.group) || []), row]);
    const parts = inOrder([...groups].map(([name, members]) => headingOf(name, members))).flatMap((one) => [one, ...inOrder(one.members)]);
    fill(body, (groups.size ? parts : inOrder(rows)).map(rowOf));
  };
  const heads = columns.map((column, place) => {
    const head = el("th", { scope: "col", class: column.numeric ? "numeric" : null });
    const sort = () => {
      sorting.down = sorting.by === keys[place] && !sorting.down;
      sorting.by = keys[place];
      update();
    };
    head.append(rows.length < 2 ? column.heading : el("button", { type: "button", class: "sort", onclick: sort }, column.heading));
    return head;
  });
  update();
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", { class: "quiet" }, caption), el("thead", {}, el("tr", {}, heads)), body),
  );
}

function announce(text) {
  byId("live").textContent = text;
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
