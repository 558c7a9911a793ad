// What the views share: state, elements, fetching, Plotly in the page's colours.
export const $ = (id) => document.getElementById(id);
export const state = { runs: [], tab: "curves" };

/** An element: el("td", { class: "text" }, "words", child). A function as property is a listener. */
export function el(tag, given = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(given)) {
    if (typeof value === "function") node.addEventListener(key, value);
    else if (value !== undefined && value !== null) node.setAttribute(key, value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

export async function get(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

/** A file of JSON lines, read on from where it was; lines that are no JSON are counted in `bad`. A file that was replaced is read anew.
 * A negative `at`: only so many bytes of its end. */
export class Lines {
  constructor(path, at = 0) {
    Object.assign(this, { path, at, rows: [], bad: 0 });
  }
  /** Returns whether there were new rows. A file that isn't there has none. */
  async more() {
    const had = this.rows.length;
    for (;;) {
      const response = await fetch(`${this.path}?from=${this.at}`);
      if (!response.ok) return false;
      const start = Number(response.headers.get("X-From"));
      if (start !== this.at) Object.assign(this, { rows: [], bad: 0 });
      const bytes = await response.arrayBuffer();
      for (const line of new TextDecoder().decode(bytes).split("\n")) {
        if (!line) continue;
        try {
          const row = JSON.parse(line);
          if (typeof row === "object" && row) this.rows.push(row);
          else this.bad++;
        } catch {
          this.bad++;
        }
      }
      this.at = start + bytes.byteLength;
      if (!bytes.byteLength || this.at >= Number(response.headers.get("X-Size"))) return this.rows.length !== had;
    }
  }
}

/** A number for people. */
export function nice(x, digits = 4) {
  if (x === null || x === undefined) return "–";
  if (typeof x !== "number") return String(x);
  if (Number.isInteger(x) && Math.abs(x) < 1e7) return String(x);
  return Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3 ? x.toExponential(2) : String(Number(x.toPrecision(digits)));
}

export function table(names, rows) {
  const head = el("tr", {}, ...names.map((n) => el("th", { scope: "col" }, n)));
  const body = rows.map((row) => el("tr", {}, ...row.map((c) => (c instanceof Node ? el("td", { class: "text" }, c) : el("td", { class: typeof c === "string" ? "text" : "" }, typeof c === "string" ? c : nice(c))))));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
}

/** Plotly's layout in the page's colours. */
export function layout(more = {}) {
  const css = getComputedStyle(document.documentElement);
  const color = (name) => css.getPropertyValue(name).trim();
  const axis = { gridcolor: color("--line"), zerolinecolor: color("--line"), linecolor: color("--line"), automargin: true };
  return {
    margin: { l: 48, r: 10, t: 8, b: 32 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
    font: { color: color("--dim"), size: 11, family: "system-ui, 'DejaVu Sans', sans-serif" }, hovermode: "x unified",
    hoverlabel: { bgcolor: color("--panel"), bordercolor: color("--line"), font: { color: color("--text") } },
    ...more, xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
  };
}
export const config = { displaylogo: false, responsive: true, displayModeBar: false };

let plotly = null;
/** Plotly, 5 MB, once something is drawn. */
export function plot() {
  plotly ??= new Promise((done, failed) => {
    document.head.append(el("script", { src: "/plotly.min.js", load: () => done(window.Plotly), error: failed }));
  });
  return plotly;
}

/** A view's <select> of runs, filled once; returns the chosen run. */
export function chosen(id, changed) {
  const select = $(id);
  if (!select.options.length) {
    state.runs.forEach((r, i) => select.append(el("option", { value: i }, r.name)));
    select.addEventListener("change", changed);
  }
  return state.runs[select.value || 0];
}

/** Say how many lines were left out. */
export function notice() {
  const bad = state.runs.reduce((n, r) => n + r.metrics.bad + (r.badSamples || 0), 0);
  $("notice").textContent = bad ? `${bad} damaged line${bad > 1 ? "s" : ""} left out` : "";
}
