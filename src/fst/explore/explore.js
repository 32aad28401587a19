// The page: what is drawn goes to the server, what comes back is shown.
// All positions are in the unit box: [first axis, second axis], as the model has them.
import {
  colourOf, colourScale, dark, drawAxes, drawColourBar, drawCurves, largest, line, paintField,
  placeImage, prepare, range, short, style, valueAt,
} from "./plots.js";

const element = (id) => document.getElementById(id);
const PANELS = ["prediction", "reference", "difference"];
let about; // what the server says of the model and its data
let input; // Float32Array: u at time 0, or 1 where the coefficient is high
let answer = null; // the last one, unpacked
let pointer = null; // unit coordinates under the mouse
let limit = 2; // of the axis on which u is drawn
let painting = 1; // with the high coefficient, or the low one

// ---- Requests: one at a time while something is dragged; the finest grid gives way at once.

let wanted = 0; // counts changes
let level = 0; // the grid that the newest change has been asked for
let flying = null;
let dragging = false;
let since = 0; // when the newest change came
let shown = 0; // how many changes had come when what is shown was asked for

function changed(finished) {
  wanted += 1;
  since = performance.now();
  dragging = !finished;
  if (!flying || finished || flying.level > 0) ask(finished ? Math.min(1, about.grids.length - 1) : 0);
}

async function ask(asked) {
  level = asked;
  const mine = { level: asked, change: wanted };
  flying = mine;
  const request = { level: asked, neighbors: neighborCount(), input: packedInput() };
  if (about.viscosity) request.viscosity = viscosity();
  say(asked > 1 ? "finer grid …" : "computing …");
  let found = null;
  try {
    const response = await fetch(`answer${location.search}`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request),
    });
    found = await response.json();
    if (response.status === 409) found = null; // overtaken, perhaps by another window
    else if (!response.ok) throw new Error(found.error);
  } catch (error) {
    if (flying === mine) flying = null;
    say(error.message, true);
    return;
  }
  if (flying !== mine) return; // a newer request is on its way
  flying = null;
  if (found === null) {
    setTimeout(() => flying || ask(asked), 300);
    return;
  }
  receive(found);
  if (mine.change === wanted) {
    const passed = `${((performance.now() - since) / 1000).toFixed(2)} s`;
    if (shown !== wanted) element("first").textContent = passed;
    element("finest").textContent = asked === about.grids.length - 1 ? passed : "…";
    shown = wanted;
  }
  if (mine.change !== wanted) ask(dragging ? 0 : Math.min(1, about.grids.length - 1));
  else if (!dragging && asked < about.grids.length - 1) ask(asked + 1);
  else say("ready");
}

function packedInput() {
  if (about.kind === "points") return Array.from(input);
  return about.kind === "darcy" ? Array.from(input).join("") : Array.from(input, (u) => +u.toFixed(6));
}

function say(text, bad = false) {
  element("status").textContent = text;
  element("status").classList.toggle("bad", bad);
}

