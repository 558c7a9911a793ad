// Samples: a virtual list over the server's index, of which the page holds a few numbers a sample; texts are fetched for the rows in sight.
import { $, chosen, el, get, nice, notice, state } from "./page.js";
import { detail, nextColour } from "./detail.js";

const ROW = 28, PAGE = 50;
const list = $("list"), spacer = $("spacer");
let run = null, order = [], selected = -1; // `selected`: position in `order`
let hits = null; // samples that hold the searched text, as a Set, or null
const pool = []; // row elements, reused for whatever is in sight
let current = -1; // the sample that is shown, or about to be

const empty = () => ({ n: 0, columns: {}, heads: new Map(), asked: new Set(), whole: false });

/** Read on in the index; returns whether there was news. */
async function more(of) {
  of.index ??= empty();
  const got = await get(`/api/index/${of.i}?from=${of.index.n}`);
  if (got.first !== of.index.n) of.index = empty(); // it was made anew
  if (got.first !== of.index.n) return more(of);
  const added = got.columns.step.length;
  for (const [name, values] of Object.entries(got.columns)) of.index.columns[name] = (of.index.columns[name] || []).concat(values);
  const news = added > 0 || of.index.whole !== got.whole;
  Object.assign(of.index, { n: of.index.n + added, whole: got.whole });
  of.badSamples = got.bad;
  return news;
}

/** Numbers of the samples that the filters let through, sorted. */
function choose() {
  const c = run.index.columns, n = run.index.n;
  const number = (id) => ($(id).value === "" ? null : Number($(id).value));
  const step = number("f-step"), low = number("f-min"), high = number("f-max"), status = $("f-status").value, flag = $("f-flag").value;
  const held = selected >= 0 ? order[selected] : -1;
  order = [];
  for (let i = 0; i < n; i++) {
    if (step !== null && c.step[i] !== step) continue;
    if (low !== null && !(c.reward[i] >= low)) continue;
    if (high !== null && !(c.reward[i] <= high)) continue;
    if (status && c.status[i] !== status) continue;
    if (flag === "removed" && !c.removed[i]) continue;
    if (flag === "blocked" && !c.blocked[i]) continue;
    if (flag === "versions" && c.versions[i] < 2) continue;
    if (hits && !hits.has(i)) continue;
    order.push(i);
  }
  const [down, key] = $("f-sort").value.match(/(-?)(.*)/).slice(1);
  const by = c[key] || [];
  if (key !== "step") order.sort((a, b) => (by[a] - by[b]) * (down ? -1 : 1) || a - b);
  else if (down) order.reverse();
  selected = held < 0 ? -1 : order.indexOf(held);
  spacer.style.height = `${order.length * ROW}px`;
  const share = order.length === n ? `${n}` : `${order.length} of ${n}`;
  $("sample-count").textContent = `${share} samples${run.index.whole ? "" : ", reading…"}`;
  const kinds = [...new Set(c.status || [])].sort();
  if ($("f-status").options.length !== kinds.length + 1) $("f-status").replaceChildren(el("option", { value: "" }, "any"), ...kinds.map((k) => el("option", {}, k)));
}

let asking = false;
/** Texts of the rows in sight, asked for by pages, one request at a time. */
async function texts(first, last) {
  if (asking) return;
  const { heads } = run.index, missing = [];
  for (let at = Math.max(0, first); at < Math.min(order.length, last) && missing.length < 200; at++) if (!heads.has(order[at])) missing.push(order[at]);
  if (!missing.length) return;
  asking = true;
  try {
    const got = await get(`/api/heads/${run.i}?ids=${missing}`);
    missing.forEach((id, k) => heads.set(id, got[k]));
    if (heads.size > 20000) for (const id of [...heads.keys()].slice(0, 10000)) heads.delete(id);
  } finally {
    asking = false;
  }
  draw();
}

function fill(row, at) {
  const c = run.index.columns, i = order[at], head = run.index.heads.get(i), reward = c.reward[i];
  const set = (k, text, kind = "") => { // what is there already is kept here: asking the document would cost as much as changing it
    if (row.texts[k] !== text) row.children[k].firstChild.data = row.texts[k] = text;
    if (row.kinds[k] !== kind) row.children[k].className = row.kinds[k] = kind;
  };
  if (row.at !== at) {
    row.style.transform = `translateY(${at * ROW}px)`;
    row.at = at;
    row.id = `row-${at}`;
  }
  if (row.chosen !== (at === selected)) row.setAttribute("aria-selected", String((row.chosen = at === selected)));
  set(0, String(c.step[i]), "dim");
  set(1, String(c.uid[i]));
  set(2, String(c.group_index[i]), "dim");
  set(3, nice(reward, 3), reward > 0 ? "good" : reward < 0 ? "bad" : "");
  set(4, String(c.response_length[i]));
  set(5, c.blocked[i] ? "blocked" : c.removed[i] ? "not trained" : c.status[i], c.blocked[i] ? "bad" : c.status[i] === "completed" && !c.removed[i] ? "dim" : "warn");
  set(6, head ? head.response.replace(/\s+/g, " ") : "");
}

