// Time by rank, memory by stage, loss and throughput.
"use strict";
Page.box = (theme) => ({
  backgroundColor: theme.card, borderColor: theme.line, textStyle: { color: theme.ink, fontSize: 13 }, confine: true,
});
Page.legend = (theme, data) => ({
  data, top: 0, left: 0, itemWidth: 14, itemHeight: 10, itemGap: 14, textStyle: { color: theme.soft, fontSize: 12 }, icon: "roundRect",
});
// stripes: what was measured
Page.stripes = () => ({ symbol: "rect", symbolSize: 1, dashArrayX: [1, 0], dashArrayY: [2, 4], rotation: -Math.PI / 4, color: "rgba(255,255,255,.45)" });

Page.times = () => {
  const times = Page.data.times, element = document.getElementById("times"), theme = Page.theme();
  const first = times.measured || times.predicted;
  if (!first) { element.hidden = true; return; }
  const count = times.measured ? first.idle.length : first.idle.length * times.team;
  const ranks = Array.from({ length: count }, (_, rank) => String(rank));
  const predicted = (kind) => ranks.map((_, rank) => times.predicted[kind][Math.floor(rank / times.team)]);
  const series = [];
  for (const kind of times.kinds) {
    const own = { type: "bar", name: kind, barMaxWidth: 34, barGap: "12%", color: Page.KINDS[kind], emphasis: { focus: "none" } };
    if (times.predicted) series.push({ ...own, id: `p${kind}`, stack: "predicted", data: predicted(kind) });
    if (times.measured) series.push({ ...own, id: `m${kind}`, stack: "measured", data: times.measured[kind], itemStyle: { decal: Page.stripes() } });
  }
  const both = times.predicted && times.measured;
  const chart = Page.chart(element, 300);
  chart.setOption({
    animation: false, textStyle: Page.text(), legend: Page.legend(theme, times.kinds),
    grid: { left: Page.narrow() ? 56 : 66, right: 12, top: Page.narrow() ? 74 : 54, bottom: 44 },
    title: { text: both ? "left: predicted; right, striped: measured" : times.predicted ? "predicted" : "measured", left: 0, top: Page.narrow() ? 44 : 24, textStyle: { color: theme.soft, fontSize: 12, fontWeight: 400 } },
    xAxis: Page.axis(theme, { type: "category", data: ranks, name: "rank", nameLocation: "middle", nameGap: 26 }),
    yAxis: Page.axis(theme, { type: "value", axisLabel: { color: theme.soft, formatter: Page.seconds } }),
    tooltip: {
      ...Page.box(theme), trigger: "axis", axisPointer: { type: "shadow" },
      formatter: (items) => {
        const rank = items[0].dataIndex;
        const row = (name) => times.kinds.map((kind) => {
          const values = name === "predicted" ? predicted(kind) : times.measured[kind];
          const total = times.kinds.reduce((sum, other) => sum + (name === "predicted" ? predicted(other) : times.measured[other])[rank], 0);
          return `${kind} ${Page.seconds(values[rank])} (${Page.share(total ? values[rank] / total : 0)})`;
        }).join("<br>");
        const parts = ["predicted", "measured"].filter((name) => times[name]).map((name) => `<b>${name}</b><br>${row(name)}`);
        return `rank ${rank}<br>${parts.join("<br>")}`;
      },
    },
    series,
  });
};

Page.memory = () => {
  const memory = Page.data.memory, element = document.getElementById("bytes"), theme = Page.theme();
  const stages = memory.planned.map((_, stage) => String(stage));
  const largest = Math.max(...memory.planned, ...(memory.measured || []).map((value) => value || 0));
  const shown = memory.limit && memory.limit < largest * 4;
  const series = [{
    type: "bar", name: "planned", data: memory.planned, color: "#3b82c4", barMaxWidth: 34, barGap: "12%",
    markLine: shown ? { silent: true, symbol: "none", data: [{ yAxis: memory.limit, name: "device" }], lineStyle: { color: theme.ink, type: "dashed" }, label: { color: theme.ink, position: "insideEndTop", formatter: `device: ${Page.bytes(memory.limit)}` } } : undefined,
  }];
  if (memory.measured) series.push({ type: "bar", name: "measured", data: memory.measured, color: "#ee8a3c", barMaxWidth: 34, itemStyle: { decal: Page.stripes() } });
  const chart = Page.chart(element, 260);
  chart.setOption({
    animation: false, textStyle: Page.text(), legend: Page.legend(theme, series.map((one) => one.name)),
    grid: { left: Page.narrow() ? 64 : 74, right: 12, top: 34, bottom: 44 },
    xAxis: Page.axis(theme, { type: "category", data: stages, name: "stage", nameLocation: "middle", nameGap: 26 }),
    yAxis: Page.axis(theme, { type: "value", max: shown ? Math.ceil(Math.max(memory.limit, largest) * 1.05) : null, interval: Page.step(shown ? Math.max(memory.limit, largest) : largest), axisLabel: { color: theme.soft, formatter: Page.bytes, hideOverlap: true, showMaxLabel: false } }),
    tooltip: {
      ...Page.box(theme), trigger: "axis", axisPointer: { type: "shadow" },
      formatter: (items) => {
        const index = items[0].dataIndex, measured = memory.measured && memory.measured[index];
        const second = measured === null || measured === false || measured === undefined ? "not measured" : Page.bytes(measured);
        return `stage ${index}<br>${Page.escape(Page.data.stages[index].name)}<br>planned ${Page.bytes(memory.planned[index])}<br>measured ${second}`;
      },
    },
    series,
  });
};
// a round number of bytes, about a fifth of a size
Page.step = (bytes) => {
  let step = 1;
  while (step * 5 < bytes) step *= 2;
  return step;
};

