"use strict";
(() => {
const DATA = JSON.parse(document.getElementById("data").textContent);
const CONFIG = { displaylogo: false, responsive: false, modeBarButtons: [["toImage"]] };
const NARROW = matchMedia("(max-width: 640px)");
const COLOUR = DATA.colours;
const $ = (id) => document.getElementById(id);

/* ---------- numbers: 16-bit fractions and small counts, decoded once ---------- */

const BYTES = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array };

function decode(packed) {
  if (!packed) return null;
  const text = atob(packed.bdata);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new BYTES[packed.dtype](bytes.buffer);
}

const ROLES = {};
for (const [name, role] of Object.entries(DATA.roles)) {
  ROLES[name] = { ...role };
  for (const key of ["alignment", "stderr", "chance", "directions", "rank", "boxes", "spectrum"]) {
    ROLES[name][key] = decode(role[key]);
  }
}
const TOKENS = DATA.tokens ? DATA.tokens.roles : {};
for (const streams of Object.values(TOKENS)) {
  for (const stream of Object.values(streams)) {
    stream.ids = decode(stream.ids);
    stream.values = decode(stream.values);
  }
}
const LAYERS = DATA.layers;
const TOP = { u1: 255, u2: 65535 };
const fraction = (code, top) => code === top ? NaN : code / (top - 1);

/* Rows of layers that hold values, of all sources before each, and in all. */
const ROWS = [0];
for (const start of DATA.starts) ROWS.push(ROWS[ROWS.length - 1] + LAYERS.length - start);

/* Alignment is [threshold, source, layer, head], the full stream being the last source; layers
   that a source is not upstream of are left out. */
function at(role, t, s, l, h) {
  const R = ROLES[role];
  const cell = (t * LAYERS.length + l) * R.heads + h;
  const row = t * ROWS[ROWS.length - 1] + ROWS[s] + l - DATA.starts[s];
  const place = l < DATA.starts[s] ? -1 : row * R.heads + h;
  return {
    value: place < 0 ? NaN : fraction(R.alignment[place], TOP.u2),
    stderr: place < 0 || !R.stderr ? NaN : fraction(R.stderr[place], TOP.u1) * R.stderrScale,
    chance: R.chance[cell],
    directions: R.directions[cell],
    box: R.boxes[cell],
    rank: R.rank[l * R.heads + h],
  };
}
const FULL = DATA.sources.length - 1;
const number = (v, digits = 3) => Number.isFinite(v) ? v.toFixed(digits) : "–";
const share = (t) => `${+(DATA.thresholds[t] * 100).toPrecision(4)}%`;
const ASCENDING = [...DATA.thresholds.keys()].sort((a, b) => DATA.thresholds[a] - DATA.thresholds[b]);
const spread = (v) => Number.isFinite(v) ? ` ± ${number(v)}` : "";

/* ---------- figures ---------- */

const copy = (value) => structuredClone(value);

async function draw(element, data, layouts) {
  const width = NARROW.matches ? "narrow" : "wide";
  const layout = copy(layouts[width]);
  element.style.minHeight = `${layout.height}px`;
  if (element.dataset.set === width) {
    await Plotly.react(element, data, layout, CONFIG);
    return;
  }
  // A colour bar that turns would leave its old ticks behind: begin afresh.
  Plotly.purge(element);
  element.replaceChildren();
  await Plotly.newPlot(element, data, layout, CONFIG);
  element.on("plotly_click", (event) => {
    const head = headOf(event.points[0]);
    if (head) openHead(head, element);
  });
  const cursor = document.createElement("div");
  cursor.className = "cursor";
  element.append(cursor);
  if (!element.dataset.set && element.getAttribute("role") === "application") listen(element);
  element.dataset.set = width;
  element.dataset.width = layout.width;
}

function drawFigure(name) {
  const figure = DATA.figures[name];
  return draw($(`figure-${name}`), figure.data, figure);
}

function headOf(point) {
  const meta = point.data.meta;
  if (!meta || !meta.role || point.data.type !== "heatmap") return null;
  return { role: meta.role, layer: meta.layer ?? point.customdata[point.customdata.length - 1], head: point.x };
}

function listen(element) {
  let here = null;
  const show = (cell) => {
    here = cell;
    Object.assign(element.querySelector(".cursor").style, {
      left: `${cell.x - cell.w / 2 - 1}px`, top: `${cell.y - cell.h / 2 - 1}px`,
      width: `${cell.w + 2}px`, height: `${cell.h + 2}px`,
    });
    $("spoken").textContent = cell.words();
  };
  element.addEventListener("focus", () => {
    const cells = cellsOf(element);
    if (cells.length) show(nearest(cells, here) || cells[0]);
  });
  element.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key in step && here) {
      event.preventDefault();
      const next = towards(cellsOf(element), here, step[event.key]);
      if (next) show(next);
    } else if ((event.key === "Enter" || event.key === " ") && here) {
      event.preventDefault();
      openHead(here.of, element);
    }
  });
}

