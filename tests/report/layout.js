// Facts about the layout of the page that is shown, for tests: each list names what is wrong.
(() => {
  const TOLERANCE = 1.5;
  const WIDTH = document.documentElement.clientWidth; // innerWidth grows on phones when something spills
  const box = (node) => node.getBoundingClientRect();
  const visible = (node) => node.checkVisibility({ opacityProperty: true, visibilityProperty: true }) && box(node).width > 0 && box(node).height > 0;
  const name = (node) => `${node.tagName}.${node.getAttribute("class") ?? ""} "${(node.textContent ?? "").trim().slice(0, 40)}"`;
  const all = (selector, root = document) => [...root.querySelectorAll(selector)].filter(visible);

  const scrolled = (node) => node.parentElement && (["auto", "scroll", "hidden"].includes(getComputedStyle(node.parentElement).overflowX) || scrolled(node.parentElement));

  // Wider than its page or card, where nothing scrolls it.
  const spills = all("main *, header *").filter((node) => {
    if (scrolled(node)) return false;
    const card = node.parentElement.closest(".card, figure, .tile, header") ?? document.documentElement;
    const right = Math.min(box(card).right, WIDTH);
    return box(node).right > right + TOLERANCE || box(node).left < box(card).left - TOLERANCE;
  }).map(name);
  if (document.documentElement.scrollWidth > WIDTH) spills.push("the page scrolls sideways");

  // Boxes beside or below each other that lie on top of each other.
  const overlaps = [];
  const apart = (nodes) => nodes.forEach((one, place) => nodes.slice(place + 1).forEach((other) => {
    const a = box(one), b = box(other);
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > TOLERANCE && high > TOLERANCE) overlaps.push(`${name(one)} and ${name(other)}`);
  }));
  for (const parent of all("main, .setting, .tiles, .gallery, .card, figure, .pickers, .legend, .bar, .people, .facts, header")) apart([...parent.children].filter((child) => visible(child) && !child.matches(".tip")));
  for (const svg of all(".canvas svg")) apart(all(".tick", svg));

  // Text of a figure that its edge cuts off.
  const cut = all(".drawing svg").flatMap((svg) => all("text", svg).filter((text) => {
    const inner = box(text), outer = box(svg);
    return inner.left < outer.left - 2 || inner.right > outer.right + 2 || inner.top < outer.top - 2 || inner.bottom > outer.bottom + 2;
  })).map(name);

  // Contrast by WCAG 2.2: 4.5 for text, 3 for large text and for lines.
  const parse = (colour) => {
    const [r, g, b, a = 1] = colour.match(/[\d.]+/g).map(Number);
    return { rgb: [r, g, b], a };
  };
  const over = (top, below) => top.rgb.map((value, place) => value * top.a + below[place] * (1 - top.a));
  const ground = (node) => {
    if (!node) return [255, 255, 255];
    const colour = parse(getComputedStyle(node).backgroundColor);
    return colour.a === 1 ? colour.rgb : over(colour, ground(node.parentElement));
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((value) => value / 255).map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const against = (colour, node) => {
    const behind = ground(node);
    return contrast(over(parse(colour), behind), behind);
  };
  const faint = [];
  const texts = all("body *").filter((node) => [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.textContent.trim()));
  for (const node of texts) {
    if (node.closest("[disabled], script, style")) continue;
    const style = getComputedStyle(node), size = Number.parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const ratio = against(node instanceof SVGElement ? style.fill : style.color, node);
    if (ratio < (large ? 3 : 4.5)) faint.push(`${name(node)}: ${ratio.toFixed(2)}`);
  }
  for (const line of all(".canvas .line, .canvas .dot, .legend .line")) {
    const style = getComputedStyle(line);
    const ratio = against(line.matches(".dot") ? style.fill : style.stroke, line.closest("button, .card"));
    if (ratio < 3) faint.push(`line ${line.parentElement.getAttribute("class")}: ${ratio.toFixed(2)}`);
  }
  for (const mark of all(".drawing svg [style*='--k']")) {
    const style = getComputedStyle(mark);
    const colours = [style.fill, style.stroke].filter((colour) => colour.startsWith("rgb("));
    if (colours.some((colour) => against(colour, mark.closest("figure")) < 3)) faint.push(`mark in ${name(mark.closest("figure"))}`);
  }

  const titles = all("figure").filter((figure) => figure.querySelectorAll("h3").length !== 1 || [...figure.querySelectorAll("svg text")].some((text) => Number(getComputedStyle(text).fontWeight) >= 700)).map(name);
  return { spills, overlaps, cut, faint, titles, texts: texts.length };
})()
