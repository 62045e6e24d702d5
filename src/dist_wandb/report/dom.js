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
   [shown, sort key]. */
function tableOf(caption, columns, rows, sortable = true) {
  const body = el("tbody");
  const value = (cell) => (Array.isArray(cell) ? cell[1] : cell);
  const show = (sorted) =>
    fill(
      body,
      sorted.map((row) =>
        el(
          "tr",
          { class: row.mark || null },
          row.cells.map((cell, place) => {
            const shown = Array.isArray(cell) ? cell[0] : cell;
            const content = typeof shown === "number" || shown === null ? number(shown) : shown;
            const attributes = { class: columns[place].numeric ? "numeric" : null };
            return place === 0 ? el("th", { scope: "row", ...attributes }, content) : el("td", attributes, content);
          }),
        ),
      ),
    );
  const heads = columns.map((column, place) => {
    const head = el("th", { scope: "col", class: column.numeric ? "numeric" : null });
    if (!sortable || rows.length < 2) {
      head.append(column.heading);
      return head;
    }
    const sort = () => {
      const down = head.getAttribute("aria-sort") === (column.numeric ? null : "ascending") || head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sign = down ? -1 : 1;
      const sorted = [...rows].sort((one, other) => {
        const [left, right] = [value(one.cells[place]), value(other.cells[place])];
        if (left === null || right === null) return (left === null) - (right === null);
        return sign * (typeof left === "number" && typeof right === "number" ? left - right : String(left).localeCompare(String(right), undefined, { numeric: true }));
      });
      show(sorted);
    };
    head.append(el("button", { type: "button", class: "sort", onclick: sort }, column.heading));
    return head;
  });
  show(rows);
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
