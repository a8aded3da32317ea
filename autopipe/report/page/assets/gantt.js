// The schedule: one panel for the prediction and one for the measurement, on one time scale.
"use strict";
const MOST_LABELS = 400; // with more, a frame takes too long, and each is too small
Page.rowsOf = (panel, unit) => panel.rows.map((row) => {
  const column = (values) => (typeof values === "number" ? new Int32Array(row.count).fill(values) : Int32Array.from(values));
  const start = new Float64Array(row.count), end = new Float64Array(row.count);
  let now = 0;
  for (let i = 0; i < row.count; i += 1) {
    now += row.start[i];
    start[i] = now * unit;
    end[i] = (now + row.length[i]) * unit;
  }
  return {
    count: row.count, start, end, op: column(row.op), stage: column(row.stage), minibatch: column(row.minibatch),
    microbatch: column(row.microbatch), version: column(row.version), peer: column(row.peer),
  };
});

// where a bar is in its row: 0 the row itself, 1 messages below, 2 copies between host and device above
Page.laneOf = (op) => (["SF", "SB", "RF", "RB"].includes(op) ? 1 : ["L", "O", "U"].includes(op) ? 2 : 0);

// the first bar that may end after a time
Page.firstAfter = (row, time) => {
  let low = 0, high = row.count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row.end[middle] < time) low = middle + 1; else high = middle;
  }
  return low;
};

// for each way to colour: the colours, and which of them a bar has
Page.classesOf = (ops) => {
  const names = [...new Set(ops.map((op) => Page.OPS[op][1]))], at = ops.map((op) => names.indexOf(Page.OPS[op][1]));
  const count = Page.STAGES.length;
  return {
    op: { colours: names, of: (row, i) => at[row.op[i]] },
    stage: { colours: Page.STAGES, of: (row, i) => row.stage[i] % count },
    microbatch: {
      colours: [...Page.STAGES, "#8a9199"], of: (row, i) => (row.microbatch[i] < 0 ? count : row.microbatch[i] % count),
    },
  };
};
Page.number = ([text, x, y, colour, size]) => ({
  type: "text", silent: true,
  style: { text, x, y, fill: Page.on(colour), font: `${size}px sans-serif`, align: "center", verticalAlign: "middle" },
});

