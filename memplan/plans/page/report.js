// -- figures -------------------------------------------------------------------------------------------------------

function figures() {
  const parent = document.getElementById("figures");
  for (const [name, value, note] of DATA.figures) {
    parent.append(element("div", {class: "figure", "data-figure": name},
      element("small", {}, name), element("b", {}, value), element("small", {}, note)));
  }
}

function legend(id, entries) {
  const parent = document.getElementById(id);
  for (const [kind, text] of entries) {
    const swatch = element("span", {class: "swatch", style: `background:var(--${kind})`});
    parent.append(element("span", {class: "legend"}, swatch, text));
  }
}

function contents() {
  document.getElementById("where").textContent = `It is where ${DATA.peak.where}.`;
  const names = Object.fromEntries(DATA.kinds);
  const rows = Object.entries(DATA.peak.bytes).sort((a, b) => b[1] - a[1]);
  const table = element("table", {});
  for (const [kind, size] of rows) {
    const share = size / DATA.peak_bytes;
    const bar = element("div", {class: "bar", style: `width:${100 * size / rows[0][1]}%;background:var(--${kind})`});
    table.append(element("tr", {title: names[kind]}, element("td", {}, names[kind]),
      element("td", {class: "number"}, bytesText(size)), element("td", {class: "number"}, `${Math.round(100 * share)}%`),
      element("td", {style: "width:30%"}, bar)));
  }
  document.getElementById("contents").append(table);
}

// -- memory over the step ------------------------------------------------------------------------------------------

function memory(id, picture, most, end) {
  const box = {left: 92, right: WIDTH - 8, top: 22, bottom: 218};
  const svg = canvas(id, WIDTH, 258, `Memory of the ${id} step`);
  const {x, y} = axes(svg, box, end, most, secondTicks(end), byteTicks(most), secondsText, bytesText,
    "time since the step began", "held on the device");
  const below = picture.columns.map(() => 0);
  KINDS.forEach((kind, k) => {
    if (picture.columns.every((column) => !column[2][k])) return;
    let upper = "", lower = "";
    picture.columns.forEach(([begin, later, sizes], i) => {
      const [left, right] = [x(begin).toFixed(1), x(later).toFixed(1)];
      lower = `L${right} ${y(below[i]).toFixed(1)}L${left} ${y(below[i]).toFixed(1)}${lower}`;
      below[i] += sizes[k];
      upper += `${upper ? "L" : "M"}${left} ${y(below[i]).toFixed(1)}L${right} ${y(below[i]).toFixed(1)}`;
    });
    draw(svg, "path", {d: `${upper}${lower}Z`, style: `fill:var(--${kind})`, "data-kind": kind});
  });
  const turn = x(picture.turn_s);
  draw(svg, "line", {class: "axis", x1: turn, x2: turn, y1: 6, y2: box.bottom});
  draw(svg, "text", {class: "faint", x: turn - 6, y: 15, "text-anchor": "end"}, "forward");
  draw(svg, "text", {class: "faint", x: turn + 6, y: 15}, "backward");
  if (DATA.budget_bytes !== null) {
    const at = y(DATA.budget_bytes);
    draw(svg, "line", {class: "budget", x1: box.left, x2: box.right, y1: at, y2: at});
    draw(svg, "text", {class: "halo strong", x: box.left + 6, y: at - 5}, `budget ${bytesText(DATA.budget_bytes)}`);
  }
  peak(svg, picture, x, y);
  pointer(svg, box, picture, x);
}

function peak(svg, picture, x, y) {
  const [begin, later] = picture.columns[picture.peak.column];
  const at = x((begin + later) / 2), right = at > WIDTH * 0.75;
  draw(svg, "circle", {cx: at, cy: y(picture.peak.bytes), r: 4.5, style: "fill:var(--mark);stroke:var(--page)"});
  draw(svg, "text", {class: "halo strong peak", x: at + (right ? -9 : 9), y: y(picture.peak.bytes) + 4,
    "text-anchor": right ? "end" : "start"}, `peak ${bytesText(picture.peak.bytes)}`);
}

