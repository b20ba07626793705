"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const KINDS = DATA.kinds.map((kind) => kind[0]);
const WIDTH = 1200;
const tip = document.getElementById("tip");

// -- texts ---------------------------------------------------------------------------------------------------------

// So many significant digits; halves are rounded to even, as in the report.
function short(number, digits) {
  if (!number) return "0";
  const unit = 10 ** (digits - 1 - Math.floor(Math.log10(Math.abs(number))));
  const whole = Math.floor(number * unit);
  const down = number * unit - whole === 0.5 && whole % 2 === 0;
  return String(down ? whole / unit : Number(number.toPrecision(digits)));
}

function bytesText(size) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (size < 1024) return `${short(size, 4)} ${unit}`;
    size /= 1024;
  }
  return `${short(size, 4)} TiB`;
}

function secondsText(time) {
  if (!time) return "0";
  if (time >= 1) return `${short(time, 3)} s`;
  return time >= 1e-3 ? `${short(time * 1e3, 3)} ms` : `${short(time * 1e6, 3)} us`;
}

// Round numbers from 0 to `most`, about `count` of them. unit: what counts as 1.
function ticks(most, count, unit) {
  const rough = most / count / unit;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((n) => n * power >= rough) * power * unit;
  return Array.from({length: Math.floor(most / step + 1e-9) + 1}, (_, i) => i * step);
}

const byteTicks = (most) => ticks(most, 4, 1024 ** Math.max(0, Math.floor(Math.log2(most / 4) / 10)));
const secondTicks = (most) => ticks(most, 8, most >= 1 ? 1 : most >= 1e-3 ? 1e-3 : 1e-6);

// -- elements ------------------------------------------------------------------------------------------------------

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function draw(parent, name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function canvas(id, width, height, title) {
  const svg = draw(document.getElementById(id), "svg", {viewBox: `0 0 ${width} ${height}`, role: "img"});
  svg.setAttribute("aria-label", title);
  return svg;
}

function show(event, title, rows, note) {
  const table = element("table", {});
  for (const [text, number, kind] of rows) {
    const swatch = element("td", {}, kind ? element("div", {class: "swatch", style: `background:var(--${kind})`}) : "");
    table.append(element("tr", {}, swatch, element("td", {class: "number"}, number), element("td", {}, text)));
  }
  tip.replaceChildren(element("b", {}, title), note ?? "", table);
  tip.hidden = false;
  const {clientWidth: width, clientHeight: height} = document.documentElement;
  const left = event.clientX + 16 + tip.offsetWidth > width ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, height - tip.offsetHeight - 4))}px`;
}

const hide = () => { tip.hidden = true; };

// Axes of a chart in a box, with their scales.
function axes(svg, box, mostX, mostY, xTicks, yTicks, xText, yText, xTitle, yTitle) {
  const x = (value) => box.left + (box.right - box.left) * value / mostX;
  const y = (value) => box.bottom - (box.bottom - box.top) * value / mostY;
  for (const value of yTicks) {
    draw(svg, "line", {class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value)});
    draw(svg, "text", {class: "faint", x: box.left - 8, y: y(value) + 4, "text-anchor": "end"}, yText(value));
  }
  for (const value of xTicks) {
    draw(svg, "line", {class: "axis", x1: x(value), x2: x(value), y1: box.bottom, y2: box.bottom + 4});
    draw(svg, "text", {class: "faint", x: x(value), y: box.bottom + 17, "text-anchor": "middle"}, xText(value));
  }
  draw(svg, "line", {class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom});
  draw(svg, "text", {class: "faint", x: (box.left + box.right) / 2, y: box.bottom + 34, "text-anchor": "middle"}, xTitle);
  const middle = (box.top + box.bottom) / 2;
  draw(svg, "text", {class: "faint", x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})`},
    yTitle);
  return {x, y};
}