function unpack(text) {
  return new Float32Array(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
}

function receive(found) {
  const [rows, columns] = found.grid;
  const field = (values) => ({ rows, columns, values });
  const prediction = unpack(found.prediction), reference = unpack(found.reference);
  answer = {
    prediction: field(prediction),
    reference: field(reference),
    difference: field(prediction.map((value, index) => value - reference[index])),
    anchors: found.anchors && {
      positions: unpack(found.anchors.positions), scales: unpack(found.anchors.length_scales),
    },
  };
  for (const [name, seconds] of Object.entries(found.seconds)) {
    element(name).textContent = `${seconds.toFixed(2)} s`;
  }
  element("error").textContent = `${(100 * found.error).toFixed(2)} %`;
  element("grid").textContent = `${rows} × ${columns}`;
  document.body.dataset.level = found.level;
  document.body.dataset.answers = 1 + +(document.body.dataset.answers ?? 0);
  recolour();
}

// ---- Fields

function recolour() {
  if (answer) {
    answer.reach = range(answer.reference.values, about.kind === "burgers");
    const shared = colourScale(...answer.reach);
    for (const name of PANELS) {
      const scale = name === "difference" ? colourScale(...range(answer[name].values, true)) : shared;
      answer[name].scale = scale;
      answer[name].image = paintField(answer[name], scale, across());
    }
  }
  drawInput();
  drawFields();
}

/** The axis that runs to the right: time for Burgers, x for Darcy. */
const across = () => (about.kind === "darcy" ? 1 : 0);
const panelBox = (width, height) => ({ x: 44, y: 8, width: width - 56, height: height - 76 });

/** Unit coordinates (first axis, second axis) to a point of the box, and back. */
function toBox(box, first, second) {
  const [right, up] = across() === 0 ? [first, second] : [second, first];
  return [box.x + box.width * right, box.y + box.height * (1 - up)];
}

function fromBox(box, x, y) {
  const clip = (share) => Math.min(1, Math.max(0, share));
  const right = clip((x - box.x) / box.width), up = clip(1 - (y - box.y) / box.height);
  return across() === 0 ? [right, up] : [up, right];
}

function drawFields() {
  for (const name of PANELS) {
    const { context, width, height } = prepare(element(name));
    const box = panelBox(width, height);
    if (answer) {
      placeImage(context, answer[name].image, box);
      const bar = { x: box.x, y: box.y + box.height + 36, width: box.width, height: 10 };
      drawColourBar(context, bar, answer[name].scale);
      if (name === "prediction" && answer.anchors) drawAnchors(context, box);
    }
    drawAxes(context, box, about.axes[across()], about.axes[1 - across()]);
    if (pointer) drawCross(context, box);
  }
  drawProfile();
}

function drawAnchors(context, box) {
  const { positions, scales } = answer.anchors;
  const count = positions.length / 2;
  context.save();
  context.beginPath();
  context.rect(box.x, box.y, box.width, box.height);
  context.clip();
  context.lineWidth = 1;
  const ellipse = (index) => {
    const [x, y] = toBox(box, positions[2 * index], positions[2 * index + 1]);
    const [a, b] = [scales[2 * index + across()], scales[2 * index + 1 - across()]];
    context.beginPath();
    context.ellipse(x, y, a * box.width, b * box.height, 0, 0, 2 * Math.PI);
    context.stroke();
  };
  if (element("scales").checked) {
    context.strokeStyle = style("--ink");
    context.globalAlpha = Math.min(0.6, 120 / count);
    for (let index = 0; index < count; index++) ellipse(index);
    context.globalAlpha = 1;
    const near = pointer && nearestAnchor();
    if (near !== null) {
      context.lineWidth = 2;
      ellipse(near);
    }
  }
  if (element("anchors").checked) {
    const radius = count > 400 ? 1.3 : 2.2;
    context.fillStyle = style("--ink");
    context.strokeStyle = style("--ground"); // a rim, to be seen on any colour
    for (let index = 0; index < count; index++) {
      const [x, y] = toBox(box, positions[2 * index], positions[2 * index + 1]);
      context.beginPath();
      context.arc(x, y, radius, 0, 2 * Math.PI);
      context.stroke();
      context.fill();
    }
  }
  context.restore();
}

function nearestAnchor() {
  const { positions } = answer.anchors;
  let [best, least] = [null, Infinity];
  for (let index = 0; index < positions.length / 2; index++) {
    const far = Math.hypot(positions[2 * index] - pointer[0], positions[2 * index + 1] - pointer[1]);
    if (far < least) [best, least] = [index, far];
  }
  return best;
}

function drawCross(context, box) {
  const [x, y] = toBox(box, ...pointer);
  context.strokeStyle = style("--ink");
  context.globalAlpha = 0.7;
  context.lineWidth = 1;
  line(context, [[x, box.y], [x, box.y + box.height]]);
  line(context, [[box.x, y], [box.x + box.width, y]]);
  context.globalAlpha = 1;
}

/** The cut along the second axis, at the first coordinate of the pointer. */
function drawProfile() {
  const { context, width, height } = prepare(element("profile"));
  const box = { x: 44, y: 24, width: width - 56, height: height - 58 }; // the legend is above it
  const first = pointer ? pointer[0] : 0.5;
  const inUnits = (axis, share) => axis.low + share * (axis.high - axis.low);
  const [fixed, along] = about.axes;
  element("profile-caption").textContent =
    `Profile at ${fixed.name} = ${inUnits(fixed, first).toFixed(3)}`;
  if (!answer) return;
  const { reference, prediction } = answer;
  const cut = (field) => Array.from({ length: field.columns }, (_, j) =>
    valueAt(field, first, j / (field.columns - 1)));
  const [least, most] = answer.reach;
  const margin = 0.04 * (most - least) || 1;
  const [low, high] = [least - margin, most + margin];
  const curves = [
    { values: cut(reference), colour: style("--exact"), width: 2.4 },
    { values: cut(prediction), colour: style("--predicted"), dash: [6, 3], width: 2 },
  ];
  if (about.kind === "burgers") curves.unshift({ values: input, colour: style("--start") });
  drawCurves(context, box, curves, low, high);
  drawAxes(context, box, along, { name: about.value, low, high });
  const truth = about.kind === "points" ? "target" : "exact";
  const legend = [[truth, "--exact"], ["predicted", "--predicted"], ["at t = 0", "--start"]];
  legend.slice(0, curves.length).forEach(([text, colour], index) => {
    context.fillStyle = style(colour);
    context.textAlign = "left";
    context.textBaseline = "top";
    context.fillText(`■ ${text}`, box.x + 76 * index, 6);
  });
  element("pointer").textContent = !pointer ? "Point at a field to read its values." :
    `at ${along.name} = ${inUnits(along, pointer[1]).toFixed(3)}: ` +
    `predicted ${short(valueAt(prediction, ...pointer))}, ${truth} ${short(valueAt(reference, ...pointer))}, ` +
    `difference ${short(valueAt(answer.difference, ...pointer))}`;
}

// ---- Input: a curve to draw, or a coefficient to paint

function inputBox(width, height) {
  return { x: 44, y: 8, width: width - 54, height: height - 42 };
}

function drawInput() {
  const { context, width, height } = prepare(element("input"));
  const box = inputBox(width, height);
  if (about.kind === "points") {
    drawSensors(context, box);
    drawAxes(context, box, about.axes[0], about.axes[1]);
    return;
  }
  if (about.kind === "darcy") {
    const toBytes = (colour) => {
      context.fillStyle = colour;
      return [1, 3, 5].map((start) => parseInt(context.fillStyle.slice(start, start + 2), 16));
    };
    const table = Array.from({ length: 256 }, (_, i) => toBytes(i < 128 ? style("--ground") : style("--high")));
    const field = { rows: about.points, columns: about.points, values: input };
    placeImage(context, paintField(field, { low: 0, high: 1, table }, 1), box, false);
    drawAxes(context, box, about.axes[1], about.axes[0]);
    return;
  }
  context.strokeStyle = style("--line");
  line(context, [[box.x, box.y + box.height / 2], [box.x + box.width, box.y + box.height / 2]]);
  drawCurves(context, box, [{ values: input, colour: style("--accent"), width: 2 }], -limit, limit);
  drawAxes(context, box, about.axes[1], { name: "u", low: -limit, high: limit });
}

/** Sensors, coloured by their first value: as the field where they measure the same quantity. */
function drawSensors(context, box) {
  const values = [];
  for (let k = 3; k < input.length; k += about.each) values.push(input[k]);
  const same = answer && about.sensed === about.value;
  const scale = same ? answer.reference.scale : colourScale(...range(values));
  context.strokeStyle = style("--soft");
  values.forEach((value, k) => {
    const [x, y] = toBox(box, input[1 + k * about.each], input[2 + k * about.each]);
    context.fillStyle = `rgb(${colourOf(scale, value).join(" ")})`;
    context.beginPath();
    context.arc(x, y, values.length > 300 ? 2.5 : 4, 0, 2 * Math.PI);
    context.fill();
    context.stroke();
  });
}

/** Drag a sensor to move it; click it to remove it. The last one stays. */
let held = null;
function sensorStroke(from, to) {
  if (held === null) {
    const count = (input.length - 1) / about.each;
    const far = (k) => Math.hypot(input[1 + k * about.each] - from[0], input[2 + k * about.each] - from[1]);
    const nearest = Array.from({ length: count }, (_, k) => k).reduce((a, b) => (far(b) < far(a) ? b : a));
    held = { sensor: far(nearest) < 0.04 ? nearest : -1, moved: false };
  }
  if (held.sensor < 0 || (from[0] === to[0] && from[1] === to[1])) return;
  held.moved = true;
  input.set(to, 1 + held.sensor * about.each);
}

function releaseSensor() {
  const { sensor, moved } = held;
  held = null;
  if (sensor < 0 || moved || input.length <= 1 + about.each) return;
  const start = 1 + sensor * about.each;
  input = Float32Array.from([...input.slice(0, start), ...input.slice(start + about.each)]);
}

/** Between two points of the mouse, the curve is a straight line. */
function drawStroke(from, to) {
  const count = input.length;
  const [left, right] = from[0] <= to[0] ? [from, to] : [to, from];
  for (let i = Math.round(left[0] * (count - 1)); i <= Math.round(right[0] * (count - 1)); i++) {
    const share = right[0] > left[0] ? (i / (count - 1) - left[0]) / (right[0] - left[0]) : 1;
    const height = left[1] + Math.min(1, Math.max(0, share)) * (right[1] - left[1]);
    input[i] = limit * (2 * height - 1);
  }
}

function paintStroke(from, to) {
  const size = about.points, radius = +element("brush").value;
  const steps = Math.ceil(Math.hypot(to[0] - from[0], to[1] - from[1]) * size) + 1;
  for (let step = 0; step <= steps; step++) {
    const column = (from[0] + (to[0] - from[0]) * step / steps) * (size - 1);
    const row = (from[1] + (to[1] - from[1]) * step / steps) * (size - 1);
    for (let r = Math.max(0, Math.ceil(row - radius)); r <= Math.min(size - 1, row + radius); r++) {
      for (let c = Math.max(0, Math.ceil(column - radius)); c <= Math.min(size - 1, column + radius); c++) {
        if (Math.hypot(r - row, c - column) <= radius) input[r * size + c] = painting;
      }
    }
  }
}

/** A periodic running mean, three times: nearly a Gaussian. Hands draw corners, the data have few. */
function smooth(radius) {
  const count = input.length;
  for (let pass = 0; pass < 3; pass++) {
    const before = Float32Array.from(input);
    for (let i = 0; i < count; i++) {
      let sum = 0;
      for (let k = -radius; k <= radius; k++) sum += before[(i + k + count) % count];
      input[i] = sum / (2 * radius + 1);
    }
  }
}

function listenToStrokes() {
  const canvas = element("input");
  const stroke = { burgers: drawStroke, darcy: paintStroke, points: sensorStroke }[about.kind];
  let last = null;
  const pointer = (event) => {
    const { left, top, width, height } = canvas.getBoundingClientRect();
    const box = inputBox(width, height);
    const clip = (share) => Math.min(1, Math.max(0, share));
    return [clip((event.clientX - left - box.x) / box.width), clip(1 - (event.clientY - top - box.y) / box.height)];
  };
  const extend = (event) => {
    const now = pointer(event);
    stroke(last, now);
    last = now;
    drawInput();
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    last = pointer(event);
    extend(event);
    changed(false);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!last) return;
    extend(event);
    changed(false);
  });
  const end = () => {
    if (!last) return;
    last = null;
    if (about.kind === "points") releaseSensor();
    if (about.kind === "burgers") smooth(Math.max(1, Math.round(input.length / 100)));
    drawInput();
    changed(true);
  };
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
}

