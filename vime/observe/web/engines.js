// Engines: the servers of a run at work, as it says itself, and what metrics say of them.
import { $, chosen, el, get, nice, state, table } from "./page.js";
import { card, draw } from "./curves.js";

const CHARTS = ["rollout/engine_busy", "rollout/engine_running", "rollout/engine_waiting", "rollout/engine_queue_s", "rollout/engine_prefix_hits", "rollout/engine_balance", "perf/rollout_tokens_per_s", "weights/sync_s"];

export async function show() {
  const run = chosen("engine-run", () => show());
  if (!run) return;
  const rows = run.metrics.rows, last = rows.at(-1) || {};
  const names = CHARTS.filter((n) => rows.some((r) => n in r)), box = $("engine-charts");
  if (box.dataset.shown !== names.join()) {
    box.dataset.shown = names.join();
    box.replaceChildren(...names.map((n) => card(n)));
  }
  [...box.children].forEach((node) => draw(node, [run]));
  const health = Object.entries(last).filter(([k]) => /^(health|weights|data)\//.test(k));
  $("engine-health").replaceChildren(...(health.length ? [el("div", {}, el("h2", {}, `Health, weights and data plane at step ${last.step}`), table(["what", "value"], health.map(([k, v]) => [k, nice(v)])))] : []));
  const got = await get(`/api/engines/${run.i}`);
  if (state.tab !== "engines") return;
  $("engine-note").textContent = got.error ? "no run answers here: it is over, or is starting" : "";
  $("engine-table").replaceChildren(...(got.error ? [] : [table(["engine", "state", "requests", "weights", "url"], got.engines.map((e) => [e.engine, e.state, e.requests ?? null, e.version ?? null, e.url + (e.external ? " (started elsewhere)" : "")]))]));
}
