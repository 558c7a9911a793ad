// One sample in whole: its facts, its group, its text token by token, what its agent did, what guards said.
import { $, el, nice } from "./page.js";

const MODES = { difference: "trainer − rollout logprob", logprob: "rollout logprob", mask: "loss mask", version: "weight version" };
let mode = localStorage.getItem("colour") || "difference";
let redo = () => {};

export function nextColour() {
  const names = Object.keys(MODES);
  mode = names[(names.indexOf(mode) + 1) % names.length];
  localStorage.setItem("colour", mode);
  redo();
}

/** Everything per token: {id, text, mask, lp, train, diff, version}. The trainer's logprobs are those of trained tokens only. */
function tokens(s) {
  const versions = (s.version_runs || []).flatMap(([v, n]) => Array(n).fill(v));
  let trained = 0;
  return s.tokens.map((id, i) => {
    const mask = s.loss_mask[i], lp = s.log_probs[i];
    const train = mask && s.train_log_probs ? s.train_log_probs[trained] ?? null : null;
    if (mask) trained++;
    return { i, id, text: s.pieces ? s.pieces[i] : `${id} `, mask, lp, train, diff: train === null ? null : train - lp, version: versions[i] };
  });
}

function quantile(values, q) {
  const sorted = values.filter((v) => v !== null && Number.isFinite(v)).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))] : 0;
}

/** CSS background of a token; `most`: the value that is coloured in full. */
function colour(t, most) {
  const shade = (which, x) => `rgba(var(--heat-${which}), ${Math.min(1, x).toFixed(3)})`;
  if (mode === "difference") return t.diff === null || !most ? "" : shade(t.diff < 0 ? "a" : "b", (0.75 * Math.abs(t.diff)) / most);
  if (mode === "logprob") return t.mask && most ? shade("b", (0.75 * -t.lp) / most) : "";
  if (mode === "mask") return t.mask ? shade("a", 0.22) : "";
  return t.version === undefined || t.version < 0 ? "" : `hsl(${(t.version * 67) % 360} 60% 55% / .35)`;
}

function segments(all) {
  const parts = [];
  for (const t of all) {
    if (!parts.length || parts.at(-1).mask !== t.mask || (parts.at(-1).tokens.length >= 2000)) parts.push({ mask: t.mask, tokens: [] });
    parts.at(-1).tokens.push(t);
  }
  return parts;
}

/** What guards decided, wherever it lies in metadata: dicts {decision, rule?, reason?}, and calls of an agent that were blocked or warned of. */
function verdicts(value, at = "") {
  if (!value || typeof value !== "object") return [];
  if (typeof value.decision === "string") return value.decision === "allow" ? [] : [{ at, ...value }];
  const { rule, violation, warned } = (value.tool && value.metadata) || {};
  if (value.tool && value.status === "blocked") return [{ at, decision: "block", rule, reason: violation ? "done, and then seen" : "not run", call: value }];
  if (warned) return [{ at, decision: "warn", rule: warned, reason: "", call: value }];
  return Object.entries(value).flatMap(([k, v]) => verdicts(v, at ? `${at}.${k}` : k));
}

const badge = (kind, text) => el("span", { class: `badge ${kind}` }, text);
const fold = (title, value, open) => el("details", open ? { open: "" } : {}, el("summary", {}, title), el("pre", {}, typeof value === "string" ? value : JSON.stringify(value, null, 2)));

function steps(list) {
  return list.map((step, k) => {
    const calls = (step.calls || [step]).filter((c) => c.tool || c.status); // a turn of the model and its calls, or a call by itself
    const said = [step.tokens && `${step.tokens} tokens`, step.seconds !== undefined && `${nice(step.seconds, 3)} s`, step.ill_formed && "ill-formed"].filter(Boolean).join(", ");
    const title = el("span", {}, `${k + 1}. ${said} `, ...calls.flatMap((c) => [`${c.tool || ""} `, badge(/block|error|timeout|cancel/.test(c.status) ? "bad" : "dim", c.status || "–"), " "]));
    return fold(title, step.calls || step, list.length <= 3);
  });
}

function text(prompt) {
  return typeof prompt === "string" ? prompt : prompt.map((m) => `${m.role}: ${typeof m.content === "string" ? m.content : JSON.stringify(m.content)}`).join("\n\n");
}

