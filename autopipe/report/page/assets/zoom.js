// Zoom of a chart along its x axes: wheel, drag and pinch, buttons, keys. Ranges are percentages.
"use strict";
Page.zoomable = (chart, element, section, axes, options = {}) => {
  const theme = Page.theme();
  const range = { start: 0, end: 100 };
  const smallest = options.smallest || 0.02;
  const parts = [{
    type: "inside", xAxisIndex: axes, filterMode: "none", zoomOnMouseWheel: false, moveOnMouseMove: true,
    moveOnMouseWheel: false, preventDefaultMouseMove: false, minSpan: smallest, throttle: 0,
  }, {
    type: "slider", xAxisIndex: axes, filterMode: "none", minSpan: smallest, bottom: 4, height: Page.narrow() ? 26 : 18,
    left: options.left, right: options.right, showDataShadow: false, showDetail: false, brushSelect: false,
    borderColor: theme.line, fillerColor: Page.dark() ? "rgba(124,184,245,.18)" : "rgba(11,92,173,.12)",
    handleStyle: { color: theme.card, borderColor: theme.soft }, moveHandleStyle: { color: theme.soft }, throttle: 0,
    moveHandleSize: 5,
  }];

  const go = (start, end) => {
    const width = Math.max(Math.min(end - start, 100), smallest);
    const first = Math.max(0, Math.min(start, 100 - width));
    range.start = first;
    range.end = first + width;
    chart.dispatchAction({ type: "dataZoom", dataZoomIndex: 0, start: range.start, end: range.end });
  };
  const scale = (factor, at = 0.5) => {
    const width = range.end - range.start, centre = range.start + width * at;
    const wide = Math.max(Math.min(width * factor, 100), smallest);
    go(centre - wide * at, centre + wide * (1 - at));
  };
  const move = (part) => {
    const by = (range.end - range.start) * part;
    go(range.start + by, range.end + by);
  };
  const actions = {
    in: () => scale(0.5), out: () => scale(2), left: () => move(-0.25), right: () => move(0.25), all: () => go(0, 100),
  };
  const keys = {
    "+": "in", "=": "in", "-": "out", "_": "out", ArrowLeft: "left", ArrowRight: "right", "0": "all", Home: "all",
  };

  chart.on("datazoom", (event) => {
    const change = event.batch ? event.batch[0] : event;
    if (change.start !== undefined) { range.start = change.start; range.end = change.end; }
    element.dataset.start = range.start.toFixed(4);
    element.dataset.end = range.end.toFixed(4);
    Page.tip.hide();
  });
  const signal = { signal: options.signal };
  element.addEventListener("wheel", (event) => {
    // a page that is being scrolled goes on; and there is nothing to zoom out of
    const scrolling = event.timeStamp - (Page.scrolled || -1e9) < 400;
    const whole = range.end - range.start >= 99.999;
    if (!event.ctrlKey && (scrolling || (event.deltaY > 0 && whole && !event.deltaX))) {
      Page.scrolled = event.timeStamp;
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      move(event.deltaX / 1000);
      return;
    }
    const box = element.getBoundingClientRect();
    const left = options.left || 0, width = box.width - left - (options.right || 0);
    const at = Math.max(0, Math.min(1, (event.clientX - box.left - left) / width));
    scale(Math.exp(Math.max(-200, Math.min(200, event.deltaY)) / 400), at);
  }, { passive: false, capture: true, ...signal });  // the library stops the event on its way back
  element.addEventListener("keydown", (event) => {
    const action = keys[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[action]();
  }, signal);
  for (const button of section.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => actions[button.dataset.zoom](), signal);
  }
  element.dataset.start = "0";
  element.dataset.end = "100";
  return { parts, range, go };
};
window.addEventListener("wheel", (event) => { Page.scrolled = event.timeStamp; }, { passive: true });
