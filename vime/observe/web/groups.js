// Groups: which were not trained, and why; what was redone.
import { $, Lines, chosen, config, el, layout, plot, state, table } from "./page.js";

const COUNTS = /^rollout\/(dropped_.*|retries|fenced|continued|interrupted|restarted|abandoned|lost|held_back)$/;
const SHADES = ["#2f6bdb", "#e0742b", "#2a9d6f", "#a24bc4", "#c9a227", "#d6456b", "#4aa3c7"];

export async function show(polled) {
  const run = chosen("group-run", () => show());
  if (!run || (polled && !run.live)) return;
  run.ledger ??= new Lines(`/api/file/${run.i}/ledger.jsonl`);
  const [Plotly] = await Promise.all([plot(), run.ledger.more()]);
  if (state.tab !== "groups") return;
  const rows = run.metrics.rows.filter((r) => r.step > 0), names = [...new Set(rows.flatMap(Object.keys))].filter((k) => k.startsWith("rollout/dropped_")).sort();
  const traces = names.map((name, k) => ({ type: "bar", name: name.slice(16), x: rows.map((r) => r.step), y: rows.map((r) => r[name] || 0), marker: { color: SHADES[k % SHADES.length] } }));
  const total = names.reduce((n, name) => n + rows.reduce((m, r) => m + (r[name] || 0), 0), 0);
  $("group-note").textContent = names.length ? `${total} groups were dropped in ${rows.length} steps` : "no group was dropped";
  $("dropped").hidden = !names.length;
  if (names.length) Plotly.react("dropped", traces, layout({ barmode: "stack", showlegend: true, height: 300, legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, margin: { l: 50, r: 10, t: 30, b: 40 }, xaxis: { title: { text: "step" } }, yaxis: { title: { text: "groups dropped" } } }), config);
  const counts = [...new Set(rows.flatMap(Object.keys))].filter((k) => COUNTS.test(k)).sort().map((k) => [k.slice(8), rows.reduce((n, r) => n + (r[k] || 0), 0), rows.findLast((r) => r[k])?.step ?? "never"]);
  const dropped = run.ledger.rows.filter((e) => e.e === "dropped").flatMap((e) => e.g.map((g) => [g, e.why || "–"])).slice(-200).reverse();
  $("group-tables").replaceChildren(
    el("div", {}, el("h2", {}, "Counted in the whole run"), counts.length ? table(["what", "groups", "last in step"], counts) : el("p", { class: "dim" }, "nothing yet")),
    el("div", {}, el("h2", {}, "Dropped lately, by the ledger"), dropped.length ? table(["group", "reason"], dropped) : el("p", { class: "dim" }, "none since it was last compacted")),
  );
}
