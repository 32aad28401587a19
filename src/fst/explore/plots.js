// Drawing: colours, axes, fields, curves. Knows nothing of models or requests.

/** The colour of a point of the OKLCh space as sRGB bytes. */
function fromOklch(lightness, chroma, hue) {
  const a = chroma * Math.cos(hue * Math.PI / 180);
  const b = chroma * Math.sin(hue * Math.PI / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s,
  ];
  return linear.map((value) => {
    const clipped = Math.min(1, Math.max(0, value));
    const encoded = clipped <= 0.0031308 ? 12.92 * clipped : 1.055 * clipped ** (1 / 2.4) - 0.055;
    return Math.round(255 * encoded);
  });
}

export const dark = window.matchMedia("(prefers-color-scheme: dark)");
const STEPS = 256;
const tabulate = (colour) => Array.from({ length: STEPS }, (_, i) => colour(i / (STEPS - 1)));

/** Diverging: lightness and chroma are linear in |value| in OKLab, so equal steps look equal. */
function diverging() {
  const [middle, slope] = dark.matches ? [0.2, 0.62] : [0.97, -0.55];
  return tabulate((t) => {
    const size = Math.abs(2 * t - 1);
    return fromOklch(middle + slope * size, 0.145 * size, t < 0.5 ? 252 : 36);
  });
}

/** For fields that are never negative: lightness is linear in the value. */
function sequential() {
  return tabulate((t) => fromOklch(0.24 + 0.68 * t, 0.1 + 0.05 * t, 285 - 185 * t));
}

/** Colours for values from low to high; symmetric about zero where it lies between them. */
export function colourScale(low, high) {
  if (low < 0 && high > 0) {
    const size = Math.max(-low, high);
    return { low: -size, high: size, table: diverging() };
  }
  return { low, high: high > low ? high : low + 1, table: sequential() };
}

/** The colour of a value on a scale. */
export function colourOf({ low, high, table }, value) {
  return table[Math.min(STEPS - 1, Math.max(0, Math.round((STEPS - 1) * (value - low) / (high - low))))];
}

/** The largest absolute value. (Math.max(...values) ends where the call stack does.) */
export const largest = (values) => values.reduce((size, v) => Math.max(size, Math.abs(v)), 0);

/** The lowest and the highest value; where signs matter, as far from zero as each other. */
export function range(values, symmetric) {
  const size = largest(values) || 1;
  return symmetric ? [-size, size] : values.reduce(
    ([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity],
  );
}

export const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

/** A canvas at the screen's resolution, cleared; sizes are in CSS pixels. */
export function prepare(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "11px system-ui, sans-serif";
  return { context, width, height };
}

/** Round numbers from low to high, about `count` of them; 0 counts where half a cell is missing. */
export function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let k = Math.ceil(low / step - 0.1); k * step <= high + 0.1 * step; k++) found.push(k * step);
  return found;
}

export function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size < 0.001 || size >= 1e5 ? value.toExponential(1) : String(+value.toPrecision(3));
  return text.replace("-", "−");
}

/** Frame, ticks and names around `box`; an axis is {name, low, high}. */
export function drawAxes(context, box, horizontal, vertical) {
  context.strokeStyle = style("--line");
  context.fillStyle = style("--soft");
  context.lineWidth = 1;
  context.strokeRect(box.x, box.y, box.width, box.height);
  context.textAlign = "center";
  context.textBaseline = "top";
  const share = (value, { low, high }) => Math.min(1, Math.max(0, (value - low) / (high - low)));
  for (const value of ticks(horizontal.low, horizontal.high, 5)) {
    const x = box.x + box.width * share(value, horizontal);
    context.fillText(short(value), x, box.y + box.height + 4);
    line(context, [[x, box.y + box.height], [x, box.y + box.height + 3]]);
  }
  context.fillText(horizontal.name, box.x + box.width / 2, box.y + box.height + 17);
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const value of ticks(vertical.low, vertical.high, 5)) {
    const y = box.y + box.height * (1 - share(value, vertical));
    context.fillText(short(value), box.x - 5, y);
    line(context, [[box.x - 3, y], [box.x, y]]);
  }
  context.save();
  context.translate(box.x - 34, box.y + box.height / 2);
  context.rotate(-Math.PI / 2);
  context.textAlign = "center";
  context.fillText(vertical.name, 0, 0);
  context.restore();
}

export function line(context, points) {
  context.beginPath();
  points.forEach(([x, y], index) => (index ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.stroke();
}

/** An image of a field {rows, columns, values}; `across` is the axis that runs to the right. */
export function paintField(field, scale, across) {
  const [first, second] = [field.rows, field.columns];
  const image = document.createElement("canvas");
  image.width = across === 0 ? first : second;
  image.height = across === 0 ? second : first;
  const pixels = new ImageData(image.width, image.height);
  for (let i = 0; i < first; i++) {
    for (let j = 0; j < second; j++) {
      const colour = colourOf(scale, field.values[i * second + j]);
      const [right, up] = across === 0 ? [i, j] : [j, i];
      const index = 4 * ((image.height - 1 - up) * image.width + right);
      pixels.data.set(colour, index);
      pixels.data[index + 3] = 255;
    }
  }
  image.getContext("2d").putImageData(pixels, 0, 0);
  return image;
}

/** The image into a box: its outermost points lie on the box's edges. */
export function placeImage(context, image, box, smooth = true) {
  context.imageSmoothingEnabled = smooth;
  context.imageSmoothingQuality = "high";
  context.drawImage(
    image, 0.5, 0.5, image.width - 1, image.height - 1, box.x, box.y, box.width, box.height,
  );
}

export function drawColourBar(context, box, scale) {
  scale.table.forEach(([red, green, blue], index) => {
    context.fillStyle = `rgb(${red} ${green} ${blue})`;
    const x = box.x + box.width * index / STEPS;
    context.fillRect(x, box.y, box.width / STEPS + 0.6, box.height);
  });
  context.strokeStyle = style("--line");
  context.strokeRect(box.x, box.y, box.width, box.height);
  context.fillStyle = style("--soft");
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const value of ticks(scale.low, scale.high, 4)) {
    const share = Math.min(1, Math.max(0, (value - scale.low) / (scale.high - scale.low)));
    context.fillText(short(value), box.x + box.width * share, box.y + box.height + 2);
  }
}

/** Curves {values, colour, width, dash} of equally spaced values over the box. */
export function drawCurves(context, box, curves, low, high) {
  context.save();
  context.beginPath();
  context.rect(box.x, box.y, box.width, box.height);
  context.clip();
  for (const { values, colour, width = 1.6, dash = [] } of curves) {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.setLineDash(dash);
    line(context, Array.from(values, (value, index) => [
      box.x + box.width * index / (values.length - 1),
      box.y + box.height * (1 - (value - low) / (high - low)),
    ]));
  }
  context.restore();
}

/** The field at unit coordinates, by linear interpolation. */
export function valueAt(field, first, second) {
  const [i, j] = [first * (field.rows - 1), second * (field.columns - 1)];
  const row = Math.min(Math.floor(i), field.rows - 2);
  const column = Math.min(Math.floor(j), field.columns - 2);
  const at = (r, c) => field.values[r * field.columns + c];
  const blend = (r) => at(r, column) * (1 - (j - column)) + at(r, column + 1) * (j - column);
  return blend(row) * (1 - (i - row)) + blend(row + 1) * (i - row);
}
