// The model: modules in the order of execution, cut into stages.
"use strict";
Page.model = (signal) => {
  const model = Page.data.model, stages = Page.data.stages, element = document.getElementById("modules");
  const theme = Page.theme(), narrow = Page.narrow();
  const left = narrow ? 8 : 16, right = narrow ? 8 : 16;
  const total = model.weights.reduce((sum, weight) => sum + weight, 0) || 1;
  // a call that takes no time has a width, too
  const least = total / Math.max(1, model.weights.length) * 0.08;
  const edges = [0];
  for (const weight of model.weights) edges.push(edges[edges.length - 1] + weight + least);
  const length = edges[edges.length - 1];
  const deepest = Math.max(0, ...model.depth) + 1;
  const cuts = Page.cutsOf(stages, Page.data.boundaries);
  const skips = Page.data.boundaries.filter(([, producer, consumers]) => consumers[consumers.length - 1] > producer + 1);
  const arcs = skips.length ? 34 : 0;
  const rowHeight = narrow ? 24 : 26, top = 30 + arcs, height = (deepest + 1) * rowHeight + 4;
  const chart = Page.chart(element, top + height + 34);
  const zoom = Page.zoomable(chart, element, element.closest("section"), [0], { left, right, signal, smallest: 0.05 });
  const about = document.getElementById("model-about");
  if (!about.dataset.text) about.dataset.text = about.textContent;
  const widths = model.byTime ? "The width is the time of forward and backward in the profile." : "The width is the number of calls.";
  const omitted = model.omitted ? ` The ${model.omitted} deepest levels are omitted.` : "";
  about.textContent = `${about.dataset.text} ${widths}${omitted}`;

  const shadeOf = (stage, depth) => Page.mix(Page.stageColour(stage), theme.card, Math.min(0.62, depth * 0.16));
  const font = `${narrow ? 11 : 12}px system-ui, sans-serif`;
  const text = (value, x, y, fill, align = "center", weight = "") => ({
    type: "text", silent: true,
    style: { text: value, x, y, fill, font: `${weight} ${font}`.trim(), align, verticalAlign: "middle" },
  });

  const draw = (params, api) => {
    const area = params.coordSys, zero = api.coord([0, 0])[0], factor = (api.coord([length, 0])[0] - zero) / length;
    const at = (position) => zero + edges[position] * factor, end = area.x + area.width;
    const shapes = new Map(), labels = [], lines = [];
    const put = (x0, x1, y, colour, label, weight) => {
      const from = Math.max(area.x, x0), to = Math.min(end, x1);
      if (to - from < 0.3) return;
      Page.add(shapes, 0, colour, from, y, Math.max(0.5, to - from - (to - from > 3 ? 1 : 0)), rowHeight - 2);
      const fitting = Page.fit(label, to - from - 10);
      if (fitting && labels.length < 600) labels.push(text(fitting, (from + to) / 2, y + rowHeight / 2 - 1, Page.on(colour), "center", weight));
    };
    for (let index = 0; index < stages.length; index += 1) {
      const stage = stages[index];
      const ranks = `rank${/[-,]/.test(stage.ranks) ? "s" : ""} ${stage.ranks}`;
      const wide = at(stage.stop) - at(stage.start);
      const name = wide > 150 ? `stage ${index} · ${ranks}` : wide > 62 ? `stage ${index}` : String(index);
      put(at(stage.start), at(stage.stop), area.y, Page.stageColour(index), name, "600");
    }
    for (let i = 0; i < model.depth.length; i += 1) {
      const path = model.names[model.name[i]], own = path.slice(path.lastIndexOf(".") + 1);
      const wide = at(model.stop[i]) - at(model.start[i]);
      const name = /^\d/.test(own) && path !== own && wide > 70 ? path : own;
      put(at(model.start[i]), at(model.stop[i]), area.y + 4 + (model.depth[i] + 1) * rowHeight, shadeOf(model.stage[i], model.depth[i] + 1), name);
    }
    let last = -1e9;
    for (const cut of cuts) {
      const x = at(cut.position);
      if (x < area.x || x > end) continue;
      lines.push({ type: "line", silent: true, shape: { x1: x - 0.5, y1: area.y - 6, x2: x - 0.5, y2: area.y + area.height }, style: { stroke: theme.ink, lineWidth: 1.5, lineDash: [4, 3] } });
      const label = Page.bytes(cut.bytes), room = label.length * 3.6 + 4;
      const place = Math.max(area.x + room, Math.min(end - room, x));
      if (place - last < room * 2 + 4) continue;
      last = place;
      labels.push(text(label, place, area.y - 15, theme.ink, "center", "600"));
    }
    for (const [, producer, consumers] of skips) {
      const x0 = at(stages[producer].stop), x1 = at(stages[consumers[consumers.length - 1]].start);
      if (x1 < area.x || x0 > end) continue;
      const lift = Math.min(arcs, 12 + (x1 - x0) / 12);
      lines.push({ type: "bezierCurve", silent: true, shape: { x1: x0, y1: area.y - 24, cpx1: x0, cpy1: area.y - 24 - lift, cpx2: x1, cpy2: area.y - 24 - lift, x2: x1, y2: area.y - 24 }, style: { stroke: theme.soft, lineWidth: 1.5, fill: "none" } });
    }
    const boxes = [...shapes.values()].map((shape) => Page.bars(shape.rects, shape.colour));
    return { type: "group", children: [...boxes, ...lines, ...labels] };
  };

  chart.setOption({
    animation: false, textStyle: Page.text(),
    grid: { left, right, top, height, outerBoundsMode: "none" },
    xAxis: { type: "value", min: 0, max: length, show: false },
    yAxis: { type: "value", min: 0, max: 1, show: false },
    series: [{ type: "custom", renderItem: draw, data: [[0, 0]], silent: true, encode: { x: 0, y: 1 } }],
    dataZoom: zoom.parts,
  });

  const point = (event) => {
    const position = chart.convertFromPixel({ xAxisIndex: 0 }, event.offsetX), box = element.getBoundingClientRect();
    const x = box.left + event.offsetX, y = box.top + event.offsetY;
    const near = length * (zoom.range.end - zoom.range.start) / 100 / box.width * 6;
    const cut = cuts.find((one) => Math.abs(edges[one.position] - position) < near);
    if (cut && event.offsetY < top) {
      Page.tip.show(x, y, `cut before stage ${cut.stage}: ${Page.bytes(cut.bytes)}`, cut.values.slice(0, 12).map(([name, bytes]) => [name, Page.bytes(bytes)]));
      return;
    }
    const level = Math.floor((event.offsetY - top - 4) / rowHeight) - 1;
    if (event.offsetY < top || event.offsetY > top + height || position < 0 || position > length) { Page.tip.hide(); return; }
    if (level < 0) {
      const index = stages.findIndex((stage) => edges[stage.stop] > position), stage = stages[index];
      if (stage) Page.tip.show(x, y, `stage ${index}`, [["modules", stage.name], ["ranks", stage.ranks], ["calls", String(stage.stop - stage.start)]]);
      return;
    }
    for (let i = 0; i < model.depth.length; i += 1) {
      if (model.depth[i] !== level || edges[model.start[i]] > position || edges[model.stop[i]] <= position) continue;
      const lines = [["stage", String(model.stage[i])], ["calls", String(model.stop[i] - model.start[i])]];
      if (model.kinds[model.name[i]]) lines.unshift(["class", model.kinds[model.name[i]]]);
      if (model.byTime) {
        const time = model.weights.slice(model.start[i], model.stop[i]).reduce((sum, weight) => sum + weight, 0);
        lines.push(["in the profile", Page.seconds(time * 1e-9)], ["of the model", Page.share(time / total)]);
      }
      Page.tip.show(x, y, model.names[model.name[i]], lines);
      return;
    }
    Page.tip.hide();
  };
  chart.getZr().on("mousemove", point);
  chart.getZr().on("click", point);
  chart.getZr().on("globalout", Page.tip.hide);
};

// the cuts with the values that cross them
Page.cutsOf = (stages, boundaries) => stages.slice(1).map((stage, index) => {
  const crossing = boundaries.filter(([, producer, consumers]) => producer <= index && consumers[consumers.length - 1] > index);
  return {
    stage: index + 1, position: stage.start, values: crossing.map(([name, , , bytes]) => [name, bytes]),
    bytes: crossing.reduce((sum, [, , , bytes]) => sum + bytes, 0),
  };
});

// a colour between two
Page.mix = (one, other, part) => {
  const hex = (text) => (text.length === 4 ? [...text.slice(1)].map((c) => parseInt(c + c, 16)) : [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
  const from = hex(one), to = hex(other);
  return `#${from.map((value, at) => Math.round(value + (to[at] - value) * part).toString(16).padStart(2, "0")).join("")}`;
};

// as much of a text as fits into some pixels; "" if that says nothing
Page.fit = (text, width) => {
  const most = Math.floor(width / 6.6);
  if (text.length <= most) return text;
  return most >= 6 ? `${text.slice(0, most - 1)}…` : "";
};
