/* Words, numbers, elements and tables of the dashboard. Data from the app is always inserted as text, never as markup. */

export const IS_NARROW = matchMedia("(max-width: 45rem)").matches;
export const VISIBLE_ROWS = IS_NARROW ? 3 : 25; // rows of a table before you click 'Show all'

export const $ = (id) => document.getElementById(id);

// Words and numbers -----------------------------------------------------------------

export const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (n) => (n === null || n === undefined ? "–" : whole.format(n));
export const plural = (n, singular, many = `${singular}s`) => `${count(n)} ${n === 1 ? singular : many}`;

export function rate(n) {
  if (n === null) return "–";
  return n < 10 && n > 0 ? n.toFixed(1) : count(Math.round(n));
}

export function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.max(seconds, 0);
  if (s === 0) return "0 s";
  if (s < 0.9995) return `${s < 0.0095 ? (s * 1000).toFixed(1) : Math.round(s * 1000)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 90) return `${Math.round(s)} s`;
  const pad = (n) => String(n).padStart(2, "0");
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes} min ${pad(Math.floor(s % 60))} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${pad(minutes % 60)} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (n >= 1024 && unit < 3) { n /= 1024; unit += 1; }
  return `${unit && n < 10 ? n.toFixed(1) : whole.format(n)} ${units[unit]}`;
}

export const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });
// A leading name, such as orders/3, keeps its case.
export const sentence = (text) => (text ? (/^[a-z]+[ ,:]/.test(text) ? text[0].toUpperCase() + text.slice(1) : text) + (/[.!?]$/.test(text) ? "" : ".") : "");
export const sum = (list, of) => list.reduce((total, item) => total + (of(item) || 0), 0);
export const most = (list, of) => list.reduce((largest, item) => {
  const value = of(item);
  return value === null || value === undefined || (largest !== null && largest >= value) ? largest : value;
}, null);

// Elements --------------------------------------------------------------------------

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value === true ? "" : value);
}

/* Keep one child per item, by key, so that focus, selection and open details survive an update. */
export function sync(parent, items, keyOf, make, update) {
  const known = parent.known || (parent.known = new Map());
  const keys = new Set();
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    if (keys.has(key)) continue;
    keys.add(key);
    let child = known.get(key);
    if (!child) known.set(key, (child = make(item)));
    update(child, item);
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  }
  for (const [key, child] of known) {
    if (!keys.has(key)) { child.remove(); known.delete(key); }
  }
}

export const badge = (tone, text) => el("span", { class: "badge", "data-tone": tone, text });

export function paint(node, tone, text) {
  setAttribute(node, "data-tone", tone);
  write(node, text);
}

// Tables ----------------------------------------------------------------------------

/* A column: label, and either `text(row)` or `make()` and `update(cell, row)`; `num` for numbers, `by(row)` to sort. */
export class Table {
  constructor(host, { name, columns, keyOf, empty, order = null, text = null, rows = VISIBLE_ROWS }) {
    Object.assign(this, { host, name, keyOf, empty, order, filterText: text, all: columns, few: rows });
    this.limit = rows;
    this.filter = "";
    this.rows = [];
    this.head = el("tr", { role: "row" });
    this.body = el("tbody", { role: "rowgroup" });
    this.table = el("table", { role: "table", "aria-label": name }, el("thead", { role: "rowgroup" }, this.head), this.body);
    this.nothing = el("p", { class: "empty" });
    this.more = el("button", { type: "button", class: "more", on: { click: () => this.toggle() } });
    host.className = "table";
    host.append(this.table, this.nothing, this.more);
  }

  toggle() {
    this.limit = this.limit === this.few ? Infinity : this.few;
    this.draw();
  }

  show(rows, columns = this.all) {
    this.rows = rows;
    const shape = columns.map((column) => column.label).join("|");
    if (shape !== this.shape) {
      this.shape = shape;
      this.columns = columns;
      this.head.replaceChildren(...columns.map((column) => this.heading(column)));
      this.body.replaceChildren();
      this.body.known = new Map();
    }
    this.draw();
  }

  heading(column) {
    const cell = el("th", { role: "columnheader", scope: "col", class: column.num ? "num" : ["actions", "select"].includes(column.class) ? column.class : null });
    if (column.by) {
      const sort = el("button", { type: "button", class: "sort", text: column.label, on: { click: () => this.sortBy(column.label) } });
      cell.append(sort);
    } else cell.textContent = column.label;
    cell.column = column;
    return cell;
  }

  sortBy(label, down = null) {
    const same = this.order && this.order.label === label;
    this.order = { label, down: down !== null ? down : same ? !this.order.down : true };
    this.draw();
  }

  draw() {
    const filter = this.filter.trim().toLowerCase();
    let rows = filter && this.filterText ? this.rows.filter((row) => this.filterText(row).toLowerCase().includes(filter)) : [...this.rows];
    const column = this.order && this.columns.find((candidate) => candidate.label === this.order.label);
    if (column) {
      const sign = this.order.down ? -1 : 1;
      rows = rows.map((row) => [column.by(row), row]).sort(([a], [b]) => {
        if (a === b) return 0;
        if (a === null || a === undefined) return 1;
        if (b === null || b === undefined) return -1;
        return (a < b ? -1 : 1) * sign;
      }).map(([, row]) => row);
    }
    for (const cell of this.head.children) {
      const sorted = column && cell.column === column;
      setAttribute(cell, "aria-sort", cell.column.by ? (sorted ? (this.order.down ? "descending" : "ascending") : "none") : null);
    }
    const shown = rows.slice(0, this.limit);
    sync(this.body, shown, this.keyOf, () => this.row(), (line, row) => {
      line.row = row;
      this.columns.forEach((column, n) => {
        const cell = line.children[n];
        if (column.update) column.update(cell, row);
        else write(cell, column.text(row));
      });
    });
    this.table.hidden = !shown.length;
    this.nothing.hidden = shown.length > 0;
    write(this.nothing, this.rows.length ? `Nothing matches “${this.filter.trim()}”.` : this.empty);
    this.more.hidden = rows.length <= this.few;
    write(this.more, this.limit === this.few ? `Show all ${count(rows.length)}` : `Show the first ${this.few}`);
  }

  row() {
    const line = el("tr", { role: "row" });
    for (const column of this.columns) {
      const cell = el("td", { role: "cell", "data-label": column.label, class: [column.num && "num", column.class].filter(Boolean).join(" ") || null });
      if (column.make) cell.append(...[column.make(() => line.row)].flat());
      line.append(cell);
    }
    return line;
  }
}

export const state = (of) => ({
  label: "State",
  by: (row) => of(row)[2],
  make: () => badge("quiet", ""),
  update: (cell, row) => paint(cell.firstElementChild, ...of(row).slice(0, 2)),
});
export const meter = (label, of) => ({
  label,
  num: true,
  by: (row) => of(row)[0],
  make: () => [el("span"), el("span", { class: "meter", "aria-hidden": "true" }, el("i"))],
  update: (cell, row) => {
    const [value, bound] = of(row);
    write(cell.children[0], `${count(value)} of ${count(bound)}`);
    cell.children[1].firstElementChild.style.width = `${bound ? Math.min(100, (100 * value) / bound) : 0}%`;
  },
});
export const buttons = (make) => ({
  label: "Actions",
  class: "actions",
  make: (row) => make(row),
  update: (cell, row) => { for (const child of cell.children) if (child.refresh) child.refresh(row); },
});
export const button = (row, { say, act, when = () => true, name }) => {
  const node = el("button", { type: "button", on: { click: () => act(row()) } });
  node.refresh = (now) => {
    write(node, say(now));
    setAttribute(node, "aria-label", `${say(now)} ${name(now)}`);
    setAttribute(node, "hidden", !when(now));
  };
  return node;
};
