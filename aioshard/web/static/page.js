/* The dashboard of an app. It polls dashboard.json every two seconds; its plots begin with history.json. */
import { $, Table, VISIBLE_ROWS, badge, button, buttons, bytes, clock, count, el, meter, most, paint, plural, rate, sentence, setAttribute, short, state, sum, sync, time, write } from "./elements.js";
import { createDeadLetters } from "./dead_letters.js";

const INTERVAL = 2000; // milliseconds between two polls
const TIMEOUT = 10000; // milliseconds to wait for a response
const HISTORY = 3600; // maximum seconds that a plot shows
const MIN_SPAN = 60; // minimum seconds that a plot shows
const MAX_FURTHER = 50; // further records or partitions that a finding lists
const SHORT_WAIT = 5; // seconds that a partition may wait for a record before it is a finding

// Plots -----------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes = {}) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
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
    while (this.points[0].at < at - HISTORY) this.points.shift();
    this.added = (this.added || 0) + 1;
    write(this.now, this.say(values[0]));
    write(this.aside, aside);
    this.draw();
  }

  /* Replace the points of the period for which the server has samples. */
  fill(history) {
    if (!history.length) return;
    const [first, last] = [history[0].at, history[history.length - 1].at];
    this.points = [...this.points.filter((point) => point.at < first), ...history, ...this.points.filter((point) => point.at > last)];
    this.draw();
  }

  draw() {
    const width = Math.max(this.svg.parentElement.clientWidth, 120), height = width < 200 ? 90 : 120;
    const left = 44, right = 6, top = 8, bottom = 20;
    const last = this.points.length ? this.points[this.points.length - 1].at : Date.now() / 1000;
    const first = this.points.length ? this.points[0].at : last;
    const span = Math.max(last - first, MIN_SPAN);
    const highest = Math.max(0, ...this.points.flatMap((point) => point.values.map((value) => value || 0)));
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
    for (const [at, anchor, text] of [[last - span, "start", width < 200 ? time(span) : `${time(span)} ago`], [last, "end", "now"]]) {
      const label = svg("text", { class: "axis", x: x(at), y: height - 4, "text-anchor": anchor });
      label.textContent = text;
      parts.push(label);
    }
    this.lines.forEach((_, n) => {
      const runs = this.runs(n);
      const line = runs.map((run) => run.map((point, i) => `${i ? "L" : "M"}${x(point.at).toFixed(1)} ${y(point.values[n]).toFixed(1)}`).join(""));
      if (n === 0) {
        const base = y(0).toFixed(1);
        const area = runs.map((run, i) => `${line[i]}L${x(run[run.length - 1].at).toFixed(1)} ${base}L${x(run[0].at).toFixed(1)} ${base}Z`);
        parts.push(svg("path", { class: "area", d: area.join("") }));
      }
      parts.push(svg("path", { class: "line", "data-line": n, d: line.join("") }));
    });
    const shown = this.at ? this.points.find((point) => point.at === this.at) : null;
    if (shown) parts.push(svg("line", { class: "cursor", x1: x(shown.at), x2: x(shown.at), y1: top, y2: y(0) }));
    this.x = x;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.svg.setAttribute("aria-label", `${this.title}: now ${this.now.textContent} ${this.unit}, at most ${this.say(highest)} in the last ${time(last - first)}`);
    this.svg.dataset.points = String(this.added || 0);
    this.svg.dataset.first = String(first);
    this.svg.replaceChildren(...parts);
  }

  /* Split the line where values are unknown. */
  runs(n) {
    const runs = [[]];
    for (const point of this.points) {
      if (point.values[n] === null || point.values[n] === undefined) runs.push([]);
      else runs[runs.length - 1].push(point);
    }
    return runs.filter((run) => run.length);
  }

  point(event) {
    if (!this.points.length) return;
    const box = this.svg.getBoundingClientRect();
    const at = event.clientX - box.left;
    const nearest = this.points.reduce((best, point) => (Math.abs(this.x(point.at) - at) < Math.abs(this.x(best.at) - at) ? point : best));
    this.at = nearest.at;
    const named = nearest.values.map((value, n) => `${this.lines[n] ? `${this.lines[n]} ` : ""}${this.say(value === undefined ? null : value)}`);
    write(this.tip, `${clock(nearest.at)}  ${named.join(", ")} ${this.unit}`);
    this.tip.hidden = false;
    this.tip.style.left = `${Math.min(Math.max(this.x(nearest.at) - this.tip.offsetWidth / 2, 0), box.width - this.tip.offsetWidth)}px`;
    this.draw();
  }
}

const partitionName = (row) => `${row.topic}/${row.partition}`;
const recordName = (row) => `${row.topic}/${row.partition}/${row.offset}`;
const keyText = (row) => (row.key === null ? "no key" : row.key) + (row.shard ? ` (shard ${row.shard})` : "");

const adaptive = (row) => (row.adaptive ? ` · adaptive, ${row.adaptive.minimum} to ${row.adaptive.maximum}: ${row.adaptive.why}` : "");

// Content ---------------------------------------------------------------------------

const VERDICTS = { stuck: ["bad", "stuck", 5], waiting: ["warn", "waiting", 4] };

function verdictOf(row) {
  if (row.pausedManually && row.verdict !== "stuck") return ["warn", "paused", 3];
  if (VERDICTS[row.verdict]) return VERDICTS[row.verdict];
  if (row.lag === null) return ["quiet", "lag unknown", 2];
  return row.lag > 0 || row.incomplete > 0 ? ["info", "advancing", 1] : ["good", "up to date", 0];
}