/* Every cell that holds a head, in pixels of its figure. */
function cellsOf(element) {
  const found = [];
  for (const trace of element._fullData || []) {
    if (trace.type !== "heatmap" || trace.visible !== true || !trace.meta || !trace.meta.role) continue;
    const layout = element._fullLayout;
    const xa = layout[`xaxis${trace.xaxis.slice(1)}`], ya = layout[`yaxis${trace.yaxis.slice(1)}`];
    const step = trace.dy || 1, first = trace.y0 || 0;
    trace.z.forEach((row, r) => Array.from(row).forEach((z, h) => {
      if (z === null || Number.isNaN(z)) return;
      const y = trace.y ? trace.y[r] : first + step * r;
      const behind = trace.customdata[r][h];
      found.push({
        x: xa._offset + xa.l2p(h), y: ya._offset + ya.l2p(y),
        w: Math.abs(xa.l2p(1) - xa.l2p(0)), h: Math.abs(ya.l2p(step) - ya.l2p(0)),
        of: { role: trace.meta.role, layer: trace.meta.layer ?? behind[behind.length - 1], head: h },
        words: () => told(trace.hovertemplate, h, behind, trace.text && trace.text[r] && trace.text[r][h]),
      });
    }));
  }
  return found;
}

/* A hover text in plain words: what plotly makes of its template. */
function told(template, x, customdata, text) {
  const filled = template.replace("<extra></extra>", "").replace(/%\{(\w+)(?:\[(\d+)\])?(?::([^}]*))?\}/g,
    (_, name, index, format) => {
      const value = name === "customdata" ? customdata[+index] : name === "x" ? x : text ?? "";
      return format && Number.isFinite(value) ? formatted(value, format) : value;
    });
  return new DOMParser().parseFromString(filled.replace(/<br>/g, ", "), "text/html").body.textContent;
}

/* The few of d3's number formats that the templates use: .3f, +.3f, .3g, .1%. */
function formatted(value, format) {
  const [, digits, kind] = format.match(/\.(\d)([fg%])/) || [0, "3", "f"];
  if (kind === "%") return `${(100 * value).toFixed(+digits)}%`;
  return kind === "g" ? `${+value.toPrecision(+digits)}` : value.toFixed(+digits);
}

function nearest(cells, to) {
  if (!to) return null;
  return cells.reduce((best, cell) => {
    const far = (cell.x - to.x) ** 2 + (cell.y - to.y) ** 2;
    return far < best.far ? { cell, far } : best;
  }, { cell: null, far: Infinity }).cell;
}

/* The closest cell in a direction; leaving the axis of travel costs more than going along it. */
function towards(cells, from, [dx, dy]) {
  let best = null, least = Infinity;
  for (const cell of cells) {
    const along = (cell.x - from.x) * dx + (cell.y - from.y) * dy;
    const across = Math.abs((cell.x - from.x) * dy) + Math.abs((cell.y - from.y) * dx);
    if (along < 1) continue;
    const cost = along + 4 * across;
    if (cost < least) { least = cost; best = cell; }
  }
  return best;
}

/* ---------- explorer ---------- */

const state = { role: Object.keys(ROLES).includes("V") ? "V" : Object.keys(ROLES)[0],
                source: FULL, view: 0, t: 0 };

function outline(role, t, code, start) {
  const R = ROLES[role], parts = [];
  for (let l = 0; l < LAYERS.length; l++) {
    for (let h = 0; h < R.heads; h++) {
      if (at(role, t, FULL, l, h).box !== code) continue;
      const [a, b, c, d] = [h - 0.5, l - 0.5, h + 0.5, l + 0.5];
      parts.push(`M${a},${b + start} L${a},${b} L${c},${b} L${c},${d} L${a},${d} Z`);
    }
  }
  return parts.join(" ") || "M-0.5,-0.5 Z";
}

