// Takes the figures that stand in the page, with colours by name; draws them, and again when a filter or the colours change.
"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
const theme = () => root.dataset.theme ?? (dark.matches ? "dark" : "light");
const picked = () => Object.fromEntries([...document.querySelectorAll("select")].map(x => [x.dataset.filter, x.value]));
const fits = (tags, want) => Object.entries(tags).every(([key, x]) => !Object.hasOwn(want, key) || want[key] === x);

function coloured(value, colours) {
  if (typeof value === "string") return Object.hasOwn(colours, value) ? colours[value] : value;
  if (Array.isArray(value)) return value.map(each => coloured(each, colours));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, coloured(each, colours)]));
}

// 1, 10, 100; and 2 and 5 of each where the numbers span but a few decades.
function logTicks(numbers) {
  const least = Math.log10(Math.min(...numbers)), most = Math.log10(Math.max(...numbers));
  const steps = most - least < 2.5 ? [1, 2, 5] : [1], ticks = [];
  for (let e = Math.floor(least) - 1; e <= Math.ceil(most) + 1; e++)
    for (const step of steps) ticks.push(Number((step * 10 ** e).toPrecision(1)));
  const ticktext = ticks.map(x => x.toLocaleString("en", {maximumFractionDigits: 9}));
  return {tickmode: "array", tickvals: ticks, ticktext};
}

// Room for the labels beyond the ends of bars, which plotly does not count.
function room(numbers, log, lying) {
  const least = Math.min(...numbers), most = Math.max(...numbers);
  return {range: log ? [Math.log10(least / 2), Math.log10(most * (lying ? 3 : 1.6))] : [0, most * (lying ? 1.25 : 1.12)]};
}

function axis(name, traces, own, c) {
  const numbers = traces.flatMap(t => t[name]).filter(Number.isFinite), log = own.type === "log";
  const labelled = traces.some(t => t.textposition === "outside" && (t.orientation === "h") === (name === "x"));
  return {gridcolor: c["@line"], linecolor: c["@line"], zerolinecolor: c["@line"], automargin: true,
    ...(log ? {minor: {ticks: "", showgrid: false}, ...logTicks(numbers)} : {}),
    ...(labelled ? room(numbers, log, name === "x") : {}), ...own,
    title: {standoff: 10, font: {size: 13, color: c["@soft"]}, ...own.title}};
}

function draw(place, c, want) {
  const figure = JSON.parse(place.parentElement.querySelector("script").textContent);
  const traces = figure.data.filter(t => fits(t.meta ?? {}, want)).map(t => coloured(t, c));
  place.hidden = !traces.length;
  place.parentElement.querySelector(".nothing").hidden = traces.length > 0;
  if (!traces.length) return;
  const own = coloured(figure.layout, c);
  Plotly.react(place, traces, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: {l: 60, r: 24, t: 14, b: 48},
    font: {family: getComputedStyle(document.body).fontFamily, size: 13, color: c["@ink"]}, hovermode: "closest",
    hoverlabel: {bgcolor: c["@surface"], bordercolor: c["@line"], font: {color: c["@ink"], size: 13}, align: "left"},
    legend: {orientation: "h", x: 0, y: 1.01, yanchor: "bottom", traceorder: "normal"}, ...own,
    xaxis: axis("x", traces, own.xaxis ?? {}, c), yaxis: axis("y", traces, own.yaxis ?? {}, c),
  }, {responsive: true, displaylogo: false, displayModeBar: false});
}

function redraw() {
  const c = themes[theme()], want = picked();
  for (const place of document.querySelectorAll(".chart"))
    if (place.parentElement.offsetParent) draw(place, c, want);  // one that is folded is drawn when it opens
  for (const row of document.querySelectorAll("tr[data-tags]")) row.hidden = !fits(JSON.parse(row.dataset.tags), want);
}
document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = theme() === "dark" ? "light" : "dark";
  redraw();
});
dark.addEventListener("change", redraw);
document.addEventListener("toggle", redraw, true);
for (const each of document.querySelectorAll("select")) each.addEventListener("change", redraw);
redraw();
