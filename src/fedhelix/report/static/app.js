"use strict";
// The dashboard. Views are chosen by the part of the address after '#'; the server's events keep them fresh.
// Everything that comes from a run becomes text nodes or numbers, never markup.

const AXES = [{ key: "round", label: "round" }, { key: "mib", label: "MiB uploaded" }, { key: "seconds", label: "seconds" }, { key: "hours", label: "simulated hours" }];
const MEASURES = [
  { key: "personal_accuracy", label: "personal accuracy", percent: true },
  { key: "personal_score", label: "personal score" },
  { key: "personal_p10", label: "10th percentile of clients", percent: true },
  { key: "accuracy", label: "global accuracy", percent: true },
  { key: "score", label: "global score" },
  { key: "train_loss", label: "training loss" },
];
// Of a score, the 10th percentile is a score too.
const SCORES = MEASURES.map((measure) => (measure.key === "personal_p10" ? { ...measure, percent: false } : measure));
const measuresOf = (lines) => (lines.some((line) => line.y.personal_score) ? SCORES : MEASURES);
const INCIDENTS = {
  refused: (who) => `the upload of client ${who} was refused`,
  missing: (who) => `the answer of client ${who} is missing`,
  unevaluated: (who) => `the score of client ${who} is missing`,
  troubles: (who) => `trouble with ${who}`,
};
const view = document.getElementById("view");
const runs = new Map();
const ticked = new Set();
let wanted = "";
let refresh = () => {};
let alive = 0; // the view that is shown; answers for an earlier one are dropped

const address = (kind, ...names) => `#/${kind}/${names.map(encodeURIComponent).join("/")}`;
const query = (names) => names.map((name) => `run=${encodeURIComponent(name)}`).join("&");

