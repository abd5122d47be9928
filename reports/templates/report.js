"use strict";
(function () {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const GIB = 1073741824, MIB = 1048576;
  // Okabe and Ito's palette: told apart with colour blindness; patterns ("decal") tell them apart without colour.
  const COLOURS = {
    weights: "#0072B2", adapters: "#56B4E9", gradients: "#E69F00", optimizer: "#F0E442", activations: "#009E73",
    loss: "#D55E00", dequantization: "#CC79A7", workspace: "#8c6d31", other: "#7f7f7f", gap: "#b3b3b3",
    context: "#999999", residue: "#4d4d4d",
  };
  const METHODS = { full: ["rect", "#D55E00", "#ff9a52"], lora: ["circle", "#0072B2", "#56B4E9"], qlora: ["triangle", "#009E73", "#3ddbab"] };
  const METHOD_WORDS = { full: "full fine-tuning", lora: "LoRA", qlora: "QLoRA" };
  const FIT_WORDS = { fits: "", tight: ", tight: may not fit", over: ", does not fit" };

  // The same text as planner.core.units writes.
  const gib = (bytes) => Math.abs(bytes) < 0.1 * GIB ? (bytes / MIB).toFixed(1) + " MiB" : (bytes / GIB).toFixed(2) + " GiB";
  const whole = (number) => Math.round(number).toLocaleString("en-US");
  const rate = (speed) => speed ? (speed >= 10 ? whole(speed) : speed.toPrecision(2)) + " tokens/s" : "unknown";
  const percent = (fraction) => (fraction >= 0 ? "+" : "") + (100 * fraction).toFixed(1) + " %";
  const seconds = (s) => s < 1 ? (1000 * s).toFixed(s < 0.01 ? 2 : 0) + " ms" : s.toFixed(1) + " s";
  const safe = (text) => String(text).replace(/[&<>"']/g, (c) => "&#" + c.charCodeAt(0) + ";");
  const lines = (...parts) => parts.filter(Boolean).map(safe).join("<br>");

  function theme() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue("--" + name).trim();
    return { dark: style.colorScheme === "dark", ink: colour("ink"), soft: colour("soft"), line: colour("line"), page: colour("page"), panel: colour("panel"),
             accent: colour("accent"), bad: colour("bad"), good: colour("good"), font: style.fontFamily };
  }

  function base(t) {
    return {
      animation: false, backgroundColor: "transparent",
      textStyle: { color: t.ink, fontFamily: getComputedStyle(document.body).fontFamily },
      aria: { enabled: true }, grid: { left: 8, right: 28, top: 36, bottom: 40, containLabel: true },
      tooltip: { confine: true, backgroundColor: t.panel, borderColor: t.line, textStyle: { color: t.ink } },
    };
  }
  function axis(t, more) {
    return Object.assign({
      axisLabel: { color: t.soft }, axisLine: { lineStyle: { color: t.line } }, splitLine: { lineStyle: { color: t.line } },
      nameTextStyle: { color: t.soft }, nameLocation: "middle", nameGap: 28,
    }, more);
  }
  const gibAxis = (t, more) => axis(t, Object.assign({ type: "value", axisLabel: { color: t.soft, formatter: (v) => +(v / GIB).toPrecision(3) } }, more));
  // Ticks at round numbers of GiB.
  function gibScale(largest, width) {
    const step = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((s) => largest / GIB / s <= Math.min(8, Math.max(3, width / 80))) || 10000;
    return { min: 0, interval: step * GIB, max: Math.ceil(largest / GIB / step) * step * GIB };
  }
  function limit(t, bytes, words, colour, along, type, label) {
    return { [along]: bytes, name: words, lineStyle: { color: colour, type: type, width: 2 },
             label: Object.assign({ formatter: words, color: t.ink, backgroundColor: t.page, padding: [1, 3] }, label) };
  }
  // Budget and card as upright lines, their words on either side above the picture ("top": the end that is up).
  const limits = (t, chart, top) => ({
    silent: true, symbol: "none",
    data: [limit(t, chart.budget_bytes, "budget " + gib(chart.budget_bytes), t.soft, "xAxis", "dashed", { position: top, align: "right", offset: [4, 0] }),
           limit(t, chart.memory_bytes, "card " + gib(chart.memory_bytes), t.bad, "xAxis", "solid", { position: top, align: "left", offset: [-4, 0] })],
  });

  const KINDS = {
    "memory-bars"(chart, t) {
      const own = Array.isArray(chart.memory_bytes);
      const largest = Math.max(...chart.device_bytes, ...chart.measured_bytes.map((b) => b || 0), ...[].concat(chart.memory_bytes));
      const option = base(t);
      option.aria.decal = { show: true };
      const names = [...chart.series.map((one) => one.name), "measured device peak"];
      const legendRows = Math.ceil(names.reduce((sum, name) => sum + 45 + 6.5 * name.length, 0) / t.width);
      option.grid = { left: 8, right: own ? 28 : Math.min(90, 0.12 * t.width), top: 46 + 22 * legendRows, bottom: 44, containLabel: true };
      option.legend = { top: 0, textStyle: { color: t.ink }, itemWidth: 22 };
      option.tooltip.trigger = "axis";
      option.tooltip.axisPointer = { type: "shadow" };
      option.tooltip.formatter = (rows) => {
        const index = rows[0].dataIndex;
        const parts = chart.series.filter((s) => s.bytes[index]).map((s) => s.name + ": " + gib(s.bytes[index]));
        const measured = chart.measured_bytes[index];
        const card = own ? "card: " + gib(chart.memory_bytes[index]) : "";
        return lines(chart.labels[index], ...parts, "device peak: " + gib(chart.device_bytes[index]),
                     measured ? "measured: " + gib(measured) : "", card);
      };
      option.xAxis = gibAxis(t, Object.assign({ name: "GiB" }, gibScale(largest * 1.02, t.width)));
      option.yAxis = axis(t, { type: "category", data: chart.labels, inverse: true,
                               axisLabel: { color: t.ink, width: Math.min(300, 0.34 * t.width), overflow: "truncate" } });
      option.series = chart.series.map((series) => ({
        type: "bar", stack: "memory", name: series.name, data: series.bytes, barMaxWidth: 26,
        itemStyle: { color: COLOURS[series.category] || "#7f7f7f" },
      }));
      if (chart.measured_bytes.some((bytes) => bytes !== null)) {
        option.series.push({ type: "scatter", name: "measured device peak", symbol: "diamond", symbolSize: 14, z: 5,
          itemStyle: { color: t.ink, borderColor: t.page, borderWidth: 1 },
          data: chart.measured_bytes.map((bytes, index) => bytes === null ? null : [bytes, index]).filter(Boolean) });
      }
      if (own) {
        option.series.push({ type: "scatter", name: "card", symbol: "rect", symbolSize: [3, 28], z: 4, itemStyle: { color: t.bad },
          data: chart.memory_bytes.map((bytes, index) => [bytes, index]) });
      } else {
        option.series[0].markLine = limits(t, chart, "start");
      }
      return option;
    },

    "speed-memory"(chart, t) {
      const option = base(t);
      const largest = Math.max(chart.memory_bytes, ...chart.points.map((p) => p.peak_device_bytes));
      option.grid = { left: 30, right: 90, top: 64, bottom: 44, containLabel: true };
      option.legend = { top: 0, textStyle: { color: t.ink } };
      option.tooltip.trigger = "item";
      option.tooltip.formatter = (item) => {
        const point = item.data && item.data.point;
        return point ? lines(point.difference, METHOD_WORDS[point.method] || point.method, rate(point.tokens_per_s),
                             gib(point.peak_device_bytes) + FIT_WORDS[point.verdict]) : "";
      };
      option.xAxis = gibAxis(t, Object.assign({ name: "device peak, GiB" }, gibScale(largest, t.width)));
      option.yAxis = axis(t, { type: "value", name: "tokens/s", nameGap: 50, scale: true, boundaryGap: ["5%", "10%"], axisLabel: { color: t.soft, formatter: whole } });
      const datum = (point) => ({ value: [point.peak_device_bytes, point.tokens_per_s], point: point });
      option.series = Object.keys(METHODS).map((method) => ({
        type: "scatter", name: METHOD_WORDS[method], symbol: METHODS[method][0], symbolSize: 9,
        data: chart.points.slice(1).filter((p) => p.method === method).map(datum),
        itemStyle: { color: METHODS[method][t.dark ? 2 : 1], opacity: 0.85, borderColor: t.page, borderWidth: 0.5 },
      })).filter((series) => series.data.length);
      option.series.push({ type: "line", name: "Pareto front", step: "end", data: chart.front, symbol: "none",
                           lineStyle: { color: t.ink, width: 2 }, itemStyle: { color: t.ink } });
      option.series.push({ type: "scatter", name: "the plan", symbol: "diamond", symbolSize: 20, z: 6, data: [datum(chart.points[0])],
                           itemStyle: { color: t.accent, borderColor: t.ink, borderWidth: 2 },
                           label: { show: true, formatter: "the plan", position: "left", distance: 8, color: t.ink, fontWeight: "bold", backgroundColor: t.page, padding: [1, 3] },
                           markLine: limits(t, chart, "end") });
      return option;
    },

    "phase-peaks"(chart, t) {
      const option = base(t);
      option.grid = { left: 8, right: 110, top: 8, bottom: 40, containLabel: true };
      option.tooltip.formatter = (item) => lines(chart.labels[item.dataIndex], gib(chart.bytes[item.dataIndex]));
      option.xAxis = gibAxis(t, Object.assign({ name: "allocated, GiB" }, gibScale(Math.max(...chart.bytes), t.width - 150)));
      option.yAxis = axis(t, { type: "category", data: chart.labels, inverse: true, axisLabel: { color: t.ink } });
      option.series = [{ type: "bar", name: "allocated peak", data: chart.bytes, barMaxWidth: 22,
        itemStyle: { color: (item) => chart.labels[item.dataIndex] === chart.peak ? t.accent : t.soft },
        label: { show: true, position: "right", color: t.ink, formatter: (item) => gib(item.value) + (item.name === chart.peak ? " peak" : "") } }];
      return option;
    },

    "time-parts"(chart, t) {
      const option = base(t);
      option.grid = { left: 8, right: 80, top: 8, bottom: 40, containLabel: true };
      option.tooltip.formatter = (item) => lines(chart.labels[item.dataIndex], seconds(chart.seconds[item.dataIndex]));
      option.xAxis = axis(t, { type: "value", name: "seconds per step" });
      option.yAxis = axis(t, { type: "category", data: chart.labels, inverse: true, axisLabel: { color: t.ink } });
      option.series = [{ type: "bar", name: "time", data: chart.seconds, barMaxWidth: 22, itemStyle: { color: t.accent },
        label: { show: true, position: "right", color: t.ink, formatter: (item) => seconds(item.value) } }];
      return option;
    },

    "timeline"(chart, t) {
      const option = base(t);
      const last = chart.points[chart.points.length - 1][0];
      option.grid = { left: 30, right: 28, top: 20, bottom: 40, containLabel: true };
      option.tooltip.trigger = "axis";
      option.tooltip.formatter = ([{ data: [event, bytes] }]) =>
        lines("event " + whole(event), (chart.phases.find((phase) => event < phase.end) || {}).name, gib(bytes));
      option.xAxis = axis(t, { type: "value", name: "allocations and releases, in order", max: last, axisLabel: { color: t.soft, formatter: whole } });
      option.yAxis = gibAxis(t, Object.assign({ name: "allocated, GiB", nameGap: 40 }, gibScale(chart.peak[1] * 1.15, 640)));
      // the words where they have room, else none
      const shades = [t.panel, t.page], wide = (phase) => (phase.end - phase.start) / last * (t.width - 100) > 7.5 * phase.name.length;
      option.series = [{ type: "line", name: "allocated", step: "end", symbol: "none", data: chart.points, areaStyle: { color: t.accent, opacity: 0.25 },
        lineStyle: { color: t.accent, width: 1.5 }, itemStyle: { color: t.accent },
        markArea: { silent: true, label: { color: t.ink, position: "insideTop" }, data: chart.phases.map((phase, index) =>
          [{ name: phase.name, xAxis: phase.start, itemStyle: { color: shades[index % 2] }, label: { show: wide(phase) } }, { xAxis: phase.end }]) },
        markPoint: { symbol: "pin", symbolSize: 30, itemStyle: { color: t.bad }, data: [{ name: "peak", coord: chart.peak }],
                     label: { formatter: () => "peak " + gib(chart.peak[1]), color: t.ink, fontWeight: "bold", distance: 8,
                              position: chart.peak[0] > 0.7 * last ? "left" : "right", backgroundColor: t.page, padding: [1, 3] } } }];
      return option;
    },

    "sensitivity"(chart, t) {
      const option = base(t);
      const short = (value) => value >= 1024 && value % 1024 === 0 ? value / 1024 + "k" : whole(value);
      const names = chart.values.map((value, index) => index === chart.chosen ? "[" + short(value) + "]" : short(value));
      option.tooltip.trigger = "axis";
      option.tooltip.formatter = (rows) => {
        const index = rows[0].dataIndex;
        return lines(chart.parameter + " " + whole(chart.values[index]), gib(chart.bytes[index]) + FIT_WORDS[chart.verdicts[index]],
                     rate(chart.tokens_per_s[index]));
      };
      option.axisPointer = { link: [{ xAxisIndex: "all" }] };
      option.grid = [{ left: 62, right: 20, top: 26, height: 120 }, { left: 62, right: 20, top: 190, height: 100 }];
      option.xAxis = [0, 1].map((grid) => axis(t, { type: "category", gridIndex: grid, data: names,
        axisLabel: { color: t.soft, show: grid === 1, interval: 0, fontSize: 11 }, axisTick: { show: grid === 1 } }));
      option.yAxis = [gibAxis(t, Object.assign({ name: "peak, GiB", nameGap: 40, gridIndex: 0 }, gibScale(Math.max(chart.budget_bytes, ...chart.bytes), 480))),
                      axis(t, { type: "value", name: "tokens/s", nameGap: 46, gridIndex: 1, axisLabel: { color: t.soft, formatter: whole } })];
      const size = (value, item) => item.dataIndex === chart.chosen ? 15 : 8;
      option.series = [
        { type: "line", name: "device peak", xAxisIndex: 0, yAxisIndex: 0, data: chart.bytes, symbol: (v, item) => chart.verdicts[item.dataIndex] === "fits" ? "circle" : "emptyCircle",
          symbolSize: size, lineStyle: { color: t.accent }, itemStyle: { color: t.accent },
          markLine: { silent: true, symbol: "none", data: [limit(t, chart.budget_bytes, "budget", t.bad, "yAxis", "dashed", { position: "insideStartTop" })] } },
        { type: "line", name: "tokens/s", xAxisIndex: 1, yAxisIndex: 1, data: chart.tokens_per_s, symbol: "diamond", symbolSize: size,
          lineStyle: { color: t.good }, itemStyle: { color: t.good } }];
      return option;
    },

    "search-history"(chart, t) {
      const option = base(t);
      option.grid.left = 30;
      option.legend = { top: 0, textStyle: { color: t.ink } };
      option.tooltip.trigger = "axis";
      option.tooltip.formatter = (rows) => {
        const point = chart.points[rows[0].data[0] - 1];
        return lines("trial " + rows[0].data[0], rate(point.tokens_per_s), point.reason, "best so far: " + rate(point.best));
      };
      option.xAxis = axis(t, { type: "value", name: "trial", min: 1, max: Math.max(2, chart.points.length), minInterval: 1 });
      option.yAxis = axis(t, { type: "value", name: "tokens/s", nameGap: 50, axisLabel: { color: t.soft, formatter: whole } });
      const pick = (wanted) => chart.points.map((p, i) => [i + 1, p.tokens_per_s || 0, p.feasible]).filter((p) => p[2] === wanted).map((p) => p.slice(0, 2));
      option.series = [
        { type: "line", name: "best so far", step: "end", symbol: "none", data: chart.points.map((p, i) => [i + 1, p.best]), lineStyle: { color: t.accent, width: 2 }, itemStyle: { color: t.accent } },
        { type: "scatter", name: "fits", symbol: "circle", symbolSize: 10, data: pick(true), itemStyle: { color: t.good } },
        { type: "scatter", name: "does not fit", symbol: "path://M2,0 L5,3 L8,0 L10,2 L7,5 L10,8 L8,10 L5,7 L2,10 L0,8 L3,5 L0,2 Z", symbolSize: 12, data: pick(false), itemStyle: { color: t.bad } },
      ].filter((series) => series.data.length);
      return option;
    },

    "accuracy"(chart, t) {
      const option = base(t);
      option.aria.decal = { show: true };
      option.legend = { top: 0, textStyle: { color: t.ink } };
      option.tooltip.trigger = "axis";
      option.tooltip.formatter = (rows) => lines(chart.labels[rows[0].dataIndex], ...rows.filter((r) => r.value !== null && r.value !== undefined).map((r) => r.seriesName + ": " + percent(r.value)));
      option.xAxis = axis(t, { type: "value", name: "predicted too little  ←  error  →  predicted too much", axisLabel: { color: t.soft, formatter: (v) => +(100 * v).toPrecision(3) + " %" } });
      option.yAxis = axis(t, { type: "category", data: chart.labels, inverse: true, axisLabel: { color: t.ink, width: 220, overflow: "truncate" } });
      const label = { show: true, color: t.ink, formatter: (item) => percent(item.value) };
      const bars = (errors) => errors.map((error) => error === null ? null : { value: error, label: { position: error < 0 ? "left" : "right" } });
      option.series = [
        { type: "bar", name: "allocated memory", data: bars(chart.memory_error_fraction), itemStyle: { color: "#0072B2" }, label: label, barMaxWidth: 16 },
        { type: "bar", name: "tokens/s", data: bars(chart.speed_error_fraction), itemStyle: { color: "#E69F00" }, label: label, barMaxWidth: 16 }];
      return option;
    },

    "bars"(chart, t) {
      const option = base(t);
      option.grid = { left: 8, right: 90, top: 8, bottom: 40, containLabel: true };
      option.tooltip.formatter = (item) => lines(chart.labels[item.dataIndex], chart.words[item.dataIndex]);
      option.xAxis = axis(t, { type: "value", name: chart.unit, axisLabel: { color: t.soft, hideOverlap: true } });
      option.yAxis = axis(t, { type: "category", data: chart.labels, inverse: true, axisLabel: { color: t.ink, width: Math.min(300, 0.34 * t.width), overflow: "truncate" } });
      option.series = [{ type: "bar", name: chart.unit, data: chart.values, barMaxWidth: 22, itemStyle: { color: t.accent },
        label: { show: true, position: "right", color: t.ink, formatter: (item) => chart.words[item.dataIndex] } }];
      return option;
    },
  };

  const MANY_POINTS = 600; // above this, a canvas stays responsive where single SVG nodes would not
  const drawn = [];
  const options = (element, t) => {
    t.width = element.clientWidth;
    return KINDS[charts[element.id].kind](charts[element.id], t);
  };
  function draw() {
    const t = theme();
    while (drawn.length) drawn.pop().dispose();
    for (const element of document.querySelectorAll(".chart")) {
      if (!element.clientWidth) continue; // in a plan that is closed, or not for paper
      const chart = charts[element.id];
      const renderer = (chart.points || []).length > MANY_POINTS ? "canvas" : "svg";
      const picture = echarts.init(element, null, { renderer: renderer });
      picture.setOption(options(element, t));
      element.setAttribute("role", "img");
      element.setAttribute("aria-label", chart.title + ". The numbers are in the table below it. Arrow keys walk through the values.");
      drawn.push(picture);
    }
  }
  const resize = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const picture = echarts.getInstanceByDom(target);
      if (!picture || picture.getWidth() === target.clientWidth) continue;
      picture.resize();
      if (target.clientWidth) picture.setOption(options(target, theme()), true); // words and ticks are of a width
    }
  });

  // Arrow keys walk through a chart's values by its tooltip.
  function walk(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const picture = echarts.getInstanceByDom(event.currentTarget);
    if (event.key === "Escape") picture.dispatchAction({ type: "hideTip" });
    if (!step) return;
    event.preventDefault();
    const series = picture.getOption().series;
    const places = series.flatMap((one, s) => (one.data || []).map((value, index) => [s, index]).filter((place) => one.data[place[1]] !== null && (s === 0 || one.type === "scatter")));
    const now = Math.min(places.length - 1, Math.max(0, (Number(event.currentTarget.dataset.place || -1)) + step));
    event.currentTarget.dataset.place = now;
    picture.dispatchAction({ type: "showTip", seriesIndex: places[now][0], dataIndex: places[now][1] });
  }

  async function copy(button) {
    const text = button.parentElement.querySelector("code").textContent;
    let done = false;
    try { await navigator.clipboard.writeText(text); done = true; } catch (refused) {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      done = document.execCommand("copy");
      area.remove();
      button.focus();
    }
    const words = done ? "Copied" : "Select and copy by hand";
    button.textContent = words;
    document.getElementById("said").textContent = words;
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }

  // A table is sorted by the number that a column's cells begin with; cells without one stand last, by alphabet.
  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    const key = (row, column) => {
      const text = row.cells[column].textContent.trim(), number = /^\$?(\d[\d,]*(\.\d+)?)/.exec(text);
      return { text, number: number ? parseFloat(number[1].replaceAll(",", "")) : Infinity };
    };
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const turn = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", turn === 1 ? "ascending" : "descending");
        const body = table.tBodies[0], rows = [...body.rows].map((row) => ({ row, ...key(row, column) }));
        const known = (one) => Number.isFinite(one.number);
        rows.sort((a, b) => known(a) !== known(b) ? (known(a) ? -1 : 1)
          : turn * (known(a) && a.number !== b.number ? a.number - b.number : a.text.localeCompare(b.text)));
        body.append(...rows.map((one) => one.row));
      });
    });
  }

  const THEMES = ["auto", "light", "dark"];
  function setTheme(name) {
    if (name === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
    document.getElementById("theme").textContent = "Theme: " + name;
    draw();
  }
  let chosen = "auto";
  document.getElementById("theme").addEventListener("click", () => {
    chosen = THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length];
    setTheme(chosen);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => {
    document.documentElement.dataset.theme = "light";
    document.body.classList.add("paper"); // the width of paper, so that pictures are drawn for it
    draw();
  });
  addEventListener("afterprint", () => { document.body.classList.remove("paper"); setTheme(chosen); });
  // Of several plans each is closed until somebody opens it or follows a link to it.
  const reveal = () => {
    const plan = document.getElementById(location.hash.slice(1)), whole = plan && plan.querySelector("details.whole");
    if (whole) whole.open = true;
  };
  addEventListener("hashchange", reveal);
  reveal();
  for (const one of document.querySelectorAll("details.whole")) one.addEventListener("toggle", draw);
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
  document.querySelectorAll("[data-sortable]").forEach(sortable);
  draw();
  for (const element of document.querySelectorAll(".chart")) { resize.observe(element); element.addEventListener("keydown", walk); }
  document.documentElement.dataset.ready = "true";
})();