const FAILURE_STATES = { halted: ["bad", "halted", 2], retrying: ["warn", "retrying", 1], recovery: ["warn", "diverting", 1] };
const SHARD_STATES = { in_flight: ["info", "in flight"], retrying: ["warn", "retrying"], halted: ["bad", "halted"] };

const plots = {
  rate: new Plot($("plot-rate"), { title: "Throughput", unit: "records/s", say: rate, tick: (n) => short.format(n) }),
  lag: new Plot($("plot-lag"), { title: "Lag", unit: "records", say: count, tick: (n) => short.format(n) }),
  age: new Plot($("plot-age"), { title: "Oldest incomplete record", unit: "", say: time, tick: ticks }),
  time: new Plot($("plot-time"), { title: "Run time", unit: "", say: time, tick: ticks, lines: ["median", "99 %"] }),
};

function ticks(seconds) {
  return seconds < 1 && seconds > 0 ? `${+(seconds * 1000).toPrecision(3)} ms` : seconds < 120 ? `${+seconds.toPrecision(3)} s` : `${+(seconds / 60).toPrecision(2)} min`;
}

const processes = new Table($("members"), {
  name: "Processes of the group",
  empty: "No member URLs are configured.",
  keyOf: (row) => row.url,
  order: { label: "Process", down: false },
  columns: [
    { label: "Process", class: "name", by: (row) => row.url, make: () => [el("a"), el("small")], update: (cell, row) => {
      write(cell.children[0], row.url);
      setAttribute(cell.children[0], "href", `${row.url}/`);
      write(cell.children[1], row.member_id || "");
    } },
    state((row) => (row.error ? ["bad", "no answer", 1] : [TONE[row.state], row.state, 0])),
    { label: "Partitions", num: true, by: (row) => row.count, text: (row) => count(row.count) },
    { label: "Lag", num: true, by: (row) => row.lag, text: (row) => count(row.lag) },
    { label: "In flight", num: true, by: (row) => row.incomplete, text: (row) => count(row.incomplete) },
    meter("Busy", (row) => [row.busy, row.concurrency]),
    { label: "Processed", num: true, by: (row) => row.processed, text: (row) => count(row.processed) },
    { label: "Halted", num: true, by: (row) => row.halted, text: (row) => count(row.halted) },
    { label: "Why", class: "why", text: (row) => row.error || row.trouble || "" },
  ],
});

