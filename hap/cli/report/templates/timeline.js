"use strict";
(() => {
  const data = JSON.parse(document.getElementById("timeline-data").textContent);
  const block = document.getElementById("block");
  const ROW = { compute: [4, 22], communication: [30, 22], memory: [56, 30] };
  let from = 0, to = data.ticks, marks = {}, colours = {};

  // Rows hold [waited, start after the one before, length, part, name, count] without brackets.
  const rows = data.rows.map((row) => {
    const lanes = {};
    for (const lane of ["compute", "communication"]) {
      const flat = row[lane], found = [];
      for (let k = 0, start = 0; k < flat.length; k += 6) {
        start += flat[k + 1];
        found.push({ ready: start - flat[k], start, end: start + flat[k + 2], part: flat[k + 3], name: flat[k + 4], count: flat[k + 5] });
      }
      lanes[lane] = found;
    }
    return { ...lanes, memory: row.memory };
  });
  const canvases = [...document.querySelectorAll("canvas[data-row]")];

  function seconds(ticks) {
    const s = ticks / data.ticks * data.step_s;
    const [unit, size] = s >= 1 ? ["s", 1] : s >= 1e-3 ? ["ms", 1e-3] : s >= 1e-6 ? ["us", 1e-6] : ["ns", 1e-9];
    return `${+(s / size).toPrecision(3)} ${unit}`;
  }

  function size(bytes) {
    for (const [unit, scale] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (bytes >= scale) return `${+(bytes / scale).toPrecision(3)} ${unit}`;
    }
    return `${bytes} B`;
  }

  function theme() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["ground", "ink", "soft", "line", "panel", "blue", "green", "purple", "orange", "sky", "mark"]) {
      colours[name] = style.getPropertyValue(`--${name}`).trim();
    }
    const tile = (draw) => {
      const pad = document.createElement("canvas");
      pad.width = pad.height = 8;
      const pen = pad.getContext("2d");
      pen.strokeStyle = pen.fillStyle = colours.mark;
      draw(pen);
      return pen.createPattern(pad, "repeat");
    };
    const lines = (pen, points) => {
      pen.beginPath();
      for (const [a, b, c, d] of points) { pen.moveTo(a, b); pen.lineTo(c, d); }
      pen.stroke();
    };
    marks = {
      1: tile((pen) => lines(pen, [[-1, 9, 9, -1], [-1, 1, 1, -1], [7, 9, 9, 7]])),
      2: tile((pen) => { pen.fillRect(1, 1, 2, 2); pen.fillRect(5, 5, 2, 2); }),
      wait: tile((pen) => lines(pen, [[-1, -1, 9, 9], [-1, 7, 1, 9], [7, -1, 9, 1], [-1, 3, 5, 9], [3, -1, 9, 5]])),
    };
  }

  function fit(canvas) {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(1, Math.round(canvas.clientWidth * ratio)), height = Math.round(canvas.clientHeight * ratio);
    if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    return pen;
  }

  function draw(canvas) {
    const pen = fit(canvas), width = canvas.clientWidth, row = rows[+canvas.dataset.row];
    const at = (tick) => (tick - from) / (to - from) * width;
    pen.fillStyle = colours.ground;
    pen.fillRect(0, 0, width, canvas.clientHeight);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (const lane of ["compute", "communication"]) {
      const [top, height] = ROW[lane];
      pen.fillStyle = colours.panel;
      pen.fillRect(0, top, width, height);
      for (const b of row[lane]) {
        if (b.end < from || b.ready > to) continue;
        const left = at(b.start), wide = Math.max(at(b.end) - left, 0.6);
        if (b.ready < b.start) {
          pen.fillStyle = marks.wait;
          pen.fillRect(at(b.ready), top + 4, left - at(b.ready), height - 8);
        }
        pen.fillStyle = [colours.blue, colours.green, colours.purple][b.part];
        pen.fillRect(left, top, wide, height);
        if (b.part && wide > 3) { pen.fillStyle = marks[b.part]; pen.fillRect(left, top, wide, height); }
        if (wide > 3) { pen.fillStyle = colours.ground; pen.fillRect(left + wide - 0.5, top, 0.5, height); }
        const shown = Math.max(left, 0), room = Math.min(left + wide, width) - shown;
        if (room > 46) label(pen, text(b), shown + 3, top + height / 2, room - 6);
      }
    }
    curve(pen, row.memory, at, width);
  }

  function text(b) {
    return data.names[b.name] + (b.count > 1 ? ` and ${b.count - 1} more` : "");
  }

  function label(pen, words, x, y, room) {
    const fits = Math.max(1, Math.floor(room / 6));
    const short = words.length > fits ? `${words.slice(0, fits - 1)}…` : words;
    pen.save();
    pen.beginPath();
    pen.rect(x - 2, y - 8, room + 4, 16);
    pen.clip();
    pen.fillStyle = colours.ground;
    pen.globalAlpha = 0.75;
    pen.fillRect(x - 2, y - 7, Math.min(pen.measureText(short).width + 4, room + 4), 14);
    pen.globalAlpha = 1;
    pen.fillStyle = colours.ink;
    pen.fillText(short, x, y);
    pen.restore();
  }

  function curve(pen, points, at, width) {
    const [top, height] = ROW.memory;
    const up = (bytes) => top + height * (1 - bytes / data.most_bytes);
    pen.beginPath();
    pen.moveTo(at(0), top + height);
    for (let k = 0; k < points.length; k += 2) {
      const x = at(points[k]), next = k + 2 < points.length ? at(points[k + 2]) : at(data.ticks);
      if (next < -1) continue;
      if (x > width + 1) break;
      pen.lineTo(x, up(points[k + 1]));
      pen.lineTo(next, up(points[k + 1]));
    }
    pen.lineTo(Math.min(at(data.ticks), width + 1), top + height);
    pen.fillStyle = colours.sky;
    pen.fill();
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 0.7;
    pen.stroke();
  }

  let waiting = false;
  function redraw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; canvases.forEach(draw); });
  }

  function look(first, last) {
    const width = Math.min(Math.max(last - first, 20), data.ticks);
    from = Math.min(Math.max(first, 0), data.ticks - width);
    to = from + width;
    redraw();
  }

  function zoom(factor, tick) {
    look(tick - (tick - from) * factor, tick + (to - tick) * factor);
  }

  function act(what) {
    const middle = (from + to) / 2, step = (to - from) / 4;
    if (what === "in") zoom(0.5, middle);
    else if (what === "out") zoom(2, middle);
    else if (what === "left") look(from - step, to - step);
    else if (what === "right") look(from + step, to + step);
    else look(0, data.ticks);
  }

  function tick(canvas, event) {
    return from + (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth * (to - from);
  }

  function tell(canvas, event) {
    const here = tick(canvas, event), y = event.clientY - canvas.getBoundingClientRect().top;
    const row = rows[+canvas.dataset.row], slack = (to - from) / canvas.clientWidth;
    if (y > ROW.memory[0]) {
      let bytes = 0;
      for (let k = 0; k < row.memory.length && row.memory[k] <= here; k += 2) bytes = row.memory[k + 1];
      block.textContent = `rank ${data.rows[+canvas.dataset.row].ranks}: ${size(bytes)} in use at ${seconds(here)}`;
      return;
    }
    const lane = y < ROW.communication[0] ? "compute" : "communication";
    const found = row[lane].find((b) => b.ready - slack <= here && here <= b.end + slack);
    if (!found) { block.textContent = "\u00a0"; return; }
    const waited = found.ready < found.start ? `, after waiting ${seconds(found.start - found.ready)}` : "";
    block.textContent = `rank ${data.rows[+canvas.dataset.row].ranks}, ${lane}: ${text(found)}, ${data.parts[found.part]}, ${seconds(found.end - found.start)} from ${seconds(found.start)}${waited}`;
  }

  for (const button of document.querySelectorAll("button[data-zoom]")) {
    button.addEventListener("click", () => act(button.dataset.zoom));
  }
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", Home: "all" };
  for (const canvas of canvases) {
    let grabbed = null;
    canvas.addEventListener("keydown", (event) => {
      if (keys[event.key]) { event.preventDefault(); act(keys[event.key]); }
    });
    canvas.addEventListener("dblclick", (event) => zoom(0.4, tick(canvas, event)));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, tick(canvas, event));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      grabbed = { x: event.clientX, from, to };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (grabbed) {
        const moved = (event.clientX - grabbed.x) / canvas.clientWidth * (grabbed.to - grabbed.from);
        look(grabbed.from - moved, grabbed.to - moved);
      }
      tell(canvas, event);
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { grabbed = null; });
  }
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { theme(); redraw(); });
  window.addEventListener("resize", redraw);
  theme();
  canvases.forEach(draw);
  document.documentElement.dataset.drawn = String(canvases.length);
})();
