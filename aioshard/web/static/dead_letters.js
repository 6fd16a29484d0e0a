/* Dead letters and parked records: pages of them, one in full, dry runs, and sending them back. Nothing is read from
   their topics until somebody asks. */
import { $, IS_NARROW, Table, badge, button, buttons, bytes, count, el, paint, plural, sentence, setAttribute, state, sync, time, write } from "./elements.js";

const PAGE_SIZE = IS_NARROW ? 10 : 25;
const JOB_INTERVAL = 500; // milliseconds between two polls of a job
const READ_TIMEOUT = 40000; // milliseconds to wait for a page
const MAX_SHOWN = 100000; // characters of a value that are shown; all of it can be edited
const HEX_WIDTH = IS_NARROW ? 8 : 16; // bytes on a line

const TEXTS = { handler: "letters-handler", error: "letters-error-class", key: "letters-key", header: "letters-header", text: "letters-text" };
const ENDED = new Set(["done", "stopped", "discarded", "failed"]);

// Values ----------------------------------------------------------------------------

/* The bytes of a value as the server sends it: a string if it is UTF-8, otherwise { base64 }. */
function bytesOf(value) {
  if (typeof value === "string") return new TextEncoder().encode(value);
  return Uint8Array.from(atob(value.base64), (character) => character.charCodeAt(0));
}

function hexOf(value) {
  const lines = [];
  const content = bytesOf(value).subarray(0, MAX_SHOWN / 4);
  for (let at = 0; at < content.length; at += HEX_WIDTH) {
    const row = [...content.subarray(at, at + HEX_WIDTH)];
    const hex = row.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
    const text = row.map((byte) => (byte > 31 && byte < 127 ? String.fromCharCode(byte) : "·")).join("");
    lines.push(`${at.toString(16).padStart(4, "0")}  ${hex.padEnd(3 * HEX_WIDTH)} ${text}`);
  }
  return lines.join("\n");
}

function textOf(value) {
  if (value === null || value === undefined) return "null";
  return typeof value === "string" ? value : value.base64 !== undefined ? `not text: ${value.base64} (base64)` : JSON.stringify(value);
}