const tables = {
  partitions: new Table($("partitions"), {
    name: "Partitions",
    empty: "No partition is assigned.",
    keyOf: partitionName,
    order: { label: "State", down: true },
    text: (row) => `${partitionName(row)} ${verdictOf(row)[1]} ${row.paused || ""}`,
    columns: [
      { label: "Partition", class: "name", by: (row) => row.order, text: partitionName },
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
    keyOf: (row) => row.name,
    columns: [
      { label: "Handler", class: "name", by: (row) => row.name, make: () => [el("strong"), el("small")], update: (cell, row) => {
        write(cell.children[0], row.name);
        write(cell.children[1], `${row.topics.join(", ")} · ${row.policy}${adaptive(row)}`);
      } },
      state((row) => (row.pausedManually ? ["warn", "paused", 2] : row.outliving.length ? ["bad", "outlived", 3] : row.busy ? ["info", "working", 1] : ["good", "idle", 0])),
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
      { label: "Left out", num: true, by: (row) => row.superseded + row.expired, text: (row) => count(row.superseded + row.expired) },
    ],
  }),
  failed: new Table($("failed"), {
    name: "Failed records",
    empty: "No record is halted, or waits for its next attempt.",
    keyOf: (row) => `${row.handler}|${recordName(row)}`,
    columns: [
      { label: "Record", class: "name", make: () => [el("strong"), el("small")], update: (cell, row) => {
        write(cell.children[0], recordName(row));
        write(cell.children[1], `${row.handler} · ${keyText(row)}`);
      } },
      state((row) => FAILURE_STATES[row.state] || ["warn", row.state, 0]),
      { label: "Attempt", num: true, by: (row) => row.attempt, text: (row) => `${count(row.attempt)} of ${count(row.attempts)}` },
      { label: "Failed", num: true, by: (row) => row.since, text: (row) => `${time(row.since)} ago` },
      { label: "Next attempt", num: true, by: (row) => row.due, text: (row) => (row.due === null ? "none" : `in ${time(row.due)}`) },
      { label: "Behind it", num: true, by: (row) => row.waiting, text: (row) => count(row.waiting) },
      { label: "Error", class: "why", text: (row) => row.error || "" },
    ],
  }),
  parked: new Table($("parked"), {
    name: "Parked keys",
    empty: "Nothing is parked.",
    keyOf: (row) => `${row.handler}|${recordName(row)}`,
    columns: [
      { label: "Key", class: "name", make: () => [el("strong"), el("small")], update: (cell, row) => {
        write(cell.children[0], row.key === null ? "no key" : row.key);
        write(cell.children[1], `${recordName(row)} · in ${row.stored_in}`);
      } },
      state((row) => (row.in_flight ? ["info", "runs again", 0] : row.due === null ? ["bad", "waits for release", 2] : ["warn", "parked", 1])),
      { label: "Runs again", num: true, by: (row) => row.due, text: (row) => (row.in_flight ? "now" : row.due === null ? "when released" : `in ${time(row.due)}`) },
      { label: "Retries", num: true, by: (row) => row.retries, text: (row) => count(row.retries) },
      { label: "Error", class: "why", text: (row) => row.error || "" },
    ],
  }),
  workers: new Table($("workers"), {
    name: "Records that workers run",
    empty: "All workers are idle.",
    keyOf: (row) => row.worker,
    columns: [
      { label: "Record", class: "name", make: () => [el("strong"), el("small")], update: (cell, row) => {
        write(cell.children[0], row.records > 1 ? `${recordName(row)} and ${row.records - 1} more` : recordName(row));
        write(cell.children[1], `${row.worker} · ${keyText(row)}`);
      } },
      { label: "For", num: true, by: (row) => row.since, text: (row) => time(row.since) },
      { label: "At", class: "why", make: () => [el("span", { class: "badge", "data-tone": "bad", text: "cancelled or revoked" }), el("span", { class: "code" })], update: (cell, row) => {
        const frame = row.stack && row.stack.place;
        setAttribute(cell.children[0], "hidden", row.state !== "outliving");
        write(cell.children[1], row.state === "recovery" ? row.reason : frame ? `${frame.file}:${frame.line} in ${frame.function}` : "");
      } },
    ],
  }),
  shards: new Table($("shards"), {
    name: "Shards in which records wait",
    empty: "No record waits behind another one of its key.",
    keyOf: (row) => `${row.handler}|${row.key}|${row.shard}`,
    columns: [
      { label: "Key", class: "name", make: () => [el("strong"), el("small")], update: (cell, row) => {
        write(cell.children[0], row.key === null ? (row.shard === null ? "no key" : `shard ${row.shard}`) : row.key);
        write(cell.children[1], `${row.handler}${row.key !== null && row.shard !== null ? ` · shard ${row.shard}` : ""}`);
      } },
      { label: "Waiting", num: true, by: (row) => row.waiting, text: (row) => count(row.waiting) },
      state((row) => [...(SHARD_STATES[row.state] || ["quiet", row.state]), 0]),
      { label: "Behind", class: "why", text: recordName },
    ],
  }),
};

const ACTIONS = {
  partitions: buttons((row) => [button(row, {
    name: partitionName,
    say: (now) => (now.pausedManually ? "Resume" : "Pause"),
    act: (now) => act(now.pausedManually ? "resume" : "pause", { topic: now.topic, partition: now.partition }),
    when: (now) => !now.handlerPaused,
  })]),
  handlers: buttons((row) => [button(row, {
    name: (now) => now.name,
    say: (now) => (now.pausedManually ? "Resume" : "Pause"),
    act: (now) => act(now.pausedManually ? "resume_handler" : "pause_handler", { handler: now.name }),
  })]),
  workers: buttons((row) => [button(row, {
    name: recordName,
    say: () => "Cancel",
    act: confirmCancel,
    when: (now) => now.state === "in_flight",
  })]),
  failed: buttons((row) => [
    button(row, { name: recordName, say: (now) => (now.first ? "Retry the first" : "Retry"), act: (now) => act("retry_now", coordinates(now)) }),
    button(row, { name: recordName, say: (now) => (now.first ? "Skip the first" : "Skip"), act: confirmSkip }),
  ]),
  parked: buttons((row) => [button(row, {
    name: recordName,
    say: (now) => (now.first ? "Release the first" : "Release"),
    act: (now) => act("release_parked", coordinates(now)),
    when: (now) => !now.in_flight,
  })]),
};

const coordinates = (row) => ({ topic: row.topic, partition: row.partition, offset: row.offset });

// Rows ------------------------------------------------------------------------------

const before = { processed: new Map(), durations: new Map(), at: null };

/* Return the rows of all tables. */
function rowsOf(doc) {
  const { statistics, diagnosis } = doc;
  const load = doc.workload || { workers: [], shards: [], failed: [], parked: [], pauses: [] };
  const paused = new Set(load.pauses.map((pause) => (pause.handler === null ? `p|${pause.topic}/${pause.partition}` : `h|${pause.handler}`)));
  const diagnoses = new Map(diagnosis.partitions.map((partition) => [partitionName(partition), partition]));
  const topics = new Map(statistics.handlers.flatMap((handler) => handler.topics.map((topic) => [topic, handler.name])));
  const partitions = statistics.partitions.map((row, order) => {
    const diagnosed = diagnoses.get(partitionName(row));
    const pausedManually = paused.has(`p|${partitionName(row)}`);
    const handlerPaused = paused.has(`h|${topics.get(row.topic)}`) && !pausedManually;
    const why = (diagnosed && whyOf(diagnosed)) || row.paused || "";
    return { ...row, order, verdict: diagnosed ? diagnosed.verdict : null, pausedManually: pausedManually || handlerPaused, handlerPaused, why: sentence(why) };
  });
  const handlers = statistics.handlers.map((handler) => {
    const policy = { halt: "halts failed records", skip: "skips failed records" }[handler.on_failure] || handler.on_failure;
    return { ...handler, policy, pausedManually: paused.has(`h|${handler.name}`) };
  });
  const ranks = { bad: 0, warn: 1, quiet: 2 };
  return {
    partitions,
    handlers,
    failed: load.failed,
    parked: load.parked,
    shards: [...load.shards].sort((a, b) => b.waiting - a.waiting),
    workers: [...load.workers].sort((a, b) => b.since - a.since),
    reports: [...statistics.rebalance_reports].sort((a, b) => b.at - a.at),
    findings: findingsOf(doc).sort((a, b) => ranks[a.tone] - ranks[b.tone]),
  };
}

// Findings --------------------------------------------------------------------------

// Errors and reasons that differ only in numbers and identifiers have the same cause.
const alike = (text) => text.replace(/[\w-]*\d[\w-]*/g, "#");

/* Return the failed record that holds a partition back: its oldest record, or the one that this waits for. */
function failedRecord(head) {
  if (!head || !head.error) return null;
  if (!head.waits_for) return head;
  const [topic, partition, offset] = head.waits_for.split("/");
  return { topic, partition: Number(partition), offset: Number(offset), error: head.error, since: null };
}

function failure(record) {
  const when = record.since === null || record.since === undefined ? "" : ` ${time(record.since)} ago`;
  const next = record.due === null || record.due === undefined ? "" : ` and runs again in ${time(record.due)}`;
  return `${record.state === "halted" ? "halted" : "failed"}${when}${next}: ${record.error}`;
}

/* Return the sentence for the column 'Why': the failed record if there is one, otherwise the cause. */
function whyOf(partition) {
  const failed = failedRecord(partition.head);
  const cause = failed ? null : mainFinding(partition);
  if (failed) return `${recordName(failed)} ${failure(failed)}`;
  return cause ? cause.sentence : partition.head ? `offset ${partition.head.offset}: ${partition.head.reason}` : "";
}

const RESULTS = new Set(["no room", "parked", "halted"]); // findings that other findings cause, or that block nothing

function mainFinding({ head, verdict, findings }) {
  if (head && head.state !== "held" && verdict === "stuck") return null;
  return findings.find((finding) => !RESULTS.has(finding.kind)) || (head ? null : findings[0] || null);
}

/* Return the reasons why a partition waits. Equal causes of several partitions have the same key. */
function causesOf(partition) {
  const { head } = partition;
  const [tone, word] = VERDICTS[partition.verdict];
  const base = { tone, word, partition: partitionName(partition) };
  const causes = [];
  const failed = failedRecord(head);
  const main = failed ? null : mainFinding(partition);
  const more = partition.findings.filter((finding) => finding.kind !== "halted" && finding !== main);
  const details = {
    held: partition.behind ? `${count(partition.behind)} of the ${count(partition.window)} offsets from there on wait for that record.` : "",
    todo: main ? main.what_to_do : head && head.what_to_do,
    more: more.map((finding) => ({ text: sentence(finding.sentence), todo: finding.what_to_do })),
    stack: head && head.stack,
  };
  const lasting = partition.verdict === "stuck" || partition.since === null || partition.since >= SHORT_WAIT;
  if (failed) {
    if (lasting) causes.push({ ...base, ...details, key: `${head.handler}|${alike(failed.error)}`, failed: [failed], records: 1, whole: partition.sentence, text: failure(failed) });
  } else if (main || !head) {
    const text = main ? main.sentence : partition.sentence;
    causes.push({ ...base, ...details, key: `${main ? main.kind : ""}|${alike(text)}`, text, whole: partition.sentence });
  } else if (lasting) {
    causes.push({ ...base, ...details, key: `${head.state}|${alike(head.reason)}`, text: `offset ${head.offset}: ${head.reason}`, whole: partition.sentence });
  }
  for (const halted of partition.findings.filter((finding) => finding.error)) {
    const records = halted.offsets.map((offset) => ({ topic: partition.topic, partition: partition.partition, offset, error: halted.error, state: "halted" }));
    causes.push({ ...base, key: `${head.handler}|${alike(halted.error)}`, failed: records, records: halted.records, text: failure(records[0]) });
  }
  return causes;
}

/* Return the reasons why parked keys wait, except those that are running again. */
function parkedCauses(parked) {
  return parked.filter((row) => !row.in_flight).map((row) => ({
    key: `parked|${row.handler}|${row.due === null}|${alike(row.error || "")}`, tone: row.due === null ? "warn" : "quiet", word: "parked",
    partition: partitionName(row), parked: row,
    text: `is parked ${row.due === null ? "until it is released" : `and runs again in ${time(row.due)}`}: ${row.error || "an earlier record of its key failed"}`,
  }));
}

/* Merge equal causes into one finding, which names its first record and lists the others on request. */
function merge(key, causes) {
  const worst = causes.find((cause) => cause.tone === "bad") || causes[0];
  const first = causes.find((cause) => cause.whole && cause.tone === worst.tone) || worst;
  const records = new Map();
  let total = 0;
  for (const cause of [first, ...causes.filter((cause) => cause !== first)]) {
    if (cause.parked) records.set(recordName(cause.parked), { record: cause.parked, kind: "parked", text: "" });
    for (const record of cause.failed || []) {
      if (records.has(recordName(record))) total -= 1; // several partitions wait for it
      else records.set(recordName(record), { record, kind: "failed", text: "" });
    }
    total += cause.records || 0;
  }
  const partitions = new Set(causes.map((cause) => cause.partition));
  const rows = [...records].map(([name, row]) => ({ name, ...row }));
  const [named, ...further] = rows.length ? rows : causes.map((cause) => ({ name: cause.partition, text: sentence(cause.text) }));
  const many = rows.length && first.parked ? plural(rows.length, "key") : rows.length ? plural(Math.max(total, rows.length), "record") : "";
  const single = partitions.size === 1 && further.length === 0;
  const text = first.failed || first.parked ? `${further.length ? `The first, ${named.name},` : named.name} ${first.text}` : first.text;
  return {
    ...first, ...named, key, further, tone: worst.tone, word: worst.word, text: sentence(text),
    title: single ? first.partition : [many, plural(partitions.size, "partition")].filter(Boolean).join(" in "),
    left: rows.length && !first.parked ? Math.max(total - rows.length, 0) : 0,
    todo: first.todo || (causes.find((cause) => cause.todo) || {}).todo,
  };
}

function findingsOf({ statistics, diagnosis, workload }) {
  const findings = [];
  for (const finding of diagnosis.findings) {
    if (finding.kind === "nothing assigned" && statistics.state !== "running") continue;
    findings.push({ key: `${finding.kind}|${findings.length}`, tone: finding.kind === "nothing assigned" ? "quiet" : "warn", word: finding.kind, title: "", text: sentence(finding.sentence), todo: finding.what_to_do });
  }
  const runs = diagnosis.outliving.map((run) => ({ key: `outliving|${alike(run.reason)}`, tone: "bad", word: "outlived", partition: recordName(run), text: run.reason, todo: run.what_to_do, stack: run.stack }));
  const causes = [...runs, ...diagnosis.partitions.flatMap(causesOf), ...parkedCauses(workload ? workload.parked : [])];
  for (const key of new Set(causes.map((cause) => cause.key))) findings.push(merge(`cause|${key}`, causes.filter((cause) => cause.key === key)));
  if (diagnosis.left_out) findings.push({ key: "left out", tone: "warn", word: "more", title: "", text: `${plural(diagnosis.left_out, "more partition")} wait; the table below lists all of them.` });
  return findings;
}

// Rates cover the time between two responses; a counter that fell belongs to a new process.
function measure(doc, all) {
  const passed = before.at === null ? null : doc.at - before.at;
  const processed = new Map();
  let total = passed === null || passed <= 0 ? null : 0;
  for (const row of all.handlers) {
    const key = row.name;
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

const TONE = { failed: "bad", stopped: "quiet", starting: "warn", draining: "warn", running: "good" };

function draw(doc) {
  const { statistics } = doc;
  const all = rowsOf(doc);
  const total = measure(doc, all);
  const { group_id: group, member_id: member, state: now } = statistics;
  write($("group"), group);
  const title = `${now === "running" ? "" : `${now} · `}${group} · aioshard`;
  if (document.title !== title) document.title = title;
  paint($("state"), TONE[now], now);
  write($("member"), member ? `member ${member.slice(-8)}` : "");
  setAttribute($("member"), "title", member);
  drawPlots(doc, all, total);
  drawFigures(doc, all);
  drawAttention(statistics, all);
  drawTables(doc, all);
  drawRebalances(statistics, all);
  deadLetters.update();
  write($("foot"), "Keys are shown as hashes unless show_keys is set; payloads are hidden unless show_payloads is set and actions are unlocked.");
}

function drawPlots(doc, all, total) {
  const processed = sum(all.handlers, (row) => row.processed);
  if (total !== null) plots.rate.add(doc.at, [total], `${count(processed)} since the start`);
  else write(plots.rate.aside, `${count(processed)} since the start`);
  const lagging = most(all.partitions, (row) => row.lag_seconds);
  const known = all.partitions.some((row) => row.lag !== null) || !all.partitions.length;
  plots.lag.add(doc.at, [known ? sum(all.partitions, (row) => row.lag) : null], lagging ? `oldest is ${time(lagging)} old` : "");
  const age = most(all.partitions, (row) => row.oldest_incomplete_age);
  const oldest = all.partitions.find((row) => row.oldest_incomplete_age === age && age !== null);
  plots.age.add(doc.at, [age || 0], oldest ? `in ${partitionName(oldest)}` : "");
  drawTimes(doc, all);
}

// Durations of all runs that ended between two responses, as exact as the buckets of the histogram.
function drawTimes(doc, all) {
  const histograms = all.handlers.flatMap((row) => (row.by_topic || []).map((topic) => ({ key: `${row.name}|${topic.topic}`, ...topic.durations })));
  $("plot-time").hidden = !histograms.length;
  if (!histograms.length) return;
  const { bounds } = histograms[0];
  const counts = [...bounds, 0].map(() => 0);
  for (const histogram of histograms) {
    const last = before.durations.get(histogram.key);
    histogram.counts.forEach((n, at) => { counts[at] += last ? Math.max(n - last[at], 0) : 0; });
    before.durations.set(histogram.key, histogram.counts);
  }
  const [median, slowest] = [quantile(bounds, counts, 0.5), quantile(bounds, counts, 0.99)];
  plots.time.add(doc.at, [median, slowest], slowest === null ? "" : `99 %: ${time(slowest)}`);
}

function drawHistory(history, doc) {
  const bounds = doc.statistics.handlers.flatMap((row) => (row.by_topic || []).map((topic) => topic.durations.bounds))[0];
  const points = (of) => history.map((sample, n) => ({ at: sample.at, values: of(sample, n ? history[n - 1] : sample) }));
  plots.rate.fill(points((now, last) => [now.at > last.at ? Math.max(now.processed - last.processed, 0) / (now.at - last.at) : null]));
  plots.lag.fill(points((now) => [now.lag]));
  plots.age.fill(points((now) => [now.oldest_age]));
  if (!bounds) return;
  plots.time.fill(points((now, last) => {
    const counts = now.durations.map((n, at) => Math.max(n - (last.durations[at] || 0), 0));
    return [quantile(bounds, counts, 0.5), quantile(bounds, counts, 0.99)];
  }));
}

function drawFigures(doc, all) {
  const { statistics } = doc;
  const failing = doc.workload ? doc.workload.failing : 0;
  const halted = sum(all.handlers, (row) => row.halted);
  const parked = doc.workload ? doc.workload.parked_keys : 0;
  const figures = [
    ["Workers busy", `${count(sum(all.handlers, (row) => row.busy))} of ${count(sum(all.handlers, (row) => row.concurrency))}`, "", null],
    ["In flight", count(statistics.buffered_records), `records, ${bytes(statistics.buffered_bytes)}`, null],
    ["Halted", count(halted), halted ? "hold their shard" : "records", halted ? "bad" : null],
    ["Retrying", count(Math.max(failing - halted, 0)), "records", failing > halted ? "warn" : null],
    ["Parked", count(parked), parked === 1 ? "key" : "keys", parked ? "warn" : null],
    ["Dead letters", count(sum(all.handlers, (row) => row.dead_lettered)), "since the start", null],
    ["Commits", count(statistics.commits), statistics.commit_failures ? `${count(statistics.commit_failures)} failed` : "acknowledged", null],
    ["Run again", count(statistics.replayed), "records", null],
  ];
  const transactions = statistics.transactions;
  if (transactions) {
    const unknown = transactions.decided_committed + transactions.decided_aborted + transactions.undecided;
    const ended = `committed, ${count(transactions.aborted + transactions.decided_aborted)} aborted`;
    figures.push(
      ["Transactions", count(transactions.committed + transactions.decided_committed), ended, null],
      ["Unknown outcomes", count(unknown), `${count(transactions.undecided)} undecided`, transactions.undecided ? "warn" : null],
    );
  }
  sync($("figures"), figures, ([name]) => name,
    ([name]) => el("div", {}, el("dt", { text: name }), el("dd", {}, el("strong"), el("span", { class: "muted" }))),
    (tile, [, value, unit, tone]) => {
      write(tile.lastElementChild.children[0], value);
      write(tile.lastElementChild.children[1], unit);
      setAttribute(tile, "data-tone", tone);
    });
}

function drawAttention({ state: now, trouble }, all) {
  const failed = now === "failed" ? [{ key: "failed", tone: "bad", word: "failed", title: "", text: sentence(`the app has failed${trouble ? `: ${trouble}` : "; see its log"}`) }] : [];
  const findings = [...failed, ...all.findings];
  const real = findings.filter((finding) => finding.tone !== "quiet");
  write($("attention-count"), findings.length ? count(findings.length) : "");
  setAttribute($("attention"), "data-tone", real.some((finding) => finding.tone === "bad") ? "bad" : real.length ? "warn" : null);
  sync($("findings"), findings, (finding) => finding.key, makeFinding, updateFinding);
  $("attention-empty").hidden = findings.length > 0;
  write($("attention-empty"), "No findings: every partition advances or is up to date.");
}

const allowed = () => latest !== null && latest.actions && token !== null;

/* Show the buttons of a failed or parked record, as its table has them. */
function offerActions(host, row) {
  const kind = row.kind && allowed() ? row.kind : "";
  host.row = row.record;
  if (host.kind !== kind) {
    host.kind = kind;
    host.replaceChildren(...(kind ? ACTIONS[kind].make(() => host.row) : []));
  }
  if (kind) ACTIONS[kind].update(host, host.row);
}

function makeFinding() {
  return el("li", {},
    el("p", { class: "finding-head" }, badge("quiet", ""), el("strong"), el("span", { class: "actions" })),
    el("p", { class: "said" }),
    el("details", {}, el("summary"), el("p", { class: "todo" }), el("p", { class: "said" }), el("p", { class: "said held" }), el("div"), el("ol", { class: "stack" }), el("ul", { class: "further" }), el("p", { class: "held" })));
}

function updateFinding(item, finding) {
  const [head, text, details] = item.children;
  const [summary, todo, whole, held, more, stack, further, left] = details.children;
  paint(head.children[0], finding.tone, finding.word);
  write(head.children[1], finding.title);
  const rows = finding.further || [];
  offerActions(head.children[2], { kind: finding.kind, record: { ...finding.record, first: rows.length > 0 } });
  write(text, finding.text);
  const frames = finding.stack ? framesOf(finding.stack) : [];
  const others = rows.length + (finding.left || 0);
  const named = [finding.todo && "what to do", finding.whole && "details", frames.length && `stack of ${plural(frames.filter((frame) => frame.file).length, "call")}`, others && `${count(others)} more`].filter(Boolean);
  setAttribute(details, "hidden", !named.length);
  write(summary, sentence(named.join(", ")).slice(0, -1));
  write(todo, finding.todo ? `What to do: ${finding.todo}.` : "");
  write(whole, finding.whole ? sentence(finding.whole) : "");
  write(held, finding.held || "");
  sync(more, (finding.more || []).map((other, n) => ({ ...other, n })), (other) => other.n, () => el("div", {}, el("p", { class: "said" }), el("p", { class: "todo" })), (node, other) => {
    write(node.children[0], other.text);
    write(node.children[1], other.todo ? `What to do: ${other.todo}.` : "");
  });
  setAttribute(stack, "hidden", !frames.length);
  sync(stack, frames, (frame) => frame.key, () => el("li", {}, el("span", { class: "function" }), el("span", { class: "code" })), (line, frame) => {
    setAttribute(line, "data-own", frame.own ? "yes" : null);
    write(line.children[0], frame.function);
    write(line.children[1], frame.file);
    setAttribute(line.children[1], "title", frame.whole);
  });
  sync(further, rows.slice(0, MAX_FURTHER), (row) => row.name, () => el("li", {}, el("strong"), el("span"), el("span", { class: "actions" })), (line, row) => {
    write(line.children[0], row.name);
    write(line.children[1], row.text);
    offerActions(line.children[2], row);
  });
  const unnamed = others - Math.min(rows.length, MAX_FURTHER);
  write(left, unnamed ? `${count(unnamed)} more are not listed.` : "");
}

// Shorten the path of a library's file; paths of the application stay whole.
const shortPath = (file) => file.replace(/^.*[/\\](?:site-packages|dist-packages|lib[/\\]python[\d.]+)[/\\]/, "");

function framesOf(stack) {
  const lines = stack.frames.map((frame, n) => ({ key: `${n}`, own: frame.own, function: frame.function, file: `${frame.own ? frame.file : shortPath(frame.file)}:${frame.line}`, whole: `${frame.file}:${frame.line}` }));
  if (stack.thread) lines.unshift({ key: "thread", own: false, function: `in thread ${stack.thread}`, file: "" });
  if (stack.executing && !stack.thread) lines.push({ key: "busy", own: false, function: "was executing at that moment", file: "" });
  return lines;
}

function drawTables(doc, all) {
  const of = (name) => {
    const columns = tables[name].all;
    return allowed() && ACTIONS[name] ? [...columns, ACTIONS[name]] : columns;
  };
  const totals = (name) => (doc.workload ? doc.workload[name] : 0);
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
  const names = table.columns.filter((column) => column.by).map((column) => column.label);
  sync(select, names, (name) => name, (name) => el("option", { value: name, text: name }), () => {});
  if (table.order && select.value !== table.order.label) select.value = table.order.label;
}

let allRebalances = false;
const PHASES = ["drain", "commit", "join", "resume"];

function drawRebalances(statistics, all) {
  const longest = Math.max(0.001, ...all.reports.map((report) => report.seconds));
  write($("rebalances-count"), all.reports.length ? count(statistics.rebalances) : "");
  $("rebalances-empty").hidden = all.reports.length > 0;
  $("rebalances-more").hidden = all.reports.length <= VISIBLE_ROWS;
  write($("rebalances-more"), allRebalances ? `Show the first ${VISIBLE_ROWS}` : `Show all ${count(all.reports.length)}`);
  sync($("rebalances"), allRebalances ? all.reports : all.reports.slice(0, VISIBLE_ROWS), (report) => `${report.number}|${report.at}`, () => el("li", {},
    el("p", { class: "when" }, el("strong"), el("span", { class: "muted" }), badge("warn", "under way")),
    el("div", { class: "phases", role: "img" }, ...PHASES.map((phase) => el("i", { "data-phase": phase }))),
    el("p", { class: "said" }), el("p", { class: "muted" })), (item, report) => {
    const [when, bar, cause, more] = item.children;
    write(when.children[0], clock(report.at));
    write(when.children[1], `${time(Date.now() / 1000 - report.at)} ago, took ${time(report.seconds)}`);
    setAttribute(when.children[2], "hidden", report.phase === "over");
    write(when.children[2], `under way: ${report.phase}`);
    PHASES.forEach((phase, n) => { bar.children[n].style.width = `${(100 * report[`${phase}_seconds`]) / longest}%`; });
    setAttribute(bar, "aria-label", PHASES.map((phase) => `${phase} ${time(report[`${phase}_seconds`])}`).join(", "));
    setAttribute(bar, "title", bar.getAttribute("aria-label"));
    write(cause, sentence(report.cause));
    const facts = [`${report.revoked} revoked`, `${report.assigned} assigned`, `${report.kept} kept`];
    if (report.in_flight) facts.push(`${report.in_flight} in flight`, `${report.drained} drained`, `${report.cancelled} cancelled`);
    if (report.dropped) facts.push(`${report.dropped} dropped`);
    if (report.replayed) facts.push(`${report.replayed} run again`);
    if (report.generation !== null) facts.push(`generation ${report.generation}`);
    write(more, facts.join(" · "));
  });
}

// Actions ---------------------------------------------------------------------------

let token = null; // in memory only: it is gone when the page is closed
let latest = null;

/* Send a request, with the token if there is one. */
async function request(path, body, { secret = token, timeout = TIMEOUT + 5000 } = {}) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...(secret === null ? {} : { Authorization: `Bearer ${secret}` }) },
    body: JSON.stringify(body),
    signal: AbortSignal.timeout(timeout),
  });
  const result = await response.json().catch(() => ({}));
  if (response.status === 401) setToken(null);
  if (!response.ok) throw Object.assign(new Error(result.error || `the server answered ${response.status}`), { status: response.status });
  return result;
}