function set(values) {
  input = Float32Array.from(values);
  if (about.kind === "points") {
    element("input-caption").textContent = `Test sample ${about.numbers[input[0]]}`;
  }
  if (about.kind === "burgers") {
    limit = Math.max(2, Math.ceil(2 * largest(input)) / 2);
  }
  drawInput();
  changed(true);
}

const random = () => draw(Math.floor(Math.random() * about.draws));

async function draw(number) {
  try {
    const asked = new URLSearchParams(location.search);
    asked.set("number", number);
    const response = await fetch(`draw?${asked}`);
    const found = await response.json();
    if (!response.ok) throw new Error(found.error);
    set(about.kind === "darcy" ? Array.from(found.input, Number) : found.input);
  } catch (error) {
    say(error.message, true);
  }
}

// ---- Controls

function tool(text, action) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", action);
  element("tools").append(button);
  return button;
}

function neighborCount() {
  if (!about.anchors) return null;
  const exponent = +element("neighbors").value;
  return exponent === +element("neighbors").max ? null : 2 ** exponent;
}

function viscosity() {
  const { low, high } = about.viscosity;
  const value = low * (high / low) ** (element("viscosity").value / 1000);
  return Math.min(high, Math.max(low, +value.toPrecision(3)));
}

function showValues() {
  element("neighbors-value").textContent = neighborCount() ?? `all ${about.anchors}`;
  element("brush-value").textContent = `${element("brush").value} cells`;
  if (about.viscosity) element("viscosity-value").textContent = viscosity();
}

