// Tabs, keys, themes, and looking at live runs again and again. Each view exports show(), called when it is opened and when there is news.
import * as curves from "./curves.js";
import * as engines from "./engines.js";
import * as groups from "./groups.js";
import * as samples from "./samples.js";
import * as timeline from "./timeline.js";
import { $, Lines, el, get, notice, state } from "./page.js";

const views = { curves, samples, timeline, groups, engines };
const COLORS = ["#3f7be8", "#e0742b", "#2a9d6f", "#a24bc4", "#c9a227", "#d6456b", "#4aa3c7", "#7a6a58"]; // told apart on light and dark
const POLL = 2000; // ms between looks at a run that is at work
function open(tab) {
  state.tab = tab;
  location.hash = tab;
  for (const button of document.querySelectorAll("[role=tab]")) button.setAttribute("aria-selected", String(button.dataset.tab === tab));
  for (const name of Object.keys(views)) $(name).hidden = name !== tab;
  views[tab].show();
}

function chips() {
  $("runs").replaceChildren(
    ...state.runs.map((run) =>
      el("button", {
        class: "chip", style: `--c: ${run.color}`, "aria-pressed": String(run.on), title: run.path,
        click: () => { run.on = !run.on; chips(); views[state.tab].show(); },
      }, el("i"), run.name, run.live ? el("span", { class: "live" }, "● live") : null),
    ),
  );
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("theme", name);
}

async function poll() {
  try {
    const fresh = await get("/api/runs");
    const before = state.runs.map((r) => r.live).join();
    fresh.forEach((r, i) => Object.assign(state.runs[i], { live: r.live, trace: r.trace }));
    const news = await Promise.all(state.runs.map((run) => (run.live || run.wasLive ? run.metrics.more() : false)));
    state.runs.forEach((run) => { run.wasLive = run.live; });
    if (before !== state.runs.map((r) => r.live).join()) chips();
    if (news.some(Boolean) || state.runs.some((r) => r.live && state.tab === "engines")) views[state.tab].show(true);
    notice();
  } catch (e) {
    $("notice").textContent = `the server does not answer (${e.message})`;
  }
  setTimeout(poll, POLL);
}

document.addEventListener("keydown", (e) => {
  const typing = e.target.matches("input, select, textarea") && e.target.type !== "checkbox";
  if (e.key === "Escape" && typing) return e.target.blur();
  if (typing || e.ctrlKey || e.metaKey || e.altKey || $("help").open) return;
  const tab = Object.keys(views)[Number(e.key) - 1];
  if (tab) open(tab);
  else if (e.key === "?") $("help").showModal();
  else if (e.key === "t") $("theme").click();
  else if (e.key === "/") $(state.tab === "samples" ? "sample-search" : "metric-search").focus();
  else if (!views[state.tab].key?.(e)) return;
  e.preventDefault();
});

async function start() {
  theme(localStorage.getItem("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => {
    theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    views[state.tab].show(false, true);
  });
  $("help-open").addEventListener("click", () => $("help").showModal());
  for (const button of document.querySelectorAll("[role=tab]")) button.addEventListener("click", () => open(button.dataset.tab));
  state.runs = (await get("/api/runs")).map((run, i) => ({ ...run, i, on: i < 8, color: COLORS[i % COLORS.length], metrics: new Lines(`/api/file/${i}/metrics.jsonl`) }));
  chips();
  const tab = location.hash.slice(1);
  await Promise.all(state.runs.map((run) => run.metrics.more()));
  open(views[tab] ? tab : "curves");
  notice();
  setTimeout(poll, POLL);
}

start();