let due = false;
function draw() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    const top = list.scrollTop, first = Math.max(0, Math.floor(top / ROW) - 4), n = Math.ceil(list.clientHeight / ROW) + 8;
    while (pool.length < n) {
      const row = el("div", { class: "row", role: "option" }, ...Array.from({ length: 7 }, () => el("span", {}, " ")));
      pool.push(list.appendChild(Object.assign(row, { texts: [], kinds: [] })));
    }
    pool.forEach((row, k) => {
      const at = first + ((k - (first % pool.length) + pool.length) % pool.length); // a row keeps its element while it is in sight
      if (row.hidden !== at >= order.length) row.style.display = (row.hidden = at >= order.length) ? "none" : "";
      if (!row.hidden) fill(row, at);
    });
    clearTimeout(draw.later);
    draw.later = setTimeout(() => texts(first, first + Math.max(n, PAGE)), 40);
  });
}

function select(at) {
  if (!order.length) return;
  selected = Math.max(0, Math.min(order.length - 1, at));
  current = order[selected];
  const top = selected * ROW;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  list.setAttribute("aria-activedescendant", `row-${selected}`);
  draw();
  clearTimeout(select.later);
  select.later = setTimeout(() => open(order[selected]), 60);
}

async function open(i) {
  const of = run, c = run.index.columns;
  current = i;
  const sample = await get(`/api/sample/${of.i}/${i}`);
  if (current !== i || of !== run) return; // another one was chosen meanwhile
  const siblings = [];
  for (let k = i; k >= 0 && c.group_index[k] === c.group_index[i] && c.step[k] === c.step[i]; k--) siblings.unshift(k);
  for (let k = i + 1; k < run.index.n && c.group_index[k] === c.group_index[i] && c.step[k] === c.step[i]; k++) siblings.push(k);
  detail(sample, { step: c.step[i], i, siblings: siblings.map((k) => ({ k, uid: c.uid[k], reward: c.reward[k] })), go });
}

/** Select sample `i`, wherever it is in the list; one that the filters leave out is shown all the same. */
function go(i) {
  const at = order.indexOf(i);
  if (at >= 0) select(at);
  else open(i);
}

function sibling(by) {
  const c = run.index.columns, i = current + by;
  if (current >= 0 && i >= 0 && i < run.index.n && c.group_index[i] === c.group_index[current]) go(i);
}

export function key(e) {
  const page = Math.floor(list.clientHeight / ROW) - 1;
  const by = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[e.key];
  if (by !== undefined) select(selected < 0 && Math.abs(by) === 1 ? 0 : selected + by);
  else if (e.key === "ArrowRight") sibling(1);
  else if (e.key === "ArrowLeft") sibling(-1);
  else if (e.key === "m") nextColour();
  else return false;
  return true;
}

export async function show(polled) {
  const now = chosen("sample-run", () => { hits = null; selected = -1; order = []; list.scrollTop = 0; show(); });
  if (!now || (polled && !now.live && now.index?.whole)) return;
  run = now;
  if (run.index) { choose(); draw(); }
  while ((await more(run)) || !run.index.whole) {
    if (run !== now || state.tab !== "samples") return;
    choose();
    draw();
    if (run.index.whole) break;
  }
  choose();
  draw();
  notice();
  if (!run.index.n) $("sample-count").textContent = "no samples yet (log.samples = true writes them)";
}

list.addEventListener("scroll", draw, { passive: true });
list.addEventListener("click", (e) => { const row = e.target.closest(".row"); if (row) select(row.at); });
new ResizeObserver(() => run?.index && draw()).observe(list);
for (const id of ["f-step", "f-min", "f-max", "f-status", "f-flag", "f-sort"]) $(id).addEventListener("input", () => { choose(); list.scrollTop = 0; draw(); });
$("sample-search").addEventListener("change", async () => {
  const text = $("sample-search").value;
  hits = text ? new Set(await get(`/api/search/${run.i}?q=${encodeURIComponent(text)}`)) : null;
  choose();
  list.scrollTop = 0;
  draw();
});