Page.curves = () => {
  const history = Page.data.history, theme = Page.theme();
  const loss = document.getElementById("loss"), rate = document.getElementById("rate");
  const about = document.getElementById("curves-about");
  if (!history) { loss.hidden = true; rate.hidden = true; about.hidden = true; return; }
  about.textContent = history.perPoint > 1 ? `Each point is the mean of ${history.perPoint} steps.` : "One point for each step.";
  const many = history.attempts.length > 1;
  const name = (attempt, number) => (many ? `attempt ${number + 1}` : "training");
  const dots = history.attempts.reduce((sum, attempt) => sum + attempt.steps.length, 0) < 80;
  const line = (attempt, number, values) => ({
    type: "line", name: name(attempt, number), color: Page.STAGES[number % Page.STAGES.length], symbol: "circle",
    symbolSize: dots ? 5 : 3, showSymbol: dots || attempt.steps.length < 2, lineStyle: { width: 2 }, connectNulls: false,
    data: attempt.steps.map((step, at) => [step, values[at]]),
    markLine: number && attempt.reason ? {
      silent: true, symbol: "none", data: [{ xAxis: attempt.steps[0] }], lineStyle: { color: theme.soft, type: "dotted" },
      label: { formatter: String(number + 1), color: theme.soft, position: "end" },
    } : undefined,
  });
  const common = (title, series, format, more) => ({
    animation: false, textStyle: Page.text(),
    title: { text: title, left: 0, top: 0, textStyle: { color: theme.ink, fontSize: 13, fontWeight: 600 } },
    legend: { ...Page.legend(theme, series.map((one) => one.name)), top: 22, type: "scroll" },
    grid: { left: 58, right: 16, top: 62, bottom: 44 },
    xAxis: Page.axis(theme, { type: "value", name: "step", nameLocation: "middle", nameGap: 26, minInterval: 1, min: "dataMin", max: "dataMax", splitLine: { show: false } }),
    yAxis: Page.axis(theme, { type: "value", scale: true, axisLabel: { color: theme.soft, formatter: (value) => String(Number(value.toPrecision(4))) }, ...more }),
    tooltip: {
      ...Page.box(theme), trigger: "axis",
      formatter: (items) => [`step ${items[0].axisValue}`, ...items.map((item) => `${item.marker}${Page.escape(item.seriesName)}: ${item.value[1] === null ? "not finite" : format(item.value[1])}`)].join("<br>"),
    },
    dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, filterMode: "none", preventDefaultMouseMove: false }],
    series,
  });
  const losses = history.attempts.map((attempt, number) => line(attempt, number, attempt.losses));
  const [steps, values] = history.evaluations;
  if (steps.length) {
    losses.push({
      type: "line", name: "evaluation", color: "#aa3377", symbol: "diamond", symbolSize: 9, showSymbol: true,
      lineStyle: { width: 1.5, type: "dashed" }, data: steps.map((step, at) => [step, values[at]]),
    });
  }
  Page.chart(loss, 300).setOption(common("loss", losses, (value) => value.toPrecision(6)));
  const rates = history.attempts.map((attempt, number) => line(attempt, number, attempt.rates));
  const ends = history.attempts.flatMap((attempt) => [attempt.steps[0], attempt.steps[attempt.steps.length - 1]]);
  if (Page.data.predictedRate) {
    rates.push({
      type: "line", name: "predicted", color: theme.soft, showSymbol: false, lineStyle: { type: "dashed", width: 1.5 },
      data: [[Math.min(...ends), Page.data.predictedRate], [Math.max(...ends), Page.data.predictedRate]],
    });
  }
  Page.chart(rate, 300).setOption(common("samples per second", rates, (value) => value.toPrecision(4), { min: 0, scale: false }));
};