async function act(action, details) {
  try {
    toast(sentence((await request("actions", { action, ...details })).done), "good");
  } catch (error) {
    toast(sentence(error.message), "bad");
  }
  poll(true);
}

function toast(text, tone) {
  const shown = $("toast");
  clearTimeout(toast.timer);
  setAttribute(shown, "data-tone", tone);
  shown.hidden = false;
  write(shown, text);
  toast.timer = setTimeout(() => { shown.hidden = true; }, tone === "bad" ? 12000 : 5000);
}

function setToken(value) {
  token = value;
  write($("unlock"), token === null ? "Unlock actions" : "Lock actions");
  if (latest) draw(latest);
  deadLetters.unlocked();
}

let onSubmit = null;

function openDialog({ title, text, ok, secret = false, danger = false, then }) {
  write($("ask-title"), title);
  write($("ask-text"), text);
  write($("ask-ok"), ok);
  setAttribute($("ask-ok"), "data-tone", danger ? "bad" : null);
  write($("ask-error"), "");
  $("ask-field").hidden = !secret;
  $("ask-input").required = secret;
  onSubmit = then;
  $("ask").showModal();
  (secret ? $("ask-input") : $("ask-cancel")).focus();
}

function promptToken(then = () => {}) {
  openDialog({
    title: "Unlock actions",
    text: "Actions need the token that the operator of this app has set. This page keeps the token until you close or reload it.",
    ok: "Unlock",
    secret: true,
    then: async (value) => {
      await request("actions", { action: "check" }, { secret: value });
      setToken(value);
      toast("Actions are unlocked.", "good");
      then();
    },
  });
}

