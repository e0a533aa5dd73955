// Changes an element to new markup and keeps existing nodes where possible. Kept nodes preserve the focus, a selection,
// open details, a pressed button and the position of a screen reader.

export function patch(element, html) {
  const wanted = document.createElement("template");
  wanted.innerHTML = html; // safe: rendered by the dashboard's templates, which escape all values
  const focused = element.contains(document.activeElement) ? document.activeElement : null;
  children(element, wanted.content);
  // Moving a row in the document removes the focus from it.
  if (focused && focused !== document.activeElement && element.contains(focused)) focused.focus({ preventScroll: true });
}

// Rows can move, so they are matched by `data-key`. Other nodes are matched by position.
function children(element, wanted) {
  const known = new Map();
  for (const child of element.children) if (child.dataset.key) known.set(child.dataset.key, child);
  let at = element.firstChild;
  for (const want of [...wanted.childNodes]) {
    const row = known.get(want.dataset?.key);
    if (row) {
      known.delete(want.dataset.key);
      if (row === at) at = at.nextSibling;
      else element.insertBefore(row, at);
      node(row, want);
    } else if (at && canReuse(at, want)) {
      const next = at.nextSibling;
      node(at, want);
      at = next;
    } else element.insertBefore(want, at);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

const canReuse = (current, next) => current.nodeName === next.nodeName && !current.dataset?.key && !next.dataset?.key;

function node(current, wanted) {
  if (current.nodeType !== Node.ELEMENT_NODE) {
    if (current.data !== wanted.data) current.data = wanted.data;
    return;
  }
  for (const { name } of [...current.attributes]) {
    const folded = name === "open" && current.nodeName === "DETAILS"; // opened or closed by the user
    if (!folded && !wanted.hasAttribute(name)) current.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) if (current.getAttribute(name) !== value) current.setAttribute(name, value);
  children(current, wanted);
}
