// The data of the page, numbers as text, colours, and the box that follows the pointer.
"use strict";
const Page = {};
Page.data = JSON.parse(document.getElementById("data").textContent);
Page.charts = [];

Page.seconds = (value) => {
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  const [factor, unit] = size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : size >= 1e-6 ? [1e6, "us"] : [1e9, "ns"];
  return `${Page.three(value * factor)} ${unit}`;
};
Page.three = (value) => String(Number(value.toPrecision(3)));
Page.bytes = (value) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  while (Math.abs(value) >= 1024 && index < units.length - 1) { value /= 1024; index += 1; }
  return `${index ? Page.three(value) : value} ${units[index]}`;
};
Page.share = (value) => `${(100 * value).toFixed(1)}%`;

// colours that stay apart for every common kind of colour blindness (Okabe and Ito; Tol)
Page.STAGES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b5a300", "#7f7f7f"];
Page.stageColour = (stage) => Page.STAGES[stage % Page.STAGES.length];
Page.OPS = {
  F: ["forward", "#3b82c4"], B: ["backward", "#ee8a3c"], I: ["backward, inputs", "#ee8a3c"],
  W: ["backward, weights", "#c9a227"], S: ["optimizer step", "#009988"], R: ["sum of replicas", "#aa3377"],
  SF: ["send", "#66a61e"], SB: ["send", "#66a61e"], RF: ["receive, with waiting", "#a7aeb6"],
  RB: ["receive, with waiting", "#a7aeb6"], L: ["load weights", "#56b4e9"], O: ["load optimizer state", "#56b4e9"],
  U: ["unload", "#cc79a7"],
};
Page.LONG = {
  SF: "send activations", SB: "send gradients", RF: "receive activations", RB: "receive gradients",
};
Page.KINDS = { compute: "#3b82c4", step: "#009988", transfer: "#66a61e", host: "#c9a227", idle: "#b9bfc6" };

// black or white, whichever is readable on a colour
Page.on = (colour) => {
  const part = (at) => {
    const value = parseInt(colour.slice(at, at + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  };
  return 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5) > 0.3 ? "#14171a" : "#ffffff";
};

Page.dark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
Page.variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
Page.theme = () => ({
  ink: Page.variable("ink"), soft: Page.variable("soft"), line: Page.variable("line"), grid: Page.variable("grid"),
  card: Page.variable("card"), accent: Page.variable("accent"),
});
Page.narrow = () => window.innerWidth < 600;

// a chart of ECharts in an element; all charts are made again if the theme changes
Page.chart = (element, height) => {
  element.style.height = `${height}px`;
  const chart = echarts.init(element, null, { renderer: "canvas" });
  Page.charts.push(chart);
  return chart;
};
Page.text = () => ({
  fontFamily: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif", fontSize: 12,
});
Page.axis = (theme, more) => ({
  axisLine: { lineStyle: { color: theme.line } }, axisTick: { lineStyle: { color: theme.line } },
  axisLabel: { color: theme.soft, fontSize: 12 }, splitLine: { lineStyle: { color: theme.grid } },
  nameTextStyle: { color: theme.soft, fontSize: 12 }, ...more,
});

// the box beside the pointer: a heading and lines of a name and a value, never markup
Page.tip = {
  show(x, y, heading, lines) {
    const box = document.getElementById("tip");
    const title = document.createElement("b");
    title.textContent = heading;
    box.replaceChildren(title, ...lines.map(([name, value]) => {
      const line = document.createElement("span"), label = document.createElement("em");
      label.textContent = name;
      line.append(label, document.createTextNode(value));
      return line;
    }));
    box.hidden = false;
    const width = box.offsetWidth, height = box.offsetHeight;
    const left = x + 14 + width > innerWidth ? x - width - 14 : x + 14;
    const top = y + 16 + height > innerHeight ? y - height - 12 : y + 16;
    box.style.left = `${Math.max(4, Math.min(left, innerWidth - width - 4))}px`;
    box.style.top = `${Math.max(4, top)}px`;
  },
  hide() { document.getElementById("tip").hidden = true; },
};
// text for the boxes of ECharts, which are HTML
Page.escape = (text) => echarts.format.encodeHTML(String(text));

// many rectangles of one colour as one shape: rects holds x, y, width, height of each
Page.Bars = echarts.graphic.extendShape({
  type: "bars",
  shape: { rects: [] },
  buildPath(context, shape) {
    const rects = shape.rects;
    for (let i = 0; i < rects.length; i += 4) context.rect(rects[i], rects[i + 1], rects[i + 2], rects[i + 3]);
  },
});
echarts.graphic.registerShape("bars", Page.Bars);
Page.bars = (rects, colour, opacity = 1) => ({
  type: "bars", shape: { rects }, style: { fill: colour, opacity }, silent: true, morph: false,
});
