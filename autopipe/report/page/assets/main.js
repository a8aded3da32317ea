// Draw all charts; draw them again if the theme or the width changes.
"use strict";
Page.draw = () => {
  if (Page.stop) Page.stop.abort();
  Page.stop = new AbortController();
  for (const chart of Page.charts) chart.dispose();
  Page.charts = [];
  for (const element of document.querySelectorAll(".mark")) element.remove();
  Page.tip.hide();
  Page.gantt(Page.stop.signal);
  Page.times();
  Page.memory();
  Page.model(Page.stop.signal);
  Page.curves();
  Page.width = document.documentElement.clientWidth;
};

Page.toggle = document.getElementById("theme");
Page.label = () => { Page.toggle.textContent = Page.dark() ? "light" : "dark"; };
Page.toggle.addEventListener("click", () => {
  document.documentElement.dataset.theme = Page.dark() ? "light" : "dark";
  Page.label();
  Page.draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { Page.label(); Page.draw(); });
window.addEventListener("resize", () => {
  clearTimeout(Page.resizing);
  Page.resizing = setTimeout(() => { if (document.documentElement.clientWidth !== Page.width) Page.draw(); }, 150);
});
window.addEventListener("scroll", Page.tip.hide, { passive: true });
Page.label();
Page.draw();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
