"use strict";
/* The page of an app. It asks for processes.json every two seconds and shows it; what it plots it keeps by itself.
   All that comes from the app is shown as text: nothing of it is ever read as markup. */
(() => {
  const EVERY = 2000; // milliseconds between two questions
  const PATIENCE = 10000; // for an answer
  const KEPT = 300; // points of a plot
  const NARROWEST = 60; // seconds that a plot shows at least
  const SHOWN = matchMedia("(max-width: 45rem)").matches ? 8 : 25; // rows of a table, until more are asked for
  const BRIEF = 5; // seconds that a partition may wait for a record that just runs, without a word about it

  const $ = (id) => document.getElementById(id);

  // Words and numbers -----------------------------------------------------------------

  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

  const count = (n) => (n === null || n === undefined ? "–" : whole.format(n));
  const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

  function rate(n) {
    if (n === null) return "–";
    return n < 10 && n > 0 ? n.toFixed(1) : count(Math.round(n));
  }

  function time(seconds) {
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

  function bytes(n) {
    const units = ["B", "KiB", "MiB", "GiB"];
    let unit = 0;
    while (n >= 1024 && unit < 3) { n /= 1024; unit += 1; }
    return `${unit && n < 10 ? n.toFixed(1) : whole.format(n)} ${units[unit]}`;
  }

  const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });
  // A name in front, such as orders/3, stays as it is.
  const sentence = (text) => (text ? (/^[a-z]+[ ,:]/.test(text) ? text[0].toUpperCase() + text.slice(1) : text) + (/[.!?]$/.test(text) ? "" : ".") : "");
  const sum = (list, of) => list.reduce((total, one) => total + (of(one) || 0), 0);
  const most = (list, of) => list.reduce((found, one) => {
    const value = of(one);
    return value === null || value === undefined || (found !== null && found >= value) ? found : value;
  }, null);

  // Elements --------------------------------------------------------------------------

  function el(tag, given = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(given)) {
      if (name === "text") made.textContent = value;
      else if (name === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
      else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children);
    return made;
  }

  function write(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  function mark(node, name, value) {
    if (value === null || value === undefined || value === false) {
      if (node.hasAttribute(name)) node.removeAttribute(name);
    } else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value === true ? "" : value);
  }

  /* One child for each item, made once and kept while its key is there: focus, selection and what was opened stay. */
  function sync(parent, items, keyOf, make, update) {
    const known = parent.known || (parent.known = new Map());
    const wanted = new Set();
    let at = parent.firstElementChild;
    for (const item of items) {
      const key = keyOf(item);
      if (wanted.has(key)) continue;
      wanted.add(key);
      let child = known.get(key);
      if (!child) known.set(key, (child = make(item)));
      update(child, item);
      if (child === at) at = at.nextElementSibling;
      else parent.insertBefore(child, at);
    }
    for (const [key, child] of known) {
      if (!wanted.has(key)) { child.remove(); known.delete(key); }
    }
  }

  const badge = (tone, text) => el("span", { class: "badge", "data-tone": tone, text });

  function paint(node, tone, text) {
    mark(node, "data-tone", tone);
    write(node, text);
  }

  // Plots -----------------------------------------------------------------------------

  const SVG = "http://www.w3.org/2000/svg";

  function svg(tag, given = {}) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
    return made;
  }

  function above(value) {
    if (value <= 0) return 1;
    const power = 10 ** Math.floor(Math.log10(value));
    return [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= value * 1.0001) || 10 * power;
  }

  class Plot {
    constructor(host, { title, unit, say, tick, lines = [""] }) {
      Object.assign(this, { host, title, unit, say, tick, lines });
      this.points = [];
      this.now = el("strong", { class: "now", text: "–" });
      this.aside = el("span", { class: "muted" });
      this.svg = svg("svg", { role: "img", focusable: "false" });
      this.tip = el("div", { class: "tip", hidden: true });
      const head = el("div", { class: "plot-head" }, el("h2", { text: title }), this.aside);
      const big = el("p", { class: "plot-now" }, this.now, el("span", { class: "muted", text: unit }));
      if (lines.length > 1) {
        big.append(el("span", { class: "legend" }, ...lines.flatMap((name, n) => [el("i", { "data-line": n }), name])));
      }
      host.className = "card plot";
      host.append(head, big, el("div", { class: "canvas" }, this.svg, this.tip));
      this.svg.addEventListener("pointermove", (event) => this.point(event));
      this.svg.addEventListener("pointerleave", () => { this.tip.hidden = true; this.at = null; this.draw(); });
      new ResizeObserver(() => this.draw()).observe(host);
    }

    add(at, values, aside = "") {
      this.points.push({ at, values });
      if (this.points.length > KEPT) this.points.shift();
      this.added = (this.added || 0) + 1;
      write(this.now, this.say(values[0]));
      write(this.aside, aside);
      this.draw();
    }

    draw() {
      const width = Math.max(this.svg.parentElement.clientWidth, 120), height = 120;
      const left = 44, right = 6, top = 8, bottom = 20;
      const last = this.points.length ? this.points[this.points.length - 1].at : Date.now() / 1000;
      const first = this.points.length ? this.points[0].at : last;
      const span = Math.max(last - first, NARROWEST);
      const highest = Math.max(0, ...this.points.flatMap((one) => one.values.map((value) => value || 0)));
      const limit = above(highest);
      const x = (at) => left + (1 - (last - at) / span) * (width - left - right);
      const y = (value) => top + (1 - value / limit) * (height - top - bottom);
      const parts = [];
      for (const share of [0, 0.5, 1]) {
        parts.push(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(share * limit), y2: y(share * limit) }));
        const label = svg("text", { class: "axis", x: left - 6, y: y(share * limit) + 4, "text-anchor": "end" });
        label.textContent = this.tick(share * limit);
        parts.push(label);
      }
      for (const [at, anchor, text] of [[last - span, "start", `${time(span)} ago`], [last, "end", "now"]]) {
        const label = svg("text", { class: "axis", x: x(at), y: height - 4, "text-anchor": anchor });
        label.textContent = text;
        parts.push(label);
      }
      this.lines.forEach((_, n) => {
        const runs = this.runs(n);
        const line = runs.map((run) => run.map((one, i) => `${i ? "L" : "M"}${x(one.at).toFixed(1)} ${y(one.values[n]).toFixed(1)}`).join(""));
        if (n === 0) {
          const base = y(0).toFixed(1);
          const area = runs.map((run, i) => `${line[i]}L${x(run[run.length - 1].at).toFixed(1)} ${base}L${x(run[0].at).toFixed(1)} ${base}Z`);
          parts.push(svg("path", { class: "area", d: area.join("") }));
        }
        parts.push(svg("path", { class: "line", "data-line": n, d: line.join("") }));
      });
      const shown = this.at ? this.points.find((one) => one.at === this.at) : null;
      if (shown) parts.push(svg("line", { class: "cursor", x1: x(shown.at), x2: x(shown.at), y1: top, y2: y(0) }));
      this.x = x;
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.svg.setAttribute("height", height);
      this.svg.setAttribute("aria-label", `${this.title}: now ${this.now.textContent} ${this.unit}, at most ${this.say(highest)} in the last ${time(last - first)}`);
      this.svg.dataset.points = String(this.added || 0);
      this.svg.replaceChildren(...parts);
    }

    /* Without a line across what is not known. */
    runs(n) {
      const runs = [[]];
      for (const one of this.points) {
        if (one.values[n] === null || one.values[n] === undefined) runs.push([]);
        else runs[runs.length - 1].push(one);
      }
      return runs.filter((run) => run.length);
    }

    point(event) {
      if (!this.points.length) return;
      const box = this.svg.getBoundingClientRect();
      const at = event.clientX - box.left;
      const near = this.points.reduce((best, one) => (Math.abs(this.x(one.at) - at) < Math.abs(this.x(best.at) - at) ? one : best));
      this.at = near.at;
      const named = near.values.map((value, n) => `${this.lines[n] ? `${this.lines[n]} ` : ""}${this.say(value === undefined ? null : value)}`);
      write(this.tip, `${clock(near.at)}  ${named.join(", ")} ${this.unit}`);
      this.tip.hidden = false;
      this.tip.style.left = `${Math.min(Math.max(this.x(near.at) - this.tip.offsetWidth / 2, 0), box.width - this.tip.offsetWidth)}px`;
      this.draw();
    }
  }

  // Tables ----------------------------------------------------------------------------

  /* A column: label, and either `text(row)` or `make()` and `update(cell, row)`; `num` for numbers, `by(row)` to sort. */
  class Table {
    constructor(host, { name, columns, keyOf, empty, order = null, text = null }) {
      Object.assign(this, { host, name, keyOf, empty, order, filterText: text, all: columns });
      this.limit = SHOWN;
      this.wanted = "";
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
      this.limit = this.limit === SHOWN ? Infinity : SHOWN;
      this.draw();
    }

    show(rows, columns = this.all) {
      this.rows = rows;
      const shape = columns.map((one) => one.label).join("|");
      if (shape !== this.shape) {
        this.shape = shape;
        this.columns = columns;
        this.head.replaceChildren(...columns.map((one) => this.heading(one)));
        this.body.replaceChildren();
        this.body.known = new Map();
      }
      this.draw();
    }

    heading(column) {
      const cell = el("th", { role: "columnheader", scope: "col", class: column.num ? "num" : column.class === "actions" ? "actions" : null });
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
      const wanted = this.wanted.trim().toLowerCase();
      let rows = wanted && this.filterText ? this.rows.filter((row) => this.filterText(row).toLowerCase().includes(wanted)) : [...this.rows];
      const column = this.order && this.columns.find((one) => one.label === this.order.label);
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
        mark(cell, "aria-sort", cell.column.by ? (sorted ? (this.order.down ? "descending" : "ascending") : "none") : null);
      }
      const shown = rows.slice(0, this.limit);
      sync(this.body, shown, this.keyOf, () => this.row(), (line, row) => {
        line.row = row;
        this.columns.forEach((one, n) => {
          const cell = line.children[n];
          if (one.update) one.update(cell, row);
          else write(cell, one.text(row));
        });
      });
      this.table.hidden = !shown.length;
      this.nothing.hidden = shown.length > 0;
      write(this.nothing, this.rows.length ? `Nothing matches “${this.wanted.trim()}”.` : this.empty);
      this.more.hidden = rows.length <= SHOWN;
      write(this.more, this.limit === SHOWN ? `Show all ${count(rows.length)}` : `Show the first ${SHOWN}`);
    }

    row() {
      const line = el("tr", { role: "row" });
      for (const one of this.columns) {
        const cell = el("td", { role: "cell", "data-label": one.label, class: [one.num && "num", one.class].filter(Boolean).join(" ") || null });
        if (one.make) cell.append(...[one.make(() => line.row)].flat());
        line.append(cell);
      }
      return line;
    }
  }

  const WORKER = { label: "Worker", num: true, by: (row) => row.worker, text: (row) => row.worker };
  const state = (of) => ({
    label: "State",
    by: (row) => of(row)[2],
    make: () => badge("quiet", ""),
    update: (cell, row) => paint(cell.firstElementChild, ...of(row).slice(0, 2)),
  });
  const meter = (label, of) => ({
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
  const buttons = (make) => ({
    label: "Actions",
    class: "actions",
    make: (row) => make(row),
    update: (cell, row) => { for (const one of cell.children) if (one.refresh) one.refresh(row); },
  });
  const button = (row, { say, act, when = () => true, name }) => {
    const made = el("button", { type: "button", on: { click: () => act(row()) } });
    made.refresh = (now) => {
      write(made, say(now));
      mark(made, "aria-label", `${say(now)} ${name(now)}`);
      mark(made, "hidden", !when(now));
    };
    return made;
  };

  const place = (row) => `${row.topic}/${row.partition}`;
  const record = (row) => `${row.topic}/${row.partition}/${row.offset}`;
  const keyText = (row) => (row.key === null ? "no key" : row.key) + (row.shard ? ` (shard ${row.shard})` : "");

  // What is shown ---------------------------------------------------------------------

  const VERDICTS = { stuck: ["bad", "stuck", 5], waiting: ["warn", "waiting", 4] };

  function verdictOf(row) {
    if (row.pausedByHand && row.verdict !== "stuck") return ["warn", "paused", 3];
    if (VERDICTS[row.verdict]) return VERDICTS[row.verdict];
    if (row.lag === null) return ["quiet", "lag unknown", 2];
    return row.lag > 0 || row.incomplete > 0 ? ["info", "advancing", 1] : ["good", "up to date", 0];
  }

  const FAILED = { halted: ["bad", "halted", 2], retrying: ["warn", "retrying", 1], detour: ["warn", "diverting", 1] };
  const HELD = { running: ["info", "running"], retrying: ["warn", "retrying"], halted: ["bad", "halted"], queued: ["quiet", "changing"] };

  const plots = {
    rate: new Plot($("plot-rate"), { title: "Throughput", unit: "records/s", say: rate, tick: (n) => short.format(n) }),
    lag: new Plot($("plot-lag"), { title: "Lag", unit: "records", say: count, tick: (n) => short.format(n) }),
    age: new Plot($("plot-age"), { title: "Oldest record in hand", unit: "", say: time, tick: ticks }),
    time: new Plot($("plot-time"), { title: "Run time", unit: "", say: time, tick: ticks, lines: ["median", "99 %"] }),
  };

  function ticks(seconds) {
    return seconds < 1 && seconds > 0 ? `${+(seconds * 1000).toPrecision(3)} ms` : seconds < 120 ? `${+seconds.toPrecision(3)} s` : `${+(seconds / 60).toPrecision(2)} min`;
  }

  const tables = {
    partitions: new Table($("partitions"), {
      name: "Partitions",
      empty: "No partition is assigned.",
      keyOf: (row) => `${row.worker}|${place(row)}`,
      order: { label: "State", down: true },
      text: (row) => `${place(row)} ${verdictOf(row)[1]} ${row.paused || ""} worker ${row.worker}`,
      columns: [
        { label: "Partition", class: "name", by: (row) => row.order, text: place },
        WORKER,
        state((row) => {
          const [tone, word, weight] = verdictOf(row);
          return [tone, word, weight * 1e15 + Math.min(row.lag || 0, 1e15 - 1)];
        }),
        { label: "Lag", num: true, by: (row) => row.lag, text: (row) => count(row.lag) },
        { label: "Committed", num: true, by: (row) => row.committed, text: (row) => count(row.committed) },
        { label: "Position", num: true, by: (row) => row.position, text: (row) => count(row.position) },
        { label: "In flight", num: true, by: (row) => row.incomplete, text: (row) => count(row.incomplete) },
        { label: "Buffered", num: true, by: (row) => row.buffered_bytes, text: (row) => bytes(row.buffered_bytes) },
        { label: "Oldest", num: true, by: (row) => row.oldest_incomplete_age, text: (row) => time(row.oldest_incomplete_age) },
        { label: "Why", class: "why", text: (row) => row.why || "" },
      ],
    }),
    handlers: new Table($("handlers"), {
      name: "Handlers",
      empty: "No handler runs.",
      keyOf: (row) => `${row.worker}|${row.name}`,
      columns: [
        { label: "Handler", class: "name", by: (row) => row.name, make: () => [el("strong"), el("small")], update: (cell, row) => {
          write(cell.children[0], row.name);
          write(cell.children[1], `${row.topics.join(", ")} · ${row.policy}`);
        } },
        WORKER,
        state((row) => (row.pausedByHand ? ["warn", "paused", 2] : row.outliving.length ? ["bad", "outlived", 3] : row.busy ? ["info", "working", 1] : ["good", "idle", 0])),
        meter("Busy", (row) => [row.busy, row.concurrency]),
        { label: "Records/s", num: true, by: (row) => row.rate, text: (row) => rate(row.rate) },
        { label: "Shards", num: true, by: (row) => row.shards, text: (row) => count(row.shards) },
        { label: "Queued", num: true, by: (row) => row.queued, text: (row) => count(row.queued) },
        { label: "Processed", num: true, by: (row) => row.processed, text: (row) => count(row.processed) },
        { label: "Retried", num: true, by: (row) => row.retried, text: (row) => count(row.retried) },
        { label: "Halted", num: true, by: (row) => row.halted, text: (row) => count(row.halted) },
        { label: "Skipped", num: true, by: (row) => row.skipped, text: (row) => count(row.skipped) },
        { label: "Dead letters", num: true, by: (row) => row.dead_lettered, text: (row) => count(row.dead_lettered) },
        { label: "Parked", num: true, by: (row) => row.parked, text: (row) => count(row.parked) },
      ],
    }),
    failed: new Table($("failed"), {
      name: "Failed records",
      empty: "No record is halted, or waits for its next attempt.",
      keyOf: (row) => `${row.worker}|${row.handler}|${record(row)}`,
      columns: [
        { label: "Record", class: "name", make: () => [el("strong"), el("small")], update: (cell, row) => {
          write(cell.children[0], record(row));
          write(cell.children[1], `${row.handler} · ${keyText(row)}`);
        } },
        WORKER,
        state((row) => FAILED[row.state] || ["warn", row.state, 0]),
        { label: "Attempts", num: true, by: (row) => row.attempts, text: (row) => `${count(row.attempts)} of ${count(row.most_attempts)}` },
        { label: "Failed", num: true, by: (row) => row.since, text: (row) => `${time(row.since)} ago` },
        { label: "Next attempt", num: true, by: (row) => row.due, text: (row) => (row.due === null ? "none" : `in ${time(row.due)}`) },
        { label: "Behind it", num: true, by: (row) => row.waiting, text: (row) => count(row.waiting) },
        { label: "Error", class: "why", text: (row) => row.error },
      ],
    }),
    parked: new Table($("parked"), {
      name: "Parked keys",
      empty: "Nothing is parked.",
      keyOf: (row) => `${row.worker}|${row.handler}|${record(row)}`,
      columns: [
        { label: "Key", class: "name", make: () => [el("strong"), el("small")], update: (cell, row) => {
          write(cell.children[0], row.key === null ? "no key" : row.key);
          write(cell.children[1], `${record(row)} · in ${row.stored_in}`);
        } },
        WORKER,
        state((row) => (row.running ? ["info", "runs again", 0] : row.due === null ? ["bad", "waits for release", 2] : ["warn", "parked", 1])),
        { label: "Runs again", num: true, by: (row) => row.due, text: (row) => (row.running ? "now" : row.due === null ? "when released" : `in ${time(row.due)}`) },
        { label: "Replays", num: true, by: (row) => row.replays, text: (row) => count(row.replays) },
        { label: "Error", class: "why", text: (row) => row.error || "" },
      ],
    }),
    workers: new Table($("workers"), {
      name: "What workers run",
      empty: "All workers are idle.",
      keyOf: (row) => `${row.worker}|${row.id}`,
      columns: [
        { label: "Record", class: "name", make: () => [el("strong"), el("small")], update: (cell, row) => {
          write(cell.children[0], row.records > 1 ? `${record(row)} and ${row.records - 1} more` : record(row));
          write(cell.children[1], `${row.id} · ${keyText(row)}`);
        } },
        WORKER,
        { label: "For", num: true, by: (row) => row.seconds, text: (row) => time(row.seconds) },
        { label: "At", class: "why", make: () => [el("span", { class: "badge", "data-tone": "bad", text: "told to end" }), el("span", { class: "code" })], update: (cell, row) => {
          mark(cell.children[0], "hidden", !row.cancelled);
          write(cell.children[1], row.doing !== "runs the handler" ? row.doing : row.place || "");
        } },
      ],
    }),
    shards: new Table($("shards"), {
      name: "Shards in which records wait",
      empty: "No record waits behind another one of its key.",
      keyOf: (row) => `${row.worker}|${row.handler}|${row.key}|${row.shard}`,
      columns: [
        { label: "Key", class: "name", make: () => [el("strong"), el("small")], update: (cell, row) => {
          write(cell.children[0], row.key === null ? (row.shard === null ? "no key" : `shard ${row.shard}`) : row.key);
          write(cell.children[1], `${row.handler}${row.key !== null && row.shard !== null ? ` · shard ${row.shard}` : ""}`);
        } },
        WORKER,
        { label: "Waiting", num: true, by: (row) => row.waiting, text: (row) => count(row.waiting) },
        state((row) => [...(HELD[row.state] || ["quiet", row.state]), 0]),
        { label: "Behind", class: "why", text: (row) => (row.topic === null ? "" : record(row)) },
      ],
    }),
  };

  const ACTIONS = {
    partitions: buttons((row) => [button(row, {
      name: place,
      say: (now) => (now.pausedByHand ? "Resume" : "Pause"),
      act: (now) => act(now, now.pausedByHand ? "resume" : "pause", { topic: now.topic, partition: now.partition }),
      when: (now) => !now.handlerPaused,
    })]),
    handlers: buttons((row) => [
      button(row, {
        name: (now) => now.name,
        say: (now) => (now.pausedByHand ? "Resume" : "Pause"),
        act: (now) => act(now, now.pausedByHand ? "resume_handler" : "pause_handler", { handler: now.name }),
      }),
      button(row, {
        name: (now) => now.name,
        say: () => "Concurrency",
        act: askConcurrency,
        when: (now) => !now.fixed_shards && !now.adapts,
      }),
    ]),
    failed: buttons((row) => [
      button(row, { name: record, say: () => "Retry", act: (now) => act(now, "retry_now", place3(now)) }),
      button(row, { name: record, say: () => "Skip", act: askSkip }),
    ]),
    parked: buttons((row) => [button(row, {
      name: record,
      say: () => "Release",
      act: (now) => act(now, "release_parked", place3(now)),
      when: (now) => !now.running,
    })]),
  };

  const place3 = (row) => ({ topic: row.topic, partition: row.partition, offset: row.offset });

  // Together --------------------------------------------------------------------------

  const before = { processed: new Map(), durations: new Map(), at: null };

  /* All processes as one: rows that know their worker. */
  function merged(doc) {
    const known = doc.processes.filter((one) => one.statistics);
    const all = { known, partitions: [], handlers: [], failed: [], parked: [], workers: [], shards: [], findings: [], reports: [] };
    for (const one of known) {
      const worker = one.worker;
      const load = one.workload || { handlers: [], workers: [], shards: [], failed: [], parked: [], pauses: [] };
      const tag = (rows) => rows.map((row) => ({ ...row, worker }));
      const paused = new Set(load.pauses.map((pause) => (pause.handler === null ? `p|${pause.topic}/${pause.partition}` : `h|${pause.handler}`)));
      const diagnosed = new Map(one.diagnosis.partitions.map((found) => [place(found), found]));
      const topics = new Map(one.statistics.handlers.flatMap((handler) => handler.topics.map((topic) => [topic, handler.name])));
      one.statistics.partitions.forEach((row, order) => {
        const found = diagnosed.get(place(row));
        const pausedByHand = paused.has(`p|${place(row)}`);
        const handlerPaused = paused.has(`h|${topics.get(row.topic)}`) && !pausedByHand;
        const why = row.paused || (found && (found.findings.length ? found.findings[0].sentence : found.head ? `offset ${found.head.offset}: ${found.head.reason}` : "")) || "";
        all.partitions.push({ ...row, worker, order, verdict: found ? found.verdict : null, pausedByHand: pausedByHand || handlerPaused, handlerPaused, why: sentence(why) });
      });
      const loads = new Map(load.handlers.map((handler) => [handler.name, handler]));
      for (const handler of one.statistics.handlers) {
        const more = loads.get(handler.name) || {};
        const policy = { halt: "halts what fails", skip: "skips what fails" }[more.on_failure] || (more.side_topic ? `${more.on_failure === "park" ? "parks in" : "dead letters to"} ${more.side_topic}` : "");
        all.handlers.push({ ...more, ...handler, worker, policy, pausedByHand: paused.has(`h|${handler.name}`) });
      }
      all.failed.push(...tag(load.failed));
      all.parked.push(...tag(load.parked));
      all.workers.push(...load.workers.map((row) => ({ ...row, id: row.worker, worker })));
      all.shards.push(...tag(load.shards));
      all.reports.push(...tag(one.statistics.rebalance_reports));
      all.findings.push(...findingsOf(one, worker));
    }
    const ranks = { bad: 0, warn: 1, quiet: 2 };
    all.findings.sort((a, b) => ranks[a.tone] - ranks[b.tone]);
    all.shards.sort((a, b) => b.waiting - a.waiting);
    all.workers.sort((a, b) => b.seconds - a.seconds);
    all.reports.sort((a, b) => b.at - a.at);
    return all;
  }

  function findingsOf(one, worker) {
    const found = [];
    const from = worker === null ? "" : `worker ${worker}`;
    for (const finding of one.diagnosis.findings) {
      if (finding.kind === "nothing assigned" && one.statistics.state !== "running") continue;
      found.push({ key: `${worker}|${finding.kind}|${found.length}`, tone: finding.kind === "nothing assigned" ? "quiet" : "warn", word: finding.kind, title: "", text: sentence(finding.sentence), todo: finding.what_to_do, from });
    }
    for (const run of one.diagnosis.outliving) {
      found.push({ key: `${worker}|outliving|${record(run)}`, tone: "bad", word: "outlived", title: record(run), text: sentence(run.reason), todo: run.what_to_do, stack: run.stack, from });
    }
    for (const part of one.diagnosis.partitions) {
      if (part.verdict === "waiting" && !part.findings.length && part.since !== null && part.since < BRIEF) continue;
      const [tone, word] = VERDICTS[part.verdict];
      const others = part.findings.filter((finding) => !part.head || finding.sentence !== part.sentence).map((finding) => ({ text: sentence(finding.sentence), todo: finding.what_to_do }));
      const held = part.behind ? `${count(part.behind)} of the ${count(part.window)} offsets from there on wait for that record.` : "";
      const head = part.head;
      found.push({
        key: `${worker}|${place(part)}`, tone, word, title: place(part), text: sentence(part.sentence.startsWith(`${place(part)} `) ? part.sentence.slice(place(part).length + 1) : part.sentence), held, from,
        todo: head && head.what_to_do, others: head ? others : others.filter((other) => other.todo).map((other) => ({ text: "", todo: other.todo })), stack: head && head.stack,
      });
    }
    if (one.diagnosis.left_out) found.push({ key: `${worker}|left out`, tone: "warn", word: "more", title: "", text: `${plural(one.diagnosis.left_out, "more partition")} wait; the table below has all of them.`, from });
    return found;
  }

  // Rates are of the time between two answers; a counter that fell is one of a new process.
  function measure(doc, all) {
    const passed = before.at === null ? null : doc.at - before.at;
    const processed = new Map();
    let total = passed === null || passed <= 0 ? null : 0;
    for (const row of all.handlers) {
      const key = `${row.worker}|${row.name}`;
      processed.set(key, row.processed);
      const last = before.processed.get(key);
      row.rate = last === undefined || total === null ? null : Math.max(row.processed - last, 0) / passed;
      if (row.rate !== null) total += row.rate;
    }
    const first = before.at === null;
    if (passed !== 0) Object.assign(before, { processed, at: doc.at });
    return first ? null : total;
  }

  function quantile(bounds, counts, share) {
    const total = sum(counts, (n) => n);
    if (!total) return null;
    let seen = 0;
    for (let n = 0; n < counts.length; n += 1) {
      if (seen + counts[n] >= share * total && counts[n]) {
        const low = n ? bounds[n - 1] : 0;
        if (n >= bounds.length) return bounds[bounds.length - 1];
        return low + ((bounds[n] - low) * (share * total - seen)) / counts[n];
      }
      seen += counts[n];
    }
    return bounds[bounds.length - 1];
  }

  // Drawing ---------------------------------------------------------------------------

  const RANK = { failed: 0, stopped: 1, starting: 2, draining: 3, running: 4 };
  const TONE = { failed: "bad", stopped: "quiet", starting: "warn", draining: "warn", running: "good" };
  let several = false;

  function draw(doc) {
    const all = merged(doc);
    const { known } = all;
    const total = measure(doc, all);
    several = doc.processes.length > 1 || doc.processes.some((one) => one.worker !== null);
    const states = known.map((one) => one.statistics.state);
    const worst = states.sort((a, b) => RANK[a] - RANK[b])[0] || "unknown";
    const group = known.length ? known[0].statistics.group_id : "aioshard";
    write($("group"), group);
    const title = `${worst === "running" ? "" : `${worst} · `}${group} · aioshard`;
    if (document.title !== title) document.title = title;
    paint($("state"), TONE[worst] || "quiet", worst);
    write($("members"), several ? plural(doc.processes.length, "process", "processes") : known.length && known[0].statistics.member_id ? `member ${known[0].statistics.member_id.slice(-8)}` : "");
    mark($("members"), "title", several ? null : known.length ? known[0].statistics.member_id : null);
    drawPlots(doc, all, total);
    drawFigures(all);
    drawAttention(doc, all);
    drawTables(doc, all);
    drawRebalances(all);
    write($("foot"), `Each ${several ? "process of this server" : "process"} shows itself. Keys are named by a hash unless show_keys is set; values are never shown.`);
  }

  function drawPlots(doc, all, total) {
    const processed = sum(all.handlers, (row) => row.processed);
    if (total !== null) plots.rate.add(doc.at, [total], `${count(processed)} since the start`);
    else write(plots.rate.aside, `${count(processed)} since the start`);
    const lagging = most(all.partitions, (row) => row.lag_seconds);
    const known = all.partitions.some((row) => row.lag !== null) || !all.partitions.length;
    plots.lag.add(doc.at, [known ? sum(all.partitions, (row) => row.lag) : null], lagging ? `oldest is of ${time(lagging)} ago` : "");
    const age = most(all.partitions, (row) => row.oldest_incomplete_age);
    const oldest = all.partitions.find((row) => row.oldest_incomplete_age === age && age !== null);
    plots.age.add(doc.at, [age || 0], oldest ? `in ${place(oldest)}` : "");
    drawTimes(doc, all);
  }

  // How long runs took that ended between two answers, of all handlers; a histogram tells it to about its buckets.
  function drawTimes(doc, all) {
    const told = all.handlers.flatMap((row) => (row.by_topic || []).map((one) => ({ key: `${row.worker}|${row.name}|${one.topic}`, ...one.durations })));
    $("plot-time").hidden = !told.length;
    if (!told.length) return;
    const { bounds } = told[0];
    const counts = [...bounds, 0].map(() => 0);
    for (const one of told) {
      const last = before.durations.get(one.key);
      one.counts.forEach((n, at) => { counts[at] += last ? Math.max(n - last[at], 0) : 0; });
      before.durations.set(one.key, one.counts);
    }
    const [median, slowest] = [quantile(bounds, counts, 0.5), quantile(bounds, counts, 0.99)];
    plots.time.add(doc.at, [median, slowest], slowest === null ? "" : `99 %: ${time(slowest)}`);
  }

  function drawFigures(all) {
    const stats = all.known.map((one) => one.statistics);
    const failing = sum(all.known, (one) => one.workload && one.workload.failing);
    const halted = sum(all.handlers, (row) => row.halted);
    const parked = sum(all.known, (one) => one.workload && one.workload.parked_keys);
    const figures = [
      ["Workers busy", `${count(sum(all.handlers, (row) => row.busy))} of ${count(sum(all.handlers, (row) => row.concurrency))}`, "", null],
      ["In hand", count(sum(stats, (one) => one.buffered_records)), `records, ${bytes(sum(stats, (one) => one.buffered_bytes))}`, null],
      ["Halted", count(halted), halted ? "hold their shard" : "records", halted ? "bad" : null],
      ["Retrying", count(Math.max(failing - halted, 0)), "records", failing > halted ? "warn" : null],
      ["Parked", count(parked), parked === 1 ? "key" : "keys", parked ? "warn" : null],
      ["Dead letters", count(sum(all.handlers, (row) => row.dead_lettered)), "since the start", null],
      ["Commits", count(sum(stats, (one) => one.commits)), sum(stats, (one) => one.commit_failures) ? `${count(sum(stats, (one) => one.commit_failures))} failed` : "acknowledged", null],
      ["Run again", count(sum(stats, (one) => one.replayed)), "records", null],
    ];
    sync($("figures"), figures, ([name]) => name,
      ([name]) => el("div", {}, el("dt", { text: name }), el("dd", {}, el("strong"), el("span", { class: "muted" }))),
      (tile, [, value, unit, tone]) => {
        write(tile.lastElementChild.children[0], value);
        write(tile.lastElementChild.children[1], unit);
        mark(tile, "data-tone", tone);
      });
  }

  function drawAttention(doc, all) {
    const silent = doc.processes.filter((one) => one.error !== null).map((one) => ({
      key: `${one.worker}|silent`, tone: "bad", word: "no answer", title: `worker ${one.worker}`, text: sentence(one.error), from: "",
    }));
    const troubled = all.known.flatMap(({ worker, statistics: { state: now, trouble } }) => (now === "failed" ? [{
      key: `${worker}|failed`, tone: "bad", word: "failed", title: worker === null ? "" : `worker ${worker}`, text: sentence(`the app has failed${trouble ? `: ${trouble}` : "; its log says why"}`), from: "",
    }] : []));
    const found = [...silent, ...troubled, ...all.findings];
    const real = found.filter((one) => one.tone !== "quiet");
    write($("attention-count"), real.length ? count(real.length) : "");
    mark($("attention"), "data-tone", real.some((one) => one.tone === "bad") ? "bad" : real.length ? "warn" : null);
    sync($("findings"), found, (one) => one.key, makeFinding, updateFinding);
    $("attention-empty").hidden = found.length > 0;
    write($("attention-empty"), "Nothing is in the way: every partition advances or is up to date.");
  }

  function makeFinding() {
    return el("li", {},
      el("p", { class: "finding-head" }, badge("quiet", ""), el("strong"), el("span", { class: "muted" })),
      el("p", { class: "said" }), el("p", { class: "said held" }), el("p", { class: "todo" }), el("div"),
      el("details", {}, el("summary"), el("ol", { class: "stack" })));
  }

  function updateFinding(item, one) {
    const [head, said, held, todo, others, stack] = item.children;
    paint(head.children[0], one.tone, one.word);
    write(head.children[1], one.title);
    write(head.children[2], one.from);
    write(said, one.text);
    write(held, one.held || "");
    write(todo, one.todo ? `What to do: ${one.todo}.` : "");
    sync(others, (one.others || []).map((other, n) => ({ ...other, n })), (other) => other.n, () => el("div", {}, el("p", { class: "said" }), el("p", { class: "todo" })), (node, other) => {
      write(node.children[0], other.text);
      write(node.children[1], other.todo ? `What to do: ${other.todo}.` : "");
    });
    const frames = one.stack ? framesOf(one.stack, 0) : [];
    mark(stack, "hidden", !frames.length);
    write(stack.children[0], `Stack, ${plural(frames.filter((frame) => frame.file).length, "call")}, innermost last`);
    sync(stack.children[1], frames, (frame) => frame.key, () => el("li", {}, el("span", { class: "function" }), el("span", { class: "code" })), (line, frame) => {
      line.style.marginInlineStart = `${frame.depth}em`;
      mark(line, "data-own", frame.own ? "yes" : null);
      write(line.children[0], frame.function);
      write(line.children[1], frame.file);
      mark(line.children[1], "title", frame.whole);
    });
  }

  // Of a library the place within it; of the application the whole path.
  const brief = (file) => file.replace(/^.*[/\\](?:site-packages|dist-packages|lib[/\\]python[\d.]+)[/\\]/, "");

  function framesOf(stack, depth, path = "") {
    const lines = stack.frames.map((frame, n) => ({ key: `${path}${n}`, depth, own: frame.own, function: frame.function, file: `${frame.own ? frame.file : brief(frame.file)}:${frame.line}`, whole: `${frame.file}:${frame.line}` }));
    if (stack.name || stack.thread) lines.unshift({ key: `${path}name`, depth, own: false, function: stack.thread ? `in thread ${stack.thread}` : `in task ${stack.name}`, file: "" });
    stack.tasks.forEach((task, n) => lines.push(...framesOf(task, depth + 1, `${path}t${n}.`)));
    if (stack.more_tasks) lines.push({ key: `${path}more`, depth: depth + 1, own: false, function: `and ${plural(stack.more_tasks, "more task")}`, file: "" });
    if (stack.executing && !stack.thread) lines.push({ key: `${path}busy`, depth, own: false, function: "computes or blocks there: nothing else runs meanwhile", file: "" });
    return lines;
  }

  function drawTables(doc, all) {
    const may = doc.actions && token !== null;
    const of = (name) => {
      const columns = tables[name].all.filter((one) => one !== WORKER || several);
      return may && ACTIONS[name] ? [...columns, ACTIONS[name]] : columns;
    };
    const totals = (name) => sum(all.known, (one) => one.workload && one.workload[name]);
    for (const name of Object.keys(tables)) tables[name].show(all[name], of(name));
    offerSorts();
    const topics = new Set(all.partitions.map((row) => row.topic));
    write($("partitions-count"), all.partitions.length ? `${count(all.partitions.length)} in ${plural(topics.size, "topic")}` : "");
    write($("handlers-count"), count(all.handlers.length));
    write($("failures-count"), totals("failing") > all.failed.length ? `${count(all.failed.length)} of ${count(totals("failing"))}` : all.failed.length ? count(all.failed.length) : "");
    write($("parked-count"), totals("parked_keys") > all.parked.length ? `${count(all.parked.length)} of ${count(totals("parked_keys"))}` : all.parked.length ? count(all.parked.length) : "");
    write($("workers-count"), totals("busy") ? `${count(totals("busy"))} busy` : "");
    write($("shards-count"), totals("deep") ? count(totals("deep")) : "");
  }

  function offerSorts() {
    const table = tables.partitions, select = $("partitions-sort");
    const names = table.columns.filter((one) => one.by).map((one) => one.label);
    sync(select, names, (name) => name, (name) => el("option", { value: name, text: name }), () => {});
    if (table.order && select.value !== table.order.label) select.value = table.order.label;
  }

  const PHASES = ["drain", "commit", "join", "resume"];

  function drawRebalances(all) {
    const longest = Math.max(0.001, ...all.reports.map((one) => one.seconds));
    write($("rebalances-count"), all.reports.length ? count(sum(all.known, (one) => one.statistics.rebalances)) : "");
    $("rebalances-empty").hidden = all.reports.length > 0;
    sync($("rebalances"), all.reports, (one) => `${one.worker}|${one.number}|${one.at}`, () => el("li", {},
      el("p", { class: "when" }, el("strong"), el("span", { class: "muted" }), badge("warn", "under way")),
      el("div", { class: "phases", role: "img" }, ...PHASES.map((phase) => el("i", { "data-phase": phase }))),
      el("p", { class: "said" }), el("p", { class: "muted" })), (item, one) => {
      const [when, bar, said, more] = item.children;
      write(when.children[0], clock(one.at));
      write(when.children[1], `${time(Date.now() / 1000 - one.at)} ago, took ${time(one.seconds)}${several ? `, worker ${one.worker}` : ""}`);
      mark(when.children[2], "hidden", one.phase === "over");
      write(when.children[2], `under way: ${one.phase}`);
      PHASES.forEach((phase, n) => { bar.children[n].style.width = `${(100 * one[`${phase}_seconds`]) / longest}%`; });
      mark(bar, "aria-label", PHASES.map((phase) => `${phase} ${time(one[`${phase}_seconds`])}`).join(", "));
      mark(bar, "title", bar.getAttribute("aria-label"));
      write(said, sentence(one.cause));
      const facts = [`${one.revoked} revoked`, `${one.assigned} assigned`, `${one.kept} kept`];
      if (one.in_flight) facts.push(`${one.in_flight} in flight`, `${one.drained} drained`, `${one.cancelled} cancelled`);
      if (one.dropped) facts.push(`${one.dropped} dropped`);
      if (one.replayed) facts.push(`${one.replayed} run again`);
      if (one.generation !== null) facts.push(`generation ${one.generation}`);
      write(more, facts.join(" · "));
    });
  }

  // Actions ---------------------------------------------------------------------------

  let token = null; // in memory alone: it is forgotten with the page
  let latest = null;

  async function post(body, given) {
    const answer = await fetch("actions", {
      method: "POST",
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${given}` },
      body: JSON.stringify(body),
      signal: AbortSignal.timeout(PATIENCE + 5000),
    });
    const told = await answer.json().catch(() => ({}));
    if (!answer.ok) throw Object.assign(new Error(told.error || `the server answered ${answer.status}`), { status: answer.status });
    return told.done;
  }

  async function act(row, action, given) {
    const body = { action, ...given, ...(row.worker === null ? {} : { worker: row.worker }) };
    try {
      toast(sentence(await post(body, token)), "good");
    } catch (error) {
      if (error.status === 401) setToken(null);
      toast(sentence(error.message), "bad");
    }
    ask(true);
  }

  function toast(text, tone) {
    const shown = $("toast");
    clearTimeout(toast.timer);
    mark(shown, "data-tone", tone);
    shown.hidden = false;
    write(shown, text);
    toast.timer = setTimeout(() => { shown.hidden = true; }, tone === "bad" ? 12000 : 5000);
  }

  function setToken(given) {
    token = given;
    write($("unlock"), token === null ? "Unlock actions" : "Lock actions");
    if (latest) draw(latest);
  }

  let agree = null;

  function openDialog({ title, text, ok, label = null, type = "text", value = "", danger = false, then }) {
    write($("ask-title"), title);
    write($("ask-text"), text);
    write($("ask-ok"), ok);
    mark($("ask-ok"), "data-tone", danger ? "bad" : null);
    write($("ask-error"), "");
    $("ask-field").hidden = label === null;
    write($("ask-label"), label || "");
    Object.assign($("ask-input"), { type, value, required: label !== null, min: 1 });
    agree = then;
    $("ask").showModal();
    (label === null ? $("ask-cancel") : $("ask-input")).focus();
  }

  function askToken() {
    openDialog({
      title: "Unlock actions",
      text: "Actions need the token that the operator of this app has set. This page keeps it until it is closed or reloaded.",
      ok: "Unlock",
      label: "Token",
      type: "password",
      then: async (given) => {
        await post({ action: "check" }, given);
        setToken(given);
        toast("Actions are unlocked.", "good");
      },
    });
  }

  function askSkip(row) {
    openDialog({
      title: `Skip ${record(row)}?`,
      text: "It counts as done without being processed, its shard goes on, and its offset may be committed. This cannot be taken back.",
      ok: "Skip the record",
      danger: true,
      then: () => act(row, "skip", place3(row)),
    });
  }

  function askConcurrency(row) {
    openDialog({
      title: `Concurrency of ${row.name}`,
      text: "How many records it works on at once, until the app stops. Nothing that runs is interrupted.",
      ok: "Set",
      label: "Workers",
      type: "number",
      value: row.concurrency,
      then: (given) => act(row, "set_concurrency", { handler: row.name, concurrency: Number(given) }),
    });
  }

  $("ask-cancel").addEventListener("click", () => $("ask").close());
  $("ask").addEventListener("close", () => { $("ask-input").value = ""; agree = null; });
  $("ask-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (!agree) return;
    $("ask-ok").disabled = true;
    try {
      await agree($("ask-input").value.trim());
      $("ask").close();
    } catch (error) {
      write($("ask-error"), sentence(error.message));
    } finally {
      $("ask-ok").disabled = false;
    }
  });
  $("unlock").addEventListener("click", () => (token === null ? askToken() : setToken(null)));
  $("partitions-filter").addEventListener("input", (event) => { tables.partitions.wanted = event.target.value; tables.partitions.draw(); });
  $("partitions-sort").addEventListener("change", (event) => tables.partitions.sortBy(event.target.value, event.target.value !== "Partition"));

  // Asking ----------------------------------------------------------------------------

  let answered = null; // when, in milliseconds
  let trouble = null;
  let asking = false;
  let timer = null;

  async function ask(now = false) {
    if (asking) return;
    asking = true;
    clearTimeout(timer);
    try {
      const answer = await fetch("processes.json", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      latest = await answer.json();
      answered = Date.now();
      trouble = null;
      $("unlock").hidden = !latest.actions;
      draw(latest);
    } catch (error) {
      trouble = error.name === "TimeoutError" ? "the server does not answer" : error.name === "TypeError" ? "the server cannot be reached" : error.message;
    } finally {
      asking = false;
      showConnection();
      if (!document.hidden || now) timer = setTimeout(ask, EVERY);
    }
  }

  function showConnection() {
    const late = answered === null ? null : (Date.now() - answered) / 1000;
    const stale = trouble !== null || (late !== null && late > (EVERY + PATIENCE) / 1000 && !document.hidden);
    const banner = $("stale");
    paint($("connection").lastElementChild, null, stale ? "no answer" : late === null ? "connecting" : "live");
    mark($("connection"), "data-tone", stale ? "bad" : late === null ? "quiet" : "good");
    mark(document.body, "data-stale", stale && answered !== null);
    banner.hidden = !stale;
    if (!stale) return;
    const since = answered === null ? "" : ` What is shown is of ${clock(answered / 1000)}, ${time(Math.round(late))} ago.`;
    write(banner, `${sentence(trouble || "the server does not answer")}${since} It is asked again every ${EVERY / 1000} s.`);
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
  setInterval(showConnection, 1000);
  for (const table of Object.values(tables)) table.show([]);
  ask();
})();
