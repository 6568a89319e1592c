
// Draws the schedules of the page's data on canvases that show the same stretch of time.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);

  const LEFT = 76, RIGHT = 84;  // Margins: for the device's name; for idle time and peak.
  const AXIS = 22, ROW = 22, MEMORY = 22, GAP = 8;  // Heights; from ROW on, those of a device.
  const DEVICE = ROW + MEMORY + GAP;
  const FIELDS = 5;  // The fields of an op: kind, stage, microbatch, start, end.

  const whole = Math.max(...data.schedules.map((each) => each.makespan)) || 1;
  const view = { from: 0, to: whole };
  let pictures = [];

  const short = (number) => String(Number(number.toPrecision(6)));
  const between = (low, number, high) => Math.min(Math.max(number, low), high);

  // How many entries of a sorted flat array, each of `fields` numbers, have a number `field` of at most `value`.
  function upTo(flat, fields, field, value) {
    let low = 0, high = flat.length / fields;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (flat[middle * fields + field] <= value) low = middle + 1; else high = middle;
    }
    return low;
  }

  function peak(curve) {
    let most = 0;
    for (let at = 1; at < curve.length; at += 2) most = Math.max(most, curve[at]);
    return most;
  }

  for (const each of data.schedules) each.peaks = each.activations.map(peak);

  // The view.

  function show(from, to) {
    const length = between(whole / 1e5, to - from, whole);
    view.from = between(0, from, whole - length);
    view.to = view.from + length;
    byId("shown").textContent = `${short(view.from)} to ${short(view.to)}`;
    redraw();
  }

  function zoom(factor, at = (view.from + view.to) / 2) {
    const length = between(whole / 1e5, (view.to - view.from) * factor, whole);
    const part = (at - view.from) / (view.to - view.from);
    show(at - part * length, at - part * length + length);
  }

  function move(part) {
    const by = between(-view.from, part * (view.to - view.from), whole - view.to);
    show(view.from + by, view.to + by);
  }

  // Draws at most once per frame, and only pictures that are on the screen.

  let asked = false;

  function redraw() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      const style = getComputedStyle(document.documentElement);
      const colour = (name) => style.getPropertyValue(`--${name}`).trim();
      const colours = Object.fromEntries(
        ["ink", "faint", "line", "track", "memory", "memory-fill"].map((name) => [name, colour(name)]));
      const most = Math.max(0, ...data.schedules.flatMap((each) => each.peaks));
      for (const picture of pictures) {
        const box = picture.canvas.getBoundingClientRect();
        if (box.bottom > 0 && box.top < innerHeight) paint(picture, colours, most);
      }
    });
  }

  function paint(picture, colours, most) {
    const { canvas, schedule } = picture;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    // Browsers limit the height of a canvas.
    const ratio = Math.min(devicePixelRatio || 1, 16000 / Math.max(width, height));
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const plot = width - LEFT - RIGHT;
    const scale = plot / (view.to - view.from);
    const x = (time) => LEFT + (time - view.from) * scale;
    const end = between(LEFT, x(schedule.makespan), LEFT + plot);

    axis(pen, colours, plot, height, x);
    schedule.rows.forEach((row, device) => {
      const top = AXIS + device * DEVICE;
      pen.fillStyle = colours.ink;
      pen.textAlign = "left";
      pen.fillText(`device ${device}`, 0, top + ROW / 2);
      pen.fillStyle = colours.faint;
      pen.fillText(`idle ${short(schedule.idle[device])}`, LEFT + plot + 10, top + ROW / 2);
      pen.fillText(`peak ${short(schedule.peaks[device])}`, LEFT + plot + 10, top + ROW + MEMORY / 2 + 1);
      pen.save();
      pen.beginPath();
      pen.rect(LEFT, top, plot, DEVICE);
      pen.clip();
      pen.fillStyle = colours.track;
      pen.fillRect(LEFT, top, end - LEFT, ROW);
      ops(pen, colours, picture, row, top, x, scale);
      if (most) alive(pen, colours, schedule.activations[device], top + ROW + 2, most, x, end);
      pen.restore();
    });
  }

  function axis(pen, colours, plot, height, x) {
    const rough = (view.to - view.from) / Math.max(1, plot / 90);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * (1 - 1e-9));
    pen.textAlign = "center";
    pen.fillStyle = colours.faint;
    pen.strokeStyle = colours.line;
    pen.lineWidth = 1;
    pen.beginPath();
    for (let tick = Math.ceil(view.from / step - 1e-9); tick * step <= view.to + 1e-9 * step; tick += 1) {
      const at = Math.round(x(tick * step)) + 0.5;
      pen.fillText(short(tick * step), at, AXIS / 2 - 2);
      pen.moveTo(at, AXIS - 4);
      pen.lineTo(at, height);
    }
    pen.stroke();
  }

  function ops(pen, colours, picture, row, top, x, scale) {
    const first = upTo(row, FIELDS, 4, view.from), last = upTo(row, FIELDS, 3, view.to);
    const { hovered, schedule } = picture;
    pen.textAlign = "center";
    for (let op = first; op < last; op += 1) {
      const [kind, stage, microbatch, start, end] = row.slice(op * FIELDS, (op + 1) * FIELDS);
      const from = x(start), width = (end - start) * scale, gap = width > 4 ? 1 : 0;
      pen.fillStyle = schedule.colours[kind][stage];
      pen.fillRect(from + gap / 2, top, width - gap, ROW);
      if (width > 8 && pen.measureText(microbatch).width + 6 <= width) {
        pen.fillStyle = "#111111";
        // On the visible part of its op.
        const left = Math.max(from, LEFT), right = Math.min(from + width, x(view.to));
        if (right - left >= Math.min(12, width)) pen.fillText(microbatch, (left + right) / 2, top + ROW / 2 + 0.5);
      }
      if (hovered && hovered.microbatch === microbatch) {
        pen.lineWidth = hovered.start === start && hovered.stage === stage && hovered.kind === kind ? 3 : 1.5;
        pen.strokeStyle = colours.ink;
        const inset = pen.lineWidth / 2;
        pen.strokeRect(from + inset, top + inset, Math.max(0, width - 2 * inset), ROW - 2 * inset);
      }
    }
  }

  function alive(pen, colours, curve, top, most, x, end) {
    const bottom = top + MEMORY, y = (value) => bottom - (value / most) * (MEMORY - 2);
    const first = Math.max(0, upTo(curve, 2, 0, view.from) - 1), last = upTo(curve, 2, 0, view.to);
    pen.beginPath();
    let before = bottom;
    pen.moveTo(x(curve[first * 2]), bottom);
    for (let at = first; at < last; at += 1) {
      const time = x(curve[at * 2]);
      pen.lineTo(time, before);
      before = y(curve[at * 2 + 1]);
      pen.lineTo(time, before);
    }
    pen.lineTo(end, before);
    pen.strokeStyle = colours.memory;
    pen.lineWidth = 1.25;
    pen.stroke();
    pen.lineTo(end, bottom);
    pen.closePath();
    pen.fillStyle = colours["memory-fill"];
    pen.fill();
  }

  // The object under the pointer.

  function timeAt(picture, x) {
    const plot = picture.canvas.clientWidth - LEFT - RIGHT;
    return x < LEFT || x > LEFT + plot ? null : view.from + ((x - LEFT) / plot) * (view.to - view.from);
  }

  function at(picture, x, y) {
    const { schedule } = picture;
    const time = timeAt(picture, x), device = Math.floor((y - AXIS) / DEVICE);
    if (time === null || device < 0 || device >= schedule.rows.length || time > schedule.makespan) return null;
    const row = schedule.rows[device], inside = y - AXIS - device * DEVICE;
    if (inside >= ROW + MEMORY) return null;
    if (inside >= ROW) {
      const curve = schedule.activations[device];
      const value = curve[Math.max(0, upTo(curve, 2, 0, time) - 1) * 2 + 1];
      return { text: `${short(value)} microbatches' activations\nalive on device ${device} at ${short(time)}` };
    }
    const before = upTo(row, FIELDS, 3, time);
    const [kind, stage, microbatch, start, end] = before ? row.slice((before - 1) * FIELDS, before * FIELDS) : [];
    if (!before || end < time) {
      const from = before ? end : 0, to = before * FIELDS < row.length ? row[before * FIELDS + 3] : schedule.makespan;
      return { text: `idle\n${short(from)} to ${short(to)}, ${short(to - from)} long` };
    }
    const name = `${stage}${data.kinds[kind]}${microbatch}`;
    return {
      kind, stage, microbatch, start,
      text: `${name}\n${data.meanings[kind]} of microbatch ${microbatch}, stage ${stage}, device ${device}\n`
        + `${short(start)} to ${short(end)}, takes ${short(end - start)}`,
    };
  }

  function point(picture, event) {
    const box = picture.canvas.getBoundingClientRect();
    const found = at(picture, event.clientX - box.left, event.clientY - box.top);
    const hovered = found && found.kind !== undefined ? found : null;
    const same = (one, other) => one === other || (one && other && one.text === other.text);
    if (!same(hovered, picture.hovered)) {
      picture.hovered = hovered;
      redraw();
    }
    tip(found && found.text, event);
    line(timeAt(picture, event.clientX - box.left) === null ? null : event.clientX - box.left);
  }

  function leave(picture) {
    picture.hovered = null;
    tip(null);
    line(null);
    redraw();
  }

  function tip(text, event) {
    const box = byId("tip");
    box.hidden = !text;
    if (!text) return;
    box.textContent = text;
    const left = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8);
    const below = event.clientY + 18;
    const top = below + box.offsetHeight > innerHeight ? event.clientY - box.offsetHeight - 10 : below;
    box.style.transform = `translate(${Math.max(8, left)}px, ${Math.max(8, top)}px)`;
  }

  // The same time in all pictures.
  function line(x) {
    for (const picture of pictures) {
      picture.now.hidden = x === null;
      if (x !== null) picture.now.style.transform = `translateX(${x}px)`;
    }
  }

  // Hands.

  function wheel(picture, event) {
    const time = timeAt(picture, event.clientX - picture.canvas.getBoundingClientRect().left);
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const scrolls = document.documentElement.scrollHeight > innerHeight + 1;
    if (time === null || (scrolls && !sideways && !event.ctrlKey && !event.metaKey)) return;
    event.preventDefault();
    const pixels = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
    if (sideways) move(((event.deltaX || event.deltaY) * pixels) / picture.canvas.clientWidth);
    else zoom(Math.exp(between(-1, (event.deltaY * pixels) / 400, 1)), time);
    point(picture, event);
  }

  function drags(picture) {
    const { canvas } = picture;
    let last = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      last = event.clientX;
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("drags");
      point(picture, event);  // A finger that taps doesn't move.
    });
    canvas.addEventListener("pointermove", (event) => {
      if (last !== null) {
        move((last - event.clientX) / (canvas.clientWidth - LEFT - RIGHT));
        last = event.clientX;
      }
      point(picture, event);
    });
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, () => {
        last = null;
        canvas.classList.remove("drags");
      });
    }
    canvas.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") leave(picture);  // A finger leaves when it is lifted.
    });
    canvas.addEventListener("wheel", (event) => wheel(picture, event), { passive: false });
  }

  const element = (name, properties = {}) => Object.assign(document.createElement(name), properties);

  pictures = data.schedules.map((schedule) => {
    const figure = element("figure"), canvas = element("canvas"), now = element("div", { className: "now", hidden: true });
    const height = AXIS + schedule.rows.length * DEVICE;
    canvas.style.height = now.style.height = `${height}px`;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${schedule.title}. ${schedule.summary}`);
    figure.append(element("figcaption", { textContent: schedule.title }), canvas, now);
    byId("pictures").append(figure);
    const picture = { schedule, canvas, now, hovered: null };
    drags(picture);
    return picture;
  });

  const actions = {
    left: () => move(-0.25),
    right: () => move(0.25),
    out: () => zoom(1.5),
    in: () => zoom(1 / 1.5),
    all: () => show(0, whole),
  };
  const keys = { ArrowLeft: "left", ArrowRight: "right", "-": "out", "+": "in", "=": "in", 0: "all" };
  for (const [id, act] of Object.entries(actions)) byId(id).addEventListener("click", act);
  document.addEventListener("keydown", (event) => {
    const plain = !event.ctrlKey && !event.metaKey && !event.altKey;
    if (!plain || !Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    actions[keys[event.key]]();
  });
  for (const name of ["resize", "scroll"]) addEventListener(name, redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  show(0, whole);
})();