function boxCounts(role, t) {
  const R = ROLES[role], size = LAYERS.length * R.heads;
  const codes = R.boxes.subarray(t * size, (t + 1) * size);
  return { total: size, boxed: codes.filter((c) => c > 0).length, firm: codes.filter((c) => c > 1).length };
}

const average = (values) => {
  const known = values.filter(Number.isFinite);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
};

function exploredData() {
  const { role, source, view, t } = state, R = ROLES[role];
  const base = DATA.explorer[role];
  const rows = LAYERS.map((_, l) => Array.from({ length: R.heads }, (_, h) => at(role, t, source, l, h)));
  const shown = rows.map((row) => row.map((c) => view ? c.value / c.chance : c.value));
  const level = rows.map((row) => row.map((c) => view ? (c.chance > 0 ? 1 : NaN) : c.chance));
  const columns = (grid) => Array.from({ length: R.heads }, (_, h) => grid.map((row) => row[h]));
  const words = DATA.words[source];
  const counts = boxCounts(role, t);
  const gaps = { x: [], y: [] };
  shown.forEach((row, l) => row.forEach((v, h) => {
    if (Number.isFinite(v)) return;
    gaps.x.push(h - .5, h + .5, h + .5, h - .5, h - .5, null);
    gaps.y.push(l - .5, l - .5, l + .5, l + .5, l - .5, null);
  }));
  const parts = {
    "heat": {
      z: shown.map((row) => row.map((v) => !Number.isFinite(v) ? null : view ? Math.log2(v) : v)),
      customdata: rows.map((row, l) => row.map((c) =>
        [c.value, c.stderr, c.chance, c.value / c.chance, c.directions, c.rank, LAYERS[l]])),
      hovertemplate: base.hover.replaceAll("SOURCE", words),
      meta: { role, words, part: "heat" },
    },
    "gap full": { ...gaps, showlegend: gaps.x.length > 0, text: `${words}: ${DATA.gapWords}` },
    "right full": { x: shown.map(average) },
    "bottom full": { y: columns(shown).map(average) },
    "right chance": { x: level.map(average) },
    "bottom chance": { y: columns(level).map(average) },
    "key 0": { name: `${counts.boxed} of ${counts.total} ${role} heads: full stream above embedding` },
    "key 1": { name: `${counts.firm} of these hold at 5% false discovery` },
  };
  for (const kind of ["right", "bottom"]) {
    const value = kind === "right" ? "%{x:.3f}" : "%{y:.3f}";
    const where = kind === "right" ? "layer" : "head";
    parts[`${kind} full`].hovertemplate =
      `<b>${where} %{customdata} · ${words}</b><br>mean ${value}<extra></extra>`;
  }
  return base.data.map((trace) => ({ ...trace, ...parts[trace.meta.part] }));
}

function exploredLayout(wide) {
  const { role, view, t } = state, base = DATA.explorer[role];
  const layout = copy(wide ? base.wide : base.narrow);
  const scale = copy(DATA.scales[t][view]);
  if (!wide) scale.colorbar.ticktext = scale.colorbar.ticktext.map((words) => words.replace(" <b>", "<br><b>"));
  layout.coloraxis = { ...layout.coloraxis, ...scale,
    colorbar: { ...layout.coloraxis.colorbar, ...scale.colorbar } };
  Object.assign(layout.xaxis2, DATA.levels[view]);
  Object.assign(layout.yaxis3, DATA.levels[view]);
  layout.shapes.forEach((shape, i) => {
    shape.path = outline(role, t, i + 1, i === 0 && layout.shapes.length > 1 ? base.start : 0);
  });
  return layout;
}

async function explore() {
  const element = $("figure-explorer");
  await draw(element, exploredData(), { wide: exploredLayout(true), narrow: exploredLayout(false) });
  $("explore-share").textContent = share(state.t);
}

function fill(select, labels, chosen, change) {
  labels.forEach(([value, text]) => select.append(new Option(text, value, false, value === chosen)));
  select.addEventListener("change", () => change(select.value));
}