export function detail(s, { step, i, siblings, go }) {
  const agent = s.metadata?.agent?.steps ? s.metadata.agent : { steps: s.metadata?.steps };
  const all = tokens(s), found = verdicts(s.metadata), own = Object.entries(s.metadata || {}).filter(([k]) => k !== "steps" && k !== "agent");
  const gaps = all.map((t) => (t.diff === null ? null : Math.abs(t.diff))), known = gaps.filter((g) => g !== null);
  const facts = {
    step, uid: s.uid ?? s.index, group: s.group_index, reward: typeof s.reward === "object" ? JSON.stringify(s.reward) : nice(s.reward), label: JSON.stringify(s.label),
    status: s.status, "prompt tokens": s.prompt_length, "response tokens": s.response_length, "of them trained": s.removed ? 0 : s.loss_mask.filter(Boolean).length,
    weights: s.weight_versions.join(", ") || "–", "mean |Δ logprob|": known.length ? nice(known.reduce((a, b) => a + b, 0) / known.length, 3) : "not recorded",
  };
  const body = el("div"), legend = el("div", { class: "legend" }), readout = el("div", { id: "readout" }, "Point at a token.");
  redo = () => {
    const most = mode === "difference" ? Math.max(quantile(gaps, 0.99), 1e-9) : Math.max(1, quantile(all.filter((t) => t.mask).map((t) => -t.lp), 0.99));
    const pick = el("select", { "aria-label": "Colour tokens by", change: () => { mode = pick.value; localStorage.setItem("colour", mode); redo(); } });
    for (const [k, name] of Object.entries(MODES)) pick.append(el("option", { value: k }, name));
    pick.value = mode;
    const scale = { difference: ["trainer lower", "linear-gradient(90deg, rgba(var(--heat-a),.75), transparent, rgba(var(--heat-b),.75))", most > 1e-9 ? `higher, full at ${nice(most, 2)}` : "higher; equal to five digits"], logprob: ["likely", "linear-gradient(90deg, transparent, rgba(var(--heat-b),.75))", `unlikely, full at −${nice(most, 2)}`] }[mode];
    legend.replaceChildren("colour", pick, ...(scale ? [scale[0], el("i", { style: `background: ${scale[1]}` }), scale[2]] : []));
    if (mode === "difference" && !known.length) legend.append("— the trainer's logprobs were not recorded (no gradient, or an older run)");
    let turn = 0;
    body.replaceChildren(...segments(all).map((part) => {
      const spans = part.tokens.map((t) => { const node = el("span", { style: `background: ${colour(t, most)}` }, t.text); node.token = t; return node; });
      const title = part.mask ? `model, turn ${++turn}, ${part.tokens.length} tokens` : `not the model's, or masked: ${part.tokens.length} tokens`;
      return el("div", { class: `segment ${part.mask ? "model" : "tool"}` }, el("header", {}, title), el("div", { class: "tokens" }, ...spans));
    }));
  };
  redo();
  body.addEventListener("mouseover", (e) => {
    const t = e.target.token;
    if (!t) return;
    const train = t.train === null ? "" : `   trainer ${t.train.toFixed(4)}   Δ ${t.diff >= 0 ? "+" : ""}${t.diff.toExponential(1)}`;
    readout.textContent = `#${t.i} id ${t.id} ${JSON.stringify(t.text)}   ${t.mask ? `rollout ${t.lp.toFixed(4)}${train}   p ${Math.exp(t.lp).toPrecision(2)}` : "masked"}   weights ${t.version ?? "?"}`;
  });
  const box = $("detail");
  box.replaceChildren(
    el("h2", {}, `Sample ${s.uid ?? s.index}`, el("small", {}, `step ${step}, group ${s.group_index}`), ...found.map((v) => badge(v.decision === "block" ? "bad" : "warn", v.decision)), s.removed ? badge("warn", "not trained") : null),
    el("div", { class: "facts" }, ...Object.entries(facts).map(([k, v]) => el("div", {}, el("small", {}, k), el("b", {}, String(v))))),
    el("h2", {}, "Same prompt", el("small", {}, "by reward ← →")),
    el("div", { class: "group" }, ...siblings.map((b) => el("button", { "aria-current": String(b.k === i), title: `uid ${b.uid}`, click: () => go(b.k) }, nice(b.reward, 3)))),
    ...(found.length ? [el("h2", {}, "Guard"), ...found.map((v) => fold(el("span", {}, badge(v.decision === "block" ? "bad" : "warn", v.decision), ` ${v.rule || ""} ${v.reason || ""} `, el("span", { class: "dim" }, v.at)), v))] : []),
    el("h2", {}, "Prompt"), el("pre", {}, text(s.prompt)),
    el("h2", {}, "Response", el("small", {}, "token by token")), legend, readout, body,
    ...(Array.isArray(agent.steps) ? [el("h2", {}, `Steps (${agent.steps.length})`, el("small", {}, [agent.status, agent.error].filter(Boolean).join(": "))), ...steps(agent.steps)] : []),
    ...(agent.answer ? [fold("answer", agent.answer, true)] : []), ...(Object.keys(agent.notes || {}).length ? [fold("notes of the grading", agent.notes)] : []),
    ...(own.length ? [el("h2", {}, "Metadata"), ...own.map(([k, v]) => fold(k, v, JSON.stringify(v).length < 200))] : []),
  );
  box.scrollTop = 0;
}