function slider(id, asks) {
  element(`${id}-row`).hidden = false;
  for (const kind of ["input", "change"]) {
    element(id).addEventListener(kind, () => {
      showValues();
      if (asks) changed(kind === "change");
    });
  }
}

/** The other models, each on a page of its own. */
function offerModels() {
  const menu = element("models");
  menu.append(...about.models.map((name) => new Option(name, name, false, name === about.name)));
  menu.hidden = about.models.length < 2;
  menu.addEventListener("change", () => { location.search = `?model=${menu.value}`; });
}

function arrange() {
  offerModels();
  element("title").textContent = about.title;
  const name = about.models.length < 2 ? `${about.name}: ` : "";
  element("about").textContent =
    `${name}${about.model}, ${about.parameters.toLocaleString("en")} parameters`;
  element("reference-caption").textContent = about.reference;
  element("reference-name").textContent = about.reference;
  if (about.kind === "burgers") {
    element("input-caption").textContent = "Draw u at t = 0";
    const wave = (form) => () => set(Array.from({ length: about.points }, (_, i) => form((i + 0.5) / about.points)));
    tool("Sine", wave((x) => Math.sin(2 * Math.PI * x)));
    tool("Bump", wave((x) => Math.exp(-(((x - 0.5) / 0.1) ** 2))));
    tool("Smooth", () => { smooth(Math.max(1, Math.round(input.length / 50))); set(input); });
    slider("viscosity", true);
    element("viscosity").value = about.viscosity.free ? 300 : 0;
    element("viscosity").hidden = !about.viscosity.free; // one value: nothing to slide
  } else if (about.kind === "points") {
    element("input").classList.add("square");
    element("input-hint").textContent = "drag a sensor to move it, click to remove it";
    element("random").textContent = "Random test sample";
    element("difference-caption").textContent = "Predicted − nearest target";
    tool("Restore", () => draw(input[0]));
  } else {
    element("input").classList.add("square");
    element("input-caption").textContent = "Paint the coefficient a";
    const [low, high] = about.coefficient;
    const choices = [tool(`a = ${high}`, () => choose(1)), tool(`a = ${low}`, () => choose(0))];
    const choose = (value) => {
      painting = value;
      choices.forEach((button, index) => button.setAttribute("aria-pressed", index === 1 - value));
    };
    choose(1);
    tool("Fill", () => set(input.fill(painting)));
    element("brush").max = Math.max(2, Math.round(about.points / 6));
    element("brush").value = Math.max(1, Math.round(about.points / 24));
    slider("brush", false);
  }
  if (about.anchors) {
    element("neighbors").max = Math.ceil(Math.log2(about.anchors));
    element("neighbors").value = element("neighbors").max;
    slider("neighbors", true);
    element("overlays").hidden = false;
    for (const id of ["anchors", "scales"]) element(id).addEventListener("change", drawFields);
  }
  showValues();
}

function listenToPointer() {
  for (const name of PANELS) {
    const canvas = element(name);
    canvas.addEventListener("pointermove", (event) => {
      const { left, top, width, height } = canvas.getBoundingClientRect();
      pointer = fromBox(panelBox(width, height), event.clientX - left, event.clientY - top);
      drawFields();
    });
  }
}

async function start() {
  const response = await fetch(`about${location.search}`);
  about = await response.json();
  if (!response.ok) throw new Error(about.error);
  input = new Float32Array(about.kind === "darcy" ? about.points ** 2 : about.points ?? 1);
  arrange();
  listenToStrokes();
  listenToPointer();
  element("random").addEventListener("click", random);
  window.addEventListener("resize", () => { drawInput(); drawFields(); });
  dark.addEventListener("change", recolour);
  await random();
}

start().catch((error) => say(error.message, true));