function confirmSkip(row) {
  openDialog({
    title: `Skip ${recordName(row)}?`,
    text: "The record counts as done without being processed, its shard continues, and its offset may be committed. This cannot be undone.",
    ok: "Skip the record",
    danger: true,
    then: () => act("skip", coordinates(row)),
  });
}

function confirmCancel(row) {
  openDialog({
    title: `Cancel the run of ${recordName(row)}?`,
    text: "The attempt fails as if it had taken longer than its timeout; retries and the failure policy follow. A thread cannot be stopped.",
    ok: "Cancel the run",
    danger: true,
    then: () => act("cancel_run", coordinates(row)),
  });
}

$("ask-cancel").addEventListener("click", () => $("ask").close());
$("ask").addEventListener("close", () => { $("ask-input").value = ""; onSubmit = null; });
$("ask-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!onSubmit) return;
  $("ask-ok").disabled = true;
  try {
    await onSubmit($("ask-input").value.trim());
    $("ask").close();
  } catch (error) {
    write($("ask-error"), sentence(error.message));
  } finally {
    $("ask-ok").disabled = false;
  }
});
$("unlock").addEventListener("click", () => (token === null ? promptToken() : setToken(null)));
$("rebalances-more").addEventListener("click", () => { allRebalances = !allRebalances; draw(latest); });
$("partitions-filter").addEventListener("input", (event) => { tables.partitions.filter = event.target.value; tables.partitions.draw(); });
$("partitions-sort").addEventListener("change", (event) => tables.partitions.sortBy(event.target.value, event.target.value !== "Partition"));