async function getJson(path) {
  const answer = await fetch(path);
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function size(bytes) {
  if (!isNumber(bytes)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  for (; bytes >= 1024 && place < 4; place++) bytes /= 1024;
  return `${place ? bytes.toFixed(1) : bytes} ${units[place]}`;
}

function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s` : `${(seconds / 3600).toFixed(1)} h`;
}

function age(changed) {
  const seconds = Math.max(0, Date.now() / 1000 - changed);
  if (seconds < 90) return "just now";
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 129600 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

const valueOf = (run) => figure(run.value, run.metric.endsWith("accuracy"));
// What that is, as the head of a column.
const metrics = (list) => [...new Set(list.map((run) => MEASURES.find(({ key }) => key === run.metric).label))].join(" or ");
const badges = (run) => [element("span", { class: `badge ${run.status}` }, run.status),
  run.diverged ? element("span", { class: "badge diverged" }, `diverged since round ${run.diverged}`) : null];

const remaining = (run) => (isNumber(run.left) ? `${duration(run.left)} left` : "");

function progress(run) {
  const text = `${run.done ?? 0}\u00a0/\u00a0${run.rounds ?? "?"}`;
  const bar = run.status === "running" && run.rounds ? element("progress", { max: run.rounds, value: run.done, "aria-label": "rounds done" }) : null;
  return element("span", {}, bar, text);
}

const stage = (run) => element("span", { class: "stage" }, ...badges(run), element("small", {}, progress(run)),
  remaining(run) ? element("small", { class: "left" }, remaining(run)) : null);

function row(run) {
  const tick = element("input", { type: "checkbox", "aria-label": `compare ${run.id}` });
  tick.checked = ticked.has(run.id);
  tick.addEventListener("change", () => {
    if (tick.checked) ticked.add(run.id); else ticked.delete(run.id);
    countTicked();
  });
  const name = element("td", { class: "name" }, element("a", { href: address("run", run.id) }, run.id),
    element("small", {}, [run.method, isNumber(run.seed) ? `seed ${run.seed}` : "", run.problem].filter(Boolean).join(" · ")));
  return element("tr", { "data-run": run.id }, element("td", {}, tick), name,
    element("td", { class: "value" }, valueOf(run)), element("td", {}, stage(run)),
    element("td", { class: "wide" }, size(run.uploaded)), element("td", { class: "wide" }, duration(run.seconds)),
    element("td", { class: "wide" }, age(run.changed)));
}

// Runs on the same data and partition, the group with the latest change first.
function grouped(list) {
  const groups = new Map();
  for (const run of list) {
    if (!groups.has(run.setting)) groups.set(run.setting, []);
    groups.get(run.setting).push(run);
  }
  return groups;
}

function countTicked() {
  const button = document.getElementById("compare");
  for (const name of ticked) if (!runs.has(name)) ticked.delete(name);
  if (!button) return;
  button.textContent = ticked.size > 1 ? `Compare ${ticked.size} runs` : "Tick runs to compare";
  button.disabled = ticked.size < 2;
}

const ROWS = 200; // of a group, until more are wanted

function showList() {
  let shown = ROWS;
  document.title = "fedhelix";
  const count = element("p", { class: "soft" });
  const search = element("input", { type: "search", placeholder: "Filter runs", "aria-label": "Filter runs", value: wanted });
  const compare = element("button", { id: "compare", class: "primary", type: "button", onclick: () => { location.hash = address("compare", ...ticked); } });
  const heads = (list) => [["", ""], ["run", "name"], [metrics(list), ""], ["status", ""], ["uploaded", "wide"], ["time", "wide"], ["changed", "wide"]];
  const groups = element("div");
  const table = (list) => element("table", { class: "runs" },
    element("thead", {}, element("tr", {}, ...heads(list).map(([word, kind]) => element("th", { class: kind }, word)))), element("tbody", {}, ...list.map(row)));
  view.replaceChildren(element("div", { class: "bar" }, element("h1", {}, "Runs"), search, compare), groups, count);
  const draw = () => {
    const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
    const matching = [...runs.values()].sort((a, b) => b.changed - a.changed || (a.id < b.id ? -1 : 1))
      .filter((run) => words.every((word) => `${run.id} ${run.method} ${run.data} ${run.status} ${run.diverged ? "diverged" : ""}`.toLowerCase().includes(word)));
    groups.replaceChildren(...[...grouped(matching)].map(([setting, members]) => element("section", { class: "card" },
      element("h2", {}, setting || "unknown data", " ", element("small", { class: "soft" }, members.length === 1 ? "1 run" : `${members.length} runs`)),
      table(members.slice(0, shown)),
      members.length > shown ? element("button", { class: "more", type: "button", onclick: () => { shown *= 4; draw(); } }, "Show more runs") : null)));
    count.textContent = runs.size ? `${matching.length} of ${runs.size} runs` : "There is no run here yet. Start one: fedhelix run fedavg";
    countTicked();
  };
  search.addEventListener("input", () => { wanted = search.value; draw(); });
  refresh = draw;
  draw();
}

function facts(pairs) {
  return element("dl", { class: "facts" }, ...pairs.map(([key, value]) => element("div", {}, element("dt", {}, key), element("dd", {}, value))));
}

// The method's own figures; each is drawn anew, by the server, once there are more rounds.
function showFigures(gallery, run) {
  const names = run.figures.map(({ name }) => name).join();
  if (gallery.dataset.names !== names) {
    gallery.dataset.names = names;
    gallery.replaceChildren(...run.figures.map(({ name, title, caption }) => element("figure", {},
      element("h3", {}, title),
      element("div", { class: "drawing" }, element("img", { alt: `${title}: ${caption}`, "data-figure": name, onerror: ({ target }) => target.closest("figure").remove() })),
      element("figcaption", {}, caption))));
  }
  for (const image of gallery.querySelectorAll("img")) {
    const source = `/api/figure?${query([run.id])}&figure=${image.dataset.figure}&round=${run.done}`;
    if (image.getAttribute("src") !== source && (image.complete || !image.src)) image.src = source;
  }
}

const gone = () => view.replaceChildren(element("h1", {}, "This run is not there"),
  element("p", { class: "soft" }, "It may have been moved or deleted."), element("a", { href: "#/" }, "All runs"));

async function showRun(name, mine) {
  document.title = `${name} · fedhelix`;
  const curves = element("div"), people = element("div", { class: "people" }), history = element("div", { id: "history" });
  const top = element("div", { class: "tiles" }), lists = element("div"), warnings = element("div"), gallery = element("section", { class: "gallery" });
  view.replaceChildren(element("div", { class: "bar" }, element("h1", {}, name), element("a", { href: "#/" }, "All runs")),
    top, warnings, element("section", { class: "card" }, element("h2", {}, "Learning"), curves),
    element("section", { class: "card", id: "clients", hidden: true }, element("h2", {}, "Clients"), people, history), gallery, lists);
  const chart = new LineChart(curves, { axes: AXES, measures: MEASURES });
  let chosen = null, past = null;
  const tell = async (client) => {
    const data = await getJson(`/api/client?${query([name])}&client=${client}`);
    if (!data || mine !== alive) return;
    if (!past || past.client !== client) {
      const box = element("div");
      const words = element("p", { class: "soft" });
      history.replaceChildren(element("h3", {}, `Client ${data.name}`), box, words);
      past = { client, words, chart: new LineChart(box, { axes: [AXES[0]], measures: [{ key: "value", label: "its metric", percent: chart.percent }], height: 240 }) };
    }
    past.words.textContent = `It worked in ${data.worked.length} rounds${data.worked.length ? `, last in round ${data.worked.at(-1)}` : ""}.`;
    past.chart.show([{ label: `client ${data.name}`, place: 0, x: { round: data.rounds }, y: { value: { mid: data.values } } }]);
  };
  const update = async () => {
    const run = await getJson(`/api/run?${query([name])}`);
    if (mine !== alive) return;
    if (!run) { gone(); return; }
    chart.percent = run.metric.endsWith("accuracy");
    chart.measures = measuresOf([run.line]);
    chart.show([{ ...run.line, label: run.method || name, place: 0 }]);
    const tile = (what, value) => element("div", { class: "tile" }, element("span", {}, what), element("b", {}, value));
    top.replaceChildren(tile("status", element("span", { class: "badges" }, ...badges(run))), tile("rounds", progress(run)),
      tile(run.metric.replace("_", " "), valueOf(run)), tile("uploaded", size(run.uploaded)), tile("time", duration(run.seconds)), ...(remaining(run) ? [tile("remaining", duration(run.left))] : []));
    const complaints = [
      ...(run.problem ? [run.problem] : []),
      ...(run.skipped ? [`${run.skipped} damaged lines in metrics.jsonl were left out.`] : []),
      ...run.warnings,
      ...run.incidents.slice(-12).map(([round, kind, who, why]) => `Round ${round}: ${INCIDENTS[kind](who)}: ${why}`),
    ];
    warnings.replaceChildren(...(complaints.length ? [element("section", { class: "card warning" }, element("h2", {}, "Mind this"),
      element("ul", {}, ...complaints.map((words) => element("li", {}, words))))] : []));
    document.getElementById("clients").hidden = !run.clients.length;
    people.replaceChildren(...[...run.clients].sort((a, b) => a.value - b.value).slice(0, 500).map((one) => element("button", {
      type: "button", class: one.attacker ? "attacker" : "", "aria-pressed": String(one.client === chosen), "data-client": one.client,
      title: [one.attacker ? "attacker" : "", isNumber(one.samples) ? `${one.samples} samples` : ""].filter(Boolean).join(", "),
      onclick: () => {
        chosen = one.client;
        for (const other of people.children) other.setAttribute("aria-pressed", String(other.dataset.client === String(chosen)));
        tell(chosen);
      },
    }, element("b", {}, `${one.name}${one.attacker ? " ×" : ""}`), ` ${figure(one.value, chart.percent).replace(" ", "\u00a0")}`,
    ...(chart.percent ? [element("meter", { min: 0, max: 1, value: one.value })] : []))));
    showFigures(gallery, run);
    const about = [["method", run.method], ["data", run.data], ["seed", String(run.seed ?? "–")], ["changed", age(run.changed)]];
    const open = [...lists.querySelectorAll("details")].reverse().map((part) => part.open);
    lists.replaceChildren(element("section", { class: "card" }, element("h2", {}, "About this run"), facts(about),
      ...(run.recorded.length ? [element("details", { open: open[1] }, element("summary", {}, "What the method recorded last"), facts(run.recorded))] : []),
      element("details", { open: open[0] }, element("summary", {}, "Settings"), facts(run.config))));
    if (chosen !== null) tell(chosen);
  };
  refresh = (changed) => { if (changed.has(name)) update(); };
  await update();
}

async function showCompare(names, mine) {
  document.title = "Comparison · fedhelix";
  const each = element("button", { type: "button", class: "toggle", "aria-pressed": "false" }, "Every run");
  const parts = element("div", {}, element("p", { class: "soft" }, "Reading runs …"));
  const charts = new Map();
  let sections = [];
  view.replaceChildren(element("div", { class: "bar" }, element("h1", {}, `${names.length} runs side by side`), each, element("a", { href: "#/" }, "All runs")), parts);
  const heads = (list) => [["run", "name"], [metrics(list), ""], ["status", ""], ["uploaded", "wide"], ["time", "wide"]];
  const draw = () => {
    const single = each.getAttribute("aria-pressed") === "true";
    parts.replaceChildren(...sections.map((section) => {
      if (!charts.has(section.words)) {
        const host = element("div");
        charts.set(section.words, { host, chart: new LineChart(host, { axes: AXES, measures: MEASURES }) });
      }
      const { host, chart } = charts.get(section.words);
      const lines = single ? section.lines : section.means;
      chart.measures = measuresOf(lines);
      const rows = section.rows.map((run) => element("tr", {},
        element("td", { class: "name" }, element("a", { href: address("run", run.id) }, run.id)), element("td", {}, valueOf(run)), element("td", {}, stage(run)),
        element("td", { class: "wide" }, size(run.uploaded)), element("td", { class: "wide" }, duration(run.seconds))));
      const card = element("section", { class: "card" }, section.words ? element("h2", {}, section.words) : null, host,
        section.bands && !single ? element("p", { class: "soft" }, `${section.bands[0].toUpperCase()}${section.bands.slice(1)}.`) : null,
        element("table", { class: "runs plain" }, element("thead", {}, element("tr", {}, ...heads(section.rows).map(([word, kind]) => element("th", { class: kind }, word)))), element("tbody", {}, ...rows)));
      queueMicrotask(() => chart.show(lines));
      return card;
    }));
  };
  each.addEventListener("click", () => {
    each.setAttribute("aria-pressed", String(each.getAttribute("aria-pressed") !== "true"));
    draw();
  });
  const update = async () => {
    const comparison = await getJson(`/api/compare?${query(names)}`);
    if (mine !== alive) return;
    sections = comparison.sections;
    draw();
  };
  refresh = (changed) => { if (names.some((name) => changed.has(name))) update(); };
  await update();
}

async function route() {
  const mine = ++alive;
  const [kind, ...names] = location.hash.slice(2).split("/").map(decodeURIComponent);
  refresh = () => {};
  window.scrollTo(0, 0);
  try {
    if (kind === "run" && names.length) await showRun(names[0], mine);
    else if (kind === "compare" && names.length) await showCompare(names, mine);
    else showList();
  } catch (problem) {
    if (mine === alive) view.replaceChildren(element("h1", {}, "That did not work"), element("p", {}, String(problem.message)));
  }
}

function state(word, kind) {
  const label = document.getElementById("state");
  label.textContent = word;
  label.className = `state ${kind}`;
}

async function fill() {
  const listing = await getJson("/api/runs");
  document.getElementById("root").textContent = listing.root;
  runs.clear();
  for (const run of listing.runs) runs.set(run.id, run);
}

async function begin() {
  await fill();
  addEventListener("hashchange", route);
  await route();
  const events = new EventSource("/api/events");
  let lost = false;
  events.onopen = async () => {
    state("live", "live");
    if (lost) { lost = false; await fill(); refresh(new Set(runs.keys())); } // events were missed meanwhile
  };
  events.onerror = () => { lost = true; state("connection lost", "lost"); };
  events.onmessage = ({ data }) => {
    const { changed, gone: missing } = JSON.parse(data);
    for (const run of changed) runs.set(run.id, run);
    for (const name of missing) runs.delete(name);
    refresh(new Set([...changed.map((run) => run.id), ...missing]));
  };
}

begin().catch((problem) => view.replaceChildren(element("h1", {}, "That did not work"), element("p", {}, String(problem.message))));
