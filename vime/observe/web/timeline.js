// Timeline: what each process did when. From the run's spans where [trace] recorded them, else the controller's phases out of its metrics.
import { $, Lines, chosen, config, el, layout, nice, plot, state, table } from "./page.js";

const COLORS = { rollout: "#2f6bdb", generate: "#2f6bdb", queue: "#9db7e8", reward: "#e0742b", train: "#2a9d6f", sync: "#a24bc4", publish: "#a24bc4", load: "#4aa3c7", put: "#4aa3c7", save: "#c9a227", rest: "#c9a227", setup: "#8a8f98", prompt: "#8a8f98", flush: "#8a8f98" };
const STAGES = ["prompt", "queue", "generate", "reward", "put", "lease", "load", "train", "publish"];
const LATEST = 8 << 20; // bytes of each process's spans
const rank = (name) => (name === "controller" ? 0 : name.startsWith("worker") ? 1 : 2);

/** {process: {phase: [[start, end], ...]}} in seconds; overlaps and gaps below `gap` are joined. A process's own phases, or what its samples did. */
export function busy(spans, gap) {
  const rows = {};
  const phased = new Set(spans.filter((s) => !("sample" in s.attributes)).map((s) => s.process));
  const of = spans.filter((s) => !(phased.has(s.process) && "sample" in s.attributes)).sort((a, b) => a.start - b.start);
  for (const s of of) {
    const at = ((rows[s.process] ??= {})[s.name] ??= []), a = s.start / 1e9, b = s.end / 1e9, last = at.at(-1);
    if (last && a - last[1] <= gap) last[1] = Math.max(last[1], b);
    else at.push([a, b]);
  }
  return rows;
}

function fromMetrics(run) {
  const own = { rollout: [], train: [], sync: [], rest: [] };
  let at = 0;
  for (const r of run.metrics.rows.filter((r) => r["perf/step_s"])) {
    const end = at + r["perf/step_s"];
    for (const [name, key] of [["rollout", "perf/rollout_s"], ["train", "perf/train_s"], ["sync", "weights/sync_s"]]) if (r[key]) own[name].push([at, (at += r[key])]);
    if (end > at) own.rest.push([at, end]);
    at = Math.max(at, end);
  }
  return { controller: own };
}

/** Seconds that a list of lists of intervals covers together. */
function covered(lists) {
  let total = 0, until = -Infinity;
  for (const [a, b] of lists.flat().sort((x, y) => x[0] - y[0])) { total += Math.max(0, b - Math.max(a, until)); until = Math.max(until, b); }
  return total;
}

function slowest(spans) {
  const of = new Map();
  for (const s of spans) if ("sample" in s.attributes && !("eval" in s.attributes)) (of.get(s.attributes.sample) ?? of.set(s.attributes.sample, []).get(s.attributes.sample)).push(s);
  const rows = [];
  for (const [uid, own] of of) {
    const root = own.findLast((s) => s.name === "sample");
    if (!root) continue;
    const took = Object.fromEntries(STAGES.map((n) => [n, 0]));
    for (const s of own) if (s.name in took) took[s.name] += Math.max(0, Math.min(s.end, root.end) - Math.max(s.start, root.start)) / 1e9;
    rows.push([uid, root.attributes.step, (root.end - root.start) / 1e9, ...STAGES.map((n) => took[n])]);
  }
  return rows.sort((a, b) => b[2] - a[2]).slice(0, 12);
}

async function read(run) {
  run.spans ??= new Map();
  for (const name of run.trace) {
    if (!run.spans.has(name)) run.spans.set(name, new Lines(`/api/file/${run.i}/trace/${name}`, -LATEST));
    await run.spans.get(name).more();
  }
  return [...run.spans].flatMap(([name, lines]) => lines.rows.map((s) => ({ ...s, process: name.replace(".jsonl", "") })));
}

export async function show(polled) {
  const run = chosen("time-run", () => show());
  if (!run || (polled && !run.live)) return;
  const spans = await read(run), Plotly = await plot();
  if (state.tab !== "timeline") return;
  const working = spans.filter((s) => s.name === "rollout" || s.name === "generate"); // what is before the first is the start of processes
  const begin = (working.length ? working : spans).reduce((t, s) => Math.min(t, s.start), Infinity) / 1e9, end = spans.reduce((t, s) => Math.max(t, s.end), 0) / 1e9;
  const rows = spans.length ? busy(spans.filter((s) => s.start / 1e9 >= begin), (end - begin) / 4000) : fromMetrics(run), zero = spans.length ? begin : 0; // seconds
  const names = Object.keys(rows).sort((a, b) => rank(a) - rank(b) || a.localeCompare(b, "en", { numeric: true })), phases = [...new Set(names.flatMap((n) => Object.keys(rows[n])))].filter((p) => p !== "sample" && p !== "lease");
  const traces = phases.map((phase) => {
    const bars = names.flatMap((n) => (rows[n][phase] || []).map(([a, b]) => ({ n, a: a - zero, d: b - a })));
    return {
      type: "bar", orientation: "h", name: phase, y: bars.map((b) => b.n), base: bars.map((b) => b.a), x: bars.map((b) => b.d), width: 0.6,
      marker: { color: COLORS[phase] || "#8a8f98" }, hovertemplate: bars.map((b) => `${b.n} ${phase}<br>${b.a.toFixed(2)} s, ${b.d.toFixed(3)} s long<extra></extra>`),
    };
  });
  const more = { barmode: "overlay", showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, hovermode: "closest", margin: { l: 90, r: 10, t: 30, b: 40 }, height: 110 + 36 * names.length, dragmode: "pan", uirevision: run.path };
  Plotly.react("gantt", traces, layout({ ...more, xaxis: { title: { text: "seconds since the first rollout" } }, yaxis: { autorange: "reversed", type: "category", categoryarray: names, fixedrange: true } }), { ...config, scrollZoom: true });
  $("time-note").textContent = spans.length ? `the latest ${spans.length} spans; scroll to zoom, drag to move` : "the controller's phases out of metrics.jsonl; trace.file = true shows every process and sample";
  const swatch = (p) => el("span", {}, el("i", { class: "swatch", style: `background: ${COLORS[p] || "#8a8f98"}` }), p);
  const share = names.map((n) => {
    const lists = Object.entries(rows[n]).filter(([p]) => phases.includes(p)).map(([, at]) => at), all = lists.flat();
    const span = Math.max(...all.map((x) => x[1])) - Math.min(...all.map((x) => x[0])), idle = span - covered(lists);
    return [n, ...phases.map((p) => (rows[n][p] ? `${((100 * covered([rows[n][p]])) / span).toFixed(1)} %` : "")), `${((100 * idle) / span).toFixed(1)} %`, nice(span, 4)];
  });
  const shares = table(["process", ...phases, "idle", "seconds"], share);
  [...shares.querySelectorAll("thead th")].slice(1, 1 + phases.length).forEach((th, k) => th.replaceChildren(swatch(phases[k])));
  $("shares").replaceChildren(shares);
  const slow = slowest(spans);
  $("slowest").replaceChildren(slow.length ? table(["sample", "step", "seconds", ...STAGES], slow.map((r) => r.map((v, k) => (k < 2 ? v : v.toFixed(3))))) : el("p", { class: "empty" }, "Recorded with trace.file = true."));
}
