"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const drawn = new Set();

  function themed(chart) {
    const ink = color("--muted");
    const layout = {
      showlegend: false,
      hovermode: "closest",
      margin: { l: 12, r: 14, t: 12, b: 10 },
      legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom" },
      ...structuredClone(chart.layout),
    };
    Object.assign(layout, {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: color("--font"), size: 12, color: ink },
      hoverlabel: { bgcolor: color("--ink"), bordercolor: color("--ink"), align: "left",
                    font: { family: color("--font"), size: 12, color: color("--surface") } },
      dragmode: false,
    });
    for (const key of Object.keys(layout)) {
      if (/^[xy]axis/.test(key)) {
        Object.assign(layout[key], { gridcolor: color("--line"), linecolor: color("--line"), fixedrange: true,
                                     automargin: true, zeroline: false });
      }
    }
    const data = chart.data.map((trace) => {
      if (trace.type !== "heatmap") return trace;
      const { names, counts } = chart;
      const customdata = counts.map((row, t) => row.map((n, p) => [names[t], names[p], n]));
      const hovertemplate = "true %{customdata[0]}<br>predicted %{customdata[1]}<br>" +
        "%{customdata[2]} images, %{z:.1%} of the true class<extra></extra>";
      const colorscale = [[0, color("--heat-low")], [1, color("--heat-high")]];
      return { ...trace, customdata, hovertemplate, colorscale, zmin: 0, zmax: 1, showscale: false, xgap: 1, ygap: 1 };
    });
    return { data, layout };
  }

  function draw(element) {
    const { data, layout } = themed(charts[element.dataset.chart]);
    Plotly.react(element, data, layout, { displayModeBar: false, responsive: true });
    drawn.add(element);
  }

  // A chart in a hidden panel has no width yet: it is drawn when its panel is first shown.
  function drawVisible() {
    for (const element of document.querySelectorAll("[data-chart]")) {
      if (!drawn.has(element) && element.offsetParent !== null) draw(element);
    }
  }

  const tabs = [...document.querySelectorAll("[role=tab]")];
  function select(tab) {
    for (const other of tabs) {
      const isSelected = other === tab;
      other.setAttribute("aria-selected", String(isSelected));
      other.tabIndex = isSelected ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !isSelected;
    }
    drawVisible();
  }
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!way) return;
      const next = tabs[(i + way + tabs.length) % tabs.length];
      select(next);
      next.focus();
    });
  });

  const named = tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash);
  if (tabs.length) select(named || tabs[tabs.length - 1]);
  drawVisible();

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(draw));
  addEventListener("beforeprint", () => {
    document.querySelectorAll("[role=tabpanel]").forEach((panel) => { panel.hidden = false; });
    document.querySelectorAll("details").forEach((details) => { details.open = true; });
    drawVisible();
  });
})();
