// Returns the flaws of a page that a reader would see, as a list of sentences.
const flaws = [];
const root = document.documentElement;
if (root.scrollWidth > root.clientWidth) {
  const wide = [...document.body.querySelectorAll("*")]
    .filter((e) => e.getBoundingClientRect().right > root.clientWidth && e.closest(".scroll") === null)
    .map((e) => `${e.tagName}.${e.className}`);
  flaws.push(`wider than its window (${root.scrollWidth} > ${root.clientWidth}): ${wide.slice(0, 5)}`);
}
for (const region of document.querySelectorAll(".scroll")) {
  const { scrollWidth, clientWidth } = region;
  if (scrollWidth > clientWidth) flaws.push(`a table is cut off (${scrollWidth} > ${clientWidth}): ${region.innerText.slice(0, 80)}`);
}
for (const time of document.querySelectorAll(".timeline time")) {
  if (time.scrollWidth > time.clientWidth) flaws.push(`a time covers the text beside it: ${time.textContent}`);
}

const parts = (color) => color.match(/[\d.]+/g).map(Number);
const luminance = (color) => {
  const [r, g, b] = parts(color).slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const background = (element) => {
  for (let e = element; e !== null; e = e.parentElement) {
    const color = getComputedStyle(e).backgroundColor;
    const [, , , alpha = 1] = parts(color);
    if (alpha === 1) return color;
  }
  return "rgb(255, 255, 255)";
};
for (const element of document.body.querySelectorAll("*")) {
  const hasText = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim() !== "");
  if (!hasText || element.getClientRects().length === 0) continue;
  const [a, b] = [luminance(getComputedStyle(element).color), luminance(background(element))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) flaws.push(`contrast ${ratio.toFixed(2)}: ${element.tagName} ${element.textContent}`);
}

for (const field of document.querySelectorAll("input:not([type=hidden]), select, textarea")) {
  if (field.labels.length === 0 && !field.hasAttribute("aria-label")) flaws.push(`no label: ${field.name}`);
}
for (const element of document.querySelectorAll("script, iframe, img, object, embed, base, style")) {
  if (!(element.tagName === "SCRIPT" && element.src.startsWith(location.origin + "/") && element.type === "module")) {
    flaws.push(`foreign element: ${element.outerHTML}`);
  }
}
for (const element of document.querySelectorAll("*")) {
  for (const { name } of element.attributes) if (name.startsWith("on")) flaws.push(`script in ${name}`);
}
return flaws;