const deadLetters = createDeadLetters({ request, load, openDialog, promptToken, toast, canAct: () => latest !== null && latest.actions, isUnlocked: allowed });

function drawMembers({ members }) {
  const rows = members.map(({ url, error, statistics }) => (error ? { url, error } : {
    url,
    state: statistics.state,
    member_id: statistics.member_id,
    trouble: statistics.trouble,
    count: statistics.partitions.length,
    lag: sum(statistics.partitions, (row) => row.lag),
    incomplete: sum(statistics.partitions, (row) => row.incomplete),
    ...Object.fromEntries(["busy", "concurrency", "processed", "halted"].map((name) => [name, sum(statistics.handlers, (row) => row[name])])),
  }));
  processes.show(rows);
  write($("members-count"), `${count(rows.filter((row) => !row.error).length)} of ${plural(rows.length, "process", "processes")} answer · lag ${count(sum(rows, (row) => row.lag))}`);
}

// Polling ---------------------------------------------------------------------------

let respondedAt = null; // time of the last response, in milliseconds
let trouble = null;
let polling = false;
let timer = null;

let gap = true; // whether the plots lack points that the server has: at first, and after the page was hidden

async function load(path) {
  const response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT) });
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  return response.json();
}

async function poll(now = false) {
  if (polling) return;
  polling = true;
  clearTimeout(timer);
  try {
    latest = await load("dashboard.json");
    gap = gap || Date.now() - respondedAt > 5 * INTERVAL;
    respondedAt = Date.now();
    $("unlock").hidden = !latest.actions;
    draw(latest);
    $("group-card").hidden = !latest.group;
    if (latest.group) load("members.json").then(drawMembers, () => {}); // a process that hangs must not delay the rest
    if (gap) drawHistory((await load("history.json")).history, latest);
    gap = false;
    trouble = null;
  } catch (error) {
    trouble = error.name === "TimeoutError" ? "the server does not answer" : error.name === "TypeError" ? "the server cannot be reached" : error.message;
  } finally {
    polling = false;
    showConnection();
    if (!document.hidden || now) timer = setTimeout(poll, INTERVAL);
  }
}

function showConnection() {
  const late = respondedAt === null ? null : (Date.now() - respondedAt) / 1000;
  const stale = trouble !== null || (late !== null && late > (INTERVAL + TIMEOUT) / 1000 && !document.hidden);
  const banner = $("stale");
  paint($("connection").lastElementChild, null, stale ? "no answer" : late === null ? "connecting" : "live");
  setAttribute($("connection"), "data-tone", stale ? "bad" : late === null ? "quiet" : "good");
  setAttribute(document.body, "data-stale", stale && respondedAt !== null);
  banner.hidden = !stale;
  if (!stale) return;
  const since = respondedAt === null ? "" : ` This page shows data from ${clock(respondedAt / 1000)}, ${time(Math.round(late))} ago.`;
  write(banner, `${sentence(trouble || "the server does not answer")}${since} Retrying every ${INTERVAL / 1000} s.`);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
setInterval(showConnection, 1000);
for (const table of Object.values(tables)) table.show([]);
poll();
