// Interactive figures. plotly.js lies compressed in the page and is unpacked when the first figure comes near.

const frames = [...document.querySelectorAll("figure.chart")];
const settings = {
  displaylogo: false,
  responsive: true,
  scrollZoom: false,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]], // none that asks a server
  toImageButtonOptions: { format: "svg", filename: "figure" },
};
let plotly = null;

/** plotly.js, unpacked and started once. */
function loaded() {
  plotly = plotly || unpacked("library").then((text) => {
    document.head.append(element("script", { textContent: text }));
    return window.Plotly;
  });
  return plotly;
}

/** The points of a trace whose runs are shown; with none of them, its name in the legend remains. */
function picked(trace, shown) {
  if (!trace.customdata) return trace;
  if (!trace.customdata.some((anchor) => shown.has(anchor))) return { ...trace, x: [null], y: [null], customdata: null };
  const places = trace.customdata.map((_, place) => place).filter((place) => shown.has(trace.customdata[place]));
  const some = (values) => places.map((place) => values[place]);
  return { ...trace, x: some(trace.x), y: some(trace.y), text: some(trace.text), customdata: some(trace.customdata) };
}

/** The layout with room for the legend below the axis, in as many columns as the width has room for. */
function fitted(layout, traces, width) {
  const [plotHeight, axisHeight, lineHeight] = [320, 62, 29];
  const names = traces.filter((trace) => trace.showlegend !== false).map((trace) => trace.name);
  const nameWidth = Math.min(Math.max(...names.map((name) => name.length)) * 6.8, width - 130);
  const columns = Math.max(1, Math.floor((width - 80) / (nameWidth + 50)));
  const legendHeight = lineHeight * Math.ceil(names.length / columns) + 16;
  const margin = { ...layout.margin, b: axisHeight + legendHeight };
  const legend = { ...layout.legend, y: -axisHeight / plotHeight, entrywidth: nameWidth, entrywidthmode: "pixels" };
  return { ...layout, height: margin.t + plotHeight + margin.b, margin, legend };
}

async function draw(frame, charts) {
  const plot = frame.querySelector(".plot");
  const chart = charts[frame.querySelector("select").value || 0];
  const library = await loaded();
  frame.querySelector(".wait")?.remove();
  const shown = new Set(shownRuns());
  const { data, layout } = chart.spec;
  const traces = chart.group === "explorer" ? data.map((trace) => picked(trace, shown)) : data;
  plot.setAttribute("aria-label", chart.alt);
  await library.react(plot, structuredClone(traces), fitted(structuredClone(layout), data, plot.clientWidth), settings);
  if (plot.dataset.ready) return;
  plot.dataset.ready = "yes";
  plot.on("plotly_click", ({ points }) => {
    const anchor = points[0].customdata;
    if (anchor) show(anchor);
  });
}

async function start() {
  const all = JSON.parse(await unpacked("charts"));
  for (const frame of frames) {
    const charts = all.filter((chart) => chart.group === frame.dataset.group);
    const select = frame.querySelector("select");
    charts.forEach((chart, place) => select.append(new Option(chart.title, place)));
    frame.querySelector(".chart-head").hidden = false;
    const failed = (error) => {
      frame.querySelector(".plot").textContent = `This figure cannot be drawn by this browser (${error.message}); the static ones below show the same.`;
    };
    const redraw = () => draw(frame, charts).catch(failed);
    const watcher = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watcher.disconnect();
      select.addEventListener("input", redraw);
      if (frame.dataset.group === "explorer") document.addEventListener("runs-shown", redraw);
      redraw();
    }, { rootMargin: "300px" });
    watcher.observe(frame);
  }
}

if (frames.length) start();