function wireExplorer() {
  const roles = Object.entries(ROLES).map(([name, R]) => [name, `${name} (${R.heads} heads)`]);
  fill($("explore-role"), roles, state.role, (v) => { state.role = v; explore(); });
  const order = [FULL, ...DATA.sources.keys()].filter((s, i) => i === 0 || s !== FULL);
  fill($("explore-source"), order.map((s) => [String(s), DATA.plainWords[s]]), String(FULL),
    (v) => { state.source = +v; explore(); });
  fill($("explore-view"), [["0", "alignment"], ["1", "relative to chance"]], "0",
    (v) => { state.view = +v; explore(); });
  const slider = $("explore-threshold");
  slider.max = ASCENDING.length - 1;
  slider.value = ASCENDING.indexOf(state.t);
  slider.addEventListener("input", () => {
    state.t = ASCENDING[+slider.value];
    slider.setAttribute("aria-valuetext", share(state.t));
    explore();
  });
  slider.disabled = ASCENDING.length < 2;
}

/* ---------- one head ---------- */

const dialog = $("head");
let opened = null;

function openHead(head, element) {
  // A further question may have been asked of roles or blocks that the result does not have.
  if (!(head.role in ROLES) || !LAYERS.includes(head.layer)) {
    $("spoken").textContent = `L${head.layer}H${head.head} · ${head.role} is not part of the analysis`;
    return;
  }
  const figure = DATA.figures[element.id.replace("figure-", "")];
  opened = { t: figure ? figure.threshold : state.t, ...head };
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  renderHead();
}

function partner(head, role) {
  const [mine, theirs] = [ROLES[head.role].heads, ROLES[role].heads];
  return Math.min(theirs - 1, Math.floor(head.head * theirs / mine));
}

function renderHead() {
  const { role, layer, head, t } = opened, l = LAYERS.indexOf(layer), R = ROLES[role];
  const full = at(role, t, FULL, l, head), embed = at(role, t, 0, l, head);
  $("head-title").textContent = `L${layer}H${head} · ${role}`;
  const roles = $("head-roles");
  roles.replaceChildren(...Object.keys(ROLES).map((name) => {
    const button = document.createElement("button");
    button.textContent = name;
    button.setAttribute("aria-pressed", name === role);
    button.addEventListener("click", () => {
      opened = { ...opened, role: name, head: partner(opened, name) };
      renderHead();
    });
    return button;
  }));
  const box = ["no: the embedding is aligned at least as well", "yes", "yes, also at 5% false discovery"];
  const facts = [
    ["full stream", number(full.value) + spread(full.stderr)],
    ["token embedding", number(embed.value) + spread(embed.stderr)],
    ["chance", number(full.chance)],
    ["directions", `${full.directions} of ${R.d_head} carry ${share(t)}`],
    ["numerical rank", `${full.rank}`],
    ["full stream above embedding", full.rank ? box[full.box] : "zero read-in matrix"],
  ];
  $("head-facts").replaceChildren(...facts.flatMap(([name, value]) => {
    const dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = name; dd.textContent = value;
    const pair = document.createElement("div");
    pair.append(dt, dd);
    return [pair];
  }));
  const select = $("head-threshold");
  select.replaceChildren(...ASCENDING.map((i) => new Option(share(i), i, false, i === t)));
  drawSources(role, l, head, t);
  drawSpectrum(role, l, head);
  drawCurve(role, l, head);
  tellDirections(role, layer, head);
  tellTokens(role, l, head);
}

/* ---------- what the text and the vocabulary say of one head ---------- */