const cut = (text) => (text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)}…` : text);

/* A number whose digits JavaScript would round, such as an id of 19 digits. */
class Exact {
  constructor(digits) { this.digits = digits; }
}

function parsed(text) {
  const exact = (_, value, context) => (typeof value === "number" && context && context.source !== String(value) ? new Exact(context.source) : value);
  try { return { value: JSON.parse(text, exact) }; } catch { return null; }
}

/* The lines of indented JSON, each with the path of its value; the end of an object or array has none. */
function linesOf(value) {
  const lines = [];
  const add = (at, indent, name, path, comma) => {
    const prefix = "  ".repeat(indent) + (name === null ? "" : `${JSON.stringify(name)}: `);
    if (at instanceof Exact) lines.push({ text: prefix + at.digits + comma, path });
    else if (at === null || typeof at !== "object" || !Object.keys(at).length) lines.push({ text: prefix + JSON.stringify(at) + comma, path });
    else {
      const [open, close] = Array.isArray(at) ? ["[", "]"] : ["{", "}"];
      const names = Object.keys(at);
      lines.push({ text: prefix + open, path });
      names.forEach((child, n) => add(at[child], indent + 1, Array.isArray(at) ? null : child, path ? `${path}.${child}` : child, n < names.length - 1 ? "," : ""));
      lines.push({ text: "  ".repeat(indent) + close + comma, path: null });
    }
  };
  add(value, 0, null, "", "");
  return lines;
}

function indented(text) {
  const found = parsed(text);
  return found ? linesOf(found.value).map((line) => line.text).join("\n") : text;
}

/* Show JSON with each fault beside its field; a missing field is named beside the object that lacks it. */
function annotated(value, faults) {
  const messages = new Map();
  for (const { location, message } of faults) {
    let at = value;
    const names = location ? location.split(".") : [];
    let depth = 0;
    while (depth < names.length && at !== null && typeof at === "object" && Object.hasOwn(at, names[depth])) at = at[names[depth++]];
    const rest = names.slice(depth).join(".");
    const path = names.slice(0, depth).join(".");
    const said = message === null ? "cannot be decoded" : message;
    messages.set(path, [...(messages.get(path) || []), rest ? `${rest}: ${said}` : said]);
  }
  const shown = el("pre", { class: "annotated" });
  for (const { text, path } of linesOf(value)) {
    const found = path === null ? [] : messages.get(path) || [];
    const marks = found.flatMap((said) => [" ", el("mark", { class: "fault", text: `◂ ${said}` })]);
    shown.append(el("span", { class: "code-line" }, text, ...marks), "\n");
  }
  return shown;
}

const placeOf = (letter) => `${letter.partition}/${letter.offset}`;
const recordOf = ({ record }) => `${record.topic}/${record.partition}/${record.offset}`;
const keyOf = (key) => (key === null ? "no key" : key);
const ago = (at) => `${time(Date.now() / 1000 - at)} ago`;
const moment = (at) => new Date(at * 1000).toLocaleString([], { hour12: false });

// The section -----------------------------------------------------------------------

/* `canAct` says whether the server has a token, `isUnlocked` whether this page has it. */
export function createDeadLetters({ request, load, openDialog, promptToken, toast, canAct, isUnlocked }) {
  let described = { topics: [], transforms: [], show_payloads: false, show_keys: false };
  let isDescribed = false; // whether that is known, or was asked for
  let filters = {};
  let pages = [null]; // the cursor of each page that was shown
  let page = -1; // the page that is shown; -1 before anything was read
  let following = null; // the cursor of the next page
  let jobs = {};
  let polling = false;
  let isDue = false; // whether the jobs must be polled once more
  let ours = {}; // the numbers of the jobs that this page has started, by kind
  let summary = null; // figures about all that match
  let turn = Promise.resolve(); // settles when what is being read has been read
  let opened = null; // the letter of the dialog
  let unedited = ""; // its value, as the browser edits it
  const selected = new Map();

  const isParked = () => described.topics.some((row) => row.parked && row.topic === $("letters-topic").value);
  const canSelect = (row) => row.replayed !== true;

  const checkbox = {
    label: "Select",
    class: "select",
    make: (row) => el("input", { type: "checkbox", on: { change: (event) => select([row()], event.target.checked) } }),
    update: (cell, row) => {
      const box = cell.firstElementChild;
      box.checked = selected.has(placeOf(row));
      box.disabled = !canSelect(row);
      setAttribute(box, "aria-label", `Select ${recordOf(row)}`);
    },
  };
  const actions = buttons((row) => [button(row, { name: recordOf, say: () => "Open", act: (now) => unlockedThen(() => open(now)) })]);
  const columns = [
    { label: "Record", class: "name", make: () => [el("strong"), el("small")], update: (cell, row) => {
      write(cell.children[0], recordOf(row));
      write(cell.children[1], `${keyOf(row.record.key)} · at ${placeOf(row)}`);
    } },
    { label: "Failed", num: true, text: (row) => ago(row.failed_at) },
    state((row) => (row.replayed === null ? ["quiet", "unknown", 0] : row.replayed ? ["good", "done", 0] : ["warn", "due", 1])),
    { label: "Handler", text: (row) => row.handler },
    { label: "Attempts", num: true, text: (row) => count(row.attempts) },
    { label: "Error", class: "why", text: (row) => `${row.error}: ${row.message}` },
  ].map(({ by: _, ...column }) => column); // pages are in the order of the failures
  const letters = new Table($("letters"), {
    name: "Dead letters",
    empty: "Nothing is read from the topics of dead letters and parked records until you ask.",
    keyOf: (row) => `${row.topic}|${placeOf(row)}`,
    rows: Infinity,
    columns,
  });
  const parked = new Table($("letters-parked"), {
    name: "Parked keys of the topic",
    empty: "No parked key matches.",
    keyOf: recordOfKey,
    columns: [
      { label: "Key", class: "name", make: () => [el("strong"), el("small")], update: (cell, row) => {
        write(cell.children[0], keyOf(row.key));
        write(cell.children[1], recordOfKey(row));
      } },
      { label: "Records", num: true, by: (row) => row.records, text: (row) => count(row.records) },
      { label: "Failed", num: true, by: (row) => row.failed_at, text: (row) => ago(row.failed_at) },
      { label: "Runs again", num: true, text: (row) => (row.release_requested ? "release requested" : row.due === null ? "when released" : row.due < Date.now() / 1000 ? "now" : `in ${time(row.due - Date.now() / 1000)}`) },
      { label: "Retries", num: true, by: (row) => row.retries, text: (row) => count(row.retries) },
      { label: "Handler", text: (row) => row.handler },
      { label: "Error", class: "why", text: (row) => `${row.error}: ${row.message}` },
    ],
  });
  const parkedActions = buttons((row) => [
    button(row, { name: recordOfKey, say: () => "Release", when: (now) => !now.release_requested, act: (now) => attempt(() => changeParked("release", now)) }),
    button(row, { name: recordOfKey, say: () => "Drop the first", act: confirmDrop }),
  ]);

  async function changeParked(change, row) {
    const { done } = await request(`dead-letters/${change}`, { topic: topic(), source: row.topic, partition: row.partition, offset: row.offsets[0] }, { timeout: READ_TIMEOUT });
    toast(sentence(done), "good");
    await readParked();
  }

  function confirmDrop(row) {
    openDialog({
      title: `Drop ${recordOfKey(row)}?`,
      text: `This parked record is never processed. ${row.records > 1 ? "Those behind it continue without it. " : ""}This cannot be undone.`,
      ok: "Drop the record",
      danger: true,
      then: () => changeParked("drop", row),
    });
  }

  function recordOfKey(row) { return `${row.topic}/${row.partition}/${row.offsets[0]}`; }
  function topic() { return $("letters-topic").value; }

  function showError(text) {
    write($("letters-error"), text);
    $("letters-error").hidden = !text;
  }

  async function attempt(work) {
    try {
      showError("");
      await work();
      return true;
    } catch (error) {
      showError(sentence(error.name === "TimeoutError" ? "the server does not answer" : error.message));
      return false;
    }
  }

  const unlockedThen = (then) => (isUnlocked() ? then() : promptToken(then));

  // Reading -------------------------------------------------------------------------

  /* Learn the topics, once. */
  async function describe() {
    if (isDescribed) return;
    isDescribed = true;
    try {
      described = await load("dead-letters.json");
    } catch {
      isDescribed = false; // the banner says that the server cannot be reached
      return;
    }
    const named = (row) => `${row.topic}${row.parked ? " (parked)" : ""}`;
    sync($("letters-topic"), described.topics, (row) => row.topic, (row) => el("option", { value: row.topic, text: named(row) }), () => {});
    const handlers = [...new Set(described.topics.flatMap((row) => row.handlers))];
    sync($("letters-handler"), ["", ...handlers], (name) => name, (name) => el("option", { value: name, text: name || "any" }), () => {});
    for (const list of [$("letters-transform"), $("letter-transform")]) {
      sync(list, ["", ...described.transforms], (name) => name, (name) => el("option", { value: name, text: name || "none" }), () => {});
    }
    if (!described.topics.length) letters.empty = "No handler of this app sends failed records to a topic.";
    draw();
  }

  function readFilters() {
    const found = {};
    for (const [name, id] of Object.entries(TEXTS)) {
      const value = $(id).value.trim();
      if (value && !$(id).disabled) found[name] = value;
    }
    for (const name of ["since", "until"]) {
      const value = $(`letters-${name}`).value;
      if (value) found[name] = new Date(value).getTime() / 1000;
    }
    const done = $("letters-done").value;
    if (done) found.done = done === "done";
    return found;
  }

  async function begin() {
    filters = readFilters();
    pages = [null];
    summary = null;
    selected.clear();
    if (isParked()) return attempt(readParked);
    if (await show(0)) startCount();
    return true;
  }

  /* Read from a topic, after what this page is reading now: the server refuses two of a kind. */
  function busy(work) {
    setAttribute($("dead-letters"), "aria-busy", "true");
    const reading = turn.then(work);
    turn = reading.catch(() => {}).then(() => { if (turn === last) setAttribute($("dead-letters"), "aria-busy", null); });
    const last = turn;
    return reading;
  }

  /* Show one of the pages whose cursor is known. */
  function show(number) {
    return attempt(() => busy(async () => {
      const found = await request("dead-letters/page", { topic: topic(), ...filters, size: PAGE_SIZE, ...(pages[number] === null ? {} : { cursor: pages[number] }) }, { timeout: READ_TIMEOUT });
      page = number;
      following = found.cursor;
      pages = [...pages.slice(0, number + 1), ...(following === null ? [] : [following])];
      letters.empty = following === null ? `No dead letter of ${topic()} matches.` : "None of those that were read matches: continue with older ones.";
      letters.rows = found.letters.map((letter) => ({ ...letter, topic: topic() }));
      draw();
    }));
  }

  async function readParked() {
    await busy(async () => {
      const { keys, total, records, complete } = await request("dead-letters/parked", { topic: topic(), ...filters }, { timeout: READ_TIMEOUT });
      page = 0;
      parked.rows = keys;
      write($("letters-count"), `${plural(total, "key")} with ${plural(records, "record")}${keys.length < total ? `, the first ${count(keys.length)} are shown` : ""}${complete ? "" : "; the topic was not read to its end, because too many records are parked"}`);
      draw();
    });
  }

  // Jobs ----------------------------------------------------------------------------

  async function start(kind, body) {
    const job = await request(`dead-letters/${kind}`, { topic: topic(), ...body });
    ours[kind] = job.job;
    jobs = { ...jobs, [kind]: job };
    drawJobs();
    pollJobs();
    return job;
  }

  const startCount = () => (isUnlocked() ? attempt(() => start("count", filters)) : null);

  const isActive = (job) => job.state === "reading" || job.state === "running";

  async function pollJobs() {
    isDue = true;
    if (polling) return;
    polling = true;
    try {
      while (isUnlocked() && (isDue || Object.values(jobs).some(isActive))) {
        isDue = false;
        const before = jobs;
        jobs = await request("dead-letters/jobs", {});
        for (const job of Object.values(jobs)) {
          const known = before[job.kind];
          if (!known || known.job !== job.job || known.state !== job.state) changed(job, known && known.job === job.job);
        }
        drawJobs();
        await new Promise((resolve) => { setTimeout(resolve, JOB_INTERVAL); });
      }
    } catch (error) {
      showError(sentence(error.message));
    } finally {
      polling = false;
    }
  }

  /* React to the new state of a job. */
  function changed(job, wasKnown) {
    const isOurs = ours[job.kind] === job.job;
    if (job.kind === "count" && isOurs && job.state === "done") {
      summary = job.summary;
      draw();
    }
    if (job.kind === "try" && isOurs && ENDED.has(job.state)) drawOutcome(job);
    // Never under the hands of an operator who is answering another question; the row of the job has a button too.
    if (job.kind === "send" && isOurs && job.state === "waiting" && !$("ask").open) confirmSending(job);
    if (job.kind === "send" && ENDED.has(job.state) && (isOurs || wasKnown) && job.sent && page >= 0 && !isParked()) {
      selected.clear();
      show(page).then(startCount);
    }
  }

  const stop = (job) => attempt(async () => {
    await request("dead-letters/stop", { job: job.job });
    pollJobs();
  });

  function said(job) {
    const where = `of ${job.topic}`;
    if (job.state === "failed") return [`${{ count: "Counting", try: "The dry run", send: "Sending back" }[job.kind]} has failed: ${job.error}`, null];
    if (job.kind === "count") {
      return job.state === "reading" ? [`Counting the dead letters ${where}: ${count(job.read)} of ${count(job.offsets)} read`, [job.read, job.offsets]] : null;
    }
    if (job.kind === "try" || job.state === "discarded") return null; // the dialog shows a dry run
    const failed = job.failed ? `, ${count(job.failed)} failed` : "";
    const left = job.left ? `, ${count(job.left)} left alone` : "";
    const total = job.planned ? job.planned.selected : 0;
    if (job.state === "reading") return [`Looking for the dead letters ${where} to send back: ${count(job.read)} of ${count(job.offsets)} read`, [job.read, job.offsets]];
    if (job.state === "waiting") return [`${plural(total, "dead letter")} ${where} can be sent back`, null];
    const done = `${count(job.sent)} of ${plural(total, "dead letter")} ${where} sent back${failed}${left}`;
    if (job.state === "running") return [job.stopping ? `Stopping: ${done}` : done, [job.sent + job.failed + job.left, total]];
    return total || job.state === "done" ? [`${job.state === "stopped" ? "Stopped: " : ""}${done}`, null] : null;
  }

  function drawJobs() {
    const shown = ["send", "count"].map((kind) => jobs[kind]).filter((job) => job && said(job) !== null);
    sync($("letters-jobs"), shown, (job) => job.kind, () => el("li", {}, el("p", { role: "status" }), el("progress"), el("span", { class: "actions" }), el("ul", { class: "failures" })), (item, job) => {
      const [text, bar, host, failures] = item.children;
      const [words, progress] = said(job);
      setAttribute(text, "aria-live", progress ? "off" : "polite"); // figures that change twice a second are not read out
      write(text, sentence(words));
      setAttribute(item, "data-tone", job.state === "failed" || job.failed ? "bad" : job.state === "done" ? "good" : null);
      bar.hidden = progress === null;
      if (progress) { bar.max = Math.max(progress[1], 1); bar.value = Math.min(progress[0], bar.max); }
      setAttribute(bar, "aria-label", words);
      const offered = job.state === "waiting" ? ["Send back", "Discard"] : ENDED.has(job.state) || job.stopping ? [] : ["Stop"];
      if (host.offered !== `${job.job}|${offered}`) {
        host.offered = `${job.job}|${offered}`;
        host.replaceChildren(...offered.map((name) => el("button", { type: "button", text: name, on: { click: () => (name === "Send back" ? confirmSending(job) : stop(job)) } })));
      }
      sync(failures, job.failures || [], (row) => row.dead_letter, () => el("li"), (line, row) => write(line, `${row.record}: ${row.error}`));
    });
    const trying = jobs.try && ours.try === jobs.try.job && !ENDED.has(jobs.try.state);
    $("letter-try").disabled = Boolean(trying);
    $("letter-stop").hidden = !trying;
  }

  // Sending back --------------------------------------------------------------------

  function select(rows, on) {
    for (const row of rows.filter(canSelect)) {
      if (on) selected.set(placeOf(row), row);
      else selected.delete(placeOf(row));
    }
    draw();
  }

  const chosenTransform = (list) => (list.value ? { transform: list.value } : {});

  const sendSelected = () => attempt(() => start("send", {
    at: [...selected.values()].map(({ partition, offset }) => ({ partition, offset })), ...chosenTransform($("letters-transform")),
  }));

  const sendAll = () => attempt(() => start("send", { ...filters, ...chosenTransform($("letters-transform")) }));

  function confirmSending(job) {
    const { selected: total, topics, changed: edited, left, failed } = job.planned;
    if (!total) {
      toast("Nothing to send back: all that match are done.", "bad");
      stop(job);
      return;
    }
    const where = Object.entries(topics).map(([name, n]) => `${name} (${count(n)})`).join(", ");
    const change = edited === undefined ? "" : ` ${sentence(`with ${job.change}, ${count(edited)} are changed, ${count(left)} left alone, and ${count(failed)} fail`)}`;
    openDialog({
      title: `Send ${plural(total, "dead letter")} back?`,
      text: `To ${where}.${change} They arrive behind newer records of their keys, and in every group that reads the topic. This cannot be undone.`,
      ok: `Send ${count(total)} back`,
      then: async () => {
        const now = await request("dead-letters/confirm", { job: job.job });
        jobs = { ...jobs, send: now };
        drawJobs();
        pollJobs();
      },
    });
  }

  // One letter ----------------------------------------------------------------------

  async function open(row) {
    await attempt(async () => {
      opened = await request("dead-letters/letter", { topic: row.topic, partition: row.partition, offset: row.offset }, { timeout: READ_TIMEOUT });
      opened.topic = row.topic;
      drawLetter(opened);
      $("letter").showModal();
      $("letter").scrollTop = 0;
      $("letter-close").focus();
    });
  }

  function drawLetter(letter) {
    const { record, decoded, hidden } = letter;
    write($("letter-title"), recordOf(letter));
    paint($("letter-state"), letter.replayed ? "good" : "warn", letter.replayed ? "done" : "due");
    write($("letter-error"), `${letter.error}: ${letter.message}`);
    const facts = [
      ["Dead letter", `${letter.topic}/${placeOf(letter)}`], ["Failed", `${moment(letter.failed_at)}, ${ago(letter.failed_at)}`],
      ["Handler", letter.handler], ["Group", letter.group], ["Attempts", count(letter.attempts)],
      ["Time of the record", record.timestamp < 0 ? "none" : moment(record.timestamp)], ["Key", keyOf(record.key)],
      ["Size", letter.size === null ? "none: a tombstone" : bytes(letter.size)],
    ];
    $("letter-facts").replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value }))));
    $("letter-hidden").hidden = !hidden;
    const by = decoded.handler === null ? "No handler of this app takes it" : `As ${decoded.handler} decodes it${decoded.type ? ` (${decoded.type})` : ""}`;
    write($("letter-decoded-title"), by);
    $("letter-decoded").replaceChildren(...decodedNodes(letter));
    $("letter-raw-part").hidden = hidden || record.value === null;
    showRaw("text");
    $("letter-headers-part").hidden = hidden || !record.headers.length;
    $("letter-headers").replaceChildren(...(hidden ? [] : record.headers.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: textOf(value) })))));
    const editable = !hidden && typeof record.value === "string";
    $("letter-edit-part").hidden = !editable;
    $("letter-edit-part").open = false;
    $("letter-value").value = editable ? record.value : "";
    unedited = $("letter-value").value; // its line ends are those of the browser
    $("letter-transform").value = "";
    $("letter-transform-field").hidden = !described.transforms.length;
    write($("letter-send"), letter.replayed ? "Send back again…" : "Send back…");
    $("letter-outcome").replaceChildren();
    write($("letter-trouble"), "");
  }

  function decodedNodes({ record, decoded, hidden }) {
    if (decoded.faults.length) {
      const raw = !hidden && typeof record.value === "string" ? parsed(record.value) : null;
      if (raw && raw.value !== null && typeof raw.value === "object") return [annotated(raw.value, decoded.faults)];
      return [el("ul", { class: "faults" }, ...decoded.faults.map(({ location, message }) => el("li", {}, el("strong", { text: location || "the value" }), message === null ? "" : `: ${message}`)))];
    }
    if (hidden) return [];
    return [el("pre", { text: cut(typeof decoded.value === "string" ? indented(decoded.value) : decoded.text) })];
  }

  function showRaw(form) {
    const { value } = opened.record;
    setAttribute($("letter-as-text"), "aria-pressed", String(form === "text"));
    setAttribute($("letter-as-hex"), "aria-pressed", String(form === "hex"));
    write($("letter-raw"), value === null || value === undefined ? "" : form === "hex" ? hexOf(value) : cut(textOf(value)));
  }

  /* The change that the dialog asks for: nothing, a new value, or a transform. */
  function change() {
    const { value } = $("letter-value");
    return { ...chosenTransform($("letter-transform")), ...(value === unedited ? {} : { value }) };
  }

  async function inDialog(work) {
    try {
      write($("letter-trouble"), "");
      await work();
    } catch (error) {
      write($("letter-trouble"), sentence(error.message));
    }
  }

  const tryLetter = () => inDialog(async () => {
    $("letter-outcome").replaceChildren(el("p", { class: "muted", text: "The handler runs…" }));
    const { topic: name, partition, offset } = opened;
    try {
      await start("try", { topic: name, partition, offset, ...change() });
    } catch (error) {
      $("letter-outcome").replaceChildren();
      throw error;
    }
  });

  function drawOutcome({ state: ended, error, outcome }) {
    const lines = [];
    if (ended !== "done") lines.push(outcomeLine("bad", ended === "stopped" ? "stopped" : "not run", error || "The dry run was stopped."));
    else if (outcome.left) lines.push(outcomeLine("quiet", "left alone", "The transform leaves this record alone."));
    else {
      const took = outcome.seconds === null ? "" : ` in ${time(outcome.seconds)}`;
      lines.push(outcome.succeeded ? outcomeLine("good", "succeeded", `The handler has succeeded${took}. Nothing was published or committed.`) : outcomeLine("bad", "failed", sentence(outcome.error)));
      if (outcome.hidden) lines.push(el("p", { class: "muted", text: `It would publish ${plural(outcome.messages, "message")}.` }));
      else {
        if (outcome.result !== null) lines.push(el("h3", { text: "Result" }), el("pre", { text: cut(typeof outcome.result === "string" ? indented(outcome.result) : outcome.result_text) }));
        const messages = [...outcome.messages, ...outcome.other_messages];
        if (messages.length) lines.push(el("h3", { text: `Would publish ${plural(messages.length, "message")}` }), ...messages.map((message) => el("div", { class: "message" }, el("p", {}, el("strong", { text: message.topic }), ` ${textOf(message.key) === "null" ? "no key" : textOf(message.key)}`), el("pre", { text: cut(indented(textOf(message.value))) }))));
      }
    }
    $("letter-outcome").replaceChildren(...lines);
    $("letter-outcome").scrollIntoView({ block: "nearest" });
  }

  const outcomeLine = (tone, word, text) => el("p", { class: "outcome" }, badge(tone, word), ` ${text}`);

  const sendLetter = () => inDialog(async () => {
    const { topic: name, partition, offset } = opened;
    await start("send", { topic: name, at: [{ partition, offset }], ...(opened.replayed ? { again: true } : {}), ...change() });
    $("letter").close();
  });

  // Drawing -------------------------------------------------------------------------

  const NAMES = { errors: "error", handlers: "handler", topics: null };

  /* Show figures about all that match; an error or a handler becomes a filter when it is clicked. */
  function drawSummary() {
    const rows = summary === null ? [] : Object.keys(NAMES).flatMap((group) => Object.entries(summary[group]).sort(([, a], [, b]) => b - a).slice(0, 12).map(([name, n]) => ({ group, name, n })));
    $("letters-summary").hidden = !rows.length;
    sync($("letters-summary"), rows, (row) => `${row.group}|${row.name}`, (row) => {
      if (NAMES[row.group] === null) return el("li", {}, el("span", { class: "chip" }));
      return el("li", {}, el("button", { type: "button", class: "chip", on: { click: () => { setFilter(NAMES[row.group], row.name); } } }));
    }, (item, row) => {
      write(item.firstElementChild, `${row.name} ${count(row.n)}`);
      setAttribute(item.firstElementChild, "aria-label", `${NAMES[row.group] || "topic"} ${row.name}: ${count(row.n)}`);
    });
  }

  function setFilter(name, value) {
    const control = $(TEXTS[name]);
    control.value = control.value === value ? "" : value;
    begin();
  }

  function draw() {
    const acts = canAct(), shows = acts && described.show_payloads;
    const some = described.topics.length > 0, kind = isParked();
    for (const id of ["letters-topic-field", "letters-read", "letters-filters"]) $(id).hidden = !some;
    $("letters").hidden = kind && page >= 0;
    $("letters-parked").hidden = !(kind && page >= 0);
    letters.show(page < 0 || kind ? [] : letters.rows, [...(isUnlocked() ? [checkbox] : []), ...columns, ...(acts ? [actions] : [])]);
    if (kind) parked.show(parked.rows, isUnlocked() ? [...parked.all, parkedActions] : parked.all);
    const reads = shows && isUnlocked();
    setAttribute($("letters-header"), "disabled", !reads);
    setAttribute($("letters-text"), "disabled", !reads || !described.show_keys);
    setAttribute($("letters-key"), "disabled", !described.show_keys);
    const hidden = [!shows && "by header and text show_payloads", !described.show_keys && "by key and text show_keys"].filter(Boolean);
    write($("letters-hint"), hidden.length ? `Filters need settings: ${hidden.join(", ")}.` : isUnlocked() ? "" : "Unlock actions to filter by header and text, and to see payloads.");
    const set = Object.keys(filters).length;
    write($("letters-filters").firstElementChild, set ? `Filters (${set})` : "Filters");
    const showing = page >= 0 && !kind;
    if (!kind) write($("letters-count"), showing && summary ? `${count(summary.selected)} of ${count(summary.dead_letters)}${summary.replayed === null ? "" : `, ${count(summary.replayed)} done`}` : "");
    drawSummary();
    $("letters-summary").hidden = $("letters-summary").hidden || kind;
    $("letters-pager").hidden = !showing || (page === 0 && following === null);
    $("letters-newer").hidden = page <= 0;
    $("letters-older").hidden = following === null;
    write($("letters-page"), showing ? `Page ${count(page + 1)}` : "");
    drawSelection(showing && isUnlocked());
    if (!isUnlocked()) { jobs = {}; ours = {}; }
    drawJobs();
  }

  function drawSelection(shown) {
    $("letters-selection").hidden = !shown || !letters.rows.length;
    if (!shown) return;
    const rows = letters.rows.filter(canSelect);
    const chosen = rows.filter((row) => selected.has(placeOf(row))).length;
    const box = $("letters-all");
    box.checked = rows.length > 0 && chosen === rows.length;
    box.indeterminate = chosen > 0 && chosen < rows.length;
    box.disabled = !rows.length;
    write($("letters-selected"), selected.size ? `${count(selected.size)} selected` : "Select this page");
    $("letters-send").disabled = !selected.size;
    write($("letters-send"), selected.size ? `Send ${count(selected.size)} back…` : "Send selected back…");
    const due = summary && summary.replayed !== null ? summary.selected - summary.replayed : null;
    write($("letters-send-all"), due === null ? "Send all that match back…" : `Send all ${count(due)} that match back…`);
    $("letters-send-all").disabled = due === 0;
    $("letters-transform-field").hidden = !described.transforms.length;
  }

  const on = (id, event, act) => $(id).addEventListener(event, act);
  on("letters-read", "click", begin);
  on("letters-form", "submit", (event) => { event.preventDefault(); begin(); });
  on("letters-clear", "click", () => { $("letters-form").reset(); begin(); });
  on("letters-topic", "change", () => { page = -1; summary = null; selected.clear(); following = null; letters.rows = []; draw(); });
  on("letters-newer", "click", () => show(page - 1));
  on("letters-older", "click", () => show(page + 1));
  on("letters-all", "change", (event) => select(letters.rows, event.target.checked));
  on("letters-send", "click", sendSelected);
  on("letters-send-all", "click", sendAll);
  on("letter-close", "click", () => $("letter").close());
  on("letter", "close", () => { if (jobs.try && ours.try === jobs.try.job && !ENDED.has(jobs.try.state)) stop(jobs.try); });
  on("letter-as-text", "click", () => showRaw("text"));
  on("letter-as-hex", "click", () => showRaw("hex"));
  on("letter-try", "click", tryLetter);
  on("letter-stop", "click", () => stop(jobs.try));
  on("letter-send", "click", sendLetter);
  on("letter-reset", "click", () => { $("letter-value").value = unedited; });
  describe();

  return {
    /* The page has got new figures. */
    update() {
      describe();
      draw();
    },
    /* The page has got the token, or has lost it. */
    unlocked() {
      draw();
      pollJobs();
      if (page >= 0 && !isParked() && summary === null) startCount();
    },
  };
}
