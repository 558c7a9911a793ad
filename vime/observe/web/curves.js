// Curves: one chart a metric, all runs that are switched on in it.
import { $, config, el, layout, nice, plot, state } from "./page.js";

const FIRST = ["rollout/raw_reward", "eval/reward", "rollout/response_len", "train/entropy", "train/logprob_abs_diff", "train/grad_norm", "perf/step_s", "rollout/truncated"];
let shown = JSON.parse(localStorage.getItem("metrics") || "null");
let known = "";
const cards = new Map(); // metric -> its element
const seen = new IntersectionObserver((entries) => entries.forEach((e) => { e.target.visible = e.isIntersecting; if (e.isIntersecting) draw(e.target); }), { rootMargin: "300px" });

/** Exponential moving average whose weights fall by `k` each step, so that what is measured every 20 steps is hardly smoothed; null is a gap. */
export function smooth(x, y, k) {
  let sum = 0, weight = 0, last = x[0];
  return y.map((v, i) => {
    if (v === null || !k) return v;
    const keep = k ** (x[i] - last);
    sum = keep * sum + (1 - k) * v;
    weight = keep * weight + (1 - k);
    last = x[i];
    return sum / weight;
  });
}

export function series(run, metric) {
  const rows = run.metrics.rows.filter((r) => metric in r);
  return { x: rows.map((r) => r.step), y: rows.map((r) => r[metric]) };
}

function picker() {
  const names = [...new Set(state.runs.flatMap((r) => r.metrics.rows.flatMap(Object.keys)))].filter((n) => n !== "step").sort();
  const wanted = $("metric-search").value.toLowerCase().split(/\s+/);
  const key = names.join() + wanted.join();
  shown ??= FIRST.filter((n) => names.includes(n));
  if (key === known) return;
  known = key;
  let section = "";
  const rows = [];
  for (const name of names.filter((n) => wanted.every((w) => n.toLowerCase().includes(w)))) {
    const [head, ...rest] = name.split("/");
    if (head !== section) rows.push(el("h3", {}, (section = head)));
    const box = el("input", { type: "checkbox", change: () => toggle(name, box.checked) });
    box.checked = shown.includes(name);
    rows.push(el("label", {}, box, rest.join("/") || name));
  }
  $("metric-list").replaceChildren(...(rows.length ? rows : [el("p", { class: "empty" }, "no such metric")]));
}

function toggle(name, on) {
  shown = on ? [name, ...shown.filter((n) => n !== name)] : shown.filter((n) => n !== name);
  localStorage.setItem("metrics", JSON.stringify(shown));
  show();
}

export function card(name, into) {
  const node = el("div", { class: "chart", role: "figure", "aria-label": name }, el("h3", {}, name, el("span")), el("div", { class: "plot" }));
  node.metric = name;
  into?.observe(node);
  return node;
}

let turn = Promise.resolve(); // charts are drawn one a frame: the first is there at once, and the page answers meanwhile

export function draw(node, runs = state.runs.filter((r) => r.on)) {
  const k = Number($("smooth").value), traces = [], last = [];
  for (const run of runs) {
    const { x, y } = series(run, node.metric);
    if (!x.length) continue;
    const line = { color: run.color, width: 1.8 }, few = y.filter((v) => v !== null).length < 25 && !k;
    if (k) traces.push({ x, y, name: run.name, mode: "lines", line: { ...line, width: 1 }, opacity: 0.25, hoverinfo: "skip" });
    traces.push({ x, y: smooth(x, y, k), name: run.name, mode: few ? "lines+markers" : "lines", line, marker: { size: 4 }, connectgaps: true });
    last.push(nice(y.findLast((v) => v !== null)));
  }
  node.querySelector("h3 span").textContent = last.slice(0, 4).join(" · "); // there before Plotly is
  const axes = { xaxis: { type: $("log-x").checked ? "log" : "linear" }, yaxis: { type: $("log-y").checked ? "log" : "linear" } };
  turn = turn.catch(() => {}).then(async () => {
    const Plotly = await plot();
    await Plotly.react(node.querySelector(".plot"), traces, layout({ ...axes, uirevision: `${$("log-x").checked}${$("log-y").checked}` }), config);
    await new Promise(requestAnimationFrame);
  });
  return turn;
}

export function show() {
  picker();
  $("charts").style.setProperty("--columns", $("columns").value);
  for (const [name, node] of cards) if (!shown.includes(name)) { node.remove(); seen.unobserve(node); cards.delete(name); }
  for (const name of shown) {
    if (!cards.has(name)) cards.set(name, card(name, seen));
    const node = cards.get(name);
    if (node.visible) draw(node);
  }
  const wanted = shown.map((n) => cards.get(n));
  if (wanted.some((node, i) => $("charts").children[i] !== node)) $("charts").replaceChildren(...wanted);
  if (!wanted.length) $("charts").replaceChildren(el("p", { class: "empty" }, state.runs.some((r) => r.metrics.rows.length) ? "Tick a metric on the left." : "No finished step yet."));
}

$("metric-search").addEventListener("input", picker);
for (const id of ["smooth", "log-x", "log-y", "columns"]) $(id).addEventListener("input", () => { $("smooth-out").textContent = $("smooth").value; show(); });