Page.gantt = (signal) => {
  const gantt = Page.data.gantt, element = document.getElementById("gantt");
  const panels = ["predicted", "measured"].filter((name) => gantt[name])
    .map((name) => ({ name, seconds: gantt[name].seconds, names: gantt[`${name}Names`] }));
  if (!panels.length) { element.hidden = true; return; }
  for (const panel of panels) {
    panel.rows = Page.decoded[panel.name] ||= Page.rowsOf(gantt[panel.name], gantt.unit);
  }
  const longest = Math.max(...panels.map((panel) => panel.seconds)) || 1;
  const theme = Page.theme(), narrow = Page.narrow(), select = document.getElementById("colour");
  const left = narrow ? 30 : 120, right = narrow ? 10 : 18;
  const most = Math.max(...panels.map((panel) => panel.rows.length));
  const high = most <= 8 ? 26 : most <= 16 ? 20 : most <= 32 ? 14 : 10;
  let top = 0;
  for (const panel of panels) {
    panel.top = top + 26;
    panel.height = panel.rows.length * high;
    top = panel.top + panel.height + 10;
  }
  const chart = Page.chart(element, top + 60);
  const zoom = Page.zoomable(chart, element, element.closest("section"), panels.map((_, index) => index), {
    left, right, signal, smallest: 0.005,
  });

  const lanes = gantt.ops.map(Page.laneOf);
  const classes = Page.classesOf(gantt.ops);

  // the bars of one row: those of two pixels and more as they are, of smaller ones the most frequent colour of a pixel
  const addRow = (shapes, labels, row, area, scale, y, height) => {
    const { colours, of } = classes[select.value], end = area.x + area.width, size = colours.length;
    const body = height < 12 ? height : height * 0.7;
    const place = [[y, body], [y + height * 0.72, height * 0.28], [y, height * 0.25]];
    const left = Math.floor(area.x), width = Math.ceil(area.width) + 2, parts = [null, null, null];
    for (let i = Page.firstAfter(row, scale.from); i < row.count && row.start[i] <= scale.to; i += 1) {
      const x0 = Math.max(area.x, scale.at(row.start[i])), x1 = Math.min(end, scale.at(row.end[i]));
      if (x1 <= x0) continue;
      const lane = lanes[row.op[i]], kind = of(row, i);
      if (x1 - x0 < 2) {
        const pixels = parts[lane] ||= new Float32Array(width * size);
        for (let x = Math.floor(x0); x < x1; x += 1) {
          pixels[(x - left) * size + kind] += Math.min(x1, x + 1) - Math.max(x0, x);
        }
        continue;
      }
      const gap = x1 - x0 > 5 ? 0.6 : 0, number = row.microbatch[i];
      Page.add(shapes, lane, colours[kind], x0, place[lane][0], x1 - x0 - gap, place[lane][1]);
      if (lane === 0 && number >= 0 && height >= 12 && x1 - x0 > 8 + 7 * String(number).length) {
        labels.push([String(number), (x0 + x1) / 2, y + body / 2 + 0.5, colours[kind], Math.min(12, height * 0.55)]);
      }
    }
    parts.forEach((pixels, lane) => {
      if (!pixels) return;
      let begin = 0, open = -1;
      for (let x = 0; x <= width; x += 1) {
        let best = -1, most = 0.15;
        if (x < width) for (let k = 0; k < size; k += 1) if (pixels[x * size + k] > most) { most = pixels[x * size + k]; best = k; }
        if (best === open) continue;
        if (open >= 0) Page.add(shapes, lane, colours[open], left + begin, place[lane][0], x - begin, place[lane][1]);
        begin = x;
        open = best;
      }
    });
  };

  const draw = (panel) => (params, api) => {
    const area = params.coordSys, zero = api.coord([0, 0])[0], one = api.coord([longest, 0])[0];
    const perSecond = (one - zero) / longest;
    const scale = {
      at: (time) => zero + time * perSecond,
      from: (area.x - zero) / perSecond, to: (area.x + area.width - zero) / perSecond,
    };
    const shapes = new Map(), labels = [], step = area.height / panel.rows.length;
    panel.rows.forEach((row, index) => {
      addRow(shapes, labels, row, area, scale, area.y + index * step + 1, step - 2);
    });
    const children = [...shapes.values()].map((shape) => Page.bars(shape.rects, shape.colour, shape.lane === 2 ? 0.9 : 1));
    if (labels.length > MOST_LABELS) labels.length = 0;
    return { type: "group", children: [...children, ...labels.map(Page.number)] };
  };

  const label = (panel) => (panel.name === "predicted" ? "predicted" : "measured");
  chart.setOption({
    animation: false, textStyle: Page.text(),
    title: panels.map((panel) => ({
      text: `${label(panel)}: {soft|${Page.seconds(panel.seconds)}}`, left: narrow ? 0 : left, top: panel.top - 24, padding: 0,
      textStyle: { color: theme.ink, fontSize: 13, fontWeight: 600, rich: { soft: { color: theme.soft, fontSize: 13 } } },
    })),
    grid: panels.map((panel) => ({ left, right, top: panel.top, height: panel.height, outerBoundsMode: "none", show: true, borderColor: theme.line, backgroundColor: "transparent" })),
    xAxis: panels.map((panel, index) => Page.axis(theme, {
      type: "value", gridIndex: index, min: 0, max: longest, splitNumber: narrow ? 4 : 8,
      axisLabel: {
        show: index === panels.length - 1, color: theme.soft, hideOverlap: true,
        formatter: (value) => Page.time(value, longest * (zoom.range.end - zoom.range.start) / 100),
      },
    })),
    yAxis: panels.map((panel, index) => Page.axis(theme, {
      type: "category", gridIndex: index, inverse: true, data: panel.names, axisTick: { show: false },
      splitLine: { show: true, lineStyle: { color: theme.grid } },
      axisLabel: {
        color: theme.soft, fontSize: Math.min(12, high), interval: high < 12 ? 3 : 0,
        formatter: (name) => (narrow ? name.split(" ")[1] : name),
      },
    })),
    series: panels.map((panel, index) => ({
      type: "custom", xAxisIndex: index, yAxisIndex: index, renderItem: draw(panel), data: [[0, 0]], clip: true,
      silent: true, animation: false, encode: { x: 0, y: 1 },
    })),
    dataZoom: zoom.parts,
  });
  Page.ganttLegend(panels, gantt.ops, select.value);

  const mark = document.createElement("div");
  mark.className = "mark";
  mark.hidden = true;
  element.append(mark);
  const leave = () => { mark.hidden = true; Page.tip.hide(); };
  const point = (event) => {
    const index = panels.findIndex((_, at) => chart.containPixel({ gridIndex: at }, [event.offsetX, event.offsetY]));
    if (index < 0) { leave(); return; }
    const panel = panels[index], step = panel.height / panel.rows.length;
    const number = Math.min(panel.rows.length - 1, Math.max(0, Math.floor((event.offsetY - panel.top) / step)));
    const time = chart.convertFromPixel({ xAxisIndex: index }, event.offsetX);
    const within = (event.offsetY - panel.top) / step - number;
    const bar = Page.barAt(panel.rows[number], time, within > 0.72 ? 1 : within < 0.25 ? 2 : 0, lanes);
    if (bar < 0) { leave(); return; }
    const row = panel.rows[number], box = element.getBoundingClientRect();
    const x0 = Math.max(left, chart.convertToPixel({ xAxisIndex: index }, row.start[bar]));
    const x1 = Math.min(box.width - right, chart.convertToPixel({ xAxisIndex: index }, row.end[bar]));
    Object.assign(mark.style, {
      left: `${x0 - 1}px`, top: `${panel.top + number * step}px`, width: `${Math.max(3, x1 - x0 + 1)}px`, height: `${step}px`,
    });
    mark.hidden = false;
    Page.tip.show(box.left + event.offsetX, box.top + event.offsetY, Page.opName(gantt.ops[row.op[bar]]), [
      ["", panel.name], ["rank", panel.names[number]], ...Page.lines(row, bar, gantt.ops),
    ]);
  };
  chart.getZr().on("mousemove", point);
  chart.getZr().on("click", point);
  chart.getZr().on("globalout", leave);
  chart.on("datazoom", () => { mark.hidden = true; });
  select.addEventListener("change", () => {
    Page.ganttLegend(panels, gantt.ops, select.value);
    chart.setOption({ series: panels.map((panel) => ({ type: "custom", renderItem: draw(panel) })) });
  }, { signal });
  Page.ganttChart = { chart, zoom };
};
Page.decoded = {};