function pointer(svg, box, picture, x) {
  const cursor = draw(svg, "line", {class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden"});
  const over = draw(svg, "rect", {x: box.left, y: box.top, width: box.right - box.left,
    height: box.bottom - box.top, fill: "transparent", class: "over"});
  over.addEventListener("mousemove", (event) => {
    const frame = svg.getBoundingClientRect();
    const at = (event.clientX - frame.left) * WIDTH / frame.width;
    const column = picture.columns.find(([, later]) => x(later) > at) ?? picture.columns.at(-1);
    const [begin, , sizes, what, largest] = column;
    const rows = KINDS.map((kind, k) => [kind, bytesText(sizes[k]), kind, sizes[k]]).filter((row) => row[3]).reverse();
    rows.push(["the largest:", "", ""], ...largest.map(([name, size]) => [DATA.strings[name], bytesText(size), ""]));
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.setAttribute("visibility", "visible");
    const sum = sizes.reduce((a, b) => a + b, 0);
    show(event, `${bytesText(sum)} at ${secondsText(begin)}`, rows, DATA.strings[what]);
  });
  over.addEventListener("mouseleave", () => { cursor.setAttribute("visibility", "hidden"); hide(); });
}

// -- peak against time ---------------------------------------------------------------------------------------------

function curve() {
  const {line, marks, unplanned_s: base} = DATA.curve;
  document.getElementById("curve-note").textContent = line.length
    ? "Each point is a plan; none peaks lower than the first." : `${marks.map((mark) => mark[2]).join(", ")}.`;
  const width = 590, box = {left: 78, right: width - 14, top: 24, bottom: 232};
  const svg = canvas("curve", width, 272, "Peak against time");
  const extra = (time) => Math.max(0, 100 * (time / base - 1));
  const all = [...line, ...marks];
  const mostX = 1.08 * Math.max(...all.map((point) => point[0]));
  const mostY = 1.15 * Math.max(1, ...all.map((point) => extra(point[1])));
  const {x, y} = axes(svg, box, mostX, mostY, byteTicks(mostX), ticks(mostY, 5, 1), bytesText,
    (percent) => `+${short(percent, 3)}%`, "peak on the device", "time over the unplanned step");
  const sorted = [...(line.length ? line : marks)].sort((a, b) => a[0] - b[0]);
  draw(svg, "polyline", {points: sorted.map(([size, time]) => `${x(size)},${y(extra(time))}`).join(" "), fill: "none",
    style: `stroke:var(--kept);stroke-width:2;${line.length ? "" : "stroke-dasharray:3 4;stroke-opacity:.5"}`});
  if (DATA.budget_bytes !== null) {
    const at = x(DATA.budget_bytes);
    draw(svg, "line", {class: "budget", x1: at, x2: at, y1: box.top, y2: box.bottom});
    draw(svg, "text", {class: "halo", x: at, y: 16, "text-anchor": "middle"}, "budget");
  }
  const dots = [...line.map((point) => [point, 3.5, "kept"]), ...marks.map((point) => [point, 5.5, "mark"])];
  for (const [[size, time, name], radius, colour] of dots) {
    const dot = draw(svg, "circle", {cx: x(size), cy: y(extra(time)), r: radius, class: "dot",
      style: `fill:var(--${colour});stroke:var(--page)`});
    dot.addEventListener("mousemove", (event) => show(event, name, [["peak", bytesText(size), ""],
      ["a step", secondsText(time), ""], ["over the unplanned step", `+${short(extra(time), 3)}%`, ""]]));
    dot.addEventListener("mouseleave", hide);
    if (colour === "mark") {
      const left = x(size) > width * 0.7, below = name === "this plan" ? 18 : -9;
      draw(svg, "text", {class: "halo strong", x: x(size) + (left ? -9 : 9),
        y: Math.min(y(extra(time)) + below, box.bottom - 5), "text-anchor": left ? "end" : "start"}, name);
    }
  }
}

// -- lanes ---------------------------------------------------------------------------------------------------------

const LANES = [["compute", "compute", "temporary"], ["stall", "waiting", "stall"], ["out", "to the host", "offload"],
  ["in", "to the device", "fetched"], ["network", "collectives", "kept"], ["update", "updates by the CPU", "optimizer"]];

function lanes() {
  if (DATA.lanes === null) return;
  document.getElementById("lanes-section").hidden = false;
  const {end_s: end, lanes: marks} = DATA.lanes;
  const shown = LANES.filter(([lane]) => marks[lane]);
  const box = {left: 132, right: WIDTH - 24, top: 6, bottom: 6 + 30 * shown.length};
  const svg = canvas("lanes", WIDTH, box.bottom + 40, "Compute and copies over the step");
  const one = DATA.in_flight > 1 ? ", of one microbatch by itself" : "";
  const {x} = axes(svg, box, end, 1, secondTicks(end), [], secondsText, bytesText,
    `time since the step began${one}`, "");
  shown.forEach(([lane, text, colour], row) => {
    const top = box.top + 30 * row;
    draw(svg, "text", {x: box.left - 10, y: top + 18, "text-anchor": "end"}, text);
    for (const [begin, later] of marks[lane]) {
      draw(svg, "rect", {x: x(begin), y: top + 3, width: Math.max(0.6, x(later) - x(begin) - 0.3), height: 22,
        style: `fill:var(--${colour})`, class: "mark"});
    }
    const over = draw(svg, "rect", {x: box.left, y: top, width: box.right - box.left, height: 28, fill: "transparent",
      class: "over"});
    over.addEventListener("mousemove", (event) => nearest(event, svg, marks[lane], x));
    over.addEventListener("mouseleave", hide);
  });
}

// Says what the mark next to the pointer is: many are thinner than a pixel.
function nearest(event, svg, marks, x) {
  const frame = svg.getBoundingClientRect();
  const at = (event.clientX - frame.left) * WIDTH / frame.width;
  const away = ([begin, later]) => Math.max(0, x(begin) - at, at - x(later));
  const [begin, later, what, count] = marks.reduce((best, mark) => away(mark) < away(best) ? mark : best);
  const more = count > 1 ? ` and ${count - 1} more` : "";
  show(event, `${DATA.strings[what]}${more}`,
    [["from", secondsText(begin), ""], [count > 1 ? "take" : "takes", secondsText(later - begin), ""]]);
}

// -- layers and tensors --------------------------------------------------------------------------------------------

function tables() {
  const sizes = DATA.tables.flatMap((table) => table.rows.flatMap((row) => row[2].map((cell) => cell[2])));
  const most = Math.max(1, ...sizes);
  for (const table of DATA.tables) layers(table, most);
}

function layers(table, most) {
  const parent = document.getElementById("tables");
  const count = table.columns.length, label = 470, size = Math.min(26, (WIDTH - label - 8) / count), high = 18;
  const top = table.title ? 24 : 6;
  parent.append(element("h3", {}, table.title || "Outside of repeated layers"));
  const svg = draw(parent, "svg", {viewBox: `0 0 ${WIDTH} ${top + high * table.rows.length + 22}`});
  const every = Math.ceil(18 / size);
  if (table.title) {
    draw(svg, "text", {class: "faint", x: label - 10, y: 15, "text-anchor": "end"}, "layer");
    table.columns.forEach((name, column) => {
      const place = {class: "faint", x: label + size * (column + 0.5), y: 15, "text-anchor": "middle"};
      if (column % every === 0) draw(svg, "text", place, name);
    });
  }
  table.rows.forEach(([name, tensor, cells], row) => {
    const y = top + high * row, long = DATA.strings[name];
    const text = draw(svg, "text", {x: label - 10, y: y + 13, "text-anchor": "end"});
    draw(text, "tspan", {}, long.length > 44 ? `…${long.slice(-43)}` : long);
    draw(text, "tspan", {style: "fill:var(--faint)"}, `  ${DATA.strings[tensor]}`);
    for (const [column, decision, bytes, reason] of cells) {
      const cell = draw(svg, "rect", {x: label + size * column + 0.5, y: y + 0.5, width: size - 1, height: high - 1,
        rx: 2, class: "cell", style: `fill:var(--${decision});fill-opacity:${0.25 + 0.75 * (bytes / most) ** 0.4}`});
      const where = table.title ? `${table.title.replace("*", table.columns[column])} ${long}` : long;
      cell.addEventListener("mousemove", (event) => show(event, `${decision}: ${where}`,
        [[DATA.strings[tensor], bytesText(bytes), decision]], DATA.strings[reason]));
      cell.addEventListener("mouseleave", hide);
    }
  });
  const [rest, bytes] = table.left_out;
  if (rest) {
    const y = top + high * table.rows.length + 14;
    draw(svg, "text", {class: "faint", x: label - 10, y, "text-anchor": "end"}, `${rest} more rows of ${bytesText(bytes)}`);
  }
}

figures();
legend("legend", DATA.kinds);
legend("decisions", [["keep", "kept"], ["recompute", "made again in backward"],
  ["offload", "on the host in between, or living elsewhere"]]);
const most = 1.06 * Math.max(DATA.unplanned_peak_bytes, DATA.peak_bytes, DATA.budget_bytes ?? 0);
const end = Math.max(DATA.memory.unplanned.columns.at(-1)[1], DATA.memory.planned.columns.at(-1)[1]);
memory("unplanned", DATA.memory.unplanned, most, end);
memory("planned", DATA.memory.planned, most, end);
contents();
curve();
lanes();
tables();
