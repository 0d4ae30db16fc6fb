"use strict";
// The dashboard's page. Whatever comes from a study is set as text, never as HTML. No inline script or style.

const $ = (id) => document.getElementById(id);
const STATES = ["completed", "running", "paused", "waiting", "stopped", "failed"];
const FIGURE_VIEWS = new Set(["history", "curves", "pareto", "importance", "parallel", "devices", "power", "sm2", "coordinate_check", "limits"]);

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [type, run] of Object.entries(value)) node.addEventListener(type, run);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

// --- figures in words ---

const GROUPED = new Intl.NumberFormat("en"), WHEN = new Intl.DateTimeFormat("sv", { dateStyle: "short", timeStyle: "medium" });

function fmt(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "boolean") return value ? "true" : "false";
  if (typeof value === "number") {
    if (Number.isInteger(value)) return Math.abs(value) < 1000 ? String(value) : Math.abs(value) < 1e15 ? GROUPED.format(value) : value.toExponential(3);
    const size = Math.abs(value);
    if (size >= 1e4 && size < 1e9) return GROUPED.format(Math.round(value));
    if (size < 1e-3 || size >= 1e9) return value.toExponential(2).replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  }
  if (typeof value === "object") return JSON.stringify(value);
  return String(value);
}

function seconds(value) {
  if (value === null || value === undefined) return "not known";
  if (value < 10) return `${Number(value.toPrecision(2))} s`;
  if (value < 100) return `${Math.round(value)} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 100) return `${minutes} min`;
  const hours = Math.floor(minutes / 60), rest = minutes % 60;
  if (hours < 48) return rest ? `${hours} h ${rest} min` : `${hours} h`;
  return hours % 24 ? `${Math.floor(hours / 24)} d ${hours % 24} h` : `${Math.floor(hours / 24)} d`;
}

function joules(value) {
  if (value === null || value === undefined) return "";
  if (Math.abs(value) < 3600) return `${Number(value.toPrecision(3))} J`;
  const wh = value / 3600;
  return wh < 1000 ? `${Number(wh.toPrecision(3))} Wh` : `${Number((wh / 1000).toPrecision(3)).toLocaleString("en")} kWh`;
}

const percent = (value) => (value === null || value === undefined ? "" : `${Number((100 * value).toPrecision(3))}%`);
const cut = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

function amount(figure) { // "12.3 Wh" and "+- 17% (estimated)" of "12.3 Wh +- 17% (estimated)"
  const at = figure.text.search(/ \+- | \(/);
  return [figure.text.slice(0, at), figure.text.slice(at + 1).replace("+-", "±")];
}

// --- where we are ---

const state = { study: null, view: "overview", trial: null, job: null, objective: null, x: "time", metric: "", sort: "", descending: false, filter: "", offset: 0, kinds: "", logtrial: "", logoffset: 0 };
let studies = [], jobs = [], jobsSeen = 0, told = {}, hovered = "", lastProblem = "";

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  const whole = (name) => (/^\d+$/.test(given.get(name) || "") ? Number(given.get(name)) : null);
  const before = state.study;
  if (whole("study") !== null) state.study = whole("study");
  state.view = VIEWS.some((view) => view.id === given.get("view")) ? given.get("view") : "overview";
  state.trial = whole("trial");
  if (given.has("job")) state.job = given.get("job");
  if (before !== state.study) { state.offset = 0; state.metric = ""; state.sort = ""; state.filter = ""; state.objective = null; state.logoffset = 0; }
}

function hashFor(changes) {
  const now = { study: state.study, view: state.view, trial: state.trial, ...changes };
  const parts = new URLSearchParams();
  for (const name of ["study", "view", "trial"]) if (now[name] !== null && now[name] !== undefined) parts.set(name, now[name]);
  return "#" + parts;
}

function go(changes) { location.hash = hashFor(changes); }
function select(trial) { if (trial !== state.trial) go({ trial }); }

// --- talking to the server ---

let control = new AbortController(); // ends what is asked for a view that the reader has left

async function get(path, query) {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(query || {})) if (value !== null && value !== undefined && value !== "") parts.set(name, value);
  const text = parts.toString();
  const answer = await fetch(text ? `${path}?${text}` : path, { headers: { accept: "application/json" }, signal: control.signal });
  const data = await answer.json().catch((error) => { if (error.name === "AbortError") throw error; return {}; });
  if (!answer.ok) throw new Error((data.error && data.error.reason) || `The server answered ${answer.status}.`);
  return data;
}

const view = (name, query) => get(`/api/study/${state.study}/${name}`, query);

let plotly = null;
function loadPlotly() {
  plotly = plotly || new Promise((resolve, reject) => {
    const script = el("script", { src: "/static/plotly.min.js", on: { load: () => resolve(window.Plotly), error: () => reject(new Error("Plotly's script can't be loaded: pip install \"penstock[dashboard]\".")) } });
    document.head.append(script);
  });
  return plotly;
}

let source = null, watching = null;
function watch() {
  if (watching === state.study && source) return;
  if (source) source.close();
  watching = state.study;
  // Before there is a study, the store is listened to: the first one may begin any time.
  source = new EventSource(state.study === null ? "/api/stream" : `/api/study/${state.study}/stream`);
  source.addEventListener("change", (event) => {
    const change = JSON.parse(event.data);
    const more = change.studies !== studies.length || change.jobs !== jobsSeen;
    const whole = change.read >= change.events && !(told.read >= told.events);
    told = change;
    showProgress();
    if (more) loadStudies().then(() => { if (state.study !== watching) return onHash(); soon(); }).catch(showError);
    if (whole) { took = 0; drawn = 0; }
    soon();
  });
  source.onerror = () => badge("off", "no connection");
  source.onopen = () => badge("", "connected");
  told = {};
  lastProblem = "";
}

function showProgress() {
  const reading = told.events > 0 && told.read < told.events;
  $("progress").hidden = !reading;
  if (reading) {
    const part = told.read / told.events;
    $("progress").firstElementChild.style.width = `${100 * part}%`;
    $("progress").lastElementChild.textContent = `reading the journal: ${fmt(told.read)} of ${fmt(told.events)} events`;
  }
  showProblem(told.problem || lastProblem);
  showStatus();
}

function showStatus() {
  if (told.status === undefined) return;
  const age = Date.now() / 1000 - told.last_s;
  if (told.status !== "running") badge("", told.status || "not begun");
  else if (told.last_s > 1e9 && age > 120) badge("off", `no news for ${seconds(age)}`);
  else badge("on", "running");
}

function badge(kind, text) { $("live").className = `badge ${kind}`; $("live").textContent = text; }
function showProblem(text) { $("problem").hidden = !text; $("problem").textContent = text; }
function showError(error) { showProblem(error.message || String(error)); }

// --- redrawing: at once when the reader acts, at a pace the machine keeps up with when the study moves ---

let timer = null, busy = false, again = false, took = 0, drawn = 0;

function soon() {
  if (timer !== null) return;
  const least = told.read < told.events ? 3000 : FIGURE_VIEWS.has(state.view) || state.view === "overview" ? 2000 : 1000;
  const pace = Math.max(least, Math.min(6000, 4 * took)); // the journal is read sooner if nobody asks meanwhile
  timer = setTimeout(() => { timer = null; refresh(); }, Math.max(0, drawn + pace - performance.now()));
}

async function refresh(leaving) {
  if (busy) {
    again = true;
    if (leaving) { control.abort(); control = new AbortController(); } // the reader has moved on: don't wait
    return;
  }
  if (state.study === null && state.view !== "recurring") return showNothing();
  busy = true;
  const began = performance.now(), at = hashFor({}), key = `${state.study}/${state.view}`;
  const first = shown !== key;
  const patience = first ? setTimeout(() => { if (hashFor({}) === at && shown !== key) { purge($("main")); $("main").replaceChildren(nothing("One moment ...")); shown = ""; } }, 500) : null;
  try {
    const current = VIEWS.find((each) => each.id === state.view);
    if (first) shown = "";
    await current.draw($("main"), first);
    if (hashFor({}) === at) shown = key;
    if (!told.problem) showProblem(lastProblem);
    showSelected();
    document.documentElement.dataset.drawn = at;
    document.documentElement.dataset.read = String(told.read || 0);
  } catch (error) {
    if (error.name !== "AbortError") {
      showError(error);
      if (first) { purge($("main")); $("main").replaceChildren(nothing(error.message)); }
    }
  } finally {
    clearTimeout(patience);
    busy = false;
    drawn = performance.now();
    took = drawn - began;
  }
  if (again) { again = false; refresh(); }
}

let shown = "";

function fresh(main, first, build) { // the view's lasting parts are built once, then only filled
  if (first || shown === "") {
    shown = `${state.study}/${state.view}`;
    purge(main);
    main.replaceChildren(...build());
  }
}

function purge(node) { if (window.Plotly) for (const chart of node.querySelectorAll(".chart")) window.Plotly.purge(chart); }

function nothing(text) { return el("div", { class: "nothing" }, text); }

function showNothing() {
  purge($("main"));
  shown = "";
  const box = nothing("There is no study in this store yet: this page shows the first one as soon as it begins.");
  if (jobs.length) box.append(el("p", {}, `It keeps ${jobs.length === 1 ? "a recurring job" : `${fmt(jobs.length)} recurring jobs`}: see the tab `, el("a", { href: hashFor({ view: "recurring" }) }, "Recurring"), "."));
  $("main").replaceChildren(box);
  document.documentElement.dataset.drawn = hashFor({});
}

// --- figures ---

function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { ink: of("--ink"), quiet: of("--quiet"), grid: of("--grid"), card: of("--card"), line: of("--line") };
}

function themed(layout, options) {
  const c = colours(), narrow = window.innerWidth < 640;
  const all = { ...layout };
  for (const name of Object.keys(all)) {
    if (/^[xy]axis\d*$/.test(name)) all[name] = { gridcolor: c.grid, zerolinecolor: c.grid, linecolor: c.line, tickcolor: c.line, nticks: narrow && name[0] === "x" && !all[name].tickvals ? 5 : undefined, ...all[name] };
  }
  if (narrow && all.annotations) all.annotations = all.annotations.filter((note) => note.y === 0 || note.y === 1 || !Number.isFinite(Number(note.text)));
  for (const note of all.annotations || []) note.bgcolor = note.bgcolor || c.card;
  delete all.rows;
  return {
    autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: c.ink, size: narrow ? 11 : 12, family: getComputedStyle(document.body).fontFamily },
    margin: { l: narrow ? 44 : 56, r: 16, t: 34, b: 44 },
    hoverlabel: { bgcolor: c.card, bordercolor: c.line, font: { color: c.ink }, align: "left", namelength: -1 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: c.line, activecolor: c.quiet },
    uirevision: options.key, ...all,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: narrow ? 10 : 12 }, ...(all.legend && all.legend.y < 0 ? all.legend : {}) },
  };
}

function tinted(trace) { // the blue of figures is too dark for a dark page
  if (document.documentElement.dataset.theme !== "dark") return trace;
  const lighter = (part) => (part && part.color === "#0072b2" ? { ...part, color: "#3d9bdc" } : part);
  const result = { ...trace };
  for (const name of ["marker", "line"]) if (trace[name]) result[name] = lighter(trace[name]);
  return result;
}

function highlighted(traces) {
  if (state.trial === null) return traces;
  const extra = [];
  const result = traces.map((trace) => {
    if (!Array.isArray(trace.customdata)) return trace;
    if (trace.type === "bar") {
      const mine = trace.customdata.map((trial) => trial === state.trial);
      if (!mine.includes(true)) return trace;
      return { ...trace, marker: { ...trace.marker, line: { width: mine.map((is) => (is ? 3 : 0.5)), color: mine.map((is) => (is ? colours().ink : "rgba(128,128,128,0.6)")) } } };
    }
    if (trace.mode === "markers" || trace.mode === "lines+markers") {
      trace.customdata.forEach((trial, i) => {
        if (trial === state.trial && trace.y[i] !== null) extra.push([trace.x[i], trace.y[i]]);
      });
    }
    return trace;
  });
  if (extra.length) {
    result.push({ type: "scatter", mode: "markers", name: `trial ${state.trial}`, showlegend: false, hoverinfo: "skip", x: extra.map((p) => p[0]), y: extra.map((p) => p[1]), marker: { size: 17, color: "rgba(0,0,0,0)", line: { width: 3, color: colours().ink } } });
  }
  return result;
}

function plotBox(kind) {
  return el("div", { class: `plot ${kind || ""}` }, el("div", { class: "chart" }), el("div", { class: "note" }));
}

const drawnAs = new WeakMap(); // by chart, what it shows

async function drawPlot(box, figure, note, key) {
  const chart = box.querySelector(".chart");
  box.querySelector(".note").textContent = note || "";
  if (figure.layout.rows) chart.style.height = `${Math.max(220, Math.min(1400, 110 + 34 * figure.layout.rows))}px`;
  const late = window.Plotly === undefined;
  const signal = control.signal;
  const Plotly = await (late ? Promise.race([loadPlotly(), new Promise((_, reject) => signal.addEventListener("abort", () => reject(new DOMException("left", "AbortError"))))]) : loadPlotly());
  if (signal.aborted || !chart.isConnected) throw new DOMException("left", "AbortError");
  const same = JSON.stringify([figure, key, state.trial, document.documentElement.dataset.theme, window.innerWidth < 640]);
  if (drawnAs.get(chart) === same) return; // nothing new: no frame is spent on it
  const form = `${key}/${window.innerWidth < 640}`, settled = chart.dataset.form === form && chart._fullLayout && chart._fullLayout._size;
  const layout = themed(figure.layout, { key });
  if (settled) { // margins that fit are found at the first drawing: finding them again would draw everything twice
    layout.margin = { l: settled.l, r: settled.r, t: settled.t, b: settled.b, pad: 0 };
    for (const name of Object.keys(layout)) if (/^[xy]axis\d*$/.test(name) && layout[name].type !== "category") layout[name] = { ...layout[name], automargin: false };
  }
  await Plotly.react(chart, highlighted(figure.data.map(tinted)), layout, { responsive: true, displaylogo: false, displayModeBar: window.innerWidth >= 640 && !box.classList.contains("small"), modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] });
  drawnAs.set(chart, same);
  chart.dataset.form = form;
  if (!chart.dataset.wired) {
    chart.dataset.wired = "1";
    const trialOf = (event) => { const point = event.points[0]; const found = Array.isArray(point.customdata) ? point.customdata[0] : point.customdata; return Number.isInteger(found) ? found : null; };
    chart.on("plotly_click", (event) => { const trial = trialOf(event); if (trial !== null) { hovered = ""; select(trial); showSelected(); } });
    chart.on("plotly_hover", (event) => { const trial = trialOf(event); if (trial !== null && trial !== state.trial) { hovered = `trial ${trial} under the pointer: click to select it everywhere`; showSelected(); } });
    chart.on("plotly_unhover", () => { hovered = ""; showSelected(); });
  }
}

// --- parts of pages ---

function trialLink(trial, text) { return el("a", { href: hashFor({ view: "trial", trial }) }, text || `trial ${trial}`); }
function status(name) { return el("span", {}, el("i", { class: `dot s-${name}` }), name); }

function card(name, value, more, big) {
  return el("div", { class: big ? "card big" : "card" }, el("div", { class: "name" }, name), el("div", { class: "value" }, value), el("div", { class: "more" }, more));
}

function pairs(items) {
  return el("div", { class: "scroll" }, el("table", { class: "pairs" }, el("tbody", {}, items.map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", { title: value instanceof Node ? null : String(value ?? "") }, value instanceof Node ? value : fmt(value)))))));
}

function grid(heads, rows, options) {
  const numeric = heads.map((_, i) => rows.some((row) => typeof row[i] === "number") && rows.every((row) => row[i] === null || row[i] === undefined || typeof row[i] === "number"));
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, heads.map((head, i) => el("th", { class: numeric[i] ? "n" : null, scope: "col" }, head)))),
    el("tbody", {}, rows.map((row, n) => tableRow(row.map((value, i) => el("td", { class: numeric[i] ? "n" : null, title: value instanceof Node || value === null ? null : String(value) }, value instanceof Node ? value : fmt(value))), options && options.trials ? options.trials[n] : null)))));
}

function tableRow(cells, trial) {
  if (trial === null || trial === undefined) return el("tr", {}, cells);
  const open = () => go({ view: "trial", trial });
  return el("tr", { class: `pick${trial === state.trial ? " on" : ""}`, tabindex: "0", "data-trial": trial, on: { click: open, keydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(); } } } }, cells);
}

function renew(box, parts) { // replaces what differs
  const now = [...box.children];
  if (now.length !== parts.length) { box.replaceChildren(...parts); return; }
  parts.forEach((part, i) => { if (now[i].matches(".scroll") && part.matches(".scroll")) swapIn(now[i], part); else if (!now[i].isEqualNode(part)) now[i].replaceWith(part); });
}

const signs = new WeakMap();
function sign(row) { let found = signs.get(row); if (found === undefined) { found = row.className + [...row.cells].map((cell) => `\n${cell.className}\t${cell.title}\t${cell.textContent}`).join(""); signs.set(row, found); } return found; }

function swapIn(box, next) { // shows the table that is in next; rows that are there already stay where they are
  const before = box.querySelector("table"), after = next.querySelector("table");
  if (!before || before.tHead.textContent !== after.tHead.textContent) { box.replaceChildren(...next.childNodes); return; }
  if (!before.tHead.isEqualNode(after.tHead)) before.tHead.replaceWith(after.tHead);
  const body = before.tBodies[0], rows = [...after.tBodies[0].rows];
  const have = new Map([...body.rows].map((row) => [sign(row), row])), wanted = new Set(rows.map(sign));
  let at = body.firstChild;
  const drop = () => { const gone = at; at = at.nextSibling; gone.remove(); };
  for (const row of rows) {
    const kept = have.get(sign(row));
    have.delete(sign(row));
    while (at && at !== kept && !wanted.has(sign(at))) drop();
    if (kept && kept === at) at = at.nextSibling;
    else body.insertBefore(kept || row, at);
  }
  while (at) drop();
}

function chooser(label, options, value, change) {
  return el("label", {}, el("span", { class: "quiet" }, label + " "), el("select", { "aria-label": label, on: { change: (event) => { change(event.target.value); refresh(); } } }, options.map(([id, text]) => el("option", { value: id, selected: String(id) === String(value) }, text))));
}

let goal = [];
const quality = () => Math.max(0, goal.findIndex((each) => !["energy_j", "train_s"].includes(each.metric))); // the first that is not metered
function objectiveChooser() {
  if (goal.length < 2) return null;
  return chooser("objective", goal.map((each, i) => [i, each.metric]), state.objective ?? quality(), (value) => { state.objective = Number(value); });
}

// --- the views ---

async function drawOverview(main, first) {
  const [data, past] = await Promise.all([view("overview"), view("history", { x: state.x, trial: state.trial })]);
  goal = data.objectives;
  lastProblem = data.problem;
  document.title = `${data.name} - Penstock`;
  fresh(main, first, () => [el("div", { id: "head" }), el("div", { id: "cards", class: "cards" }), el("div", { class: "two" }, plotBox(), el("div", { id: "side" }))]);
  $("head").replaceChildren(el("h1", {}, data.name), el("p", { class: "lead" }, [data.goal, data.scheduler, data.sampler, data.executor].filter(Boolean).join(" · ")));
  const t = data.trials, cards = [];
  if (data.best) {
    const metric = data.objectives[quality()].metric;
    cards.push(card(`best ${metric}`, fmt(data.best.metrics[metric]), el("span", {}, trialLink(data.best.trial), `, after ${fmt(data.best.epochs)} epochs`)));
  } else cards.push(card("best", "none yet", "no trial has reported the objective"));
  cards.push(el("div", { class: "card" }, el("div", { class: "name" }, "trials"), el("div", { class: "value" }, fmt(t.total)),
    el("div", { class: "bar", role: "img", "aria-label": STATES.filter((s) => t[s]).map((s) => `${t[s]} ${s}`).join(", ") }, STATES.filter((s) => t[s]).map((s) => { const part = el("i", { class: `s-${s}` }); part.style.width = `${(100 * t[s]) / t.total}%`; return part; })),
    el("div", { class: "counts" }, STATES.filter((s) => t[s]).map((s) => el("span", {}, el("i", { class: `dot s-${s}` }), `${fmt(t[s])} ${s}`)))));
  cards.push(card("time", seconds(data.spent_s), data.running ? (data.eta ? `about ${seconds(data.eta.seconds)} to go, by the ${data.eta.because}` : `${seconds(data.busy_s)} of training; its end is not known ahead`) : `${seconds(data.busy_s)} of training, ${fmt(data.epochs)} epochs`));
  if (data.energy) { const [value, more] = amount(data.energy); cards.push(card("energy so far", value, more)); }
  else cards.push(card("energy so far", "not metered", "this study ran without a meter"));
  if (data.running && data.watts) { const [value, more] = amount(data.watts); cards.push(card("drawn now", value, more)); }
  if (data.co2) { const [value, more] = amount(data.co2); cards.push(card("CO2e", value, `${more}; ${data.grid.where}, ${fmt(data.grid.g_per_kwh)} g/kWh`)); }
  if (data.cost) { const [value, more] = amount(data.cost); cards.push(card("money", value, more)); }
  if (data.saved) {
    const text = data.saved.energy ? joules(data.saved.energy.value) : seconds(data.saved.train_s);
    const part = data.saved.energy_part ?? data.saved.part;
    cards.push(card("saved by stopping early", `${text} (${percent(part)})`, `${fmt(data.saved.epochs)} epochs less than ${data.saved.baseline} (estimated)`, true));
  }
  for (const limit of data.power_limits.slice(-2)) cards.push(card(`power limit ${limit.applied ? "set" : "found"}`, `${fmt(limit.limit_w)} W`, `${limit.device}${limit.batch_size ? `, batch size ${limit.batch_size}` : ""}: ${percent(limit.energy_saved)} less energy per epoch than at ${fmt(limit.highest_w)} W`, true));
  $("cards").replaceChildren(...cards);
  const side = [];
  if (data.best) side.push(el("section", {}, el("h2", {}, "best configuration"), pairs(Object.entries(data.best.config)), data.objectives.length > 1 ? pairs(data.objectives.map((o) => [o.metric, data.best.metrics[o.metric]])) : null));
  if (data.errors.length) side.push(el("section", {}, el("h2", {}, "failures"), pairs(data.errors.map((each) => [trialLink(each.trial, `${each.count} ×`), cut(each.reason, 200)]))));
  if (data.ended && data.ended.reason !== "finished") side.push(el("section", {}, el("h2", {}, "left"), el("p", {}, `${data.ended.reason}${data.ended.detail ? `: ${data.ended.detail}` : ""}; it can be resumed`)));
  $("side").replaceChildren(...side);
  await drawPlot(main.querySelector(".plot"), past.figure, past.shown < past.total ? `${fmt(past.shown)} of ${fmt(past.total)} trials; those that would lie on each other are drawn as one.` : "", `${state.study}/overview`);
}

function figureView(name, query, tools, note, options) {
  return async (main, first) => {
    const data = await view(name, query());
    fresh(main, first, () => [el("div", { class: "tools" }), plotBox(options && options.kind), el("div", { id: "below" })]);
    const bar = tools ? tools(data).filter(Boolean) : [];
    const toolbox = main.querySelector(".tools");
    if (!toolbox.contains(document.activeElement)) toolbox.replaceChildren(...bar);
    toolbox.hidden = !bar.length;
    const box = main.querySelector(".plot"), empty = !data.figure || !data.figure.data.length;
    box.hidden = empty;
    if (!empty) await drawPlot(box, data.figure, note(data), `${state.study}/${name}/${JSON.stringify([state.x, state.metric, state.objective])}`);
    const below = options && options.below ? options.below(data) : [];
    renew($("below"), [...(empty ? [nothing(options.empty(data))] : []), ...below.filter(Boolean)]);
  };
}

const few = (data) => (data.shown < data.total ? ` (${fmt(data.shown)} marks: those that would lie on each other are drawn as one)` : "");

const drawHistory = figureView("history", () => ({ x: state.x, objective: state.objective, trial: state.trial }),
  () => [chooser("across", [["time", "time"], ["trial", "trial number"], ["epochs", "epochs"], ["energy", "energy"]], state.x, (value) => { state.x = value; }), objectiveChooser()],
  (data) => `${fmt(data.total)} trials with a value of ${data.metric}, each at its latest report${few(data)}; the line is the best report so far.`,
  { empty: () => "No trial has reported the objective yet." });

const drawCurves = figureView("curves", () => ({ metric: state.metric, trial: state.trial, objective: state.objective }),
  (data) => [data.metrics.length > 1 ? chooser("metric", data.metrics.map((m) => [m, m]), data.metric, (value) => { state.metric = value; }) : null],
  (data) => (data.shown < data.total ? `${fmt(data.shown)} of ${fmt(data.total)} trials, evenly over their ranking; ` : `${fmt(data.total)} trials; `) + "click a curve to select its trial.",
  { kind: "tall", empty: () => "No trial has reported anything yet." });

const drawPareto = figureView("pareto", () => ({ objective: state.objective, trial: state.trial }), () => [objectiveChooser()],
  (data) => `${fmt(data.total)} trials${few(data)}; on the front is who no other ${data.who} beats in ${data.axes.join(", ")}.`,
  { empty: () => "No trial has a value of every objective yet.",
    below: (data) => data.front.length ? [el("h2", {}, `the front: ${data.front.length} trials`), grid(["trial", ...data.axes], data.front.slice(0, 100).map((p) => [p.trial, ...data.axes.map((a) => p.values[a])]), { trials: data.front.slice(0, 100).map((p) => p.trial) })] : [] });

const drawImportance = figureView("importance", () => ({ objective: state.objective }), () => [objectiveChooser()],
  (data) => `${data.method} over ${data.trials < data.scored ? `${fmt(data.trials)} of ${fmt(data.scored)} trials with a value, evenly over their ranking` : `${fmt(data.scored)} trials with a value`}.` + (data.left_out.length ? ` Not assessed (constant, or only in some trials): ${data.left_out.join(", ")}.` : ""),
  { kind: "small", empty: (data) => data.reason });

const drawParallel = figureView("parallel", () => ({ objective: state.objective, trial: state.trial }), () => [objectiveChooser()],
  (data) => `${fmt(data.shown)} of ${fmt(data.total)} trials.`, { kind: "tall", empty: () => "No trial has reported the objective yet." });

const drawDevices = figureView("devices", () => ({ trial: state.trial }), null,
  (data) => `${fmt(data.total)} segments` + (data.joined ? "; neighbours too short to be seen are drawn as one" : "") + (data.hidden ? `; ${data.hidden} more devices are not shown` : "") + ".",
  { empty: () => "Nothing has run yet.",
    below: (data) => [el("h2", {}, "use"), grid(["device", "busy", "of the sessions", "idle", "segments"], data.devices.map((d) => [d.device, seconds(d.busy_s), percent(d.utilisation), seconds(d.idle_s), d.segments]))] });

const drawPower = figureView("power", () => ({}), null,
  () => "Full lines: energy of an epoch; dotted: its time; both relative to the highest limit. The large mark is the limit chosen.",
  { empty: (data) => data.said.join(" ") || "No power limit was profiled: give power_limits= to the study, on a GPU whose limit may be set.",
    below: (data) => data.profiles.length ? [grid(["device", "GPUs", "batch size", "rule", "limit, W", "energy", "time", "applied"], data.profiles.map((p) => [p.device, p.gpus, p.batch_size, p.rule, p.limit_w, p.energy_saved === null ? "" : `${percent(p.energy_saved)} less`, p.time_saved === null ? "" : `${percent(-p.time_saved)} more`, p.applied ? "yes" : "only observed"]))] : [] });

const drawSm2 = figureView("sm2", () => ({}), null,
  (data) => `score = alpha performance + (1 - alpha)(beta energy + (1 - beta) learning rate), alpha ${fmt(data.alpha)}, beta ${fmt(data.beta)}.`,
  { empty: (data) => data.reason || "No round is over yet.",
    below: (data) => [
      data.energy ? el("p", {}, `energy ${data.energy.text}` + (data.explored ? `, of it for explorations ${data.explored.text}` : "") + (data.parity ? `; parity: ${fmt(data.parity)} trainings of the winner` : "")) : null,
      data.rounds.length ? grid(["round", "trial", "batch size", data.metric, "J/epoch", "lr", "P", "E", "LR", "score", ""], data.rounds.flatMap((r) => r.rows.map((c) => [r.number, c.trial, c.batch_size, c.value, c.energy_j, c.lr, c.performance, c.energy, c.stability, c.score, c.kept ? "kept" : "dropped"])), { trials: data.rounds.flatMap((r) => r.rows.map((c) => c.trial)) }) : null] });

const drawCheck = figureView("coordinate_check", () => ({}), null, (data) => data.text,
  { empty: (data) => data.reason || "The check has no layers.",
    below: (data) => data.rows.length ? [grid(["layer", ...data.names, "slope", "verdict"], data.rows)] : [] });

const drawLimits = figureView("limits", () => ({ trial: state.trial }), null, (data) => "Full marks: measured; rings: predicted, of one of the two at least. Dashed: the limits." + (data.limits.some((l) => data.shown < l.trials) ? ` ${fmt(data.shown)} marks: those that would lie on each other are drawn as one.` : ""),
  { empty: (data) => data.limits.length ? "Nothing was predicted or measured of the limited quantities yet." : "This study has no limits such as power_w <= 90.",
    below: (data) => data.limits.length ? [grid(["limit", "trials", "measured", "violations"], data.limits.map((l) => [l.text, l.trials, l.measured, l.violations]))] : [] });

async function drawTable(main, first) {
  const size = 100;
  const data = await view("table", { sort: state.sort, descending: state.descending ? 1 : "", filter: state.filter, offset: state.offset, limit: size });
  fresh(main, first, () => [
    el("div", { class: "tools" },
      el("label", { class: "fill" }, el("span", { class: "quiet" }, "filter "), el("input", { type: "search", id: "filter", value: state.filter, placeholder: "lr < 0.01, status = completed", "aria-label": "Filter, e.g. lr < 0.01, status = completed", on: { input: (event) => { state.filter = event.target.value; state.offset = 0; typed(); } } })),
      el("span", { id: "matching", class: "quiet", role: "status" }), el("span", { class: "grow" }),
      el("button", { type: "button", id: "earlier", on: { click: () => { state.offset = Math.max(0, state.offset - size); refresh(); } } }, "previous"),
      el("button", { type: "button", id: "later", on: { click: () => { state.offset += size; refresh(); } } }, "next")),
    el("div", { class: "scroll", id: "table" })]);
  showProblem("");
  const last = Math.min(data.offset + data.rows.length, data.matching);
  $("matching").textContent = data.matching ? `${fmt(data.offset + 1)}-${fmt(last)} of ${fmt(data.matching)}` + (data.matching < data.total ? ` (${fmt(data.total)} trials in all)` : "") : `none of ${fmt(data.total)} trials`;
  $("earlier").disabled = data.offset === 0;
  $("later").disabled = last >= data.matching;
  const numeric = data.columns.map((_, i) => data.rows.some((row) => typeof row[i] === "number"));
  const active = document.activeElement, focus = active && active.dataset ? active.dataset.column || null : null, focused = active && active.dataset ? active.dataset.trial : null;
  const heads = data.columns.map((name, i) => el("th", { scope: "col", class: numeric[i] ? "n" : null, "aria-sort": state.sort === name ? (state.descending ? "descending" : "ascending") : "none" }, el("button", { type: "button", "data-column": name, on: { click: () => { state.descending = state.sort === name ? !state.descending : false; state.sort = name; state.offset = 0; refresh(); } } }, name)));
  const at = data.columns.indexOf("trial"), st = data.columns.indexOf("status");
  const rows = data.rows.map((row) => tableRow(row.map((value, i) => el("td", { class: numeric[i] ? "n" : null, title: value === null ? null : typeof value === "object" ? JSON.stringify(value) : String(value) }, i === st ? status(value) : i === at ? String(value) : fmt(value))), row[at]));
  const box = $("table"), left = box.scrollLeft;
  swapIn(box, el("div", {}, el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows))));
  box.scrollLeft = left;
  if (focus) { const button = [...box.querySelectorAll("button")].find((each) => each.dataset.column === focus); if (button) button.focus(); }
  else if (focused) { const row = [...box.querySelectorAll("tr.pick")].find((each) => each.dataset.trial === focused); if (row) row.focus(); }
}

let typing = null;
function typed() { clearTimeout(typing); typing = setTimeout(refresh, 250); }

async function drawLog(main, first) {
  const size = 100;
  const data = await view("log", { filter: state.kinds, trial: state.logtrial, offset: state.logoffset, limit: size });
  fresh(main, first, () => [
    el("div", { class: "tools" },
      chooser("kind", [["", "all"], ["ended,dropped", "ends"], ["noted", "notes"], ["session_opened,session_closed", "sessions"], ...data.kinds.map((kind) => [kind, kind.replace("_", " ")])], state.kinds, (value) => { state.kinds = value; state.logoffset = 0; }),
      el("label", {}, el("span", { class: "quiet" }, "trial "), el("input", { type: "number", min: 0, "aria-label": "Only of this trial", value: state.logtrial, on: { input: (event) => { state.logtrial = /^\d+$/.test(event.target.value) ? event.target.value : ""; state.logoffset = 0; typed(); } } })),
      el("span", { id: "count", class: "quiet", role: "status" }), el("span", { class: "grow" }),
      el("button", { type: "button", id: "earlier", on: { click: () => { state.logoffset = Math.max(0, state.logoffset - size); refresh(); } } }, "newer"),
      el("button", { type: "button", id: "later", on: { click: () => { state.logoffset += size; refresh(); } } }, "older")),
    el("div", { id: "lines" })]);
  $("count").textContent = `${fmt(data.total)} events in all` + (data.kept < data.total ? `, the newest ${fmt(data.kept)} here` : "");
  $("earlier").disabled = state.logoffset === 0;
  $("later").disabled = data.lines.length < size;
  const when = (line) => (line.time_s > 1e9 ? WHEN.format(line.time_s * 1000) : `+${seconds(line.since_s)}`);
  renew($("lines"), [data.lines.length ? grid(["no.", "when", "event", "trial", "what"], data.lines.map((line) => [line.number, when(line), line.kind.replace("_", " "), line.trial === null ? "" : trialLink(line.trial, String(line.trial)), line.text])) : nothing("Nothing like that happened.")]);
}

async function drawTrial(main, first) {
  if (state.trial === null) {
    purge(main);
    main.replaceChildren(nothing("No trial is selected: click one in a figure or in the table, or type its number above."));
    return;
  }
  const data = await view("trial", { trial: state.trial });
  const total = data.figures.length;
  if (first || shown === "" || main.dataset.trial !== `${data.trial}/${total}`) {
    purge(main);
    main.replaceChildren(el("div", { id: "head" }), el("div", { class: "cards", id: "cards" }), el("div", { class: "figures" }, data.figures.map(() => plotBox("small"))), el("div", { class: "two", id: "rest" }));
    main.dataset.trial = `${data.trial}/${total}`;
    shown = `${state.study}/${state.view}`;
  }
  $("head").replaceChildren(el("h1", {}, `trial ${data.trial} `, status(data.status)), el("p", { class: "lead" }, [data.rank !== null ? `number ${data.rank + 1} of ${data.ranked} by the goal` : "not ranked", data.reason, data.parent !== null ? `made from trial ${data.parent}` : ""].filter(Boolean).join(" · ")));
  const cards = data.objectives.map((name) => card(name, fmt(data.metrics[name]) || "no value", ""));
  cards.push(card("epochs", fmt(data.epochs), data.until ? `of ${data.until} in its segment` : ""), card("time", seconds(data.busy_s), `${seconds(data.train_s)} in epochs`));
  if (data.energy) { const [value, more] = amount(data.energy); cards.push(card("energy", value, more)); }
  $("cards").replaceChildren(...cards);
  const where = data.spans.map((span) => [`+${seconds(span.begin_s)}`, span.end_s === null ? "now" : `+${seconds(span.end_s)}`, span.devices.map(([device, share]) => (share === 1 ? device : `${fmt(share)} of ${device}`)).join(", "), span.fused.length ? `with ${span.fused.slice(0, 5).join(", ")}` : "", span.status]);
  $("rest").replaceChildren(
    el("div", {}, el("section", {}, el("h2", {}, "configuration"), pairs([...Object.entries(data.config), ["seed", String(data.seed)]])), data.limits.length ? el("section", {}, el("h2", {}, "limits"), grid(["limit", "predicted", "measured"], data.limits.map((l) => [l.text, l.predicted, l.measured]))) : null),
    el("div", {}, el("section", {}, el("h2", {}, "metrics at its latest report"), pairs(Object.entries(data.metrics))), where.length ? el("section", {}, el("h2", {}, "where it ran"), grid(["from", "to", "on", "fused", ""], where)) : null),
    data.error ? el("section", { class: "wide" }, el("h2", {}, "error"), el("pre", {}, data.error)) : "");
  const boxes = main.querySelectorAll(".figures .plot");
  for (let i = 0; i < total; i++) await drawPlot(boxes[i], data.figures[i], "", `${state.study}/trial/${data.trial}/${i}`);
}

async function drawRecurring(main, first) {
  if (!jobs.length) { purge(main); main.replaceChildren(nothing("This store keeps no recurring job (penstock recur, pk.RecurringJob).")); return; }
  if (!jobs.includes(state.job)) state.job = jobs[0];
  const data = await get("/api/recurring", { job: state.job });
  fresh(main, first, () => [el("div", { class: "tools" }), el("div", { class: "figures" }, plotBox(), plotBox()), el("div", { id: "below" })]);
  const toolbox = main.querySelector(".tools");
  if (!toolbox.contains(document.activeElement)) toolbox.replaceChildren(chooser("job", jobs.map((job) => [job, job]), state.job, (value) => { state.job = value; }));
  const boxes = main.querySelectorAll(".plot");
  await drawPlot(boxes[0], data.figures[0], `${data.policy ? `Policy ${data.policy}. ` : ""}Cost of each run: ${fmt(data.eta)} x energy + ${fmt(1 - data.eta)} x ${fmt(data.max_power_w)} W x time (eta ${fmt(data.eta)}).`, `job/${state.job}/0`);
  await drawPlot(boxes[1], data.figures[1], "Mean cost of each batch size's runs that reached the target, with its 95% interval.", `job/${state.job}/1`);
  renew($("below"), [data.arms.length ? el("h2", {}, "mean cost of runs that reached the target") : el("span"), data.arms.length ? grid(["batch size", "runs", "reached the target", "mean cost, J", "95% belief, +- J"], data.arms.map((a) => [a.batch_size, a.runs, a.reached, a.mean, a.std === null ? null : 1.96 * a.std])) : el("span"), el("h2", {}, `${fmt(data.runs.length)} runs${data.runs.length > 200 ? ", the latest 200" : ""}`), grid(["run", "batch size", "limit, W", "", "epochs", "time", "energy", "cost, J", "outcome"], data.runs.slice(-200).reverse().map((r) => [r.number, r.batch_size, r.limit_w, r.explore ? "exploring" : "", r.epochs, r.time_s === null ? "" : seconds(r.time_s), joules(r.energy_j), r.cost, r.error ? `${r.state}: ${cut(r.error, 120)}` : r.state]))]);
}

const VIEWS = [
  { id: "overview", title: "Overview", draw: drawOverview },
  { id: "history", title: "History", draw: drawHistory },
  { id: "curves", title: "Curves", draw: drawCurves },
  { id: "table", title: "Trials", draw: drawTable },
  { id: "trial", title: "Trial", draw: drawTrial },
  { id: "pareto", title: "Pareto", draw: drawPareto },
  { id: "importance", title: "Importance", draw: drawImportance },
  { id: "parallel", title: "Parallel", draw: drawParallel },
  { id: "devices", title: "Devices", draw: drawDevices },
  { id: "power", title: "Power limits", draw: drawPower },
  { id: "sm2", title: "SM2", draw: drawSm2 },
  { id: "coordinate_check", title: "Twin", draw: drawCheck },
  { id: "limits", title: "Limits", draw: drawLimits },
  { id: "recurring", title: "Recurring", draw: drawRecurring },
  { id: "log", title: "Log", draw: drawLog },
];

// --- the frame ---

function showNav() {
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.view : null;
  $("nav").replaceChildren(...VIEWS.map((each) => el("a", { class: "tab", href: hashFor({ view: each.id }), "data-view": each.id, "aria-current": each.id === state.view ? "page" : null }, each.id === "trial" && state.trial !== null ? `Trial ${state.trial}` : each.title)));
  const current = $("nav").querySelector("[aria-current]");
  if (current) { // keep the current tab in sight on a narrow screen
    const box = $("nav"), left = current.offsetLeft - 12, right = current.offsetLeft + current.offsetWidth + 12;
    if (left < box.scrollLeft || right > box.scrollLeft + box.clientWidth) box.scrollLeft = left;
  }
  if (focused) { const tab = $("nav").querySelector(`[data-view="${focused}"]`); if (tab) tab.focus(); }
}

function showSelected() {
  const footer = $("selected");
  footer.hidden = state.trial === null && !hovered;
  if (footer.hidden) return;
  const parts = [el("span", { class: "text" }, hovered || `trial ${state.trial} is selected in every view`)];
  if (state.trial !== null) parts.push(el("a", { href: hashFor({ view: "trial" }) }, `open trial ${state.trial}`), el("button", { type: "button", "aria-label": "Select no trial", on: { click: () => go({ trial: null }) } }, "clear"));
  footer.replaceChildren(...parts);
}

async function loadStudies() {
  const data = await get("/api/studies");
  studies = data.studies;
  jobs = data.jobs;
  jobsSeen = data.jobs_version;
  if (state.study === null || !studies.some((each) => each.id === state.study)) state.study = studies.length ? studies[0].id : null;
  $("study").replaceChildren(...studies.map((each) => el("option", { value: each.id, selected: each.id === state.study }, `${each.name} (${fmt(each.events)} events)`)));
  if (!studies.length) $("study").replaceChildren(el("option", {}, "none"));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "light" : "dark";
}

async function onHash() {
  readHash();
  if (studies.length && !studies.some((each) => each.id === state.study)) state.study = studies[0].id;
  $("study").value = state.study;
  watch();
  showNav();
  showSelected();
  await refresh(true);
}

async function begin() {
  let saved = null;
  try { saved = localStorage.getItem("penstock-theme"); } catch { /* no storage: follow the system */ }
  setTheme(saved || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    setTheme(theme);
    try { localStorage.setItem("penstock-theme", theme); } catch { /* not kept */ }
    refresh();
  });
  $("study").addEventListener("change", (event) => go({ study: Number(event.target.value), trial: null, view: state.view === "trial" ? "overview" : state.view }));
  $("goto").addEventListener("change", (event) => { if (/^\d+$/.test(event.target.value)) go({ trial: Number(event.target.value), view: "trial" }); });
  addEventListener("hashchange", () => onHash().catch(showError));
  $("nav").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const tabs = [...$("nav").children], at = tabs.indexOf(document.activeElement);
    if (at >= 0) { event.preventDefault(); tabs[(at + step + tabs.length) % tabs.length].focus(); }
  });
  readHash();
  showNav();
  try {
    await loadStudies();
  } catch (error) { showError(error); }
  await onHash();
}

setInterval(showStatus, 10000);
begin().catch(showError);