Page.add = (shapes, lane, colour, x, y, width, height) => {
  const key = `${lane}${colour}`;
  let shape = shapes.get(key);
  if (!shape) shapes.set(key, shape = { lane, colour, rects: [] });
  shape.rects.push(x, y, width, height);
};

// the bar of a row at a time: of its lane, else of any lane
Page.barAt = (row, time, lane, lanes) => {
  let other = -1;
  const from = Math.max(0, Page.firstAfter(row, time) - 8);
  for (let i = from; i < row.count && row.start[i] <= time; i += 1) {
    if (row.end[i] < time) continue;
    if (lanes[row.op[i]] === lane) return i;
    other = i;
  }
  return other;
};

Page.opName = (op) => Page.LONG[op] || Page.OPS[op][0];
Page.lines = (row, bar, ops) => {
  const lines = [["stage", String(row.stage[bar])]];
  if (row.peer[bar] >= 0) lines.push([ops[row.op[bar]].startsWith("S") ? "to stage" : "from stage", String(row.peer[bar])]);
  if (row.microbatch[bar] >= 0) lines.push(["microbatch", String(row.microbatch[bar])]);
  lines.push(["minibatch", String(row.minibatch[bar])]);
  if (row.version[bar] >= 0) lines.push(["weight version", String(row.version[bar])]);
  const text = `${row.stage[bar]}${ops[row.op[bar]]}${row.microbatch[bar] >= 0 ? row.microbatch[bar] : ""}`;
  lines.push(["instruction", text], ["begins", Page.seconds(row.start[bar])], ["takes", Page.seconds(row.end[bar] - row.start[bar])]);
  return lines;
};

// a time on an axis: enough digits for the range that is visible
Page.time = (value, visible) => {
  const [factor, unit] = visible >= 3 ? [1, "s"] : visible >= 3e-3 ? [1e3, "ms"] : [1e6, "us"];
  const digits = Math.max(0, Math.min(6, 1 - Math.floor(Math.log10(visible * factor / 8))));
  return `${Number((value * factor).toFixed(digits))} ${unit}`;
};

Page.ganttLegend = (panels, ops, mode) => {
  const legend = document.getElementById("legend"), entries = new Map();
  for (const panel of panels) {
    for (const row of panel.rows) {
      for (let i = 0; i < row.count; i += 1) {
        const op = ops[row.op[i]], thin = Page.laneOf(op) > 0;
        if (mode === "op") entries.set(Page.OPS[op][0], [row.op[i], Page.OPS[op][1], thin]);
        else if (mode === "stage") entries.set(`stage ${row.stage[i]}`, [row.stage[i], Page.stageColour(row.stage[i]), false]);
      }
    }
  }
  const sorted = [...entries].sort((a, b) => a[1][0] - b[1][0]);
  const shown = sorted.slice(0, 16).map(([name, [, colour, thin]]) => {
    const entry = document.createElement("span"), box = document.createElement("i");
    box.style.background = colour;
    if (thin) box.className = "thin";
    entry.append(box, document.createTextNode(name));
    return entry;
  });
  if (sorted.length > 16) shown.push(document.createTextNode(`and ${sorted.length - 16} more; 8 colours repeat`));
  if (mode === "microbatch") shown.push(document.createTextNode("8 colours repeat; numbers appear when you zoom in"));
  legend.replaceChildren(...shown);
};