function element(tag, content, attributes = {}) {
  const made = document.createElement(tag);
  made.append(...[content].flat());
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function tabulate(table, names, rows) {
  table.replaceChildren(
    element("thead", element("tr", names.map((name) => element("th", name, { scope: "col" })))),
    element("tbody", rows.map((row) => element("tr", row))));
}

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
const chips = (tokens) => element("td", tokens.length
  ? tokens.map((token) => element("code", visible(token))) : "–", { class: "tokens" });

function tellDirections(role, layer, head) {
  const rows = (DATA.directions[role] || {})[`${layer},${head}`] || [];
  $("head-directions-section").hidden = !rows.length;
  tabulate($("head-directions"), ["direction", "of squares", "one end", "the other"],
    rows.map(([direction, part, positive, negative]) => [
      element("td", direction.replace("-", "–")), element("td", `${(100 * part).toFixed(1)}%`, { class: "number" }),
      chips(positive), chips(negative)]));
}

function tellTokens(role, l, head) {
  const streams = TOKENS[role], section = $("head-tokens-section");
  section.hidden = !streams;
  if (!streams) return;
  const name = $("head-stream").value, stream = streams[name], rows = [];
  const { ranks, before, words } = DATA.tokens;
  const places = stream.ids.length / stream.values.length;
  const word = (id) => id < 0 ? "" : visible(words[id] ?? `⟨${id}⟩`);
  for (const [side, end] of ["most", "least"].entries()) {
    for (let rank = 0; rank < ranks; rank++) {
      const place = ((side * LAYERS.length + l) * ROLES[role].heads + head) * ranks + rank;
      const value = fraction(stream.values[place], TOP.u2);
      if (!Number.isFinite(value)) continue;
      const ids = Array.from(stream.ids.subarray(place * places, (place + 1) * places));
      const own = places > 1 ? before : 0;
      const [left, right] = [ids.slice(0, own), ids.slice(own + 1)].map((part) => part.map(word).join(""));
      rows.push([element("td", rank ? "" : end), element("td", number(value), { class: "number" }),
        element("td", [left, element("mark", word(ids[own])), right], { class: "tokens" })]);
    }
  }
  section.hidden = !rows.length;
  $("head-tokens-share").textContent = share(0);
  tabulate($("head-tokens"), ["", "alignment", name === "full" ? "token in its context" : "token"], rows);
}

const chartLayout = (extra) => ({
  margin: { l: 10, r: 16, t: 8, b: 42 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
  font: { family: "system-ui, sans-serif", size: 12 }, hovermode: "closest",
  width: Math.min(700, dialog.clientWidth - 40),
  legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
  ...extra,
});
const axis = (extra) => ({ tickfont: { size: 11 }, gridcolor: COLOUR.faint, zeroline: false, automargin: true, fixedrange: true, ...extra });
const QUIET = { displaylogo: false, displayModeBar: false };

function kindOf(s) {
  const label = DATA.sources[s];
  return s === FULL ? "full" : label.endsWith("mlp_out") ? "mlp" : label.endsWith("attn_out") ? "attention" : "embed";
}

function drawSources(role, l, head, t) {
  const rows = [...DATA.sources.keys()].map((s) => ({ s, ...at(role, t, s, l, head) }))
    .filter((c) => Number.isFinite(c.value)).sort((a, b) => b.value - a.value);
  const element = $("head-sources");
  if (!rows.length) { Plotly.purge(element); element.replaceChildren("Nothing to rank: no upstream source, or a zero read-in matrix."); return; }
  if (!element.classList.contains("js-plotly-plot")) element.replaceChildren();
  const symbols = { full: "diamond", embed: "star", attention: "circle", mlp: "square" };
  const trace = {
    type: "scatter", mode: "markers", x: rows.map((c) => c.value), y: rows.map((_, i) => i),
    error_x: { type: "data", array: rows.map((c) => Number.isFinite(c.stderr) ? c.stderr : 0), thickness: 1.5, width: 3, color: COLOUR.grey },
    marker: { size: 10, color: rows.map((c) => COLOUR[kindOf(c.s)]), symbol: rows.map((c) => symbols[kindOf(c.s)]) },
    customdata: rows.map((c) => [DATA.words[c.s], spread(c.stderr), c.value / c.chance]),
    hovertemplate: "<b>%{customdata[0]}</b><br>alignment %{x:.3f}%{customdata[1]}<br>%{customdata[2]:.2f} × chance<extra></extra>",
    showlegend: false,
  };
  const chance = rows[0].chance;
  const values = [...trace.x, chance], low = Math.min(...values), high = Math.max(...values);
  const room = Math.max((high - low) * .08, .01);
  Plotly.react(element, [trace], chartLayout({
    height: 70 + 22 * rows.length,
    xaxis: axis({ title: { text: "alignment ± standard error" }, range: [low - room, high + room] }),
    yaxis: axis({ tickvals: trace.y, ticktext: rows.map((c) => DATA.words[c.s]), range: [rows.length - .4, -.6], showgrid: true }),
    shapes: [{ type: "line", x0: chance, x1: chance, yref: "paper", y0: 0, y1: 1, line: { color: COLOUR.grey, dash: "dot", width: 2 } }],
    annotations: [{ x: chance, y: 1, yref: "paper", yanchor: "bottom", text: `chance ${number(chance, 2)}`, showarrow: false, font: { size: 11 } }],
    margin: { l: 10, r: 16, t: 22, b: 42 },
  }), QUIET);
}

function drawSpectrum(role, l, head) {
  const R = ROLES[role], d = R.d_head, start = (l * R.heads + head) * d;
  const s = Array.from(R.spectrum.subarray(start, start + d), (code) => fraction(code, TOP.u2));
  const total = s.reduce((a, v) => a + v * v, 0);
  let sum = 0;
  const cumulative = s.map((v) => { sum += v * v; return total ? sum / total : 0; });
  const x = s.map((_, i) => i + 1);
  const marks = DATA.thresholds.slice(0, 2)
    .map((_, t) => ({ t, k: at(role, t, FULL, l, head).directions })).filter((m) => m.k > 0);
  Plotly.react($("head-spectrum"), [
    { type: "bar", x, y: s, name: "singular value, first = 1", marker: { color: COLOUR.full }, opacity: .55,
      hovertemplate: "direction %{x}<br>%{y:.3f} of the largest<extra></extra>" },
    { type: "scatter", mode: "lines", x, y: cumulative, name: "share of squares so far", line: { color: COLOUR.embed, width: 2 },
      hovertemplate: "%{x} directions carry %{y:.1%}<extra></extra>" },
  ], chartLayout({
    height: 250, bargap: 0.1, margin: { l: 10, r: 16, t: 30, b: 42 },
    xaxis: axis({ title: { text: "input direction" }, range: [.4, d + .6], showgrid: false }),
    yaxis: axis({ range: [0, 1.12], tickvals: [0, .25, .5, .75, 1] }),
    shapes: marks.map((m) => ({ type: "line", x0: m.k + .5, x1: m.k + .5, y0: 0, y1: 1.02, line: { color: COLOUR.grey, dash: "dot", width: 1.5 } })),
    annotations: marks.map((m) => ({ x: m.k + .5, y: 1.02, yanchor: "bottom", text: share(m.t), showarrow: false, font: { size: 11 } })),
  }), QUIET);
}

function drawCurve(role, l, head) {
  const section = $("head-curve-section");
  section.hidden = DATA.thresholds.length < 3;
  if (section.hidden) return;
  const order = ASCENDING;
  const x = order.map((t) => DATA.thresholds[t]);
  const line = (name, y, color, dash) => ({ type: "scatter", mode: "lines+markers", x, y, name, line: { color, dash, width: 2 },
    hovertemplate: `${name}<br>%{x:.0%}: %{y:.3f}<extra></extra>` });
  Plotly.react($("head-curve"), [
    line("full stream", order.map((t) => at(role, t, FULL, l, head).value), COLOUR.full, "solid"),
    line("token embedding", order.map((t) => at(role, t, 0, l, head).value), COLOUR.embed, "dashdot"),
    line("chance", order.map((t) => at(role, t, FULL, l, head).chance), COLOUR.grey, "dot"),
  ], chartLayout({ height: 250, margin: { l: 10, r: 16, t: 30, b: 42 },
    xaxis: axis({ title: { text: "share of squared singular values" }, tickformat: ".0%" }),
    yaxis: axis({ title: { text: "alignment" } }) }), QUIET);
}

$("head-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
$("head-stream").addEventListener("change", renderHead);
$("head-threshold").addEventListener("change", (event) => { opened.t = +event.target.value; renderHead(); });

/* ---------- print: what is too wide is made smaller ---------- */

const PRINTED = 960;
window.addEventListener("beforeprint", () => document.querySelectorAll(".plot").forEach((element) => {
  element.style.zoom = Math.min(1, PRINTED / element.dataset.width);
}));
window.addEventListener("afterprint", () => document.querySelectorAll(".plot").forEach((element) => {
  element.style.zoom = "";
}));

/* ---------- start ---------- */

/* One drawing at a time; a page that changes width meanwhile is drawn once more. */
let drawing = false, again = false;

async function drawAll() {
  if (drawing) { again = true; return; }
  drawing = true;
  delete document.documentElement.dataset.drawn;
  do {
    again = false;
    for (const name of Object.keys(DATA.figures)) {
      await drawFigure(name);
      await new Promise((resume) => setTimeout(resume));
    }
    await explore();
  } while (again);
  drawing = false;
  document.documentElement.dataset.drawn = "yes";
}

NARROW.addEventListener("change", drawAll);
wireExplorer();
drawAll();
})();
