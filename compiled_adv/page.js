// Takes the page's data; draws its charts, and again when a filter or the colour scheme changes.
"use strict";
const {charts, colours} = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
let chosen = null;
const scheme = () => chosen ?? (dark.matches ? "dark" : "light");
const css = name => getComputedStyle(root).getPropertyValue(name).trim();
const picked = () => Object.fromEntries([...document.querySelectorAll("select")].map(x => [x.dataset.filter, x.value]));
const fits = (tags, want) => Object.entries(tags).every(([key, x]) => !(key in want) || want[key] === x);
const colour = key => colours[key][scheme() === "dark" ? 1 : 0];

function trace(s, chart) {
  const it = {name: s.name, x: s.x, y: s.y, hovertext: s.hover, hoverinfo: "text"};
  if (s.kind === "bar") {
    const marks = s.bad ? s.bad.map(b => colour(b ? "bad" : s.colour)) : colour(s.colour);
    return {...it, type: "bar", orientation: chart.flat ? "h" : "v", marker: {color: marks},
      text: s.label ?? undefined, textposition: chart.stacked ? "inside" : "outside", cliponaxis: false,
      insidetextanchor: "middle", constraintext: chart.stacked ? "inside" : "none", textangle: 0};
  }
  const bad = s.bad ?? s.x.map(() => false);
  return {...it, type: "scatter", mode: "lines+markers",
    line: {color: colour(s.colour), width: s.colour === "compiled" ? 3 : 2, dash: s.dash ? "dash" : "solid"},
    marker: {opacity: 1, color: bad.map(b => colour(b ? "bad" : s.colour)), size: bad.map(b => b ? 13 : 7),
      symbol: bad.map(b => b ? "x" : "circle")}};
}

function axis(title, log, more) {
  return {title: {text: title, standoff: 12, font: {size: 13, color: css("--soft")}}, type: log ? "log" : undefined,
    gridcolor: css("--rule"), linecolor: css("--rule"), zeroline: false, automargin: true,
    minor: log ? {ticks: "", showgrid: false} : undefined, ...(log ? {dtick: undefined, exponentformat: "none"} : {}),
    ...more};
}

// 1, 10, 100; and 2 and 5 of each where the numbers span but a few decades.
function logTicks(all) {
  const least = Math.log10(Math.min(...all)), most = Math.log10(Math.max(...all));
  const steps = most - least < 2.5 ? [1, 2, 5] : [1], ticks = [];
  for (let e = Math.floor(least) - 1; e <= Math.ceil(most) + 1; e++)
    for (const step of steps) ticks.push(Number((step * 10 ** e).toPrecision(1)));
  return {tickmode: "array", tickvals: ticks, ticktext: ticks.map(x => x.toLocaleString("en", {maximumFractionDigits: 9}))};
}

// Room for the labels beyond the ends of bars, which plotly does not count.
function room(traces, flat, log, stacked) {
  const all = traces.flatMap(t => flat ? t.x : t.y);
  const least = Math.min(...all), most = Math.max(...all);
  if (log) return {range: [Math.log10(least / 2), Math.log10(most * (flat ? 3 : 1.6))]};
  return {range: [0, most * (stacked ? 1 : flat ? 1.25 : 1.12)], ...(stacked ? {autorange: true} : {})};
}

function layout(c, traces) {
  const ticks = c.ticks ? {tickmode: "array", tickvals: c.ticks[0], ticktext: c.ticks[1]} : {};
  const plain = log => log ? logTicks(traces.flatMap(t => c.flat ? t.x : t.y)) : {};
  const line = c.line_at === null ? [] : [{type: "line", layer: "below", line: {color: css("--soft"), width: 1, dash: "dot"},
    ...(c.flat ? {x0: c.line_at, x1: c.line_at, yref: "paper", y0: 0, y1: 1}
               : {y0: c.line_at, y1: c.line_at, xref: "paper", x0: 0, x1: 1})}];
  const bars = traces.some(t => t.type === "bar"), shown = traces.length > 1;
  return {height: c.height, margin: {l: 60, r: 24, t: shown ? 34 : 14, b: 52}, shapes: line,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--ink")},
    barmode: c.stacked ? "stack" : "group", bargap: .32, bargroupgap: .06, showlegend: shown,
    legend: {orientation: "h", x: 0, y: 1.0, yanchor: "bottom", traceorder: "normal"},
    hoverlabel: {bgcolor: css("--card"), bordercolor: css("--rule"), font: {color: css("--ink"), size: 13}, align: "left"},
    hovermode: "closest",
    xaxis: axis(c.x_title, c.x_log, c.ticks ? ticks : !bars || !c.flat ? {type: c.x_log ? "log" : "category"}
      : {...plain(c.x_log), ...room(traces, true, c.x_log, c.stacked)}),
    yaxis: axis(c.y_title, c.y_log, c.flat ? {autorange: "reversed", type: "category"}
      : {...plain(c.y_log), ...(bars ? room(traces, false, c.y_log, c.stacked) : {})})};
}

function draw() {
  root.dataset.scheme = scheme();
  const want = picked();
  charts.forEach((c, i) => {
    const section = document.getElementById("chart-" + i), plot = section.querySelector(".plot");
    const traces = c.series.filter(s => fits(s.tags, want)).map(s => trace(s, c));
    plot.hidden = !traces.length;
    section.querySelector(".nothing").hidden = traces.length > 0;
    if (traces.length) Plotly.react(plot, traces, layout(c, traces), {responsive: true, displayModeBar: false});
    for (const row of section.querySelectorAll("tbody tr")) row.hidden = !fits(JSON.parse(row.dataset.tags), want);
  });
}
document.getElementById("scheme").onclick = () => { chosen = scheme() === "dark" ? "light" : "dark"; draw(); };
dark.onchange = draw;
document.querySelectorAll("select").forEach(x => x.onchange = draw);
draw();
